from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dougong.run.page import StepRecord
from dougong.run.settings import Policy
from dougong.run.straggler import Straggler, StragglerWatch, is_replaced

POLICY = Policy()
NUM = POLICY.straggler_steps


def record(step: int, compute_s: float) -> StepRecord:
    return StepRecord(
        step=step,
        begin_ns=0,
        end_ns=1,
        data_wait_ns=0,
        loss=None,
        tokens=None,
        checkpoint_stall_ns=0,
        between_ns=0,
        compute_ns=round(compute_s * 1e9),
    )


def watched(
    steps: Sequence[Sequence[float]], *, watch: StragglerWatch | None = None, first: int = 1
) -> list[Straggler]:
    """Who is named when the ranks take these times, step by step."""
    if watch is None:
        watch = StragglerWatch(POLICY)
        watch.begin_generation(world_size=len(steps[0]))
    return [
        found
        for number, times_s in enumerate(steps, start=first)
        for rank, time_s in enumerate(times_s)
        for found in watch.add(rank, (record(number, time_s),))
    ]


def test_a_rank_that_takes_half_as_long_again_is_named_once() -> None:
    (found,) = watched([(0.1, 0.1, 0.101, 0.15)] * (3 * NUM))
    assert (found.rank, found.compute_s, found.z is not None) == (3, 0.15, True)
    assert "1.49 x the median of 4 ranks" in found.reason or "1.50 x" in found.reason


def test_no_rank_is_named_before_enough_steps_are_known() -> None:
    assert watched([(0.1, 0.1, 0.3)] * NUM) == []


@given(st.lists(st.lists(st.floats(0.08, 0.1), min_size=4, max_size=4), min_size=30, max_size=40))
def test_ranks_within_a_quarter_of_each_other_are_never_named(steps: list[list[float]]) -> None:
    assert watched(steps) == []


def test_one_slow_step_in_three_is_no_straggler() -> None:
    assert watched([(0.1, 0.1, 0.3), (0.1, 0.1, 0.1), (0.1, 0.1, 0.1)] * NUM) == []


def test_a_few_milliseconds_are_no_straggler() -> None:
    assert watched([(0.001, 0.001, 0.008)] * (3 * NUM)) == []


def test_a_wide_spread_of_all_is_no_straggler() -> None:
    assert watched([(0.1, 0.15, 0.2, 0.25, 0.3, 0.35)] * (3 * NUM)) == []


def test_a_rank_that_recovers_and_falls_behind_again_is_named_again() -> None:
    slow, fine = [(0.1, 0.1, 0.3)] * (2 * NUM), [(0.1, 0.1, 0.1)] * (2 * NUM)
    assert [found.rank for found in watched([*slow, *fine, *slow])] == [2, 2]


def test_of_two_ranks_the_one_is_named_that_has_become_slower_than_it_was() -> None:
    (found,) = watched([*[(0.1, 0.1)] * (NUM + 1), *[(0.1, 0.2)] * (2 * NUM)])
    assert (found.rank, found.z) == (1, None)
    assert "the other rank" in found.reason


def test_of_two_ranks_one_that_was_always_slower_is_not_named() -> None:
    assert watched([(0.1, 0.2)] * (4 * NUM)) == []


def test_if_both_of_two_ranks_become_slower_neither_is_named() -> None:
    assert watched([*[(0.1, 0.1)] * (NUM + 1), *[(0.2, 0.2)] * (2 * NUM)]) == []


@pytest.mark.parametrize("times", [(0.0, 0.0, 0.0), (0.1,)])
def test_what_was_not_measured_or_has_no_other_rank_names_nobody(times: tuple[float, ...]) -> None:
    assert watched([times] * (3 * NUM)) == []


def test_a_new_generation_learns_anew() -> None:
    watch = StragglerWatch(POLICY)
    watch.begin_generation(world_size=3)
    watched([(0.1, 0.1, 0.3)] * NUM, watch=watch)
    watch.begin_generation(world_size=3)
    assert watched([(0.1, 0.1, 0.3)] * NUM, watch=watch, first=100) == []


@pytest.mark.parametrize(
    ("policy", "has_spare", "saved_step", "expected"),
    [
        ("name", True, 99, False),
        ("replace", False, 99, False),
        ("replace", True, 29, False),
        ("replace", True, 30, True),
    ],
)
def test_it_is_replaced_by_policy_with_a_spare_behind_a_checkpoint(
    policy: str, has_spare: bool, saved_step: int, expected: bool
) -> None:
    found = Straggler(rank=1, step=30, compute_s=0.2, usual_s=0.1, z=9.0, reason="")
    rule = Policy(straggler=policy)  # pyright: ignore[reportArgumentType]
    assert is_replaced(found, policy=rule, has_spare=has_spare, saved_step=saved_step) is expected
