from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dougong.event import kinds
from dougong.event.kinds import Cause, Recorded
from dougong.score.accounts import PHASES
from dougong.score.fold import JobFold
from dougong.score.scorecard import percentile, score, score_with_timeline
from tests.score.story import NS, Story, one_interruption


def test_one_interruption_is_split_into_its_phases() -> None:
    card = score(one_interruption().records)
    assert card.interruptions == 1
    assert card.interruptions_by_cause == {"crash": 1}
    assert card.mttd_s == 1.0
    assert card.mttr_split_s is not None
    assert msgspec.structs.asdict(card.mttr_split_s) == {
        "detect": 1.0,
        "decide": 0.5,
        "restart": 3.5 - 1.0 + 1.0,
        "reload": 1.0,
        "redo": 3.0,
    }
    assert card.mttr_s == 9.0
    assert (card.badput_s.init, card.badput_s.unfinished, card.badput_s.shutdown) == (5.0, 1.0, 1.0)
    assert card.ettr == pytest.approx(15 / 31)
    assert card.tokens == 150
    assert card.tokens_per_s == pytest.approx(150 / 31)
    assert card.mtbf_s == pytest.approx(31 - 6.0)
    assert card.steps_redone == 3


def test_what_was_not_measured_is_null_and_not_zero() -> None:
    card = score([])
    assert card.ettr is None
    assert card.mtbf_s is None
    assert card.mttd_s is None
    assert card.mfu is None
    assert card.checkpoint_stall_ratio is None
    assert card.samples_lost is None
    assert card.availability.inventory is None
    assert card.interruptions == 0


def test_a_run_without_a_fault_bounds_its_mtbf_from_below() -> None:
    story = Story()
    story.started(0)
    story.generation(0, 1)
    story.steps(10, 1, 1, 10, begin_s=0, end_s=10)
    card = score(story.records)
    assert card.mtbf_s is None
    assert card.mtbf_ci95_s == (pytest.approx(10 / 3.689, rel=1e-3), None)
    assert card.checkpoint_stall_ratio == 0.0


def test_several_losses_before_a_decision_are_one_interruption() -> None:
    story = _trained()
    story.lost(11, 1, rank=0)
    story.lost(11.5, 1, rank=1)
    story.decided(12, 1)
    story.lost(12.5, 1, rank=0)
    _recovered(story, 13)
    assert score(story.records).interruptions == 1


def test_losses_that_name_one_fault_are_one_interruption() -> None:
    story = _trained()
    fault = story.fault(10.5, rank=None)
    cause = Cause(fault.stream, fault.seq)
    story.lost(11, 1, cause=cause)
    story.decided(12, 1)
    story.generation(13, 2)
    story.lost(13.5, 2, cause=cause)
    story.decided(14, 2)
    _recovered(story, 15, number=3)
    assert score(story.records).interruptions == 1


def test_a_fault_during_a_recovery_is_an_interruption_of_its_own_in_the_same_downtime() -> None:
    story = _trained()
    story.fault(11, rank=1)
    story.lost(12, 1, rank=1)
    story.decided(13, 1)
    story.generation(14, 2)
    story.fault(16, rank=0)
    story.lost(18, 2, rank=0)
    story.decided(19, 2)
    _recovered(story, 20, number=3)
    card, timeline = score_with_timeline(story.records)
    first, second = timeline.interruptions
    assert (first.detect_ns, first.decide_ns, first.restart_ns) == (1 * NS, 1 * NS, 3 * NS)
    assert (second.detect_ns, second.decide_ns) == (2 * NS, 1 * NS)
    assert first.is_overtaken
    assert second.resumed_ns is not None
    assert card.mttd_s == 1.5


def test_a_range_reported_after_the_loss_counts_as_training_up_to_the_loss() -> None:
    story = _trained()
    story.lost(13, 1, onset_s=12.5)
    story.steps(13.1, 1, 11, 12, begin_s=10, end_s=12)
    story.decided(14, 1)
    _recovered(story, 15)
    card = score(story.records)
    assert card.productive_s == 10 + 2 + 5
    assert card.badput_s.unfinished == pytest.approx(0.5)
    assert card.badput_s.detect == pytest.approx(0.5)


