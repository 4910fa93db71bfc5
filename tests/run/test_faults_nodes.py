"""Nodes that come back, two faults at once, faults in a recovery, clocks that jump, and a scheduler that wants its
machine back; with real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from dougong.event.kinds import (
    AgentReturned,
    CheckpointSaved,
    ControllerStarted,
    GenerationStarted,
    JobStopped,
    NodeJoined,
    NodeLost,
    NodeRepaired,
    PreflightDone,
    RecoveryDecided,
    StateRestored,
    WorkerLost,
)
from tests.run import runs
from tests.run.made_disturbance import assert_same, disturbed, injected

pytest.importorskip("torch", reason="torch is not installed (extra: train)")
pytestmark = pytest.mark.processes
FIRST, SECOND, THIRD = (f"local/rack-01/node-0{number}" for number in (1, 2, 3))


def test_a_node_that_comes_back_is_a_spare_again_and_takes_over_when_it_is_needed(
    new_run: Path, quiet_run: runs.Finished
) -> None:
    done = disturbed(
        new_run,
        f"kind: kill-node, at_step: 22, node: {SECOND}",
        "kind: return-node, during: recovery",
        f"kind: kill-node, at_step: 50, node: {FIRST}",
        options=("--spares", "1"),
        arguments=("--step-s", "0.4"),
    )
    assert_same(done, quiet_run)
    assert [event.component for event in done.events(NodeRepaired)] == [SECOND]
    assert [event.role for event in done.events(NodeJoined) if event.component == SECOND] == ["active", "spare"]
    (tested,) = done.events(PreflightDone)
    assert [node.component for node in tested.nodes] == [SECOND], "before it was given work"
    last = done.events(GenerationStarted)[-1]
    assert [placed.component for placed in last.placement] == [SECOND, THIRD]


def test_two_ranks_killed_at_once_are_both_replaced(new_run: Path, quiet_run: runs.Finished) -> None:
    done = disturbed(new_run, "kind: kill-worker, at_step: 15, rank: 0", "kind: kill-worker, at_step: 15, rank: 1")
    assert_same(done, quiet_run)
    assert injected(done) == ["kill-worker", "kill-worker"]
    # one interruption, or two if the first was answered before the second struck
    assert len(done.events(WorkerLost)) in (1, 2)


def test_a_rank_killed_in_the_recovery_from_another_loss_is_replaced_too(
    new_run: Path, quiet_run: runs.Finished
) -> None:
    done = disturbed(
        new_run,
        "kind: kill-worker, at_step: 15, rank: 0",
        "kind: kill-worker, during: recovery, rank: 1, after_s: 0.1",
    )
    assert_same(done, quiet_run)
    assert injected(done) == ["kill-worker", "kill-worker"]


def test_a_controller_killed_in_a_recovery_leaves_it_to_the_next(new_run: Path, quiet_run: runs.Finished) -> None:
    done = disturbed(
        new_run,
        f"kind: kill-node, at_step: 30, node: {SECOND}",
        "kind: kill-controller, during: recovery",
        options=("--spares", "1"),
    )
    assert_same(done, quiet_run)
    assert [event.is_restart for event in done.events(ControllerStarted)] == [False, True]
    assert done.events(RecoveryDecided)[-1].rung == "replaced-node"


def test_an_agent_and_the_controller_killed_together_are_replaced_while_the_workers_run_on(
    new_run: Path, quiet_run: runs.Finished
) -> None:
    done = disturbed(new_run, f"kind: kill-agent-and-controller, at_step: 15, node: {FIRST}")
    assert_same(done, quiet_run)
    assert len(done.events(GenerationStarted)) == 1, "no rank was started again"
    assert sorted(event.num_workers for event in done.events(AgentReturned)) == [1, 1]


def test_a_clock_that_jumps_changes_neither_the_run_nor_the_order_of_its_events(
    new_run: Path, quiet_run: runs.Finished
) -> None:
    done = disturbed(
        new_run,
        "kind: jump-clock, at_step: 10, jump_s: 7200",
        "kind: kill-agent-and-controller, at_step: 20",
        "kind: jump-clock, at_step: 30, jump_s: -14400",
        "kind: kill-worker, at_step: 40, rank: 1",
    )
    assert_same(done, quiet_run)
    assert len(done.events(WorkerLost)) == 1, "only the rank that was killed"
    assert done.events(NodeLost) == []
    times_ns = [record.time_ns for record in done.records() if record.stream == "job"]
    assert max(times_ns) - min(times_ns) < 600e9, "no event is two hours away"
    assert done.score()["wall_s"] < 600


def test_a_slow_rank_is_not_taken_for_a_stopped_one(new_run: Path, quiet_run: runs.Finished) -> None:
    done = disturbed(new_run, "kind: slow-worker, at_step: 15, rank: 0, stopped_ratio: 0.7, for_s: 3")
    assert_same(done, quiet_run)
    assert done.events(WorkerLost) == []


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        pytest.param("kind: sigterm-grace, at_step: 12, grace_s: 60", 130, id="pre-empted"),
        pytest.param("kind: sigterm-launcher, at_step: 12", 130, id="the command asked to leave"),
        pytest.param("kind: kill-launcher, at_step: 12", -9, id="the command killed"),
    ],
)
def test_a_run_that_has_to_leave_saves_and_is_resumed_exactly(
    new_run: Path, quiet_run: runs.Finished, fault: str, code: int
) -> None:
    done = disturbed(new_run, fault)
    assert done.code == code, done.report
    again = runs.finish(runs.resume(new_run), new_run)
    (stopped,) = again.events(JobStopped)
    assert [event.step for event in again.events(CheckpointSaved) if event.tier == "durable"].count(stopped.step) == 1
    assert again.events(StateRestored)[-1].step == stopped.step, "nothing is done twice"
    assert_same(again, quiet_run)


def test_a_pre_emption_does_not_end_a_rank_that_is_just_starting_again(new_run: Path, quiet_run: runs.Finished) -> None:
    """A scheduler signals every process; one that has not come to `attach` yet must not die of it either."""
    faults = ("kind: kill-worker, at_step: 12", "kind: sigterm-grace, during: recovery, after_s: 0.05, grace_s: 20.0")
    done = disturbed(new_run, *faults)
    assert done.code == 130, done.report
    assert len(done.events(WorkerLost)) == 1, done.report
    assert_same(runs.finish(runs.resume(new_run), new_run), quiet_run)


def test_a_grace_that_is_over_too_soon_leaves_a_run_that_is_resumed_exactly(
    new_run: Path, quiet_run: runs.Finished
) -> None:
    done = disturbed(new_run, "kind: sigterm-grace, at_step: 22, grace_s: 0.01")
    assert done.code in (-9, 130), done.report
    runs.end_all(new_run)
    again = runs.finish(runs.resume(new_run), new_run)
    assert_same(again, quiet_run)
