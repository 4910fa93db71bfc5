"""The copies of memory checkpoints that a node keeps: its own ranks' and other nodes', two of each, in its memory.

`copies/OWNER/rank-R` has the form of a rank's own memory checkpoints, so the same rule holds: one buffer is void while
it is written, the other stays whole. A copy is declared whole only after its checksum was found right.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash

from dougong.errors import CheckpointDamaged
from dougong.run.host_memory import leaves_memory
from dougong.run.layout import NodeDirectory
from dougong.run.snapshot import Slot, SnapshotFiles
from dougong.run.wire import CopyStatus, SnapshotStatus

CHUNK_BYTES = 4 * 2**20
_SPARE_MEMORY_RATIO = 0.05
_INDICES = (0, 1)


class Anchor(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A state of the job by which every rank can be restored: it must stay until there is a newer one."""

    generation: int
    step: int


NO_ANCHOR = Anchor(0, 0)


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A state that lies in this node's memory. `owner` "" = among the checkpoints of the node's own ranks."""

    prefix: Path
    slot: Slot
    owner: str
    rank: int

    def open(self) -> int:
        """A descriptor of its buffer, for reading. Raises OSError."""
        return os.open(buffer_path(self.prefix, self.slot.index), os.O_RDONLY)

    def is_whole(self) -> bool:
        """Do its bytes still agree with its checksum? Read by calls: a mapping of so many pages takes longer."""
        try:
            source = self.open()
        except OSError:
            return False
        chunk, done, digest = memoryview(bytearray(CHUNK_BYTES)), 0, xxhash.xxh3_128()
        try:
            while num_bytes := os.preadv(source, [chunk[: self.slot.num_bytes - done]], done):
                digest.update(chunk[:num_bytes])
                done += num_bytes
        finally:
            os.close(source)
        return done == self.slot.num_bytes and digest.digest() == self.slot.digest

    def is_still_there(self) -> bool:
        """Was it not written over meanwhile?"""
        return self.slot in SnapshotFiles(self.prefix).slots()


class CopyStore:
    """All copies of one node. Several threads may use it; of one rank's copies one is written at a time."""

    def __init__(self, node: NodeDirectory) -> None:
        self._node = node
        self._locks: dict[Path, threading.Lock] = {}
        self._guard = threading.Lock()

    def held(self) -> tuple[CopyStatus, ...]:
        """All whole copies."""
        return tuple(
            CopyStatus(owner=found.owner, snapshot=status_of(found.slot, rank=found.rank)) for found in self._copies()
        )

    def newest_of_own(self, *, generation: int, from_step: int) -> tuple[Found, ...]:
        """Of each rank that ran on this node the first memory checkpoint of a generation at or after a step."""
        found: list[Found] = []
        for rank, prefix in ranks_in(self._node.root):
            fitting = [s for s in SnapshotFiles(prefix).slots() if s.generation == generation and s.step >= from_step]
            if fitting:
                first = min(fitting, key=lambda slot: slot.step)
                found.append(Found(prefix=prefix, slot=first, owner="", rank=rank))
        return tuple(found)

    def find(self, rank: int, *, generation: int, step: int, owner: str | None = None) -> Found | None:
        """A state in the node's memory; the rank's own checkpoints go before copies. `owner`: only copies of its."""
        own = [
            Found(prefix=self._node.snapshot(rank), slot=slot, owner="", rank=rank)
            for slot in SnapshotFiles(self._node.snapshot(rank)).slots()
        ]
        for found in (*own, *self._copies()):
            is_state = (found.rank, found.slot.generation, found.slot.step) == (rank, generation, step)
            if is_state and owner in (None, found.owner):
                return found
        return None

    def has(self, owner: str, rank: int, slot: Slot) -> bool:
        """Is a copy of this very state there?"""
        slots = SnapshotFiles(self._node.copy(rank, owner=owner)).slots()
        return any((o.generation, o.step, o.digest) == (slot.generation, slot.step, slot.digest) for o in slots)

    def deposit(self, owner: str, rank: int, slot: Slot, *, anchor: Anchor) -> Deposit:
        """A place for a copy, to be filled. Raises OSError (ENOSPC) if others would be short of memory for it."""
        prefix = self._node.copy(rank, owner=owner)
        prefix.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _leave_memory_for_others(prefix, slot.num_bytes)
        return self._deposit_at(prefix, slot, anchor=anchor)

    def deposit_own(self, rank: int, slot: Slot) -> Deposit:
        """A place among the checkpoints of the node's own ranks, for a rank that is about to start here."""
        return self._deposit_at(self._node.snapshot(rank), slot, anchor=NO_ANCHOR)

    def drop(self, found: Found) -> None:
        """Forget a copy that was found damaged."""
        if found.is_still_there():
            SnapshotFiles(found.prefix).void(found.slot.index)

    def forget_before(self, anchor: Anchor) -> bool:
        """Give back the memory of copies that are all older than the anchor: nobody keeps them up any more, since their
        owner is gone or has another keeper. Was there any?"""
        is_changed = False
        for folder in self._node.copies.glob("*"):
            for rank, prefix in ranks_in(folder):
                lock = self._lock_of(prefix)
                if not lock.acquire(blocking=False):
                    continue
                try:
                    # asked under the lock: a copy may just have been put there
                    newest = max((_state(slot) for slot in SnapshotFiles(prefix).slots()), default=NO_ANCHOR)
                    if newest < anchor:
                        for path in (*folder.glob(f"rank-{rank}.commit"), *folder.glob(f"rank-{rank}.buf*")):
                            path.unlink(missing_ok=True)
                        is_changed = True
                finally:
                    lock.release()
            with contextlib.suppress(OSError):
                folder.rmdir()  # once it is empty
        return is_changed

    def _lock_of(self, prefix: Path) -> threading.Lock:
        with self._guard:
            return self._locks.setdefault(prefix, threading.Lock())

    def _deposit_at(self, prefix: Path, slot: Slot, *, anchor: Anchor) -> Deposit:
        return Deposit(prefix, slot, anchor=anchor, lock=self._lock_of(prefix))

    def _copies(self) -> Iterator[Found]:
        for folder in sorted(self._node.copies.glob("*")):
            for rank, prefix in ranks_in(folder):
                for slot in SnapshotFiles(prefix).slots():
                    yield Found(prefix=prefix, slot=slot, owner=folder.name.replace("~", "/"), rank=rank)


