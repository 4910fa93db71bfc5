"""What a crash left at the end of a segment: cut off, and kept beside it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

_BLOCK_BYTES = 1 << 16


def cut_torn_tail(segment: Path, *, fsync: bool = True) -> int:
    """Cut the segment behind its last whole line; the number of bytes cut, which are appended to `<segment>.torn`.

    A last line with a zero byte in it is torn as well: JSON has none, a page that was never written is full of them.
    Raises OSError.
    """
    with segment.open("r+b") as file:
        size_bytes = file.seek(0, os.SEEK_END)
        end_bytes = _end_of_whole_lines(file, size_bytes)
        if end_bytes < size_bytes:
            file.seek(end_bytes)
            _keep(segment.with_suffix(".torn"), file.read())
            file.truncate(end_bytes)
        if fsync:
            # Lines that were written but not acknowledged are taken over: from here on they must last.
            os.fsync(file.fileno())
    return size_bytes - end_bytes


def last_line(segment: Path) -> bytes:
    """The last line of a segment that ends in a whole line; empty if it has none. Raises OSError."""
    with segment.open("rb") as file:
        size_bytes = file.seek(0, os.SEEK_END)
        begin_bytes = _behind_newline(file, size_bytes - 1)
        file.seek(begin_bytes)
        return file.read(size_bytes - begin_bytes)


def _end_of_whole_lines(file: BinaryIO, size_bytes: int) -> int:
    end_bytes = _behind_newline(file, size_bytes)
    while end_bytes > 0:
        begin_bytes = _behind_newline(file, end_bytes - 1)
        file.seek(begin_bytes)
        if b"\0" not in file.read(end_bytes - begin_bytes):
            break
        end_bytes = begin_bytes
    return end_bytes


def _behind_newline(file: BinaryIO, before_bytes: int) -> int:
    """The offset behind the last newline that lies before `before_bytes`; 0 if there is none."""
    end_bytes = before_bytes
    while end_bytes > 0:
        begin_bytes = max(0, end_bytes - _BLOCK_BYTES)
        file.seek(begin_bytes)
        found = file.read(end_bytes - begin_bytes).rfind(b"\n")
        if found >= 0:
            return begin_bytes + found + 1
        end_bytes = begin_bytes
    return 0


def _keep(path: Path, torn: bytes) -> None:
    with path.open("ab") as file:
        file.write(torn + b"\n")
        file.flush()
        os.fsync(file.fileno())
