"""A job goes on with 4, then 3, then 4 ranks: every sample once, and the same batches. The test plays the agent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dougong.run import manifest
from dougong.run.agent import free_port
from dougong.run.global_batches import GlobalBatches
from dougong.run.layout import NodeDirectory
from dougong.run.manifest import LocalPlace, Manifest
from dougong.run.page import Page
from dougong.run.place import WorkerPlace, worker_variables

pytest.importorskip("torch", reason="torch is not installed (extra: train)")
pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).parent / "scripts" / "elastic.py"


def run_world(root: Path, *, generation: int, world_size: int, until: int, restore_step: int) -> None:
    """All ranks of one generation, to their end; what they have in memory then is made durable."""
    port = free_port("127.0.0.1")
    node = NodeDirectory(root / f"node-{generation}")
    node.root.mkdir(parents=True)
    processes: list[subprocess.Popen[str]] = []
    for rank in range(world_size):
        Page.create(node.page(rank), generation=generation).close()
        place = WorkerPlace(
            run_id="test",
            run_root=str(root),
            node_root=str(node.root),
            checkpoint_url=str(root / "checkpoints"),
            generation=generation,
            rank=rank,
            local_rank=rank,
            world_size=world_size,
            restore_source="durable" if restore_step else "none",
            restore_step=restore_step,
            restore_directory=manifest.directory_name(restore_step, generation=generation - 1),
            memory_every_steps=1,
            durable_every_steps=1000,
            commit_timeout_s=0.2,
            wants_peak=False,
            is_chaos=False,
        )
        environment = {
            **os.environ,
            **worker_variables(place),
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [sys.executable, str(SCRIPT), str(until)]
        processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    ends = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0] * world_size, [text for _, text in ends]
    make_durable(root, node, generation=generation, world_size=world_size, step=until)


def make_durable(root: Path, node: NodeDirectory, *, generation: int, world_size: int, step: int) -> None:
    from dougong.run.dcp_shard import write_metadata, write_shard
    from dougong.run.snapshot import SnapshotFiles

    url, name = str(root / "checkpoints"), manifest.directory_name(step, generation=generation)
    place, directory = LocalPlace(), f"{root}/checkpoints/{name}"
    if Path(directory).exists():  # what the script itself began to write, which nobody committed
        place.remove_tree(directory)
    buffers = [SnapshotFiles(node.snapshot(rank)).read(step=step) for rank in range(world_size)]
    parts = [write_shard(buffer, place=place, directory=directory, rank=rank) for rank, buffer in enumerate(buffers)]
    index = write_metadata([item for _, items in parts for item in items], place=place, directory=directory)
    record = Manifest(
        format_version=manifest.FORMAT_VERSION,
        run_id="test",
        step=step,
        generation=generation,
        world_size=world_size,
        time_ns=1,
        files=(*(file for files, _ in parts for file in files), index),
    )
    manifest.commit(url, record)


def samples_of(root: Path) -> dict[int, list[int]]:
    """The samples of each step in the order of ranks."""
    found: dict[int, list[int]] = {}
    for rank in range(4):
        for line in (root / "ledger" / f"rank-{rank}.jsonl").read_text().splitlines():
            entry = json.loads(line)
            found.setdefault(entry["step"], []).extend(entry["ids"])
    return found


def test_samples_are_exact_through_4_then_3_then_4_ranks(tmp_path: Path) -> None:
    for generation, (world_size, until) in enumerate(((4, 5), (3, 9), (4, 13)), start=1):
        restore_step = {1: 0, 2: 5, 3: 9}[generation]
        run_world(tmp_path, generation=generation, world_size=world_size, until=until, restore_step=restore_step)
    whole = GlobalBatches(num_samples=40, global_batch_size=14, seed=1, rank=0, world_size=1)
    expected = {step: whole.whole((step - 1) // 2, (step - 1) % 2) for step in range(1, 14)}
    assert samples_of(tmp_path) == expected, "two batches in an epoch; each step's, of all its ranks, is the same"
