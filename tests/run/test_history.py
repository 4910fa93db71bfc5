from __future__ import annotations

from itertools import count
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dougong.event import kinds
from dougong.event.kinds import AnyEvent, Placed, Recorded, StepFinished
from dougong.run.history import JobHistory, replay

HOME = (Placed(rank=0, local_rank=0, component="a"),)
CREATED = kinds.JobCreated(
    job="r", version="1", command=("t.py",), backend="local", world_size=1, num_accelerators=1, nodes=("a",)
)
STARTED = kinds.JobStarted(job="r")
LOST = kinds.WorkerLost(generation=1, rank=0, component="a", cause_class="crash", detail="signal 9")


def generation(number: int, rung: Any = "standby") -> kinds.GenerationStarted:
    return kinds.GenerationStarted(generation=number, placement=HOME, rung=rung, reason="x")


def restored(step: int, *, number: int = 1) -> kinds.StateRestored:
    return kinds.StateRestored(generation=number, step=step, source="none", reload_s=0.1, reason="")


def steps(first: int, last: int, *, number: int = 1, is_redo: bool = False) -> StepFinished:
    return StepFinished(
        generation=number,
        first_step=first,
        last_step=last,
        begin_ns=0,
        end_ns=1,
        is_redo=is_redo,
        step_s=0.1,
        between_s=0,
        data_wait_s=0,
        checkpoint_stall_s=0,
        max_step_s=0.1,
    )


BEGINNING: tuple[AnyEvent, ...] = (
    CREATED,
    kinds.ControllerStarted(pid=1, is_restart=False),
    STARTED,
    kinds.NodeJoined(component="a", role="active"),
    generation(1, "first"),
    restored(0),
    steps(1, 10),
)


def after(*events: AnyEvent) -> JobHistory:
    seq = count(1)
    return replay(Recorded(stream="job", seq=next(seq), time_ns=0, event=event) for event in events)


def test_nothing_recorded_is_nothing_begun() -> None:
    assert after() == JobHistory()


def test_a_job_that_runs_stands_at_its_generation_placement_and_step() -> None:
    history = after(*BEGINNING)
    assert history.is_created and history.is_started and not history.is_ended and not history.is_broken
    assert (history.generation, history.placement, history.last_step, history.max_step) == (1, HOME, 10, 10)
    assert history.is_attached and history.is_restored and history.is_resumed
    assert (history.num_restarts, history.num_fruitless) == (0, 0)


def test_a_lost_rank_breaks_the_generation_until_the_next_one() -> None:
    broken = after(*BEGINNING, LOST)
    assert broken.is_broken and broken.num_fruitless == 1
    mended = after(*BEGINNING, LOST, generation(2))
    assert not mended.is_broken and not mended.is_restored and not mended.is_resumed
    assert (mended.generation, mended.num_restarts, mended.last_step, mended.max_step) == (2, 1, 0, 10)


def test_a_roll_back_counts_from_the_restored_step_and_keeps_the_highest() -> None:
    history = after(*BEGINNING, LOST, generation(2), restored(5, number=2), steps(6, 8, number=2, is_redo=True))
    assert (history.last_step, history.max_step) == (8, 10)


def test_only_a_step_that_is_new_ends_a_row_of_fruitless_failures() -> None:
    redo = (generation(2), restored(5, number=2), steps(6, 10, number=2, is_redo=True))
    assert after(*BEGINNING, LOST, *redo).num_fruitless == 1
    assert after(*BEGINNING, LOST, *redo, LOST).num_fruitless == 2
    assert after(*BEGINNING, LOST, *redo, steps(11, 11, number=2)).num_fruitless == 0


@pytest.mark.parametrize(
    ("event", "end"),
    [
        (kinds.JobFinished(step=10), "finished"),
        (kinds.JobFailed(reason="x"), "failed"),
        (kinds.JobStopped(step=10, reason="x"), "stopped"),
    ],
)
def test_an_end_is_known_by_name_until_the_job_is_started_again(event: AnyEvent, end: str) -> None:
    ended = after(*BEGINNING, event)
    assert (ended.is_ended, ended.end) == (True, end)
    again = after(*BEGINNING, LOST, generation(2), event, kinds.JobStarted(job="r", is_resume=True))
    assert (again.is_ended, again.end, again.num_restarts, again.num_fruitless) == (False, "", 0, 0)
    assert again.max_step == 10 and again.generation == 2


