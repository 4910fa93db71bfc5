"""A little shared memory kept back on each node, so that what is small and must be said can be said on a full one.

Whoever meets "no space left" there gives a piece of the reserve up and tries again; the agent fills it up when there is
room again. Without it a letter about the full memory could not be written for want of memory.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

SIZE_BYTES = 2 * 2**20
_PART = 16
_PIECE_BYTES = 128 * 2**10
_FULL = (errno.ENOSPC, errno.EDQUOT)
_T = TypeVar("_T")


def fill_reserve(root: Path) -> None:
    """Have the whole reserve in the node's directory, if there is room: 2 MiB, or a sixteenth of a small memory."""
    with contextlib.suppress(OSError):
        wanted_bytes = size_bytes(root)
        fd = os.open(_path(root), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if os.fstat(fd).st_size < wanted_bytes:
                os.posix_fallocate(fd, 0, wanted_bytes)
        finally:
            os.close(fd)


def size_bytes(root: Path) -> int:
    """How much is kept back on this file system. Raises OSError."""
    found = os.statvfs(root)
    return min(SIZE_BYTES, found.f_blocks * found.f_frsize // _PART)


def leaves_room(root: Path, num_bytes: int) -> bool:
    """Would what is small still fit beside `num_bytes` more? Raises OSError."""
    found = os.statvfs(root)
    return found.f_bavail * found.f_frsize - num_bytes >= size_bytes(root)


def with_reserve(root: Path, write: Callable[[], _T]) -> _T:
    """Do it; where the memory is full, with the room of the reserve. Raises OSError once that is used up too."""
    while True:
        try:
            return write()
        except OSError as error:
            if error.errno not in _FULL or not _give_up_a_piece(root):
                raise


def _give_up_a_piece(root: Path) -> bool:
    try:
        left_bytes = _path(root).stat().st_size
        if left_bytes == 0:
            return False
        os.truncate(_path(root), max(0, left_bytes - _PIECE_BYTES))
    except OSError:
        return False
    return True


def _path(root: Path) -> Path:
    return root / "reserve"
