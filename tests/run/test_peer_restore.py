"""Lost nodes and the copies of their memory on others, with real processes. After each: the losses of the undisturbed
run, step for step and bit for bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dougong.backend.local.nodes import NODE_VARIABLE, LocalNodes
from dougong.backend.local.process import pids_with_variable
from dougong.event import store
from dougong.event.kinds import (
    CheckpointRejected,
    CheckpointSaved,
    GenerationStarted,
    JobFailed,
    JobFinished,
    NodeLost,
    PeersChosen,
    RecoveryDecided,
    StateRestored,
    WorkerLost,
)
from dougong.run.layout import NodeDirectory, node_directory
from dougong.run.settings import load_settings, run_directory
from dougong.run.snapshot import SnapshotFiles
from tests.run import runs
from tests.run.made_copies import flip_a_bit

pytest.importorskip("torch", reason="torch is not installed (extra: train)")
pytestmark = pytest.mark.processes

FIRST, SECOND, THIRD, FOURTH = (f"local/rack-01/node-0{number}" for number in range(1, 5))
STEPS = ("--steps", "150")
OFTEN = ("--memory-every", "1", "--set", "save.peer_every_s=0", "--set", "save.peer_busy_ratio=1")
NEVER = ("--durable-every", "1000")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> runs.Finished:
    done = runs.run(tmp_path_factory.mktemp("undisturbed") / "run", *NEVER, arguments=STEPS)
    assert done.code == 0, done.report
    return done


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "run"
    yield path
    runs.end_all(path)


def assert_same(done: runs.Finished, undisturbed: runs.Finished, *, num_ranks: int = 2) -> None:
    assert done.code == 0, done.report
    for rank in range(num_ranks):
        assert done.losses(rank) == undisturbed.losses(rank), done.report
    assert done.samples() == undisturbed.samples(), done.report
    assert runs.left_behind(done.run_dir) == []
    assert runs.memory_left(done.run_dir) == []
    assert done.events(JobFinished)


def copied_steps(run_dir: Path) -> list[int]:
    """The steps of which every rank has a copy on another node."""
    if not (run_dir / "events").exists():
        return []
    events = (record.event for record in store.read(run_dir / "events"))
    return [event.step for event in events if isinstance(event, CheckpointSaved) and event.tier == "peer"]


def wait_for_copy(run_dir: Path, *, from_step: int) -> None:
    runs.wait_for(lambda: any(step >= from_step for step in copied_steps(run_dir)))


def memory_of(run_dir: Path, component: str) -> NodeDirectory:
    settings = load_settings(run_directory(run_dir))
    return node_directory(settings.run_id, component, memory_root=Path(settings.memory_root))


def kill_nodes(run_dir: Path, components: Sequence[str]) -> None:
    """At once: agents, workers, and all that their memory held."""
    run_id = load_settings(run_directory(run_dir)).run_id
    nodes = LocalNodes(run_dir, run_id=run_id, memory_of=lambda component: memory_of(run_dir, component).root)
    for component in components:
        nodes.kill_node(component)


def courier_of(run_dir: Path, component: str) -> int:
    run_id = load_settings(run_directory(run_dir)).run_id
    pids = pids_with_variable(NODE_VARIABLE, f"{run_id}:{component}")
    return next(pid for pid in pids if b"dougong.run.courier" in Path(f"/proc/{pid}/cmdline").read_bytes())


def test_a_lost_nodes_rank_comes_back_on_the_spare_from_the_copy(run_dir: Path, undisturbed: runs.Finished) -> None:
    chaos = runs.write_chaos(run_dir.parent / "chaos.yaml", f"kind: kill-node, at_step: 60, node: {SECOND}")
    done = runs.run(run_dir, *OFTEN, *NEVER, "--spares", "1", "--chaos", str(chaos), arguments=STEPS)
    assert_same(done, undisturbed)
    assert [event.component for event in done.events(NodeLost)] == [SECOND]
    (decided,) = done.events(RecoveryDecided)
    assert (decided.rung, decided.restore_source) == ("replaced-node", "peer")
    assert decided.restore_step in copied_steps(run_dir)
    assert decided.reason.endswith(
        f"step {decided.restore_step}: rank 0 from own memory, rank 1 from the copy on {THIRD}"
    )
    assert done.events(StateRestored)[-1].source == "peer"
    first, *_, last = done.events(PeersChosen)
    assert {keeper.owner: keeper.keepers for keeper in first.keepers} == {FIRST: (THIRD,), SECOND: (THIRD,)}
    assert {keeper.owner for keeper in last.keepers} == {FIRST, THIRD}
    assert done.score()["interruptions"] == 1


def test_the_rank_goes_to_the_spare_that_has_its_state_and_is_copied_from_there_afterwards(
    run_dir: Path, undisturbed: runs.Finished
) -> None:
    chaos = runs.write_chaos(
        run_dir.parent / "chaos.yaml",
        f"kind: kill-node, at_step: 40, node: {SECOND}",
        f"kind: kill-node, at_step: 100, node: {FIRST}",
    )
    done = runs.run(run_dir, *OFTEN, *NEVER, "--spares", "2", "--chaos", str(chaos), arguments=STEPS)
    assert_same(done, undisturbed)
    first, second = done.events(RecoveryDecided)
    assert (first.restore_source, second.restore_source) == ("peer", "peer")
    assert first.reason.endswith(f"rank 0 from own memory, rank 1 from the copy on {FOURTH}")
    assert done.events(GenerationStarted)[1].placement[1].component == FOURTH, "nothing travels"
    assert "rank 1 from own memory, rank 0 from the copy on" in second.reason


def test_a_spare_fetches_the_state_from_another_node(run_dir: Path) -> None:
    """With three nodes and one spare a node in use keeps the copy of another."""
    quiet = runs.run(run_dir.parent / "quiet" / "run", *NEVER, arguments=STEPS, nodes=3)
    chaos = runs.write_chaos(run_dir.parent / "chaos.yaml", f"kind: kill-node, at_step: 60, node: {SECOND}")
    options = (*OFTEN, *NEVER, "--spares", "1", "--chaos", str(chaos))
    done = runs.run(run_dir, *options, arguments=STEPS, nodes=3)
    assert_same(done, quiet, num_ranks=3)
    (decided,) = done.events(RecoveryDecided)
    assert decided.restore_source == "peer"
    assert decided.reason.endswith(f"rank 1 from the copy on {THIRD}")
    assert done.events(GenerationStarted)[1].placement[1].component == FOURTH, "not the node that has the copy"


def test_a_survivor_stays_in_its_process_and_goes_back_to_what_its_node_kept(
    run_dir: Path, undisturbed: runs.Finished
) -> None:
    chaos = runs.write_chaos(run_dir.parent / "chaos.yaml", f"kind: kill-node, at_step: 60, node: {SECOND}")
    options = (*OFTEN, *NEVER, "--spares", "2", "--chaos", str(chaos))
    done = runs.run(run_dir, *options, arguments=(*STEPS, "--replaceable"))
    assert_same(done, undisturbed)
    (decided,) = done.events(RecoveryDecided)
    assert (decided.rung, decided.restore_source) == ("in-process", "peer")
    assert (run_dir / "logs" / "rank-0.log").read_text(errors="replace").count("--- generation") == 1


def test_a_node_lost_together_with_its_copies_is_replaced_from_the_durable_checkpoint(
    run_dir: Path, undisturbed: runs.Finished
) -> None:
    process = runs.start(run_dir, *OFTEN, "--durable-every", "50", "--spares", "2", arguments=STEPS)
    wait_for_copy(run_dir, from_step=55)
    kill_nodes(run_dir, (FOURTH, SECOND))
    done = runs.finish(process, run_dir)
    assert_same(done, undisturbed)
    decided = done.events(RecoveryDecided)[-1]
    assert (decided.restore_source, decided.restore_step % 50) == ("durable", 0)
    assert "not of rank(s) 1, and no living node has a copy; newest durable" in decided.reason


def test_a_copy_with_a_flipped_bit_is_refused_and_the_durable_checkpoint_used(
    run_dir: Path, undisturbed: runs.Finished
) -> None:
    process = runs.start(run_dir, *OFTEN, "--durable-every", "50", "--spares", "1", arguments=STEPS)
    wait_for_copy(run_dir, from_step=55)
    courier = courier_of(run_dir, THIRD)
    os.kill(courier, signal.SIGSTOP)  # so that no later copy takes the place of the bad ones
    prefix = memory_of(run_dir, THIRD).copy(1, owner=SECOND)
    for slot in SnapshotFiles(prefix).slots():
        flip_a_bit(prefix, slot)
    kill_nodes(run_dir, (SECOND,))
    os.kill(courier, signal.SIGCONT)
    done = runs.finish(process, run_dir)
    assert_same(done, undisturbed)
    rejected = [event for event in done.events(CheckpointRejected) if event.tier == "peer"]
    assert rejected and all("checksum differs" in event.reason for event in rejected)
    assert done.events(RecoveryDecided)[0].restore_source == "peer"
    assert done.events(StateRestored)[-1].source == "durable"
    assert "could not be had" in done.events(WorkerLost)[-1].detail
    assert not done.events(JobFailed)


def test_couriers_that_are_killed_come_back_and_training_does_not_notice(
    run_dir: Path, undisturbed: runs.Finished
) -> None:
    process = runs.start(run_dir, *OFTEN, *NEVER, "--spares", "1", arguments=STEPS)
    wait_for_copy(run_dir, from_step=1)
    for component in (FIRST, THIRD):
        os.kill(courier_of(run_dir, component), signal.SIGKILL)
    later = max(copied_steps(run_dir)) + 10
    wait_for_copy(run_dir, from_step=later)
    done = runs.finish(process, run_dir)
    assert_same(done, undisturbed)
    assert len(done.events(GenerationStarted)) == 1
