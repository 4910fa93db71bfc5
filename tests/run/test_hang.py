from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dougong.run.hang import StepTimes, find_hang, patience
from dougong.run.page import Phase
from dougong.run.settings import HangRule
from dougong.run.wire import Activity, RankStatus

RULE = HangRule()
KNOWN = StepTimes(num_steps=100, p99_s=0.2, longest_gap_s=0.5)
NEVER = StepTimes()


def rank(number: int, **changes: Any) -> RankStatus:
    base: dict[str, Any] = {
        "rank": number,
        "generation": 1,
        "pid": 100 + number,
        "phase": Phase.STEP,
        "step": 50,
        "idle_s": 0.1,
        "quiet_s": 0.0,
        "activity": "running",
        "is_attached": True,
    }
    return RankStatus(**{**base, **changes})


def silent(number: int, seconds: float, **changes: Any) -> RankStatus:
    """No step and no activity for so long, as a rank that waits for another one looks too."""
    return rank(number, **{"idle_s": seconds, "quiet_s": seconds, "activity": "idle", **changes})


def busy(number: int, idle_s: float, activity: Activity = "running", **changes: Any) -> RankStatus:
    """No step for so long, but its processes do something."""
    return rank(number, **{"idle_s": idle_s, "quiet_s": 0.0, "activity": activity, **changes})


# --- found ---


def test_a_stopped_process_is_found_within_three_seconds_and_by_itself() -> None:
    assert RULE.stopped_s < 3
    stopped = rank(1, activity="stopped", quiet_s=RULE.stopped_s, idle_s=RULE.stopped_s)
    found = find_hang([rank(0), stopped], learnt=KNOWN, rule=RULE)
    assert found is not None and (found.kind, found.rank) == ("stopped", 1)
    assert "state T" in found.reason and "101" in found.reason


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.DONE])
def test_a_stopped_process_is_found_in_every_phase(phase: Phase) -> None:
    stopped = rank(0, activity="stopped", quiet_s=RULE.stopped_s, phase=phase)
    found = find_hang([stopped], learnt=NEVER, rule=RULE)
    assert found is not None and found.kind == "stopped"


def test_a_lock_hang_of_an_attached_script_is_found_within_the_promised_time() -> None:
    promised_s = max(3.0, 6 * 0.2)
    found = find_hang([silent(0, promised_s), silent(1, promised_s)], learnt=KNOWN, rule=RULE)
    assert found is not None and found.kind == "hang"


@pytest.mark.parametrize("p99_s", [0.01, 0.4, 1.0, 5.0])
def test_the_limit_of_an_attached_script_grows_with_its_steps(p99_s: float) -> None:
    learnt = StepTimes(num_steps=100, p99_s=p99_s, longest_gap_s=2 * p99_s)
    limit_s, why = patience([silent(0, 1)], learnt=learnt, rule=RULE)
    assert limit_s == max(RULE.attached_min_s, RULE.attached_p99_factor * p99_s) <= max(3.0, 6 * p99_s)
    assert "p99" in why


def test_the_rank_that_is_behind_is_the_suspect() -> None:
    found = find_hang([silent(0, 9, step=51), silent(1, 9, step=50), silent(2, 9, step=51)], learnt=KNOWN, rule=RULE)
    assert found is not None and found.rank == 1


def test_at_the_same_step_the_one_outside_of_it_is_the_suspect() -> None:
    ranks = [silent(0, 70), silent(1, 69, phase=Phase.BETWEEN)]
    found = find_hang(ranks, learnt=KNOWN, rule=RULE)
    assert found is not None and found.rank == 1


def test_a_busy_loop_is_found_at_the_limit_for_the_busy() -> None:
    almost = [busy(0, RULE.active_s), silent(1, RULE.active_s)]
    assert find_hang(almost, learnt=KNOWN, rule=RULE) is None
    found = find_hang([busy(0, RULE.active_s + 1), silent(1, RULE.active_s + 1)], learnt=KNOWN, rule=RULE)
    assert found is not None and found.kind == "hang" and found.reason.startswith("busy")


# --- no false alarm ---


def test_a_rank_that_waits_for_a_busy_one_is_no_hang() -> None:
    assert find_hang([silent(0, 60), busy(1, 60)], learnt=KNOWN, rule=RULE) is None


@pytest.mark.parametrize("activity", ["running", "disk", "timer"])
@pytest.mark.parametrize("phase", [Phase.STEP, Phase.BETWEEN, Phase.CHECKPOINT])
def test_a_scripts_own_four_second_save_is_no_hang(activity: Activity, phase: Phase) -> None:
    """Compressing, waiting for the disk, or sleeping on a timer; inside a step or between two, of rank 0 alone."""
    learnt = StepTimes(num_steps=500, p99_s=0.01, longest_gap_s=0.02)
    ranks = [busy(0, 4.5, activity, phase=phase), silent(1, 4.5)]
    assert find_hang(ranks, learnt=learnt, rule=RULE) is None


