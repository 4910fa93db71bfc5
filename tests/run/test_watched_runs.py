"""Losses that turn bad, and state that silently differs, with real processes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from dougong.event.kinds import (
    BatchesSkipped,
    CheckpointSaved,
    CorruptionSuspected,
    JobFailed,
    JobFinished,
    PreflightDone,
    RecoveryDecided,
    ReplicasCompared,
    SnapshotRefused,
    StragglerNamed,
    WorkerLost,
)
from tests.run import runs

pytest.importorskip("torch", reason="torch is not installed (extra: train)")
pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).parent / "scripts" / "watched.py"
SAVES = ("--memory-every", "4", "--durable-every", "20")


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "run"
    yield path
    runs.end_all(path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> runs.Finished:
    done = runs.run(tmp_path_factory.mktemp("undisturbed") / "run", *SAVES, script=SCRIPT)
    assert done.code == 0, done.report
    return done


def bad_sample(undisturbed: runs.Finished, *, step: int, rank: int) -> str:
    return str(undisturbed.samples()[step, rank][1])


def test_no_checkpoint_is_taken_after_a_bad_loss_and_it_is_said_once(run_dir: Path, undisturbed: runs.Finished) -> None:
    sample = bad_sample(undisturbed, step=30, rank=1)
    done = runs.run(run_dir, *SAVES, script=SCRIPT, arguments=("--bad-sample", sample))
    assert done.code == 0, done.report
    # the other rank's gradients and parameters are no numbers from then on either
    assert {event.rank for event in done.events(SnapshotRefused)} <= {0, 1}
    assert len(done.events(SnapshotRefused)) == 1
    assert max(event.step for event in done.events(CheckpointSaved)) < 30
    assert done.events(WorkerLost) == []


def test_the_batches_of_a_bad_loss_are_skipped_by_all_ranks_and_listed(
    run_dir: Path, undisturbed: runs.Finished
) -> None:
    sample = bad_sample(undisturbed, step=30, rank=1)
    options = (*SAVES, "--set", "policy.bad_loss=roll-back-and-skip")
    done = runs.run(run_dir, *options, script=SCRIPT, arguments=("--bad-sample", sample, "--steps", "44"))
    assert done.code == 0, done.report
    (lost,) = done.events(WorkerLost)
    assert (lost.rank, lost.cause_class) == (1, "software")
    (skipped,) = done.events(BatchesSkipped)
    assert skipped.step == 30
    assert dict(skipped.samples) == {rank: tuple(undisturbed.samples()[30, rank]) for rank in (0, 1)}
    (decided,) = done.events(RecoveryDecided)
    assert (decided.restore_source, decided.restore_step) == ("memory", 28)
    for rank in (0, 1):
        losses = done.losses(rank)
        assert all(math.isfinite(loss) for loss in losses.values()), losses
        assert {step: losses[step] for step in range(1, 30)} == {
            step: undisturbed.losses(rank)[step] for step in range(1, 30)
        }
        for step in range(30, 45):
            assert trained(done, step, rank) == undisturbed.samples()[step + 1, rank], "one batch further"
    assert done.events(JobFinished)


def test_a_bad_loss_may_end_the_job(run_dir: Path, undisturbed: runs.Finished) -> None:
    sample = bad_sample(undisturbed, step=30, rank=0)
    options = (*SAVES, "--set", "policy.bad_loss=stop")
    done = runs.run(run_dir, *options, script=SCRIPT, arguments=("--bad-sample", sample))
    assert done.code == 1, done.report
    (failed,) = done.events(JobFailed)
    assert "the loss is nan in step 30" in failed.reason


def test_a_flipped_bit_is_found_and_all_go_back_behind_it(run_dir: Path, undisturbed: runs.Finished) -> None:
    chaos = runs.write_chaos(run_dir.parent / "chaos.yaml", "kind: flip-bit, at_step: 33, rank: 1")
    options = (*SAVES, "--set", "save.fingerprint_every_steps=10", "--chaos", str(chaos))
    done = runs.run(run_dir, *options, script=SCRIPT)
    assert done.code == 0, done.report
    (suspected,) = done.events(CorruptionSuspected)
    assert (suspected.ranks, suspected.step, suspected.agreed_step) == ((0, 1), 40, 30)
    (lost,) = done.events(WorkerLost)
    assert lost.cause_class == "silent-corruption"
    (report,) = done.events(PreflightDone)
    assert len(report.nodes) == 2, "either may be at fault, so both are tested again"
    (decided,) = done.events(RecoveryDecided)
    assert (decided.restore_source, decided.restore_step) == ("durable", 20)
    assert "not trusted" in decided.reason
    assert [event.step for event in done.events(ReplicasCompared)][:3] == [10, 20, 30]
    for rank in (0, 1):
        assert done.losses(rank) == undisturbed.losses(rank), "the flip left no trace"
    assert done.events(JobFinished)


def test_a_rank_that_becomes_slow_is_named(run_dir: Path) -> None:
    arguments = ("--steps", "90", "--slow-rank", "1", "--slow-from", "30")
    done = runs.run(run_dir, *SAVES, script=SCRIPT, arguments=arguments)
    assert done.code == 0, done.report
    (named,) = done.events(StragglerNamed)
    assert (named.rank, named.z) == (1, None)
    assert named.compute_s > 1.3 * named.usual_s
    assert done.events(WorkerLost) == []


def trained(done: runs.Finished, step: int, rank: int) -> list[int]:
    """The samples that a rank really trained on in a step; lines of skipped ones left out."""
    lines = (done.run_dir / "ledger" / f"rank-{rank}.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    return [entry["ids"] for entry in entries if entry["step"] == step and "skipped" not in entry][-1]
