"""A new file on storage, written once from its first byte to its last, with its checksum made on the way.

On a local or mounted file system past the page cache (O_DIRECT): fresh pages of the cache cost more than the disk.
Source of the rules of O_DIRECT: open(2), "O_DIRECT"; all of address, offset and length are kept at multiples of 4096.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import xxhash

from dougong.run.manifest import FileRecord, LocalPlace, Place

BLOCK_BYTES = 4096
_CHUNK_BYTES = 8 * 2**20
_STRAIGHT_BYTES = 64 * 1024
"""Shorter stretches are gathered: one large write is cheaper than several small ones."""
_LIBC = ctypes.CDLL(None, use_errno=True)

OnChunk = Callable[[int], None]
"""Told of each chunk before it is written; holds back, or raises to end the writing."""


class NewFile(Protocol):
    """Takes bytes in order. Every method raises OSError; after `discard` nothing of it is left."""

    def write(self, content: memoryview, *, is_on_page: bool = False) -> None: ...
    def finish(self) -> FileRecord: ...
    def discard(self) -> None: ...


def new_file(place: Place, path: str, *, num_bytes: int, on_chunk: OnChunk) -> NewFile:
    """A file of `num_bytes`. Raises FileExistsError: no file of a checkpoint is ever written twice."""
    if isinstance(place, LocalPlace):
        return DirectFile(path, num_bytes=num_bytes, on_chunk=on_chunk)
    return UploadedFile(place, path, on_chunk=on_chunk)


class DirectFile:
    """Whole blocks that lie on a page of memory go straight to the disk; all else through one aligned buffer."""

    def __init__(self, path: str, *, num_bytes: int, on_chunk: OnChunk) -> None:
        self._path = path
        self._on_chunk = on_chunk
        self._digest = xxhash.xxh3_128()
        self._num_bytes = 0
        self._written_bytes = 0
        self._held_bytes = 0
        self._gathered = mmap.mmap(-1, _CHUNK_BYTES)
        self._fd, self.is_direct = _open_new(path)
        try:
            _allocate(self._fd, num_bytes)
        except BaseException:
            self.discard()
            raise

    def write(self, content: memoryview, *, is_on_page: bool = False) -> None:
        """`is_on_page`: the first byte lies on a page of memory."""
        while content:
            can_go_straight = is_on_page and self._held_bytes % BLOCK_BYTES == 0
            if can_go_straight and len(content) >= (_STRAIGHT_BYTES if self._held_bytes else BLOCK_BYTES):
                chunk = content[: min(len(content) // BLOCK_BYTES * BLOCK_BYTES, _CHUNK_BYTES)]
                self._flush(chunk)  # what was gathered goes along: small writes of their own would cost as much
            else:
                chunk = content[: _CHUNK_BYTES - self._held_bytes]
                self._gathered[self._held_bytes : self._held_bytes + len(chunk)] = chunk
                self._held_bytes += len(chunk)
                if self._held_bytes == _CHUNK_BYTES:
                    self._flush()
            self._digest.update(chunk)
            self._num_bytes += len(chunk)
            is_on_page = is_on_page and len(chunk) % BLOCK_BYTES == 0
            content = content[len(chunk) :]

    def finish(self) -> FileRecord:
        """Have it on disk, synced; its name must still be (see `layout.sync_directory`)."""
        if self.is_direct:
            end = -(-self._held_bytes // BLOCK_BYTES) * BLOCK_BYTES
            self._gathered[self._held_bytes : end] = bytes(end - self._held_bytes)
            self._held_bytes = end
        self._flush()
        os.ftruncate(self._fd, self._num_bytes)
        os.fsync(self._fd)
        self._close()
        return FileRecord(os.path.basename(self._path), self._num_bytes, self._digest.hexdigest())

    def discard(self) -> None:
        self._close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _flush(self, *straight: memoryview) -> None:
        held, self._held_bytes = self._held_bytes, 0
        with memoryview(self._gathered) as gathered:
            self._put([part for part in (gathered[:held], *straight) if part])

    def _put(self, parts: list[memoryview]) -> None:
        self._on_chunk(sum(map(len, parts)))
        while parts:
            try:
                num_bytes = os.pwritev(self._fd, parts, self._written_bytes)
            except OSError as error:
                if error.errno != errno.EINVAL or not self.is_direct:
                    raise
                self._go_indirect()
                continue
            self._written_bytes += num_bytes
            while parts and num_bytes >= len(parts[0]):
                num_bytes -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][num_bytes:]

    def _go_indirect(self) -> None:
        """Some file systems take the flag and refuse the write; some want larger blocks."""
        self.is_direct = False
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._gathered.close()


class UploadedFile:
    """A file that goes to an object store or another system behind `fsspec`."""

    def __init__(self, place: Place, path: str, *, on_chunk: OnChunk) -> None:
        self._place = place
        self._path = path
        self._on_chunk = on_chunk
        self._digest = xxhash.xxh3_128()
        self._num_bytes = 0
        self._file: Any = place.open_write(path)

    def write(self, content: memoryview, *, is_on_page: bool = False) -> None:
        while content:
            chunk = content[:_CHUNK_BYTES]
            self._on_chunk(len(chunk))
            self._file.write(chunk)
            self._digest.update(chunk)
            self._num_bytes += len(chunk)
            content = content[len(chunk) :]

    def finish(self) -> FileRecord:
        self._file.close()
        return FileRecord(self._path.rsplit("/", 1)[-1], self._num_bytes, self._digest.hexdigest())

    def discard(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._place.remove(self._path)


class Pace:
    """Holds several threads together to a rate. 0 = as fast as it goes."""

    def __init__(self, write_bytes_per_s: float) -> None:
        self._write_bytes_per_s = write_bytes_per_s
        self._free_ns = 0
        self._lock = threading.Lock()

    def spend(self, num_bytes: int) -> None:
        """Wait until the bytes before these have had their time."""
        if self._write_bytes_per_s <= 0:
            return
        with self._lock:
            now_ns = time.monotonic_ns()
            begin_ns = max(now_ns, self._free_ns)
            self._free_ns = begin_ns + round(num_bytes / self._write_bytes_per_s * 1e9)
        time.sleep((begin_ns - now_ns) / 1e9)


def _open_new(path: str) -> tuple[int, bool]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # the file may have been made before the flag was refused
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, flags, 0o644), False


def _allocate(fd: int, num_bytes: int) -> None:
    """Have the room, or know at once that there is none. `os.posix_fallocate` would write the whole file where the
    file system cannot reserve."""
    if num_bytes == 0:
        return
    while _LIBC.fallocate(fd, 0, ctypes.c_long(0), ctypes.c_long(num_bytes)) != 0:
        number = ctypes.get_errno()
        if number == errno.EINTR:
            continue
        if number in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            return
        raise OSError(number, os.strerror(number))
