"""Faults of storage: a damaged or half-written checkpoint, and file systems that are full or read-only."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

from dougong.backend.local.command import command
from dougong.run.chaos_workers import Reach, Undo
from dougong.run.manifest import list_stored

_TEAR_POLL_S = 0.001
_LARGEST_FILL_BYTES = 4 * 2**30
_FILL_NAME = ".dougong-chaos-fill"


class StorageFaults:
    """Harms the durable checkpoints' and the memory checkpoints' file systems."""

    def __init__(self, reach: Reach, *, checkpoint_url: str, drawn: random.Random) -> None:
        self._reach = reach
        self._url = checkpoint_url
        self._drawn = drawn

    def corrupt(self) -> tuple[str, str]:
        """Flip one bit in the largest file of the newest durable checkpoint."""
        committed = [stored for stored in list_stored(self._url) if stored.is_committed]
        if not committed:
            raise LookupError("there is no durable checkpoint yet")
        newest = committed[0]
        directory = self._directory() / newest.directory
        victim = max(directory.iterdir(), key=lambda path: (path.stat().st_size, path.name))
        offset = self._drawn.randrange(victim.stat().st_size)
        with victim.open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 0x10]))
        return f"checkpoints/{newest.directory}", f"bit 4 of byte {offset} of {victim.name}"

    def wait_for_torn(self, stop: threading.Event, *, at_step: int, look: Callable[[], None]) -> str:
        """The directory of a durable checkpoint that is being written now. Raises LookupError if the run ends first."""
        while not stop.is_set():
            look()
            torn = [stored for stored in list_stored(self._url) if not stored.is_committed]
            if torn and torn[0].step >= at_step:
                return torn[0].directory
            stop.wait(_TEAR_POLL_S)
        raise LookupError("the run ended first")

    def fill_disk(self) -> tuple[str, str, Undo]:
        """Take all that is free where the durable checkpoints are kept."""
        return ("checkpoints", *_fill(self._directory()))

    def fill_memory(self) -> tuple[str, str, Undo]:
        """Take all that is free where the memory checkpoints are kept. On a full one nothing new can be written."""
        return ("memory", *_fill(self._reach.memory_root))

    def make_read_only(self) -> tuple[str, str, Undo]:
        """Mount the checkpoints' directory over itself, read-only: what was opened before goes on, as on a real one
        that the kernel has remounted."""
        directory = str(self._directory())
        if os.geteuid() != 0:
            raise PermissionError(errno.EPERM, "only root can make a directory read-only")
        command("mount", "--bind", directory, directory)
        try:
            command("mount", "-o", "remount,bind,ro", directory)
        except OSError:
            _unmount(directory)
            raise
        return "checkpoints", f"{directory} is read-only", lambda: _unmount(directory)

    def _directory(self) -> Path:
        """Raises LookupError for checkpoints that are not in a directory."""
        if "://" in self._url and not self._url.startswith("file://"):
            raise LookupError(f"{self._url} is not a directory")
        directory = Path(self._url.removeprefix("file://"))
        directory.mkdir(parents=True, exist_ok=True)
        return directory


def _fill(directory: Path) -> tuple[str, Undo]:
    """Take all free space of a small file system. Raises OSError for a large one, which others need too."""
    found = os.statvfs(directory)
    free_bytes = found.f_bavail * found.f_frsize
    if free_bytes > _LARGEST_FILL_BYTES:
        reason = f"{free_bytes / 2**30:.0f} GiB are free, more than may be taken: use a small file system of its own"
        raise OSError(errno.EFBIG, reason, str(directory))
    path = directory / f"{_FILL_NAME}-{os.getpid()}"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        taken_bytes = _take(fd, free_bytes, block_bytes=found.f_frsize)
    finally:
        os.close(fd)
    return f"{taken_bytes} bytes of {directory} are taken, all that was free", lambda: path.unlink(missing_ok=True)


def _take(fd: int, free_bytes: int, *, block_bytes: int) -> int:
    """Halve the piece whenever it does not fit, down to one block."""
    taken_bytes, piece_bytes = 0, max(free_bytes, block_bytes)
    while piece_bytes >= block_bytes:
        try:
            os.posix_fallocate(fd, taken_bytes, piece_bytes)
            taken_bytes += piece_bytes
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            piece_bytes //= 2
    return taken_bytes


def _unmount(directory: str) -> None:
    """Lazily: who reads there now may finish."""
    with contextlib.suppress(OSError):
        command("umount", "--lazy", directory)
