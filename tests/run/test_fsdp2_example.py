"""The FSDP2 example through faults: each rank holds only its shards, and they come back bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dougong.event.kinds import JobFinished, RecoveryDecided
from tests.run import runs

pytest.importorskip("torch", reason="torch is not installed (extra: train)")
pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).parents[2] / "examples" / "fsdp2" / "train.py"
STEPS = 40
SAVES = ("--memory-every", "4", "--durable-every", "20", "--set", "save.peer_copies=0")
ARGUMENTS = ("--steps", str(STEPS), "--max-bytes", "30000")  # an epoch is about 29 steps


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> runs.Finished:
    done = runs.run(tmp_path_factory.mktemp("undisturbed") / "run", *SAVES, script=SCRIPT, arguments=ARGUMENTS)
    assert done.code == 0, done.report
    assert sorted(done.losses()) == list(range(1, STEPS + 1))
    return done


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "run"
    yield path
    runs.end_all(path)


@pytest.mark.parametrize(
    ("fault", "spares", "source"),
    [
        ("kind: kill-worker, at_step: 15, rank: 1", 0, "memory"),
        ("kind: kill-node, at_step: 30, node: local/rack-01/node-02", 1, "durable"),
    ],
    ids=["memory", "durable"],
)
def test_sharded_training_goes_on_exactly(
    fault: str, spares: int, source: str, run_dir: Path, undisturbed: runs.Finished
) -> None:
    chaos = runs.write_chaos(run_dir.parent / "chaos.yaml", fault)
    options = (*SAVES, "--spares", str(spares), "--chaos", str(chaos))
    done = runs.run(run_dir, *options, script=SCRIPT, arguments=ARGUMENTS)
    assert done.code == 0, done.report
    for rank in (0, 1):
        assert done.losses(rank) == undisturbed.losses(rank), done.report
    assert done.samples() == undisturbed.samples(), done.report
    assert [event.restore_source for event in done.events(RecoveryDecided)] == [source]
    assert done.events(JobFinished)


def test_the_ranks_share_the_bytes_of_a_durable_checkpoint(undisturbed: runs.Finished) -> None:
    last = max(undisturbed.run_dir.glob("checkpoints/step-*"))
    sizes = sorted(path.stat().st_size for path in last.glob("*.distcp"))
    assert len(sizes) == 2 and sizes[0] > 0.8 * sizes[1]