class Deposit:
    """A copy on its way in: `with` holds its place; `write` each chunk in order; `finish` compares and declares it
    whole. Left earlier, it does not exist.

    Written by calls and not through a mapping: pages that are new need not be cleared first, and a full memory is an
    error and not a SIGBUS.
    """

    def __init__(self, prefix: Path, slot: Slot, *, anchor: Anchor, lock: threading.Lock) -> None:
        self._files = SnapshotFiles(prefix)
        self._prefix = prefix
        self._slot = slot
        self._anchor = anchor
        self._lock = lock
        self._index = 0
        self._file = -1
        self._num_bytes = 0
        self._digest = xxhash.xxh3_128()

    def __enter__(self) -> Deposit:
        """Raises OSError if there is no memory for it."""
        self._lock.acquire()
        try:
            self._prefix.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._index = self._free_index()
            self._files.void(self._index)
            self._file = os.open(buffer_path(self._prefix, self._index), os.O_RDWR | os.O_CREAT, 0o600)
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        os.close(self._file)
        self._lock.release()

    @property
    def missing_bytes(self) -> int:
        """What is still to come."""
        return self._slot.num_bytes - self._num_bytes

    def write(self, chunk: memoryview) -> None:
        """The next bytes. Raises OSError (ENOSPC)."""
        self._digest.update(chunk)
        while chunk:
            done = os.pwrite(self._file, chunk, self._num_bytes)
            self._num_bytes += done
            chunk = chunk[done:]

    def finish(self) -> None:
        """Declare it whole. Raises CheckpointDamaged if it is not what was announced."""
        slot = self._slot
        if self._num_bytes != slot.num_bytes or self._digest.digest() != slot.digest:
            raise CheckpointDamaged(f"the copy of step {slot.step}", reason="checksum differs (xxh3-128)")
        self._files.publish(
            self._index,
            step=slot.step,
            generation=slot.generation,
            world_size=slot.world_size,
            num_bytes=slot.num_bytes,
            digest=slot.digest,
        )

    def _free_index(self) -> int:
        """Not the anchor's buffer; of others a void one, else the older."""
        slots = [slot for slot in self._files.slots() if slot.index in _INDICES]
        kept = {slot.index for slot in slots if _state(slot) == self._anchor}
        by_age = [slot.index for slot in reversed(slots)]
        free = [index for index in _INDICES if index not in by_age] + by_age
        return next((index for index in free if index not in kept), free[0])