def test_a_resume_is_no_restart_and_a_copy_that_could_not_be_had_is_no_failure() -> None:
    resumed = after(*BEGINNING, kinds.JobStopped(step=1, reason="x"), kinds.JobStarted(job="r", is_resume=True))
    assert resumed.num_restarts == 0
    begun = after(*BEGINNING, kinds.JobStarted(job="r", is_resume=True), generation(2, rung="standby"))
    assert (begun.num_restarts, begun.rung) == (0, "standby")
    again = after(*BEGINNING, kinds.JobStarted(job="r", is_resume=True), generation(2), LOST, generation(3))
    assert again.num_restarts == 1
    refused = msgspec.structs.replace(LOST, is_failure=False)
    assert after(*BEGINNING, refused).num_fruitless == 0 and after(*BEGINNING, LOST).num_fruitless == 1


def test_only_a_loss_whose_state_came_from_storage_counts_as_one_of_memory() -> None:
    def decided(source: Any) -> kinds.RecoveryDecided:
        return kinds.RecoveryDecided(
            generation=2, rung="standby", restore_step=1, restore_source=source, backoff_s=0.0, reason="x"
        )

    assert after(*BEGINNING, LOST, decided("durable")).num_memory_losses == 1
    assert after(*BEGINNING, LOST, decided("memory")).num_memory_losses == 0
    assert after(*BEGINNING, decided("durable")).num_memory_losses == 0, "the world grew; nothing was lost"


def test_lost_nodes_are_known_until_they_are_repaired() -> None:
    lost = after(*BEGINNING, kinds.NodeLost(component="a", reason="x"), kinds.NodeLost(component="b", reason="x"))
    assert lost.lost_nodes == {"a", "b"}
    repaired = after(*BEGINNING, kinds.NodeLost(component="a", reason="x"), kinds.NodeRepaired(component="a"))
    assert repaired.lost_nodes == frozenset()


def test_what_was_described_once_is_not_described_again() -> None:
    history = after(
        *BEGINNING,
        kinds.ModelDescribed(num_parameters=1, model_flop_per_token=None, hardware_flop_per_token=None, source="x"),
        kinds.PeakDescribed(peak_flop_per_s=1.0, source="x"),
        kinds.ControllerStarted(pid=2, is_restart=True),
    )
    assert history.is_model_described and history.is_peak_described and history.num_controllers == 2


def test_the_last_durable_step_is_no_memory_checkpoint() -> None:
    def saved(step: int, tier: Any) -> kinds.CheckpointSaved:
        return kinds.CheckpointSaved(step=step, generation=1, tier=tier, num_bytes=1, stall_s=0, write_s=0)

    assert after(*BEGINNING, saved(5, "durable"), saved(8, "memory")).last_durable_step == 5


def test_events_of_no_concern_change_nothing() -> None:
    events = (
        kinds.WarningRaised(component="x", text="y"),
        kinds.AgentLost(component="a", reason="x"),
        kinds.WebhookSent(status=200, detail="sent"),
        kinds.Unknown(kind="Later", fields_json="{}"),
    )
    assert after(*BEGINNING, *events) == after(*BEGINNING)  # type: ignore[arg-type]


EVENTS = st.sampled_from(
    [
        *BEGINNING,
        LOST,
        generation(2),
        restored(5, number=2),
        steps(6, 12, number=2),
        kinds.NodeLost(component="a", reason="x"),
        kinds.JobStopped(step=1, reason="x"),
    ]
)


@given(st.lists(EVENTS, max_size=30))
def test_the_highest_step_never_falls_and_is_at_least_the_last_finished(events: list[AnyEvent]) -> None:
    highest = 0
    for length in range(len(events) + 1):
        history = after(*events[:length])
        assert history.max_step >= highest
        highest = history.max_step
    finished = [event.last_step for event in events if isinstance(event, StepFinished)]
    assert highest == max(finished, default=0)