def test_a_loss_without_a_known_onset_is_not_in_the_mttd_but_its_time_is_accounted_for() -> None:
    story = _trained()
    story.lost(14, 1)
    story.decided(15, 1)
    _recovered(story, 16)
    card = score(story.records)
    assert card.mttd_s is None
    assert card.badput_s.detect == 4.0


def test_steps_redone_after_the_job_resumed_belong_to_the_interruption() -> None:
    story = _trained()
    story.lost(11, 1, onset_s=10.5)
    story.decided(11, 1)
    story.generation(12, 2)
    story.restored(13, 2)
    story.resumed(14, 2, step=6)
    story.steps(18, 2, 6, 10, begin_s=13, end_s=18, is_redo=True)
    story.steps(19, 2, 11, 11, begin_s=18, end_s=19)
    card, timeline = score_with_timeline(story.records)
    assert timeline.interruptions[0].redo_ns == 5 * NS
    assert timeline.interruptions[0].num_redone_steps == 5
    assert card.badput_s.redo == 5.0


def test_time_stopped_by_hand_is_outside_the_wall() -> None:
    story = _trained()
    story.write(11, kinds.JobStopped(step=10, reason="Ctrl-C"))
    story.started(1000, is_resume=True)
    story.generation(1001, 2)
    story.steps(1012, 2, 11, 20, begin_s=1002, end_s=1012)
    card = score(story.records)
    assert card.idle_s == 989.0
    assert card.wall_s == 23.0
    assert card.interruptions == 0


def test_a_resume_without_a_stop_is_an_interruption_by_an_unknown_cause() -> None:
    story = _trained()
    story.started(100, is_resume=True)
    _recovered(story, 101)
    card = score(story.records)
    assert card.interruptions_by_cause == {"unknown": 1}
    assert card.badput_s.detect == 90.0


def test_parts_of_a_range_never_exceed_the_range() -> None:
    story = Story()
    story.started(0)
    story.generation(0, 1)
    story.steps(10, 1, 1, 10, begin_s=0, end_s=10, between_s=8, stall_s=8, wait_s=8)
    card = score(story.records)
    assert (card.productive_s, card.between_steps_s) == (2.0, 8.0)
    assert (card.badput_s.checkpoint_stall, card.badput_s.data_wait) == (0.0, 0.0)


def test_the_time_before_a_step_is_split_as_its_range_says() -> None:
    story = _trained()
    # Two steps of 1 s; before each 0.5 s of data wait, 1 s of checkpoint stall and 0.25 s that are told as evaluation.
    story.range(16, 11, 12, begin_s=11.75, end_s=15.5, step_s=2, between_s=0.5, stall_s=2, wait_s=1)
    card = score(story.records)
    assert (card.productive_s, card.between_steps_s) == (12.0, 0.5)
    assert (card.badput_s.checkpoint_stall, card.badput_s.data_wait) == (2.0, 1.0)


def test_before_the_first_step_after_a_start_all_time_belongs_to_the_start() -> None:
    story = Story()
    story.started(0)
    story.generation(0, 1)
    story.range(10, 1, 1, begin_s=5, end_s=10, step_s=5, between_s=1, stall_s=1, wait_s=3)
    card = score(story.records)
    assert (card.badput_s.init, card.productive_s, card.badput_s.data_wait) == (5.0, 5.0, 0.0)


def test_a_rank_that_waits_for_another_ones_evaluation_is_not_training() -> None:
    story = _trained()
    story.range(20, 11, 11, begin_s=10, end_s=20, step_s=10, between_s=9)
    card = score(story.records)
    assert (card.productive_s, card.between_steps_s) == (11.0, 9.0)


