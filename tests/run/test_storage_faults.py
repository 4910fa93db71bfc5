"""Storage that is full, read-only or slow, in a real run on a small file system of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dougong.event import store
from dougong.event.kinds import CheckpointSaved, JobFinished, StorageFailing, StorageRecovered, WorkerLost
from dougong.run.layout import NodeDirectory
from dougong.run.letters import ShardFailed, ShardWritten
from dougong.run.write_order import put_order
from dougong.run.writer import Writer, WriterSettings
from tests.run import made_orders as made
from tests.run import runs

pytestmark = pytest.mark.processes


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a file system cannot be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def remount(place: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", str(place)], check=True)


def serve(root: Path, place: Path, *, step: int, num_bytes: int) -> ShardFailed | ShardWritten:
    """What becomes of one order on that place."""
    order = made.order_at(root, step=step, num_bytes=num_bytes, url=str(place / "checkpoints"))
    shutil.rmtree(NodeDirectory(root / "node").outbox(0), ignore_errors=True)
    path = put_order(NodeDirectory(root / "node"), order)
    Writer(WriterSettings(node_root=str(root / "node"), write_bytes_per_s=0.0, checkpoint_key="")).serve(path)
    (told,) = made.told_controller(root)
    assert isinstance(told, ShardFailed | ShardWritten)
    return told


def files_below(place: Path) -> list[str]:
    return sorted(path.name for path in place.rglob("*") if path.is_file())


def test_a_full_disk_is_named_leaves_no_partial_file_and_is_tried_again(small_disk: Path, tmp_path: Path) -> None:
    told = serve(tmp_path, small_disk, step=10, num_bytes=6 * 2**20)
    assert isinstance(told, ShardFailed)
    assert told.cause == "full" and "No space left" in told.reason
    assert files_below(small_disk) == []
    assert isinstance(serve(tmp_path, small_disk, step=20, num_bytes=2 * 2**20), ShardWritten)


def test_a_read_only_disk_is_named_and_tried_again(small_disk: Path, tmp_path: Path) -> None:
    remount(small_disk, "ro")
    told = serve(tmp_path, small_disk, step=10, num_bytes=1000)
    assert isinstance(told, ShardFailed)
    assert told.cause == "read-only" and "Read-only" in told.reason
    remount(small_disk, "rw")
    assert isinstance(serve(tmp_path, small_disk, step=20, num_bytes=1000), ShardWritten)


def events_of(run_dir: Path, *kinds: type) -> list:
    if not (run_dir / "events").exists():
        return []
    return [record.event for record in store.read(run_dir / "events") if isinstance(record.event, kinds)]


def test_a_run_goes_on_over_a_full_disk_says_so_once_and_saves_again_when_there_is_room(
    small_disk: Path, tmp_path: Path
) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(bytes(4 * 2**20))
    run_dir = tmp_path / "run"
    process = runs.start(
        run_dir, "--durable-every", "5", "--checkpoint-dir", str(small_disk), arguments=("--steps", "300")
    )
    try:
        runs.wait_for(lambda: runs._last_step(run_dir) >= 40, timeout_s=150)
        (failing,) = events_of(run_dir, StorageFailing)
        assert failing.cause == "full" and failing.step == 5 and "df -h" in failing.mend
        assert {event.tier for event in events_of(run_dir, CheckpointSaved)} <= {"memory", "peer"}
    finally:
        filler.unlink()
    done = runs.finish(process, run_dir)
    assert done.code == 0, done.report
    assert [event.cause for event in done.events(StorageFailing)].count("full") == 1, done.report
    (recovered,) = [event for event in done.events(StorageRecovered) if event.cause == "full"]
    assert recovered.num_missed >= 2
    assert done.events(JobFinished)
    saved = [event for event in done.events(CheckpointSaved) if event.tier == "durable"]
    assert saved[-1].step == 300
    assert files_below(small_disk).count("COMMIT") == 3


def test_a_killed_writer_is_replaced_and_the_checkpoints_go_on(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = runs.start(run_dir, "--durable-every", "5", arguments=("--steps", "200"))
    runs.wait_for(lambda: any(event.tier == "durable" for event in events_of(run_dir, CheckpointSaved)), timeout_s=150)
    killed: set[int] = set()
    for _ in range(4):
        pids = [pid for pid in writers_of(run_dir) if pid not in killed]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        killed.update(pids)
        runs.wait_for(lambda: len(set(writers_of(run_dir)) - killed) == 2)
    done = runs.finish(process, run_dir)
    assert done.code == 0, done.report
    assert len(killed) >= 4
    saved = [event.step for event in done.events(CheckpointSaved) if event.tier == "durable"]
    assert saved[-1] == 200
    assert done.events(WorkerLost) == []


def writers_of(run_dir: Path) -> list[int]:
    found: list[int] = []
    for pid in runs.living(run_dir):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"dougong.run.writer" in command:
            found.append(pid)
    return found


def test_slow_storage_is_said_once_and_the_last_step_is_saved_all_the_same(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = runs.run(
        run_dir, "--durable-every", "2", "--set", "save.write_bytes_per_s=100000", arguments=("--steps", "60")
    )
    assert done.code == 0, done.report
    (failing,) = done.events(StorageFailing)
    assert failing.cause == "slow" and "B/s" in failing.reason
    saved = [event.step for event in done.events(CheckpointSaved) if event.tier == "durable"]
    assert saved and saved[-1] == 60
