"""File systems that are full or read-only: training goes on, and saves again when they are well."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dougong.event.kinds import (
    CheckpointSaved,
    JobFinished,
    RecoveryDecided,
    StateRestored,
    StorageFailing,
    StorageRecovered,
    WarningRaised,
    WorkerLost,
)
from tests.run import runs
from tests.run.made_disturbance import assert_commits, assert_same, disturbed, injected, small_file_system

pytest.importorskip("torch", reason="torch is not installed (extra: train)")
pytestmark = pytest.mark.processes


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_file_system(tmp_path / "disk", kind="ext4", num_bytes=16 * 2**20) as path:
        yield path


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    with small_file_system(tmp_path / "memory", kind="tmpfs", num_bytes=32 * 2**20) as path:
        yield path


@pytest.mark.parametrize("kind", ["fill-disk", "read-only-disk"])
def test_durable_checkpoints_work_again_when_their_disk_is_well(
    new_run: Path, quiet_run: runs.Finished, disk: Path, kind: str
) -> None:
    done = disturbed(
        new_run, f"kind: {kind}, at_step: 5, for_s: 1", options=("--checkpoint-dir", str(disk / "checkpoints"))
    )
    assert injected(done) == [kind]
    assert done.events(WorkerLost) == []
    saved = [event.step for event in done.events(CheckpointSaved) if event.tier == "durable"]
    assert saved[-1] == 60, done.report
    assert len(done.events(StorageFailing)) == len(done.events(StorageRecovered)) == 1, "told once, and when it is over"
    assert_commits(done, checkpoints=disk / "checkpoints")
    for rank in (0, 1):
        assert done.losses(rank) == quiet_run.losses(rank), done.report
    assert not list((disk / "checkpoints").glob(".dougong-chaos*")), "what chaos took is given back"


def test_what_a_full_disk_left_half_written_does_not_keep_it_full(new_run: Path, disk: Path) -> None:
    """Enough failed saves to fill it for good, were they kept."""
    chaos = runs.write_chaos(new_run.parent / "chaos.yaml", "kind: fill-disk, at_step: 3, for_s: 2")
    options = ("--memory-every", "4", "--durable-every", "4", "--checkpoint-dir", str(disk / "checkpoints"))
    done = runs.run(new_run, *options, "--chaos", str(chaos))
    assert done.code == 0, done.report
    assert [event.step for event in done.events(CheckpointSaved) if event.tier == "durable"][-1] == 60, done.report
    assert len(list((disk / "checkpoints").iterdir())) <= 3, "those that are kept, and nothing else"


def test_a_rank_lost_while_the_disk_is_full_goes_on_from_memory(
    new_run: Path, quiet_run: runs.Finished, disk: Path
) -> None:
    done = disturbed(
        new_run,
        "kind: fill-disk, at_step: 15",
        "kind: kill-worker, at_step: 30, rank: 1",
        options=("--checkpoint-dir", str(disk / "checkpoints")),
    )
    assert done.code == 0, done.report
    assert [event.restore_source for event in done.events(RecoveryDecided)] == ["memory"]
    assert done.events(JobFinished), "a disk that stays full does not keep it from finishing"
    for rank in (0, 1):
        assert done.losses(rank) == quiet_run.losses(rank), done.report


def test_with_full_shared_memory_a_rank_is_lost_and_replaced_all_the_same(
    new_run: Path, quiet_run: runs.Finished, memory: Path
) -> None:
    done = disturbed(
        new_run,
        "kind: fill-shm, at_step: 15",
        "kind: kill-worker, at_step: 30, rank: 1",
        options=("--set", f"save.memory_root={memory}"),
    )
    assert injected(done) == ["fill-shm", "kill-worker"]
    assert_same(done, quiet_run, memory=memory)


def test_shared_memory_that_is_too_small_is_told_and_durable_checkpoints_are_written_all_the_same(
    new_run: Path, quiet_run: runs.Finished, tmp_path: Path
) -> None:
    with small_file_system(tmp_path / "tiny", kind="tmpfs", num_bytes=4 * 2**20) as tiny:
        done = disturbed(
            new_run,
            "kind: kill-worker, at_step: 30, rank: 1",
            options=("--set", f"save.memory_root={tiny}"),
            arguments=("--ballast-bytes", str(2 * 2**20)),
        )
        assert_same(done, quiet_run, memory=tiny)
    told = [event.text for event in done.events(WarningRaised) if "shared memory is full" in event.text]
    assert 1 <= len(told) <= 4, "once for each start of a rank, not for each save"
    assert done.events(StateRestored)[-1].source in ("memory", "durable")