def test_a_recovery_decided_after_a_resume_by_hand_is_part_of_the_start() -> None:
    story = _trained()
    story.write(11, kinds.JobStopped(step=10, reason="Ctrl-C"))
    story.started(100, is_resume=True)
    story.decided(101, 2)
    story.generation(102, 2)
    story.steps(112, 2, 11, 15, begin_s=107, end_s=112)
    card = score(story.records)
    assert (card.interruptions, card.badput_s.init, card.badput_s.restart) == (0, 7.0, 0.0)


def test_a_job_given_up_keeps_its_last_interruption_unresolved() -> None:
    story = _trained()
    story.lost(11, 1, onset_s=10)
    story.decided(12, 1)
    story.write(15, kinds.JobFailed(reason="limit"))
    card = score(story.records)
    assert (card.outcome, card.interruptions_unresolved, card.mttr_s) == ("failed", 1, None)
    assert card.badput_s.restart == 3.0


def test_an_unknown_kind_is_counted_and_reported() -> None:
    story = _trained()
    story.write(12, kinds.Unknown(kind="CardSwapped", fields_json="{}"))
    assert score(story.records).unknown_kinds == {"CardSwapped": 1}


def test_mfu_shows_its_terms() -> None:
    story = Story()
    story.started(0)
    story.write(
        0, kinds.ModelDescribed(num_parameters=10, model_flop_per_token=60.0, hardware_flop_per_token=80.0, source="6P")
    )
    story.write(0, kinds.PeakDescribed(peak_flop_per_s=6000.0, source="measured GEMM"))
    story.generation(0, 1)
    story.steps(20, 1, 1, 1, begin_s=0, end_s=20, tokens=10)
    story.steps(30, 1, 2, 11, begin_s=20, end_s=30, tokens=100)
    card = score(story.records)
    assert card.mfu == pytest.approx(10 * 60 / 6000)  # the first, slow step is warm-up
    assert card.hfu == pytest.approx(10 * 80 / 6000)
    assert card.mfu_of_wall == pytest.approx(110 / 30 * 60 / 6000)
    assert card.utilisation_terms.peak_source == "measured GEMM"


def test_inventory_availability_counts_lost_accelerator_time() -> None:
    story = Story()
    story.write(0, kinds.NodeJoined(component="a", role="active", num_accelerators=8))
    story.write(0, kinds.NodeJoined(component="b", role="spare", num_accelerators=8))
    story.started(0)
    story.write(40, kinds.NodeLost(component="a", reason=""))
    story.write(90, kinds.NodeRepaired(component="a"))
    story.write(100, kinds.JobFinished(step=0))
    card = score(story.records)
    assert card.availability.inventory == pytest.approx(0.75)
    assert card.node_repair_s == 50.0
    assert card.availability.schedulable is None


def test_the_json_carries_the_contract_at_its_top_level() -> None:
    names = msgspec.json.decode(msgspec.json.encode(score(one_interruption().records)))
    assert {
        "ettr",
        "interruptions",
        "mtbf_s",
        "mttd_s",
        "mttr_s",
        "checkpoint_stall_ratio",
        "tokens_per_s",
        "mfu",
        "samples_lost",
        "samples_repeated",
        "samples_skipped",
    } <= names.keys()


def test_percentiles_are_of_the_nearest_rank() -> None:
    assert [percentile(list(range(1, 101)), ratio) for ratio in (0.5, 0.9, 0.99, 1.0)] == [50, 90, 99, 100]
    assert percentile([], 0.5) is None


_SECONDS = st.floats(min_value=0, max_value=50, allow_nan=False)


