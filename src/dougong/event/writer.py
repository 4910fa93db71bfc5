"""Bytes into segments, durably: written and fsynced as a whole, or cut away again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from dougong.event.segment import segment_name


class _Open(NamedTuple):
    fd: int
    path: Path
    durable_bytes: int
    durable_seq: int


class SegmentWriter:
    """Writes the segments of one stream from where they end.

    All it remembers is one tuple that is replaced in one step, after the fsync: an exception at any other point (a full
    disk, Ctrl-C) leaves bytes behind the durable end, which the next write cuts away first.
    """

    def __init__(self, stream_directory: Path, *, last_seq: int, segment_max_bytes: int, fsync: bool) -> None:
        """Go on in the segment of this name, or begin the first. Raises OSError."""
        self._directory = stream_directory
        self._segment_max_bytes = segment_max_bytes
        self._fsync = fsync
        self._open: _Open | None = None
        self._last_seq = last_seq

    @property
    def path(self) -> Path:
        """The segment being written."""
        return self._directory if self._open is None else self._open.path

    @property
    def durable_seq(self) -> int:
        """The last `seq` that is safe on disk; 0 = none."""
        return self._last_seq if self._open is None else self._open.durable_seq

    def open_segment(self, first_seq: int) -> None:
        """Go on at the end of the segment that begins with `first_seq`, created if it is not there. Raises OSError."""
        path = self._directory / segment_name(first_seq)
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if self._fsync:
                fsync_directory(self._directory)
            size_bytes = os.fstat(fd).st_size
        except BaseException:
            os.close(fd)
            raise
        before, self._open = self._open, _Open(fd, path, size_bytes, self.durable_seq)
        if before is not None:
            os.close(before.fd)

    def write(self, batch: bytes, *, last_seq: int) -> None:
        """Make the whole lines of `batch`, which end with `last_seq`, durable. Raises OSError: none of them is."""
        assert self._open is not None
        if self._open.durable_bytes > 0 and self._open.durable_bytes + len(batch) > self._segment_max_bytes:
            self.open_segment(self._open.durable_seq + 1)
        try:
            self._append(self._open, batch)
        except OSError:
            self._cut_if_possible(self._open)
            raise
        self._open = self._open._replace(durable_bytes=self._open.durable_bytes + len(batch), durable_seq=last_seq)

    def close(self) -> None:
        """Give the file back. What was not written stays unwritten."""
        if self._open is not None:
            os.close(self._open.fd)

    def _append(self, to: _Open, batch: bytes) -> None:
        _cut(to)
        rest, offset_bytes = memoryview(batch), to.durable_bytes
        while rest:
            num_bytes = os.pwrite(to.fd, rest, offset_bytes)
            rest, offset_bytes = rest[num_bytes:], offset_bytes + num_bytes
        if self._fsync:
            os.fsync(to.fd)

    def _cut_if_possible(self, to: _Open) -> None:
        try:
            _cut(to)
        except OSError:
            return  # the next write cuts first, and the next opening repairs


def fsync_directory(directory: Path) -> None:
    """Make the names in `directory` durable. Raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _cut(to: _Open) -> None:
    if os.fstat(to.fd).st_size > to.durable_bytes:
        os.ftruncate(to.fd, to.durable_bytes)
