"""The controller's side of durable checkpoints: who has written what, when it may be committed, and what may be
deleted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Literal

import msgspec

from dougong.clock import Clock
from dougong.errors import CheckpointDamaged, CheckpointLocked, DougongError, UserError
from dougong.event.kinds import AnyEvent, CheckpointDeleted, CheckpointRejected, CheckpointSaved
from dougong.run import manifest, retention_lock
from dougong.run.letters import (
    CheckpointCommitted,
    DropCheckpoint,
    MetadataWritten,
    Reopened,
    SaveAgain,
    ShardFailed,
    ShardHeld,
    ShardSkipped,
    ShardWritten,
    WriteMetadata,
)
from dougong.run.sealed import load_key, load_sealer
from dougong.run.settings import RunSettings
from dougong.run.storage_alarm import StorageAlarm, cause_of

CheckpointLetter = ShardWritten | ShardFailed | ShardSkipped | ShardHeld | SaveAgain | MetadataWritten


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What follows from a letter about a checkpoint."""

    events: tuple[AnyEvent, ...] = ()
    letter: WriteMetadata | CheckpointCommitted | DropCheckpoint | Reopened | None = None


class _Gathered(msgspec.Struct):
    """What is known of one step's checkpoint."""

    shards: dict[int, ShardWritten] = msgspec.field(default_factory=dict[int, ShardWritten])
    fate: Literal["open", "committing", "committed", "dropped"] = "open"
    again: set[int] = msgspec.field(default_factory=set[int])
    """The ranks that would save this step once more."""


class CheckpointDesk:
    """Gathers the shards of one generation's checkpoints; commits when all ranks and the metadata are there."""

    def __init__(self, settings: RunSettings, *, clock: Clock, world_size: int | None = None) -> None:
        self._settings = settings
        self._clock = clock
        self._generation = 0
        self.last_durable_step = 0
        self._world_size = world_size or settings.world_size
        self._steps: dict[int, _Gathered] = {}
        self._over_step = 0
        self._alarm = StorageAlarm(settings.checkpoint_url)
        self._busy = asyncio.Lock()

    def begin_generation(self, generation: int, *, world_size: int) -> None:
        """Shards of an earlier generation can no longer be completed."""
        self._generation = generation
        self._world_size = world_size
        self._steps.clear()
        self._over_step = 0

    async def take(self, letter: CheckpointLetter) -> Outcome:
        """A letter in, what follows out. What the storage does not take becomes an event."""
        async with self._busy:
            if letter.generation != self._generation:
                self._generation = letter.generation
                self._steps.clear()
                self._over_step = await asyncio.to_thread(self._newest_committed, letter.generation)
            if letter.step <= self._over_step:
                return Outcome()  # an agent tells again what a controller that died may not have heard
            gathered = self._steps.setdefault(letter.step, _Gathered())
            if isinstance(letter, SaveAgain):
                return await self._reopen(letter, gathered)
            if gathered.fate == "dropped":
                # somebody wrote on before the word of it came
                await asyncio.to_thread(self._clear, letter)
                return Outcome()
            if gathered.fate != "open":
                return Outcome()  # told again
            match letter:
                case ShardWritten():
                    return self._take_shard(letter, gathered)
                case MetadataWritten():
                    return await self._take_metadata(letter, gathered)
                case ShardFailed():
                    reason = f"rank {letter.rank}: {letter.reason}"
                    events = self._alarm.failed(letter.step, cause=letter.cause, reason=reason)
                case ShardSkipped():
                    events = self._alarm.skipped(
                        letter.step,
                        busy_step=letter.busy_step,
                        rank=letter.rank,
                        now_s=self._clock.monotonic_ns() / 1e9,
                    )
                case ShardHeld():
                    events = ()
            return await self._drop(letter, gathered, events)

    async def finish(self) -> None:
        """Until the commit in hand is done."""
        async with self._busy:
            return

    async def retire(self) -> tuple[AnyEvent, ...]:
        """Delete what is beyond retention. Raises OSError and CheckpointDamaged if the storage fails."""
        async with self._busy:
            return await asyncio.to_thread(self._retire)

    def _newest_committed(self, generation: int) -> int:
        """Up to here an earlier controller of this generation has committed, or given up; 0 = nothing."""
        try:
            listed = manifest.list_stored(self._settings.checkpoint_url)
        except OSError:
            return 0
        return max((item.step for item in listed if item.generation == generation and item.is_committed), default=0)

    def _take_shard(self, letter: ShardWritten, gathered: _Gathered) -> Outcome:
        gathered.shards[letter.rank] = letter
        events = self._alarm.written(sum(file.num_bytes for file in letter.files), write_s=letter.write_s)
        if len(gathered.shards) < self._world_size:
            return Outcome(events=events)
        items = tuple(item for shard in gathered.shards.values() for item in shard.items)
        return Outcome(
            events=events,
            letter=WriteMetadata(
                generation=letter.generation, rank=0, step=letter.step, directory=letter.directory, items=items
            ),
        )

    async def _take_metadata(self, letter: MetadataWritten, gathered: _Gathered) -> Outcome:
        if len(gathered.shards) < self._world_size:
            return Outcome()
        gathered.fate = "committing"
        try:
            saved = await asyncio.to_thread(self._commit, letter, gathered.shards)
        except (OSError, DougongError) as error:
            reason = f"it could not be committed: {error}"
            events = self._alarm.failed(letter.step, cause=cause_of(error), reason=reason)
            return await self._drop(letter, gathered, events)
        gathered.fate = "committed"
        gathered.shards = {}
        self.last_durable_step = letter.step
        committed = CheckpointCommitted(generation=letter.generation, rank=0, step=letter.step)
        return Outcome(events=(saved, *self._alarm.committed(letter.step)), letter=committed)

    def _commit(self, letter: MetadataWritten, shards: dict[int, ShardWritten]) -> CheckpointSaved:
        settings = self._settings
        files = tuple(file for _, shard in sorted(shards.items()) for file in shard.files)
        record = manifest.Manifest(
            format_version=manifest.FORMAT_VERSION,
            run_id=settings.run_id,
            step=letter.step,
            generation=letter.generation,
            world_size=len(shards),
            time_ns=self._clock.wall_ns(),
            files=(*files, letter.file),
            sealed_by=load_sealer(settings.checkpoint_key).fingerprint if settings.checkpoint_key else "",
        )
        manifest.commit(
            settings.checkpoint_url,
            record,
            lock_s=settings.save.lock_s,
            lock_key=_lock_key(settings),
            since=retention_lock.now(self._clock),
        )
        return CheckpointSaved(
            step=letter.step,
            generation=letter.generation,
            tier="durable",
            num_bytes=record.num_bytes,
            stall_s=max(shard.stall_s for shard in shards.values()),
            write_s=max(shard.write_s for shard in shards.values()),
            path=manifest.directory_name(letter.step, generation=letter.generation),
        )

    async def _reopen(self, letter: SaveAgain, gathered: _Gathered) -> Outcome:
        """Letters come in order, so when all ranks have said this, none of them still writes the first attempt."""
        gathered.again.add(letter.rank)
        if len(gathered.again) < self._world_size or gathered.fate == "committed":
            return Outcome()
        await asyncio.to_thread(self._clear, letter)
        self._steps[letter.step] = _Gathered()
        return Outcome(letter=Reopened(generation=letter.generation, rank=0, step=letter.step))

    async def _drop(self, letter: CheckpointLetter, gathered: _Gathered, events: tuple[AnyEvent, ...]) -> Outcome:
        """The checkpoint will never exist: its files go at once, since they may be what fills the disk."""
        gathered.fate = "dropped"
        gathered.shards = {}
        await asyncio.to_thread(self._clear, letter)
        drop = DropCheckpoint(generation=letter.generation, rank=0, step=letter.step)
        return Outcome(events=events, letter=drop)

    def _clear(self, letter: CheckpointLetter) -> None:
        """A rank that is still writing finds its file gone, and gives up; retention takes what is left."""
        url = self._settings.checkpoint_url
        directory = manifest.directory_name(letter.step, generation=letter.generation)
        with contextlib.suppress(OSError, DougongError):
            manifest.delete(url, directory, moment=retention_lock.now(self._clock))

    def _retire(self) -> tuple[AnyEvent, ...]:
        url, keep = self._settings.checkpoint_url, self._settings.save.keep_durable
        events: list[AnyEvent] = []
        moment, key = retention_lock.now(self._clock), _lock_key(self._settings)
        for stored in manifest.beyond_retention(manifest.list_stored(url), keep=keep):
            try:
                manifest.delete(url, stored.directory, moment=moment, key=key)
            except CheckpointLocked:
                continue
            reason = _why_retired(stored, keep)
            events.append(CheckpointDeleted(step=stored.step, path=stored.directory, reason=reason))
        return tuple(events)


