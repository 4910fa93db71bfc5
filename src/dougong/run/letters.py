"""Letters between a worker and its agent: rare, larger than a heartbeat word, and safe across the death of either.

A letter is a file in a small directory in shared memory, named so that they sort in the order of writing, made by
rename. An agent that was killed finds them when it is back.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from dougong.run.manifest import FileRecord, ItemRecord
from dougong.run.reserve import with_reserve

_serial = itertools.count()

StorageCause = Literal["full", "read-only", "slow", "gone", "other"]
"""Why storage did not take a checkpoint."""


class Skip(msgspec.Struct, frozen=True, array_like=True):
    """One batch to pass over: the one that this generation trained as this step, on every rank."""

    step: int
    generation: int


class Letter(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all letters."""

    generation: int
    rank: int


class ModelFound(Letter, frozen=True, kw_only=True):
    """The attached model and its FLOP per token."""

    num_parameters: int
    model_flop_per_token: float | None
    hardware_flop_per_token: float | None
    source: str


class PeakMeasured(Letter, frozen=True, kw_only=True):
    """The matmul rate this rank reached while all ranks measured at once."""

    flop_per_s: float
    source: str


class Restored(Letter, frozen=True, kw_only=True):
    """The rank holds the state of `step`."""

    step: int
    source: Literal["none", "memory", "peer", "durable"]
    reload_s: float


class ShardWritten(Letter, frozen=True, kw_only=True):
    """The rank's part of a durable checkpoint is on disk, synced."""

    step: int
    directory: str
    files: tuple[FileRecord, ...]
    items: tuple[ItemRecord, ...]
    stall_s: float
    write_s: float


class ShardFailed(Letter, frozen=True, kw_only=True):
    """The rank's part of a durable checkpoint could not be written; training goes on."""

    step: int
    reason: str
    cause: StorageCause = "other"


class ShardSkipped(Letter, frozen=True, kw_only=True):
    """A durable checkpoint was due while the one of `busy_step` was not finished everywhere."""

    step: int
    busy_step: int


class ShardHeld(Letter, frozen=True, kw_only=True):
    """A durable checkpoint was due, and this rank takes none: its state is not to be kept. No other's is of use."""

    step: int


class SaveAgain(Letter, frozen=True, kw_only=True):
    """The script ends at this step and its checkpoint was skipped or given up: the rank would save it once more."""

    step: int


class OrderPut(Letter, frozen=True, kw_only=True):
    """To the agent alone: an order for the writer lies at `path`."""

    path: str


class WarningGiven(Letter, frozen=True, kw_only=True):
    """Something went wrong that does not stop training."""

    text: str


class MetadataWritten(Letter, frozen=True, kw_only=True):
    """The file that names every tensor of a durable checkpoint is on disk, synced."""

    step: int
    file: FileRecord


class LossFoundBad(Letter, frozen=True, kw_only=True):
    """The loss or the gradient norm of this rank has turned bad in `step`; those before were good."""

    step: int
    reason: str


class SaveRefused(Letter, frozen=True, kw_only=True):
    """This rank took no checkpoint at `step`, since a loss before it was bad."""

    step: int
    reason: str


class Fingerprinted(Letter, frozen=True, kw_only=True):
    """The fingerprint of what must be the same on all ranks right after `step`."""

    step: int
    digest: str


class Probed(Letter, frozen=True, kw_only=True):
    """What one rank's test of a pre-flight came to. `generation` is the serial number of the pre-flight.

    `flop_per_s` of a product of matrices; `bytes_per_s` of an all-reduce with the partner node.
    """

    flop_per_s: float | None = None
    bytes_per_s: float | None = None
    is_exact: bool = True


class ErrorRaised(Letter, frozen=True, kw_only=True):
    """The script ended with an exception."""

    time_ns: int
    error: str
    traceback: str
    is_broken_collective: bool


class ScriptEnded(Letter, frozen=True, kw_only=True):
    """The script ended by itself with this exit code."""

    exit_code: int
    step: int


class Stopped(Letter, frozen=True, kw_only=True):
    """The rank has saved at `step`, as asked, and leaves."""

    step: int


WorkerLetter = (
    ModelFound
    | PeakMeasured
    | Restored
    | ShardWritten
    | ShardFailed
    | ShardSkipped
    | ShardHeld
    | SaveAgain
    | OrderPut
    | MetadataWritten
    | ErrorRaised
    | ScriptEnded
    | Stopped
    | WarningGiven
    | Probed
    | LossFoundBad
    | SaveRefused
    | Fingerprinted
)


class WriteMetadata(Letter, frozen=True, kw_only=True):
    """All shards are written: rank 0 writes the metadata file over all of them."""

    step: int
    directory: str
    items: tuple[ItemRecord, ...]


class OrderDone(Letter, frozen=True, kw_only=True):
    """From the writer: the order is carried out, or given up for `reason`."""

    order: Literal["shard", "metadata"]
    step: int
    write_s: float
    reason: str = ""


class CheckpointCommitted(Letter, frozen=True, kw_only=True):
    """The checkpoint of this step exists."""

    step: int


class Reopened(Letter, frozen=True, kw_only=True):
    """Every rank would save this step once more, and nothing of the first attempt is left: begin."""

    step: int


class DropCheckpoint(Letter, frozen=True, kw_only=True):
    """A shard of this checkpoint failed; forget it."""

    step: int


class Rejoin(Letter, frozen=True, kw_only=True):
    """To a rank that unwound: roll back to this state, form a new group with this store, go on."""

    master_address: str
    master_port: int
    restore_source: Literal["none", "memory", "peer", "durable"]
    restore_step: int
    restore_generation: int = 0
    restore_directory: str = ""
    skips: tuple[Skip, ...] = ()


AgentLetter = WriteMetadata | OrderDone | CheckpointCommitted | DropCheckpoint | Reopened | Rejoin


def post(box: Path, letter: Letter) -> None:
    """Put a letter into a box. Raises OSError where memory is full, the node's reserve included."""
    box.mkdir(parents=True, exist_ok=True)
    name = f"{time.monotonic_ns():020d}-{os.getpid()}-{next(_serial):06d}"
    staging = box / f".{name}"
    content = msgspec.msgpack.encode(letter)
    with_reserve(box.parent, lambda: staging.write_bytes(content))
    staging.rename(box / name)


def unread(box: Path) -> tuple[Path, ...]:
    """The letters of a box, oldest first."""
    try:
        with os.scandir(box) as entries:
            names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_file())
    except FileNotFoundError:
        return ()
    return tuple(box / name for name in names)


def from_agent(box: Path) -> Iterator[tuple[Path, AgentLetter]]:
    """The letters of a worker's box, oldest first, with where they lie. What is no letter is removed."""
    for path in unread(box):
        try:
            yield path, read_from_agent(path)
        except (FileNotFoundError, msgspec.MsgspecError):
            path.unlink(missing_ok=True)


def read_from_worker(path: Path) -> WorkerLetter:
    return msgspec.msgpack.decode(path.read_bytes(), type=WorkerLetter)


def read_from_agent(path: Path) -> AgentLetter:
    return msgspec.msgpack.decode(path.read_bytes(), type=AgentLetter)
