from __future__ import annotations

import os
from typing import Any

import pytest

from dougong.backend.local.process import Reading
from dougong.run.activity import ActivityState, advance
from dougong.run.wire import Activity

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def reading(**changes: Any) -> Reading:
    base: dict[str, Any] = {
        "state": "S",
        "cpu_ticks": 0,
        "io_bytes": 0,
        "is_on_timer": False,
        "is_in_disk_wait": False,
    }
    return Reading(**{**base, **changes})


def after(readings: list[Reading], *, every_s: float = 1.0) -> ActivityState:
    state = None
    for number, item in enumerate(readings):
        state = advance(state, item, now_s=number * every_s)
    assert state is not None
    return state


@pytest.mark.parametrize(
    ("second", "activity"),
    [
        ({"cpu_ticks": TICKS_PER_S // 2}, "running"),
        ({"io_bytes": 2**20}, "disk"),
        ({"is_in_disk_wait": True}, "disk"),
        ({"is_on_timer": True}, "timer"),
        ({}, "idle"),
        ({"cpu_ticks": 1}, "idle"),  # a heartbeat thread is no work
        ({"io_bytes": 1000}, "idle"),
        ({"state": "T"}, "stopped"),
    ],
)
def test_what_changed_between_two_readings_tells_the_activity(second: dict[str, Any], activity: Activity) -> None:
    assert after([reading(), reading(**second)]).activity == activity


def test_a_process_that_is_gone_has_no_state() -> None:
    assert advance(after([reading(), reading()]), None, now_s=9.0) is None


def test_quiet_counts_from_the_last_activity() -> None:
    busy = [reading(cpu_ticks=number * TICKS_PER_S) for number in range(4)]
    state = after([*busy, *[reading(cpu_ticks=3 * TICKS_PER_S)] * 5])
    assert state.activity == "idle"
    assert state.quiet_since_s == 3.0


def test_readings_that_follow_too_quickly_do_not_count() -> None:
    first = after([reading()])
    assert advance(first, reading(cpu_ticks=TICKS_PER_S), now_s=0.1) is first


def test_a_stop_is_seen_at_once_and_its_time_does_not_move() -> None:
    state = after([reading(), reading(state="T")], every_s=0.1)
    assert (state.activity, state.quiet_since_s) == ("stopped", 0.1)
    again = advance(state, reading(state="T"), now_s=5.0)
    assert again is not None and again.quiet_since_s == 0.1


def test_a_process_that_is_continued_is_judged_anew() -> None:
    state = advance(after([reading(), reading(state="T")]), reading(), now_s=5.0)
    assert state is not None and (state.activity, state.quiet_since_s) == ("idle", 1.0)
    busy = advance(state, reading(cpu_ticks=TICKS_PER_S), now_s=6.0)
    assert busy is not None and (busy.activity, busy.quiet_since_s) == ("running", 6.0)


def test_a_four_second_sleep_is_not_quiet() -> None:
    state = after([reading(is_on_timer=True)] * 6)
    assert state.activity == "timer" and state.quiet_since_s == 5.0


def test_an_endless_row_of_sleeps_becomes_quiet_after_a_while() -> None:
    state = after([reading(is_on_timer=True)] * 30)
    assert state.activity == "idle"
    assert 10.0 < state.quiet_since_s < 20.0


def test_a_process_that_is_stopped_for_moments_only_is_slow_and_not_stopped() -> None:
    stopped = after([reading(state="T", cpu_ticks=0)] * 5)
    assert stopped.quiet_since_s == 1.0
    braked = after([reading(state="T", cpu_ticks=number) for number in range(5)])
    assert braked.quiet_since_s == 4.0