def newest_good(
    url: str, *, checkpoint_key: str = "", trusts: Callable[[int, int], bool] = lambda generation, step: True
) -> tuple[tuple[int, str] | None, tuple[CheckpointRejected, ...]]:
    """The newest durable checkpoint whose every byte is right, and those that were passed over, with the reason.

    With the file of its key, an encrypted one is also known to be by somebody who has that key. `trusts` says of a
    generation and step whether the state was sound, whatever its bytes.
    """
    rejected: list[CheckpointRejected] = []
    sealer = None
    if checkpoint_key:
        with contextlib.suppress(UserError):  # the ranks will say it: they cannot read without it
            sealer = load_sealer(checkpoint_key)
    for stored in manifest.list_stored(url):
        if not trusts(stored.generation, stored.step):
            reason = "saved after a bad loss, or since the ranks' states were last found equal"
            rejected.append(CheckpointRejected(step=stored.step, tier="durable", path=stored.directory, reason=reason))
            continue
        try:
            manifest.verify(url, stored.directory, sealer=sealer)
        except (CheckpointDamaged, OSError) as error:
            reason = error.reason if isinstance(error, CheckpointDamaged) else str(error)
            if isinstance(error, CheckpointDamaged) and stored.is_committed and not stored.is_rejected:
                _mark_rejected(url, stored, reason)
            rejected.append(CheckpointRejected(step=stored.step, tier="durable", path=stored.directory, reason=reason))
            continue
        return (stored.step, stored.directory), tuple(rejected)
    return None, tuple(rejected)


def newest_committed(
    url: str, *, trusts: Callable[[int, int], bool] = lambda generation, step: True
) -> tuple[int, str] | None:
    """The newest durable checkpoint that counts as good, its bytes unread."""
    for stored in manifest.list_stored(url):
        if stored.is_committed and not stored.is_rejected and trusts(stored.generation, stored.step):
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


def _lock_key(settings: RunSettings) -> bytes | None:
    return load_key(settings.lock_key, option="--lock-key") if settings.lock_key else None