def copy_over(found: Found, deposit: Deposit) -> None:
    """Fill a deposit from this node's own memory. Raises CheckpointDamaged if that changed meanwhile, OSError."""
    chunk, source, done = memoryview(bytearray(CHUNK_BYTES)), found.open(), 0
    try:
        while deposit.missing_bytes:
            num_bytes = os.preadv(source, [chunk[: deposit.missing_bytes]], done)
            if num_bytes == 0:
                break
            deposit.write(chunk[:num_bytes])
            done += num_bytes
    finally:
        os.close(source)
    deposit.finish()


def forget_newer(prefix: Path, *, generation: int, step: int) -> None:
    """Before a rank goes back to a state in memory: void its checkpoints of the future that is given up.

    Else the next one would be written over the state that it goes back to, as the older of two. 0 = not from memory.
    """
    if generation:
        SnapshotFiles(prefix).void_newer(generation=generation, step=step)


def kept_for(rank: int, node: NodeDirectory, *, generation: int, step: int) -> tuple[SnapshotFiles, Slot]:
    """A state that the node keeps as a copy, for the rank itself to read. Raises CheckpointDamaged if there is none."""
    found = CopyStore(node).find(rank, generation=generation, step=step)
    if found is None:
        raise CheckpointDamaged(str(node.snapshot(rank)), reason=f"no valid memory checkpoint or copy of step {step}")
    return SnapshotFiles(found.prefix), found.slot


def status_of(slot: Slot, *, rank: int) -> SnapshotStatus:
    return SnapshotStatus(
        rank=rank,
        step=slot.step,
        generation=slot.generation,
        world_size=slot.world_size,
        num_bytes=slot.num_bytes,
    )


def buffer_path(prefix: Path, index: int) -> Path:
    return prefix.with_name(f"{prefix.name}.buf{index}")


def _state(slot: Slot) -> Anchor:
    return Anchor(slot.generation, slot.step)


def ranks_in(folder: Path) -> list[tuple[int, Path]]:
    """The ranks of which there is a page of checkpoints, and the prefix of their files."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(e.name for e in entries if e.name.startswith("rank-") and e.name.endswith(".commit"))
    except OSError:
        return []
    numbers = [name[len("rank-") : -len(".commit")] for name in names]
    return [(int(number), folder / f"rank-{number}") for number in numbers if number.isdecimal()]


def _leave_memory_for_others(prefix: Path, num_bytes: int) -> None:
    """Copies must not take the last memory, which the ranks' own checkpoints need. Raises OSError (ENOSPC)."""
    there = [path.stat().st_size for index in _INDICES if (path := buffer_path(prefix, index)).exists()]
    missing = sum(max(0, num_bytes - size) for size in (*there, 0, 0)[: len(_INDICES)])
    room = os.statvfs(prefix.parent)
    left = room.f_bavail * room.f_frsize - missing
    is_room = left >= _SPARE_MEMORY_RATIO * room.f_blocks * room.f_frsize
    if missing and not (is_room and leaves_memory(missing)):
        raise OSError(errno.ENOSPC, "no shared memory to spare for copies of checkpoints")
