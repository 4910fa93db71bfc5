"""The first rung with real processes: what is well stays, what is lost is replaced, and no loss shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dougong.event.kinds import GenerationStarted, RecoveryDecided, StateRestored, WarningRaised, WorkerLost
from tests.run import runs

pytest.importorskip("torch", reason="torch is not installed (extra: train)")
pytestmark = pytest.mark.processes

STEPS = ("--steps", "110", "--replaceable")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> runs.Finished:
    done = runs.run(tmp_path_factory.mktemp("quiet") / "run", "--no-score", arguments=STEPS)
    assert done.code == 0, done.report
    return done


def pids(done: runs.Finished, rank: int) -> int:
    """How many processes rank `rank` has had: each logs a line at its start."""
    return (done.run_dir / "logs" / f"rank-{rank}.log").read_text(errors="replace").count("--- generation")


def test_survivors_keep_their_process_through_every_kind_of_loss(undisturbed: runs.Finished, tmp_path: Path) -> None:
    chaos = runs.write_chaos(
        tmp_path / "chaos.yaml",
        "kind: kill-worker, rank: 1, at_step: 20",
        "kind: kill-worker, rank: 0, at_step: 35",
        "kind: stop-worker, rank: 1, at_step: 50",
        "kind: raise-worker, rank: 0, at_step: 65",
        "kind: hang-worker, rank: 1, at_step: 80",
    )
    done = runs.run(tmp_path / "run", "--no-score", "--chaos", str(chaos), arguments=STEPS)
    assert done.code == 0, done.report
    assert [event.cause_class for event in done.events(WorkerLost)] == [
        "crash",
        "crash",
        "stopped",
        "exception",
        "hang",
    ], done.report
    assert [event.rung for event in done.events(RecoveryDecided)] == ["in-process"] * 5, done.report
    assert [event.source for event in done.events(StateRestored)] == ["none", *["memory"] * 5]
    assert (pids(done, 0), pids(done, 1)) == (3, 4), "each was started anew only when it was itself lost"
    assert done.losses(0) == undisturbed.losses(0) and done.losses(1) == undisturbed.losses(1)
    assert done.samples() == undisturbed.samples()
    assert not runs.left_behind(done.run_dir) and not runs.memory_left(done.run_dir)


def test_a_survivor_goes_on_from_a_durable_checkpoint_when_a_node_is_lost(
    undisturbed: runs.Finished, tmp_path: Path
) -> None:
    chaos = runs.write_chaos(tmp_path / "chaos.yaml", "kind: kill-node, node: random, at_step: 60")
    options = ("--spares", "1", "--durable-every", "20", "--set", "save.keep_durable=9", "--no-score")
    done = runs.run(tmp_path / "run", *options, "--chaos", str(chaos), arguments=STEPS)
    assert done.code == 0, done.report
    assert [event.rung for event in done.events(RecoveryDecided)] == ["in-process"], done.report
    started = done.events(GenerationStarted)[-1]
    assert {placed.component.rsplit("/")[-1] for placed in started.placement} & {"node-03"}
    assert done.losses(0) == undisturbed.losses(0) and done.losses(1) == undisturbed.losses(1)


def test_a_script_with_a_group_of_torch_s_own_starts_all_ranks_again(tmp_path: Path) -> None:
    chaos = runs.write_chaos(tmp_path / "chaos.yaml", "kind: kill-worker, rank: 1, at_step: 20")
    done = runs.run(tmp_path / "run", "--no-score", "--chaos", str(chaos), arguments=("--steps", "40"))
    assert done.code == 0, done.report
    assert [event.rung for event in done.events(RecoveryDecided)] == ["standby"]


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    chaos = runs.write_chaos(tmp_path / "chaos.yaml", "kind: kill-worker, rank: 1, at_step: 20")
    options = ("--set", "policy.is_in_process=false", "--no-score", "--chaos", str(chaos))
    done = runs.run(tmp_path / "run", *options, arguments=("--steps", "40", "--replaceable"))
    assert done.code == 0, done.report
    assert [event.rung for event in done.events(RecoveryDecided)] == ["standby"]
    assert not [event for event in done.events(WarningRaised) if "in the process" in event.text]
