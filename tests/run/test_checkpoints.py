from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from dougong.clock import ManualClock
from dougong.event.kinds import CheckpointDeleted, CheckpointSaved, StorageFailing, StorageRecovered
from dougong.run import manifest
from dougong.run.checkpoints import CheckpointDesk, Outcome, newest_good
from dougong.run.letters import (
    CheckpointCommitted,
    DropCheckpoint,
    MetadataWritten,
    Reopened,
    SaveAgain,
    ShardFailed,
    ShardSkipped,
    ShardWritten,
    WriteMetadata,
)
from dougong.run.manifest import FileRecord, ItemRecord
from dougong.run.new_file import DirectFile
from dougong.run.settings import RunSettings
from tests.run.made_settings import settings_at

RANKS = range(4)


def settings_of(root: Path, **save: float) -> RunSettings:
    settings = settings_at(root)
    return msgspec.structs.replace(settings, save=msgspec.structs.replace(settings.save, **save))


def desk_at(root: Path, *, settings: RunSettings | None = None) -> CheckpointDesk:
    desk = CheckpointDesk(settings or settings_at(root), clock=ManualClock(10**18))
    desk.begin_generation(1, world_size=len(RANKS))
    return desk


def name_of(step: int) -> str:
    return manifest.directory_name(step, generation=1)


def written(root: Path, name: str, step: int) -> FileRecord:
    directory = root / "checkpoints" / name_of(step)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).unlink(missing_ok=True)
    file = DirectFile(str(directory / name), num_bytes=5, on_chunk=lambda _: None)
    file.write(memoryview(b"bytes"))
    return file.finish()


def shard(root: Path, rank: int, step: int) -> ShardWritten:
    """What a rank tells once its file is there."""
    return ShardWritten(
        generation=1,
        rank=rank,
        step=step,
        directory=name_of(step),
        files=(written(root, f"__{rank}_0.distcp", step),),
        items=(ItemRecord(f"w{rank}", (f"w{rank}",), f"__{rank}_0.distcp", 0, 5, "uint8", (5,)),),
        stall_s=0.1,
        write_s=float(rank),
    )


def metadata(root: Path, step: int) -> MetadataWritten:
    return MetadataWritten(generation=1, rank=0, step=step, file=written(root, ".metadata", step))


Told = ShardWritten | ShardFailed | ShardSkipped | SaveAgain | MetadataWritten


def tell(desk: CheckpointDesk, *letters: Told) -> list[Outcome]:
    async def all_of_them() -> list[Outcome]:
        return [await desk.take(letter) for letter in letters]

    return asyncio.run(all_of_them())


def save(desk: CheckpointDesk, root: Path, step: int) -> list[Outcome]:
    return tell(desk, *(shard(root, rank, step) for rank in RANKS), metadata(root, step))


def stored(root: Path) -> list[tuple[int, bool]]:
    return [(item.step, item.is_committed) for item in manifest.list_stored(str(root / "checkpoints"))]


def failed(rank: int, step: int) -> ShardFailed:
    return ShardFailed(generation=1, rank=rank, step=step, reason="No space left on device", cause="full")


def skipped(rank: int, step: int) -> ShardSkipped:
    return ShardSkipped(generation=1, rank=rank, step=step, busy_step=step - 50)


def test_it_is_committed_when_all_shards_and_the_metadata_are_there(tmp_path: Path) -> None:
    *shards, last = save(desk_at(tmp_path), tmp_path, 50)
    assert all(outcome == Outcome() for outcome in shards[:-1])
    asked = shards[-1].letter
    assert isinstance(asked, WriteMetadata) and {item.fqn for item in asked.items} == {f"w{rank}" for rank in RANKS}
    (event,) = last.events
    assert isinstance(event, CheckpointSaved)
    assert (event.step, event.num_bytes, event.write_s, event.stall_s) == (50, 25, 3.0, 0.1)
    assert last.letter == CheckpointCommitted(generation=1, rank=0, step=50)
    manifest.verify(str(tmp_path / "checkpoints"), name_of(50))


def test_without_one_shard_nothing_is_committed(tmp_path: Path) -> None:
    letters: Sequence[Told] = [*(shard(tmp_path, rank, 50) for rank in RANKS[1:]), metadata(tmp_path, 50)]
    tell(desk_at(tmp_path), *letters)
    assert stored(tmp_path) == [(50, False)]


def test_when_a_shard_fails_all_are_told_once_and_the_files_of_the_others_go(tmp_path: Path) -> None:
    desk = desk_at(tmp_path)
    _, outcome, *rest = tell(desk, shard(tmp_path, 0, 50), failed(1, 50), failed(2, 50), shard(tmp_path, 3, 50))
    assert outcome.letter == DropCheckpoint(generation=1, rank=0, step=50)
    (event,) = outcome.events
    assert isinstance(event, StorageFailing) and event.cause == "full" and "rank 1" in event.reason
    assert rest == [Outcome(), Outcome()]
    assert stored(tmp_path) == []


def test_the_next_one_tries_again_and_its_success_is_said(tmp_path: Path) -> None:
    desk = desk_at(tmp_path)
    tell(desk, failed(1, 50))
    assert tell(desk, failed(1, 100))[0].events == ()
    saved, recovered = save(desk, tmp_path, 150)[-1].events
    assert isinstance(saved, CheckpointSaved)
    assert isinstance(recovered, StorageRecovered) and recovered.num_missed == 2