@st.composite
def _any_records(draw: st.DrawFn) -> list[Recorded]:
    """Events in any order at all: a scorecard must not depend on a controller that does everything right."""
    story = Story()
    now_s, number = 0.0, 1
    if draw(st.booleans()):
        story.started(0)
    for _ in range(draw(st.integers(0, 25))):
        now_s += draw(_SECONDS)
        before_s = max(0.0, now_s - draw(_SECONDS))
        match draw(st.integers(0, 10)):
            case 0:
                story.started(now_s, is_resume=draw(st.booleans()))
            case 1:
                number += 1
                story.generation(now_s, number)
            case 2:
                story.restored(now_s, number, reload_s=draw(_SECONDS))
            case 3:
                story.fault(now_s, rank=draw(st.sampled_from([None, 0, 1])))
            case 4:
                story.lost(
                    now_s,
                    draw(st.integers(1, number)),
                    rank=draw(st.integers(0, 1)),
                    onset_s=draw(st.sampled_from([None, before_s])),
                )
            case 5:
                story.decided(now_s, number)
            case 6:
                story.resumed(now_s, number, step=1)
            case 7:
                story.write(
                    now_s,
                    draw(
                        st.sampled_from(
                            [kinds.JobStopped(step=1, reason=""), kinds.JobFinished(step=1), kinds.JobFailed(reason="")]
                        )
                    ),
                )
            case _:
                story.steps(
                    now_s,
                    draw(st.integers(1, number)),
                    1,
                    3,
                    begin_s=before_s,
                    end_s=now_s,
                    is_redo=draw(st.booleans()),
                    between_s=draw(_SECONDS),
                    stall_s=draw(_SECONDS),
                    wait_s=draw(_SECONDS),
                    tokens=draw(st.sampled_from([None, 7])),
                )
    return story.records


@settings(max_examples=400)
@given(_any_records())
def test_every_nanosecond_is_in_exactly_one_phase(records: list[Recorded]) -> None:
    card, timeline = score_with_timeline(records)
    spent_ns = msgspec.structs.asdict(card.time_spent)
    assert all(value >= 0 for value in spent_ns.values())
    for before, after in zip(timeline.bands, timeline.bands[1:], strict=False):
        assert before.end_ns == after.begin_ns
    for phase in PHASES:
        assert spent_ns[f"{phase}_ns"] == sum(b.end_ns - b.begin_ns for b in timeline.bands if b.phase == phase)
    whole_ns = timeline.bands[-1].end_ns - timeline.bands[0].begin_ns if timeline.bands else 0
    assert sum(spent_ns.values()) == whole_ns
    assert card.wall_s == (whole_ns - spent_ns["idle_ns"]) / 1e9
    badput_s = sum(msgspec.structs.astuple(card.badput_s))
    assert badput_s + card.productive_s + card.between_steps_s == pytest.approx(card.wall_s)


@settings(max_examples=200)
@given(_any_records())
def test_repairs_own_their_time_once(records: list[Recorded]) -> None:
    card, timeline = score_with_timeline(records)
    for phase in ("detect", "decide"):
        owned_ns = sum(getattr(item, f"{phase}_ns") for item in timeline.interruptions)
        assert owned_ns == getattr(card.time_spent, f"{phase}_ns")


@settings(max_examples=200)
@given(_any_records())
def test_the_rolling_ettr_ends_in_the_ettr_of_the_scorecard(records: list[Recorded]) -> None:
    state = JobFold()
    for recorded in records:
        state.advance(recorded)
        assert state.ettr is None or 0 <= state.ettr <= 1
    assert state.ettr == score(records).ettr


def _trained() -> Story:
    story = Story()
    story.created(0)
    story.started(0)
    story.generation(0, 1)
    story.steps(10, 1, 1, 10, begin_s=0, end_s=10)
    return story


def _recovered(story: Story, at_s: float, *, number: int = 2) -> None:
    story.generation(at_s, number)
    story.restored(at_s + 1, number)
    story.steps(at_s + 6, number, 13, 17, begin_s=at_s + 1, end_s=at_s + 6)


def test_a_job_of_months_keeps_few_bands_and_exact_sums() -> None:
    story = Story()
    story.started(0)
    for index in range(20_000):
        story.range(
            index + 1, index + 1, index + 1, begin_s=index + 0.2, end_s=index + 1, step_s=0.8, stall_s=0.1, wait_s=0.1
        )
    card, timeline = score_with_timeline(story.records)
    assert len(timeline.bands) < 15_000
    assert card.badput_s.checkpoint_stall == pytest.approx(19_999 * 0.1)
    assert timeline.bands[-1].end_ns == 20_000 * NS