def test_a_silent_four_second_save_between_steps_of_all_ranks_is_no_hang() -> None:
    """An upload that waits for the network shows no activity at all."""
    ranks = [silent(0, 4.5, phase=Phase.BETWEEN), silent(1, 4.5, phase=Phase.BETWEEN)]
    assert find_hang(ranks, learnt=KNOWN, rule=RULE) is None


@pytest.mark.parametrize("phase", [Phase.CHECKPOINT, Phase.RESTORING])
def test_a_checkpoint_of_ours_has_the_patience_for_what_is_outside_of_steps(phase: Phase) -> None:
    ranks = [silent(0, RULE.outside_step_s - 1, phase=phase), silent(1, RULE.outside_step_s - 1)]
    assert find_hang(ranks, learnt=KNOWN, rule=RULE) is None


def test_an_evaluation_is_no_hang() -> None:
    ranks = [busy(0, 300, phase=Phase.BETWEEN), silent(1, 300, phase=Phase.STEP)]
    assert find_hang(ranks, learnt=KNOWN, rule=RULE) is None


@pytest.mark.parametrize("active_s", [600.0, 60.0])
def test_a_long_first_step_is_no_hang(active_s: float) -> None:
    rule = HangRule(active_s=active_s)
    starting = [silent(0, 1000, phase=Phase.STARTING, step=0), silent(1, 1000, step=0)]
    assert find_hang(starting, learnt=NEVER, rule=rule) is None


def test_the_first_steps_have_patience_until_steps_are_known() -> None:
    assert find_hang([silent(0, 30), silent(1, 30)], learnt=NEVER, rule=RULE) is None
    few = StepTimes(num_steps=2, p99_s=8.0, longest_gap_s=8.0)
    assert find_hang([silent(0, 30), silent(1, 30)], learnt=few, rule=RULE) is None


def test_a_start_that_hangs_is_found_in_the_end() -> None:
    assert find_hang([silent(0, RULE.startup_s + 1, phase=Phase.STARTING)], learnt=NEVER, rule=RULE) is not None


def test_ranks_that_are_done_or_gone_are_not_asked() -> None:
    ranks = [silent(0, 9999, phase=Phase.DONE), silent(1, 9999, activity="gone")]
    assert find_hang(ranks, learnt=KNOWN, rule=RULE) is None
    assert find_hang([], learnt=KNOWN, rule=RULE) is None


# --- a script that is not attached ---


def unmodified(seconds: float) -> list[RankStatus]:
    return [silent(0, seconds, is_attached=False), silent(1, seconds, is_attached=False)]


def test_an_unmodified_script_has_ten_minutes_at_first() -> None:
    few = StepTimes(num_steps=5, p99_s=0.1, longest_gap_s=0.1)
    for learnt in (NEVER, few):
        assert find_hang(unmodified(599), learnt=learnt, rule=RULE) is None
        assert find_hang(unmodified(601), learnt=learnt, rule=RULE) is not None


@pytest.mark.parametrize(("longest_gap_s", "limit_s"), [(0.1, 60.0), (20.0, 200.0), (500.0, 600.0)])
def test_its_limit_is_learnt_from_the_longest_gap_between_floor_and_ceiling(
    longest_gap_s: float, limit_s: float
) -> None:
    learnt = StepTimes(num_steps=50, p99_s=0.1, longest_gap_s=longest_gap_s)
    assert find_hang(unmodified(limit_s - 1), learnt=learnt, rule=RULE) is None
    found = find_hang(unmodified(limit_s + 1), learnt=learnt, rule=RULE)
    assert found is not None and "longest gap" in found.reason


# --- laws ---


STATUSES = st.lists(
    st.builds(
        RankStatus,
        rank=st.integers(0, 3),
        generation=st.just(1),
        pid=st.just(7),
        phase=st.sampled_from([int(phase) for phase in Phase if phase is not Phase.UNWOUND]),
        step=st.integers(0, 9),
        idle_s=st.floats(0, 5000),
        quiet_s=st.floats(0, 5000),
        activity=st.sampled_from(["running", "idle", "timer", "disk", "gone"]),
        is_attached=st.booleans(),
    ),
    max_size=4,
)
LEARNT = st.builds(
    StepTimes, num_steps=st.integers(1, 99), p99_s=st.floats(0.001, 60), longest_gap_s=st.floats(0.001, 600)
)


@given(STATUSES, LEARNT)
def test_no_alarm_while_any_living_rank_made_progress_a_moment_ago(ranks: list[RankStatus], learnt: StepTimes) -> None:
    moved = [*ranks, rank(9, idle_s=RULE.attached_min_s / 2)]
    assert find_hang(moved, learnt=learnt, rule=RULE) is None