def test_a_step_that_one_rank_skipped_is_given_up_by_all(tmp_path: Path) -> None:
    desk = desk_at(tmp_path)
    letters: Sequence[Told] = [shard(tmp_path, 0, 100), skipped(1, 100), skipped(2, 100), shard(tmp_path, 3, 100)]
    outcomes = tell(desk, *letters, metadata(tmp_path, 100))
    assert outcomes[1].letter == DropCheckpoint(generation=1, rank=0, step=100)
    (event,) = outcomes[1].events
    assert isinstance(event, StorageFailing) and event.cause == "slow" and "B/s" in event.reason
    assert stored(tmp_path) == []


def test_a_step_that_was_given_up_is_reopened_when_all_ranks_would_save_it_again(tmp_path: Path) -> None:
    desk = desk_at(tmp_path)
    tell(desk, shard(tmp_path, 0, 100), skipped(1, 100))
    again = [SaveAgain(generation=1, rank=rank, step=100) for rank in RANKS]
    *early, last = tell(desk, *again)
    assert early == [Outcome()] * 3
    assert last.letter == Reopened(generation=1, rank=0, step=100)
    assert isinstance(save(desk, tmp_path, 100)[-1].letter, CheckpointCommitted)
    assert stored(tmp_path) == [(100, True)]


def test_what_is_committed_is_never_reopened(tmp_path: Path) -> None:
    desk = desk_at(tmp_path)
    save(desk, tmp_path, 100)
    outcomes = tell(desk, *(SaveAgain(generation=1, rank=rank, step=100) for rank in RANKS))
    assert outcomes == [Outcome()] * 4
    assert stored(tmp_path) == [(100, True)]


def test_letters_told_again_to_another_controller_commit_nothing_twice(tmp_path: Path) -> None:
    """Agents tell a new controller all of this generation, also what retention has deleted meanwhile."""
    first = desk_at(tmp_path)
    letters = {step: [*(shard(tmp_path, r, step) for r in RANKS), metadata(tmp_path, step)] for step in (50, 100)}
    for step in (50, 100):
        tell(first, *letters[step])
    shutil.rmtree(tmp_path / "checkpoints" / name_of(50))
    again = CheckpointDesk(settings_at(tmp_path), clock=ManualClock(10**18))
    outcomes = tell(again, *letters[50], *letters[100])
    assert stored(tmp_path) == [(100, True)]
    assert [event for outcome in outcomes for event in outcome.events] == []


def test_another_controller_finishes_what_the_first_did_not(tmp_path: Path) -> None:
    letters = [*(shard(tmp_path, rank, 50) for rank in RANKS), metadata(tmp_path, 50)]
    tell(desk_at(tmp_path), *letters[:3])
    tell(CheckpointDesk(settings_at(tmp_path), clock=ManualClock(10**18)), *letters)
    assert stored(tmp_path) == [(50, True)]


def test_storage_that_does_not_take_the_commit_is_an_alarm_and_not_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    desk = desk_at(tmp_path)
    letters = [*(shard(tmp_path, rank, 50) for rank in RANKS), metadata(tmp_path, 50)]
    with monkeypatch.context() as patch:
        patch.setattr(manifest.LocalPlace, "write", full)
        outcome = tell(desk, *letters)[-1]
    assert isinstance(outcome.letter, DropCheckpoint)
    (event,) = outcome.events
    assert isinstance(event, StorageFailing) and event.cause == "full" and "committed" in event.reason
    assert stored(tmp_path) == []
    assert save(desk, tmp_path, 100)[-1].letter is not None
    assert stored(tmp_path) == [(100, True)]


def test_what_is_beyond_retention_is_deleted_and_told(tmp_path: Path) -> None:
    desk = desk_at(tmp_path, settings=settings_of(tmp_path, keep_durable=2))
    for step in (50, 100, 150):
        save(desk, tmp_path, step)
    (event,) = asyncio.run(desk.retire())
    assert isinstance(event, CheckpointDeleted) and event.step == 50
    assert stored(tmp_path) == [(150, True), (100, True)]


def test_what_is_locked_stays_although_it_is_beyond_retention(tmp_path: Path) -> None:
    from dougong.run import retention_lock

    desk = desk_at(tmp_path, settings=settings_of(tmp_path, keep_durable=1, lock_s=1000.0))
    for step in (50, 100):
        save(desk, tmp_path, step)
    try:
        assert asyncio.run(desk.retire()) == ()
        assert stored(tmp_path) == [(100, True), (50, True)]
    finally:
        for directory in (tmp_path / "checkpoints").iterdir():
            retention_lock.unprotect(directory)


def test_an_earlier_generations_shards_complete_nothing(tmp_path: Path) -> None:
    desk = desk_at(tmp_path)
    tell(desk, *(shard(tmp_path, rank, 50) for rank in RANKS[:3]))
    desk.begin_generation(2, world_size=len(RANKS))
    late = msgspec.structs.replace(shard(tmp_path, 3, 50), generation=2)
    assert tell(desk, late) == [Outcome()]


def test_the_first_good_one_ends_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = desk_at(tmp_path)
    for step in (50, 100, 150):
        save(desk, tmp_path, step)
    (tmp_path / "checkpoints" / name_of(150) / "__2_0.distcp").write_bytes(b"bytez")
    read: list[str] = []
    real = manifest.verify

    def verify(url: str, directory: str, **rest: object) -> manifest.Manifest:
        read.append(directory)
        return real(url, directory)

    monkeypatch.setattr(manifest, "verify", verify)
    good, rejected = newest_good(str(tmp_path / "checkpoints"))
    assert good == (100, name_of(100)) and [event.step for event in rejected] == [150]
    assert read == [name_of(150), name_of(100)]
