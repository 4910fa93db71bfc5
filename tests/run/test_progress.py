from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dougong.event.kinds import StepFinished
from dougong.run.hang import StepTimes
from dougong.run.page import StepRecord
from dougong.run.progress import JobProgress


def record(step: int, *, step_s: float = 0.1, **changes: Any) -> StepRecord:
    """Steps follow each other every 100 ms."""
    begin_ns = step * 100_000_000
    base: dict[str, Any] = {
        "step": step,
        "begin_ns": begin_ns,
        "end_ns": begin_ns + round(step_s * 1e9),
        "data_wait_ns": 1_000_000,
        "loss": 1.0 / step,
        "tokens": 10,
        "checkpoint_stall_ns": 0,
        "between_ns": 2_000_000,
    }
    return StepRecord(**{**base, **changes})


def records(first: int, last: int) -> tuple[StepRecord, ...]:
    return tuple(record(step) for step in range(first, last + 1))


def started(*, world_size: int = 2, generation: int = 1, max_step: int = 0, **rest: Any) -> JobProgress:
    progress = JobProgress(max_step=max_step)
    progress.begin_generation(generation, world_size=world_size, **rest)
    return progress


def spans(events: tuple[StepFinished, ...]) -> list[tuple[int, int, bool]]:
    return [(event.first_step, event.last_step, event.is_redo) for event in events]


def test_a_step_is_finished_when_every_rank_has_finished_it() -> None:
    progress = started()
    progress.add(0, records(1, 3))
    assert progress.last_step == 0 and progress.take_ranges(is_forced=True) == ()
    progress.add(1, records(1, 2))
    assert progress.last_step == 2
    assert spans(progress.take_ranges(is_forced=True)) == [(1, 2, False)]


def test_ranges_come_at_most_once_a_second() -> None:
    progress = started(world_size=1)
    progress.add(0, records(1, 9))
    assert progress.take_ranges(is_forced=False) == ()
    progress.add(0, records(10, 10))
    assert spans(progress.take_ranges(is_forced=False)) == [(1, 10, False)]
    assert progress.take_ranges(is_forced=True) == ()


def test_a_range_sums_the_slowest_rank_and_counts_all_tokens() -> None:
    progress = started()
    progress.add(0, (record(1, step_s=0.1, loss=3.0), record(2, step_s=0.3, loss=2.0)))
    progress.add(1, (record(1, step_s=0.2, loss=9.0, data_wait_ns=5_000_000), record(2, checkpoint_stall_ns=7_000_000)))
    (event,) = progress.take_ranges(is_forced=True)
    assert event.step_s == pytest.approx(0.5) and event.max_step_s == pytest.approx(0.3)
    assert event.tokens == 40 and event.loss == 2.0
    assert event.data_wait_s == pytest.approx(0.006) and event.checkpoint_stall_s == pytest.approx(0.007)
    assert event.between_s == pytest.approx(0.004)
    assert (event.begin_ns, event.end_ns) == (100_000_000, 500_000_000)


def test_tokens_are_unknown_if_a_rank_does_not_tell_them() -> None:
    progress = started()
    progress.add(0, (record(1),))
    progress.add(1, (record(1, tokens=None),))
    assert progress.take_ranges(is_forced=True)[0].tokens is None


def test_steps_done_before_a_roll_back_are_redo_and_never_share_a_range_with_new_ones() -> None:
    progress = started(world_size=1)
    progress.add(0, records(1, 7))
    progress.take_ranges(is_forced=True)
    progress.begin_generation(2, world_size=1)
    progress.add(0, records(6, 9))
    events = progress.take_ranges(is_forced=True)
    assert spans(events) == [(6, 7, True), (8, 9, False)]
    assert {event.generation for event in events} == {2}


def test_a_range_has_no_gap() -> None:
    """Records are lost when more steps were finished than the page holds while its agent was away."""
    progress = started(world_size=1)
    progress.add(0, (*records(1, 3), *records(8, 9)))
    assert spans(progress.take_ranges(is_forced=True)) == [(1, 3, False), (8, 9, False)]


def test_what_an_agent_tells_again_counts_once() -> None:
    progress = started(world_size=1)
    assert len(progress.add(0, records(1, 5))) == 5
    assert [item.step for item in progress.add(0, records(1, 6))] == [6]
    assert spans(progress.take_ranges(is_forced=True)) == [(1, 6, False)]


def test_a_controller_that_comes_back_goes_on_after_what_was_recorded() -> None:
    progress = started(world_size=1, max_step=20, last_step=15)
    assert [item.step for item in progress.add(0, records(1, 22))] == list(range(16, 23))
    assert spans(progress.take_ranges(is_forced=True)) == [(16, 20, True), (21, 22, False)]