@given(STATUSES, LEARNT, st.floats(0, 1000))
def test_a_hang_that_is_found_is_still_found_later(ranks: list[RankStatus], learnt: StepTimes, later_s: float) -> None:
    import msgspec

    found = find_hang(ranks, learnt=learnt, rule=RULE)
    older = [
        msgspec.structs.replace(item, idle_s=item.idle_s + later_s, quiet_s=item.quiet_s + later_s) for item in ranks
    ]
    if found is not None:
        assert find_hang(older, learnt=learnt, rule=RULE) is not None
        assert found.rank in {item.rank for item in ranks}
        assert found.reason


def test_a_rank_alone_between_steps_may_wait_for_an_upload_while_the_others_wait_for_it() -> None:
    ranks = [silent(0, 30, phase=Phase.BETWEEN), silent(1, 30)]
    assert find_hang(ranks, learnt=KNOWN, rule=RULE) is None
    assert find_hang([silent(0, RULE.outside_step_s + 1, phase=Phase.BETWEEN), silent(1, 99)], learnt=KNOWN, rule=RULE)


def test_a_lock_between_steps_is_found_as_soon_as_one_in_a_step() -> None:
    ranks = [silent(0, 4, phase=Phase.BETWEEN, activity="lock"), silent(1, 4)]
    finding = find_hang(ranks, learnt=KNOWN, rule=RULE)
    assert finding is not None
    assert finding.kind == "hang"


def test_a_broken_link_between_living_ranks_is_found_by_their_unwinding() -> None:
    ranks = [silent(0, 2, phase=Phase.UNWOUND, activity="timer"), silent(1, 2, phase=Phase.UNWOUND, activity="timer")]
    finding = find_hang(ranks, learnt=KNOWN, rule=RULE)
    assert finding is not None
    assert finding.kind == "unwound"


def test_a_rank_that_has_not_unwound_may_be_the_one_that_broke_the_collective_and_is_given_time_to_end() -> None:
    def found(unwound_s: float) -> object:
        ranks = [silent(0, unwound_s, phase=Phase.UNWOUND, activity="timer"), silent(1, 0.1, activity="running")]
        return find_hang(ranks, learnt=KNOWN, rule=RULE)

    assert found(2 * RULE.unwound_s - 0.1) is None
    assert found(2 * RULE.unwound_s + 0.1) is not None


def test_a_start_after_the_first_has_the_patience_of_the_starts_before() -> None:
    starting = [silent(0, 100, phase=Phase.STARTING), silent(1, 100, phase=Phase.RESTORING)]
    assert find_hang(starting, learnt=NEVER, rule=RULE) is None
    assert find_hang(starting, learnt=StepTimes(start_s=40.0), rule=RULE) is None
    found = find_hang(starting, learnt=StepTimes(start_s=5.0), rule=RULE)
    assert found is not None and "a start" in found.reason
    assert patience(starting, learnt=StepTimes(start_s=1e6), rule=RULE)[0] == RULE.startup_s


# --- budgets of phases ---


@pytest.mark.parametrize(
    ("phase", "limit_s"),
    [
        (Phase.CHECKPOINT, RULE.checkpoint_s),
        (Phase.COMPILE, RULE.compile_s),
        (Phase.EVALUATION, RULE.evaluation_s),
        (Phase.STARTING, RULE.startup_s),
    ],
)
def test_a_phase_has_its_own_budget_and_one_rank_in_it_is_enough(phase: Phase, limit_s: float) -> None:
    def found(seconds: float) -> object:
        return find_hang([silent(0, seconds, phase=phase), silent(1, seconds)], learnt=KNOWN, rule=RULE)

    assert found(limit_s - 1) is None
    assert found(limit_s + 1) is not None


def test_the_first_step_of_a_start_has_its_own_budget_until_it_is_known() -> None:
    first = StepTimes(num_steps=100, p99_s=0.2, longest_gap_s=0.5, is_first_step=True)
    assert patience([rank(0), rank(1)], learnt=first, rule=RULE)[0] == RULE.first_step_s
    limit_s, why = patience(
        [rank(0)], learnt=StepTimes(num_steps=100, p99_s=0.2, is_first_step=True, first_step_s=4.0), rule=RULE
    )
    assert limit_s == pytest.approx(4.0 * RULE.attached_p99_factor)
    assert "first step" in why


def test_a_quick_first_step_does_not_shorten_the_limit_of_a_step() -> None:
    first = StepTimes(num_steps=100, p99_s=2.0, is_first_step=True, first_step_s=0.01)
    later = StepTimes(num_steps=100, p99_s=2.0)
    assert patience([rank(0)], learnt=first, rule=RULE)[0] == patience([rank(0)], learnt=later, rule=RULE)[0]
