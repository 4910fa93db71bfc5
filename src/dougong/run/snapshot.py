"""Memory checkpoints of one rank: two buffers in shared memory and a page that says which of them is whole.

The files belong to the node, not to the worker, so they outlive it. A buffer is declared void before it is written
and valid, with its checksum, after; the other one stays valid meanwhile. So a worker killed at any moment leaves the
newest or the one before.

A worker that starts again may *adopt* the buffer it is restored from: its tensors then live there, without a copy, and
another buffer takes its place among the two. While one is being persisted, or where every step is saved, one more is
used if there is room: else the rank could write over the only state that a slower rank has, too (`next_index`).

This module knows bytes only. What they mean is in `dougong.run.state`.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import msgspec
import xxhash

from dougong.errors import CheckpointDamaged
from dougong.run.host_memory import leaves_memory
from dougong.run.reserve import leaves_room, with_reserve

_SLOT = struct.Struct("<QQQQ16s")  # step, generation, world_size, bytes, xxh3-128
_SLOT_BYTES = 256
_CRC = struct.Struct("<I")
_ALIGN_BYTES = 4096
_INDICES = (0, 1, 2, 3, 4)
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_POPULATE_BYTES = 8 * 2**20
_DIGEST_BYTES = 2**20
_COPY_BYTES = 64 * 2**20


class GivenUp(Exception):
    """A snapshot is not wanted any more, and was not finished."""


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """What a valid buffer holds."""

    index: int
    step: int
    generation: int
    world_size: int
    num_bytes: int
    digest: bytes


class Comparison:
    """Compares a snapshot with its checksum while it is read: each byte comes from memory once for both."""

    def __init__(self, content: memoryview, digest: bytes) -> None:
        self._content = content
        self._expected = digest
        self._digest = xxhash.xxh3_128()
        self._end = 0

    def advance(self, end: int) -> None:
        """All up to `end` is read next."""
        for offset in range(self._end, end, _DIGEST_BYTES):
            self._digest.update(self._content[offset : min(end, offset + _DIGEST_BYTES)])
        self._end = max(self._end, end)

    def is_equal(self) -> bool:
        """Is all of it what was published?"""
        self.advance(len(self._content))
        return self._digest.digest() == self._expected


class SnapshotFiles:
    """The buffers of one rank, for writing by its worker or reading by anyone on the node."""

    def __init__(self, prefix: Path) -> None:
        self._prefix = prefix
        self._buffers: dict[int, mmap.mmap] = {}
        self._pinned: int | None = None
        self._adopted: int | None = None
        self._touched: dict[int, mmap.mmap] = {}
        self._fresh: set[int] = set()
        self._private_fds: dict[int, int] = {}
        self._ahead: tuple[Slot, Future[bool]] | None = None

    def reserve(self, num_bytes: int, *, only: int | None = None) -> None:
        """Have two buffers (or only one) hold `num_bytes`, with the memory really there. Raises OSError if it is not.

        Fallocate first: writing into a hole of a full tmpfs would kill the process with SIGBUS. Where shared memory is
        full the buffer is this process's own, found at its path as long as the process lives: enough to be persisted
        from.
        """
        size = -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        for index in self._rotation() if only is None else (only,):
            if index in self._buffers and len(self._buffers[index]) >= num_bytes:
                continue
            try:
                self._buffers[index] = self._shared(index, size)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                self._buffers[index] = self._private(index, size)

    @property
    def is_private(self) -> bool:
        """Does a buffer die with this process, for want of shared memory?"""
        return bool(self._private_fds)

    def touch(self, *, only: int | None = None) -> None:
        """Enter the buffers' pages into this process's page table, without holding the interpreter up."""
        for index in self._rotation() if only is None else (only,):
            if self._touched.get(index) is not self._buffers[index]:
                _populate(self._buffers[index], is_fresh=index in self._fresh)
                self._touched[index] = self._buffers[index]

    def pin(self, index: int | None) -> None:
        """Keep a buffer from being written over while it is being persisted."""
        self._pinned = index

    def next_index(self, *, num_kept: int = 1) -> int:
        """The buffer to write next: neither the pinned one nor one of the `num_kept` newest, if there is room for that.

        Without room only the pinned one is spared, or the newest.
        """
        by_age = [slot.index for slot in reversed(self.slots())]
        spared = {self._adopted, self._pinned, *by_age[-num_kept:]}
        free = [index for index in _INDICES if index not in spared]
        there = [index for index in free if self.path(index).exists()]
        if there:
            return min(there, key=lambda index: by_age.index(index) if index in by_age else -1)  # void ones first
        if self._may_grow():
            return free[0]
        spare = [self._pinned] if self._pinned is not None else by_age[-1:]
        return min(
            (index for index in self._rotation() if index not in spare),
            key=lambda index: (not self.path(index).exists(), index),
        )

    def _may_grow(self) -> bool:
        """Is there room for one more buffer? The first two are made in any case."""
        sizes = [path.stat().st_size for index in _INDICES if (path := self.path(index)).exists()]
        if len(sizes) < len(self._rotation()):
            return True
        try:
            room = not self.is_private and leaves_room(self._prefix.parent, max(sizes))
            return room and leaves_memory(max(sizes))
        except OSError:
            return False

    def adopt(self, slot: Slot) -> memoryview:
        """The verified bytes of a snapshot, from now on this process's own to change. Raises CheckpointDamaged.

        The snapshot stays valid until `void`, which must come before the first change.
        """
        content = self.read_slot(slot)
        self._adopted = slot.index
        return content

    @property
    def adopted_index(self) -> int | None:
        """The buffer in which this process's tensors live."""
        return self._adopted

    def give_back(self) -> None:
        """No tensor lives in the adopted buffer any more."""
        self._adopted = None

    def path(self, index: int) -> Path:
        """The file of a buffer."""
        return self._prefix.with_name(f"{self._prefix.name}.buf{index}")

    def buffer(self, index: int) -> memoryview:
        return memoryview(self._buffers[index])

    def copy(self, slot: Slot, index: int) -> None:
        """Copy a snapshot's bytes into the reserved buffer `index`, while other threads run. Raises OSError.

        As a write to its file: a new process would have to map each page first, which takes as long again.
        """
        source = self._mapped(slot)
        fd = os.open(self.path(index), os.O_WRONLY)
        try:
            done = 0
            while done < slot.num_bytes:
                done += os.pwrite(fd, source[done : done + _COPY_BYTES], done)
        finally:
            os.close(fd)

    def void(self, index: int) -> None:
        """Declare a buffer not whole, before it is written."""
        if self._ahead is not None and self._ahead[0].index == index:
            self._ahead = None
        self._write_slot(index, b"\0" * _SLOT_BYTES)

    def publish(
        self,
        index: int,
        *,
        step: int,
        generation: int,
        world_size: int,
        num_bytes: int,
        digest: bytes | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Slot:
        """Declare a buffer whole, with the checksum of its first `num_bytes`, which a reader on the way may know.

        Raises GivenUp once it is not wanted any more.
        """
        digest = digest or _digest(memoryview(self._buffers[index])[:num_bytes], is_wanted=is_wanted)
        body = _SLOT.pack(step, generation, world_size, num_bytes, digest)
        self._write_slot(index, body + _CRC.pack(zlib.crc32(body)))
        return Slot(
            index=index, step=step, generation=generation, world_size=world_size, num_bytes=num_bytes, digest=digest
        )

    def slots(self) -> tuple[Slot, ...]:
        """The valid buffers, newest first: after a roll-back a higher step of an earlier generation is the older
        one."""
        try:
            content = self._page_path().read_bytes()
        except FileNotFoundError:
            return ()
        found = [slot for index in _INDICES if (slot := _parse(content, index)) is not None]
        return tuple(sorted(found, key=lambda slot: (slot.generation, slot.step), reverse=True))

    def void_newer(self, *, generation: int, step: int) -> None:
        """After going back to a state: what was saved after it is not wanted, and must not pass for the newest."""
        for slot in self.slots():
            if (slot.generation, slot.step) > (generation, step):
                self.void(slot.index)

    def is_there(self, slot: Slot) -> bool:
        """Is there such a buffer at all? A private one goes with its process."""
        try:
            return os.stat(self.path(slot.index)).st_size >= slot.num_bytes
        except OSError:
            return False

    def is_whole(self, slot: Slot) -> bool:
        """Does the buffer still have the bytes that its checksum was made of?"""
        if self._ahead is not None and self._ahead[0] == slot:
            return self._ahead[1].result()
        return self._is_as_published(slot)

    def compare_ahead(self, slot: Slot) -> None:
        """Have a thread find out now what `is_whole` will be asked, until the buffer is void."""
        found: Future[bool] = Future()
        self._ahead = (slot, found)

        def compare() -> None:
            try:
                found.set_result(self._is_as_published(slot))
            except BaseException as error:
                found.set_exception(error)

        threading.Thread(target=compare, name="dougong-compare", daemon=True).start()

    def _is_as_published(self, slot: Slot) -> bool:
        try:
            view = self._mapped(slot)
        except (OSError, ValueError):
            return False
        return Comparison(view, slot.digest).is_equal()

    def find(self, *, step: int, generation: int = 0) -> Slot:
        """The slot of a step, of one generation or (0) the newest that has it. Raises CheckpointDamaged."""
        for slot in self.slots():
            if slot.step == step and generation in (0, slot.generation):
                return slot
        raise CheckpointDamaged(str(self._prefix), reason=f"no valid memory checkpoint of step {step}")

    def read(self, *, step: int, generation: int = 0) -> memoryview:
        """The verified bytes of the snapshot of `step`. Raises CheckpointDamaged."""
        return self.read_slot(self.find(step=step, generation=generation))

    def read_slot(self, slot: Slot) -> memoryview:
        """The verified bytes of a snapshot. Raises CheckpointDamaged."""
        if not self.is_whole(slot):
            raise CheckpointDamaged(str(self.path(slot.index)), reason="checksum differs (xxh3-128)")
        return self._mapped(slot)

    def compare(self, slot: Slot) -> tuple[memoryview, Comparison]:
        """The bytes of a snapshot, to be compared while they are read. Raises CheckpointDamaged if they are gone."""
        try:
            content = self._mapped(slot)
        except (OSError, ValueError) as error:
            raise CheckpointDamaged(str(self.path(slot.index)), reason=str(error)) from error
        return content, Comparison(content, slot.digest)

    def _shared(self, index: int, size: int) -> mmap.mmap:
        path = self.path(index)
        if path.is_symlink():
            path.unlink()  # to the memory of a process that has ended
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if os.fstat(fd).st_size < size:
                if not leaves_room(path.parent, size):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
                os.posix_fallocate(fd, 0, size)
                self._fresh.add(index)
            return mmap.mmap(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)

    def _private(self, index: int, size: int) -> mmap.mmap:
        fd = os.memfd_create(f"dougong-buffer-{index}")
        try:
            os.posix_fallocate(fd, 0, size)
            self._fresh.add(index)
            mapping = mmap.mmap(fd, size)
            self.path(index).unlink(missing_ok=True)
            self.path(index).symlink_to(f"/proc/{os.getpid()}/fd/{fd}")
        except BaseException:
            os.close(fd)
            raise
        if index in self._private_fds:
            os.close(self._private_fds[index])
        self._private_fds[index] = fd
        return mapping

    def _mapped(self, slot: Slot) -> memoryview:
        if slot.index not in self._buffers or len(self._buffers[slot.index]) < slot.num_bytes:
            fd = os.open(self.path(slot.index), os.O_RDWR)
            try:
                self._buffers[slot.index] = mmap.mmap(fd, os.fstat(fd).st_size)
            finally:
                os.close(fd)
        if len(self._buffers[slot.index]) < slot.num_bytes:
            raise ValueError("the buffer is shorter than its slot says")
        return memoryview(self._buffers[slot.index])[: slot.num_bytes]

    def _write_slot(self, index: int, body: bytes) -> None:
        fd = os.open(self._page_path(), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            content = body.ljust(_SLOT_BYTES, b"\0")
            with_reserve(self._prefix.parent, lambda: os.pwrite(fd, content, index * _SLOT_BYTES))
        finally:
            os.close(fd)

    def _rotation(self) -> tuple[int, int]:
        """The two buffers that take turns."""
        first, second = [index for index in _INDICES if index != self._adopted][:2]
        return first, second

    def _page_path(self) -> Path:
        return self._prefix.with_name(f"{self._prefix.name}.commit")


def _digest(content: memoryview, *, is_wanted: Callable[[], bool] = lambda: True) -> bytes:
    """xxh3-128, in pieces: training goes on beside it. Raises GivenUp."""
    digest = xxhash.xxh3_128()
    for offset in range(0, len(content), _DIGEST_BYTES):
        if not is_wanted():
            raise GivenUp
        digest.update(content[offset : offset + _DIGEST_BYTES])
    return digest.digest()


def _populate(mapping: mmap.mmap, *, is_fresh: bool) -> None:
    """madvise(MADV_POPULATE_…), Linux 5.14; an older one faults the pages in as they are used.

    In pieces: during each, no thread of the process can map or unmap memory. For 1.1 GB that nobody has used yet
    populating to write took 0.26 s, to read 0.44; for pages that another process has filled 0.25 and 0.11.
    """
    advice = _MADV_POPULATE_WRITE if is_fresh else _MADV_POPULATE_READ
    anchor = ctypes.c_char.from_buffer(mapping)
    libc = ctypes.CDLL(None)
    try:
        for offset in range(0, len(mapping), _POPULATE_BYTES):
            length = min(_POPULATE_BYTES, len(mapping) - offset)
            address = ctypes.c_void_p(ctypes.addressof(anchor) + offset)
            libc.madvise(address, ctypes.c_size_t(length), advice)
    finally:
        del anchor


def _parse(content: bytes, index: int) -> Slot | None:
    """The slot at `index`, or None if it is void or was only half written (its CRC tells)."""
    raw = content[index * _SLOT_BYTES : (index + 1) * _SLOT_BYTES]
    if len(raw) < _SLOT.size + _CRC.size:
        return None
    body = raw[: _SLOT.size]
    if _CRC.unpack_from(raw, _SLOT.size)[0] != zlib.crc32(body):
        return None
    step, generation, world_size, num_bytes, digest = _SLOT.unpack(body)
    if step == 0:
        return None
    return Slot(
        index=index, step=step, generation=generation, world_size=world_size, num_bytes=num_bytes, digest=digest
    )