def test_a_step_that_a_rank_left_out_is_not_finished_by_the_next_one() -> None:
    progress = started()
    progress.add(0, records(1, 4))
    progress.add(1, (record(1), record(4)))
    assert spans(progress.take_ranges(is_forced=True)) == [(1, 1, False), (4, 4, False)]


def test_nothing_is_learnt_before_a_step() -> None:
    assert started().learnt() == StepTimes(is_first_step=True)


def test_slow_steps_at_the_start_do_not_hide_how_fast_the_job_may_be() -> None:
    """By it a stop is announced: too few steps ahead, and a rank is past them before it hears of it."""
    progress = started(world_size=1)
    assert progress.fast_step_s == 1.0
    progress.add(0, (record(1, step_s=5.0), record(2, step_s=4.0), *records(100, 150)))
    assert progress.learnt().p99_s == pytest.approx(4.0, abs=1.1)
    assert progress.fast_step_s == pytest.approx(0.1)


def test_step_times_and_the_longest_gap_are_learnt() -> None:
    progress = started(world_size=1)
    progress.add(0, (*records(1, 200), record(220)))
    learnt = progress.learnt()
    assert learnt.p99_s == pytest.approx(0.1) and learnt.longest_gap_s == pytest.approx(2.0)


def test_the_time_between_two_generations_is_no_gap() -> None:
    progress = started(world_size=1)
    progress.add(0, records(1, 10))
    progress.begin_generation(2, world_size=1)
    progress.add(0, records(1000, 1010))
    assert progress.learnt().longest_gap_s == pytest.approx(0.1)


@st.composite
def deliveries(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, int, bool]]]:
    """(world size, batches): each batch a rank, the range of its steps, and whether ranges are taken after it.

    Batches overlap, since an agent tells again what it is not sure of.
    """
    world_size = draw(st.integers(1, 3))
    done = dict.fromkeys(range(world_size), 0)
    batches: list[tuple[int, int, int, bool]] = []
    for _ in range(draw(st.integers(0, 12))):
        rank = draw(st.integers(0, world_size - 1))
        first = draw(st.integers(1, done[rank] + 1))
        done[rank] = max(done[rank], first - 1 + draw(st.integers(0, 4)))
        batches.append((rank, first, done[rank], draw(st.booleans())))
    return world_size, batches


@given(deliveries(), st.integers(0, 10))
def test_how_steps_arrive_does_not_change_what_is_told(case: Any, max_step: int) -> None:
    world_size, batches = case
    piecewise, whole = (started(world_size=world_size, max_step=max_step) for _ in range(2))
    told: list[StepFinished] = []
    last = dict.fromkeys(range(world_size), 0)
    for rank, first, until, is_taken in batches:
        piecewise.add(rank, records(first, until))
        last[rank] = max(last[rank], until)
        told += piecewise.take_ranges(is_forced=True) if is_taken else ()
    told += piecewise.take_ranges(is_forced=True)
    for rank, until in last.items():
        whole.add(rank, records(1, until))
    at_once = whole.take_ranges(is_forced=True)

    def steps(events: Any) -> list[tuple[int, bool]]:
        return [(step, e.is_redo) for e in events for step in range(e.first_step, e.last_step + 1)]

    assert steps(told) == steps(at_once) == [(step, step <= max_step) for step in range(1, min(last.values()) + 1)]
    assert sum(event.tokens or 0 for event in told) == sum(event.tokens or 0 for event in at_once)
    assert sum(event.step_s for event in told) == pytest.approx(sum(event.step_s for event in at_once))
    assert piecewise.last_step == whole.last_step == min(last.values())
    assert piecewise.max_step == max(max_step, min(last.values()))


def test_the_first_step_of_each_generation_is_learnt_apart() -> None:
    progress = started(world_size=1)
    assert progress.learnt().is_first_step
    progress.add(0, (record(1, step_s=5.0), record(2)))
    learnt = progress.learnt()
    assert (learnt.is_first_step, learnt.first_step_s, learnt.p99_s) == (False, 5.0, pytest.approx(0.1))
    progress.begin_generation(2, world_size=1)
    assert progress.learnt().is_first_step
    progress.add(0, (record(3, step_s=7.0),))
    assert progress.learnt().first_step_s == 7.0


def test_a_new_controller_does_not_take_a_running_job_for_one_in_its_first_step() -> None:
    assert not started(world_size=1, last_step=40).learnt().is_first_step
