"""The controller's side of durable checkpoints: who has written what, when it may be committed, and what may be
deleted."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec

from dougong.clock import Clock
from dougong.errors import CheckpointDamaged
from dougong.event.kinds import AnyEvent, CheckpointDeleted, CheckpointRejected, CheckpointSaved, WarningRaised
from dougong.run import manifest
from dougong.run.letters import DropCheckpoint, MetadataWritten, ShardFailed, ShardWritten, WriteMetadata
from dougong.run.settings import RunSettings


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What follows from a letter about a checkpoint."""

    events: tuple[AnyEvent, ...] = ()
    letter: WriteMetadata | DropCheckpoint | None = None


class CheckpointDesk:
    """Gathers the shards of one generation's checkpoints; commits when all ranks and the metadata are there."""

    def __init__(self, settings: RunSettings, *, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._generation = 0
        self.last_durable_step = 0
        self._world_size = settings.world_size
        self._shards: dict[int, dict[int, ShardWritten]] = {}
        self._busy = asyncio.Lock()

    def begin_generation(self, generation: int, *, world_size: int) -> None:
        """Shards of an earlier generation can no longer be completed."""
        self._generation = generation
        self._world_size = world_size
        self._shards.clear()

    async def take(self, letter: ShardWritten | ShardFailed | MetadataWritten) -> Outcome:
        """A letter in, what follows out. Raises OSError and CheckpointDamaged if the storage fails."""
        match letter:
            case ShardFailed():
                self._shards.pop(letter.step, None)
                text = f"checkpoint of step {letter.step} was not written by rank {letter.rank}: {letter.reason}"
                drop = DropCheckpoint(generation=letter.generation, rank=0, step=letter.step)
                return Outcome(events=(WarningRaised(component="checkpoints", text=text),), letter=drop)
            case ShardWritten():
                return self._take_shard(letter)
            case MetadataWritten():
                async with self._busy:
                    return await asyncio.to_thread(self._commit, letter)

    async def finish(self) -> None:
        """Until the commit in hand is done."""
        async with self._busy:
            return

    def _take_shard(self, letter: ShardWritten) -> Outcome:
        shards = self._shards.setdefault(letter.step, {})
        shards[letter.rank] = letter
        if len(shards) < self._world_size:
            return Outcome()
        items = tuple(item for shard in shards.values() for item in shard.items)
        return Outcome(
            letter=WriteMetadata(
                generation=letter.generation, rank=0, step=letter.step, directory=letter.directory, items=items
            )
        )

    def _commit(self, letter: MetadataWritten) -> Outcome:
        shards = self._shards.pop(letter.step, None)
        if shards is None:
            return Outcome()
        files = tuple(file for _, shard in sorted(shards.items()) for file in shard.files)
        record = manifest.Manifest(
            format_version=manifest.FORMAT_VERSION,
            run_id=self._settings.run_id,
            step=letter.step,
            generation=letter.generation,
            world_size=len(shards),
            time_ns=self._clock.wall_ns(),
            files=(*files, letter.file),
        )
        manifest.commit(self._settings.checkpoint_url, record)
        self.last_durable_step = letter.step
        saved = CheckpointSaved(
            step=letter.step,
            generation=letter.generation,
            tier="durable",
            num_bytes=record.num_bytes,
            stall_s=max(shard.stall_s for shard in shards.values()),
            write_s=max(shard.write_s for shard in shards.values()),
            path=manifest.directory_name(letter.step, generation=letter.generation),
        )
        return Outcome(events=(saved, *self._retire()))

    def _retire(self) -> tuple[AnyEvent, ...]:
        url, keep = self._settings.checkpoint_url, self._settings.save.keep_durable
        events: list[AnyEvent] = []
        for stored in manifest.beyond_retention(manifest.list_stored(url), keep=keep):
            manifest.delete(url, stored.directory)
            reason = _why_retired(stored, keep)
            events.append(CheckpointDeleted(step=stored.step, path=stored.directory, reason=reason))
        return tuple(events)


def newest_good(url: str) -> tuple[tuple[int, str] | None, tuple[CheckpointRejected, ...]]:
    """The newest durable checkpoint whose every byte is right, and those that were passed over, with the reason."""
    rejected: list[CheckpointRejected] = []
    for stored in manifest.list_stored(url):
        try:
            manifest.verify(url, stored.directory)
        except (CheckpointDamaged, OSError) as error:
            reason = error.reason if isinstance(error, CheckpointDamaged) else str(error)
            if isinstance(error, CheckpointDamaged) and stored.is_committed and not stored.is_rejected:
                _mark_rejected(url, stored, reason)
            rejected.append(CheckpointRejected(step=stored.step, tier="durable", path=stored.directory, reason=reason))
            continue
        return (stored.step, stored.directory), tuple(rejected)
    return None, tuple(rejected)


def newest_committed(url: str) -> tuple[int, str] | None:
    """The newest durable checkpoint that counts as good, its bytes unread."""
    for stored in manifest.list_stored(url):
        if stored.is_committed and not stored.is_rejected:
            return stored.step, stored.directory
    return None


def _mark_rejected(url: str, stored: manifest.Stored, reason: str) -> None:
    """A disk that does not take the mark must not hinder the recovery: the checkpoint is passed over all the same."""
    with contextlib.suppress(OSError):
        manifest.reject(url, stored.directory, reason=reason)


def _why_retired(stored: manifest.Stored, keep: int) -> str:
    if stored.is_rejected:
        return "it was found damaged, and newer good ones exist"
    return f"the newest {keep} are kept" if stored.is_committed else "never committed, left by a crash"
