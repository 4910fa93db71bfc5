"""A whole run whose world shrinks when a node is lost, and grows when it is back."""

from __future__ import annotations

from pathlib import Path

import pytest

from dougong.event.kinds import JobFinished, NodeLost, RecoveryDecided, StateRestored, WorldResized
from tests.run import runs

pytest.importorskip("torch", reason="torch is not installed (extra: train)")
pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).parent / "scripts" / "elastic.py"
SECOND = "local/rack-01/node-02"


def sample_sets(done: runs.Finished) -> dict[int, list[int]]:
    """The samples of each step, over all ranks that had a share of it last."""
    sizes = [(event.step + 1, event.to_world_size) for event in done.events(WorldResized)]
    found: dict[int, list[int]] = {}
    for (step, rank), ids in done.samples().items():
        world_size = next((size for first, size in reversed(sizes) if step >= first), 3)
        if rank < world_size:
            found.setdefault(step, []).extend(ids)
    return {step: sorted(ids) for step, ids in found.items()}


def test_a_world_shrinks_without_a_spare_and_grows_when_the_node_is_back(tmp_path: Path) -> None:
    quiet = runs.run(tmp_path / "quiet" / "run", "--no-score", script=SCRIPT, arguments=("200",), nodes=3)
    assert quiet.code == 0, quiet.report
    chaos = runs.write_chaos(
        tmp_path / "chaos.yaml",
        f"kind: kill-node, node: {SECOND}, at_step: 45",
        f"kind: return-node, node: {SECOND}, at_step: 60",
    )
    options = ("--min-nodes", "2", "--durable-every", "20", "--set", "policy.grow_wait_s=1", "--chaos", str(chaos))
    run_dir = tmp_path / "run"
    done = runs.run(run_dir, "--no-score", *options, script=SCRIPT, arguments=("200", "0.08"), nodes=3)
    assert done.code == 0, done.report
    assert done.events(JobFinished) and [event.component for event in done.events(NodeLost)] == [SECOND]
    resized = done.events(WorldResized)
    assert [(event.from_world_size, event.to_world_size) for event in resized] == [(3, 2), (2, 3)], done.report
    assert [event.rung for event in done.events(RecoveryDecided)] == ["resized", "resized"]
    assert [event.source for event in done.events(StateRestored)] == ["none", "durable", "durable"]
    assert resized[0].step == 40, "back to the last durable checkpoint"
    assert resized[1].step > 45, "growing is planned: the ranks save first, and nothing is done again"
    assert sample_sets(done) == sample_sets(quiet), "no sample lost, none twice"
    assert not runs.left_behind(done.run_dir) and not runs.memory_left(done.run_dir)
