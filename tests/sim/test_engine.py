from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dougong.clock import ManualClock
from dougong.sim.engine import Engine


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(-2, 2)), max_size=60))
def test_callbacks_run_by_time_then_priority_then_the_order_they_were_scheduled_in(due: list[tuple[int, int]]) -> None:
    engine = Engine(ManualClock(0))
    ran: list[tuple[int, int, int]] = []
    for index, (time_ns, priority) in enumerate(due):
        key = (time_ns, priority, index)
        engine.at(time_ns, lambda key=key: ran.append(key), priority=priority)
    engine.run(until_ns=100)
    assert ran == sorted(ran)
    assert len(ran) == len(due)


def test_the_clock_stands_at_the_time_of_what_runs_and_ends_at_the_end() -> None:
    engine = Engine(ManualClock(5))
    seen: list[int] = []
    engine.after(10, lambda: seen.append(engine.now_ns))
    engine.run(until_ns=40)
    assert (seen, engine.now_ns) == ([15], 40)


def test_what_is_due_after_the_end_waits_for_the_next_run() -> None:
    engine = Engine(ManualClock(0))
    ran: list[str] = []
    engine.at(10, lambda: ran.append("at the end"))
    engine.at(11, lambda: ran.append("beyond"))
    engine.run(until_ns=10)
    assert ran == ["at the end"]
    engine.run(until_ns=20)
    assert ran == ["at the end", "beyond"]


def test_a_cancelled_callback_never_runs() -> None:
    engine = Engine(ManualClock(0))
    ran: list[int] = []
    scheduled = engine.at(1, lambda: ran.append(1))
    engine.at(0, scheduled.cancel)
    engine.run(until_ns=5)
    scheduled.cancel()
    assert ran == []
    assert not scheduled.is_waiting


def test_a_callback_may_schedule_another_for_the_same_time() -> None:
    engine = Engine(ManualClock(0))
    ran: list[str] = []

    def first() -> None:
        ran.append("first")
        engine.after(0, lambda: ran.append("second"))

    engine.at(3, first)
    engine.run(until_ns=3)
    assert ran == ["first", "second"]


def test_nothing_can_be_scheduled_in_the_past() -> None:
    engine = Engine(ManualClock(10))
    with pytest.raises(AssertionError):
        engine.at(9, lambda: None)


def test_before_each_is_told_the_time_before_the_clock_jumps() -> None:
    engine = Engine(ManualClock(0))
    told: list[tuple[int, int]] = []
    engine.at(7, lambda: None)
    engine.run(until_ns=9, before_each=lambda time_ns: told.append((time_ns, engine.now_ns)))
    assert told == [(7, 0)]
