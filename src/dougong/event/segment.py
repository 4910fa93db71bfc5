"""Segments: the files `<directory>/<stream>/00000001.jsonl`, named by the first `seq` in them. Reading only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from dougong.errors import StoreDamaged
from dougong.event.codec import decode
from dougong.event.kinds import Recorded

_NAME = re.compile(r"([0-9]{8,})\.jsonl\Z")
_BUFFER_BYTES = 1 << 18


class Position(NamedTuple):
    """Where the next line of a stream begins: the segment's file name, the offset there, and the `seq` due."""

    segment: str
    offset_bytes: int
    next_seq: int


class Stored(NamedTuple):
    """A record, where its line begins, and the position behind it."""

    recorded: Recorded
    segment: str
    offset_bytes: int
    behind: Position


def segment_name(first_seq: int) -> str:
    """The file name of the segment that begins with `first_seq`."""
    return f"{first_seq:08d}.jsonl"


def first_seq_of(name: str) -> int:
    """The first `seq` of the segment of this file name."""
    match = _NAME.match(name)
    assert match is not None, name
    return int(match[1])


def segment_names(stream_directory: Path) -> tuple[str, ...]:
    """The stream's segments, oldest first."""
    names = [path.name for path in stream_directory.iterdir() if _NAME.match(path.name)]
    return tuple(sorted(names, key=first_seq_of))


def stream_names(directory: Path) -> tuple[str, ...]:
    """The streams of a log directory, sorted. A directory that is not there yet has none."""
    if not directory.is_dir():
        return ()
    return tuple(sorted(path.name for path in directory.iterdir() if path.is_dir()))


def read_stream(stream_directory: Path, *, position: Position | None = None, after_seq: int = 0) -> Iterator[Stored]:
    """The stream's whole lines from `position` on, or those behind `after_seq`.

    A last line without its newline is still being written, and is left for the next reading.
    Raises `StoreDamaged`: a line cannot be decoded, belongs to another stream, or its `seq` is not the one due.
    """
    # Segments are listed before the lines are read: one that has a successor in this list will never grow again.
    names = segment_names(stream_directory)
    start = position or _start(names, after_seq=after_seq)
    if start is None:
        return
    names = tuple(name for name in names if first_seq_of(name) >= first_seq_of(start.segment))
    for name in names:
        if name != start.segment:
            start = _next_segment(stream_directory / name, start)
        for stored in _read_segment(stream_directory / name, start):
            start = stored.behind
            if stored.recorded.seq > after_seq:
                yield stored
        if name != names[-1]:
            _require_whole(stream_directory / name, start)


def _start(names: tuple[str, ...], *, after_seq: int) -> Position | None:
    if not names:
        return None
    holding = [name for name in names if first_seq_of(name) <= after_seq + 1]
    name = holding[-1] if holding else names[0]
    return Position(name, 0, first_seq_of(name))


def _next_segment(path: Path, start: Position) -> Position:
    if first_seq_of(path.name) != start.next_seq:
        raise StoreDamaged(str(path), line=1, reason=f"the segment that begins with seq {start.next_seq} is missing")
    return Position(path.name, 0, start.next_seq)


def _read_segment(path: Path, start: Position) -> Iterator[Stored]:
    stream = path.parent.name
    offset_bytes, seq = start.offset_bytes, start.next_seq
    for line in _whole_lines(path, offset_bytes=offset_bytes):
        recorded = _checked(path, line, stream=stream, seq=seq)
        behind = Position(path.name, offset_bytes + len(line), seq + 1)
        yield Stored(recorded, path.name, offset_bytes, behind)
        offset_bytes, seq = behind.offset_bytes, behind.next_seq


def _whole_lines(path: Path, *, offset_bytes: int) -> Iterator[bytes]:
    with path.open("rb", buffering=_BUFFER_BYTES) as file:
        file.seek(offset_bytes)
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield line


def _checked(path: Path, line: bytes, *, stream: str, seq: int) -> Recorded:
    line_number = seq - first_seq_of(path.name) + 1
    try:
        recorded = decode(line)
    except msgspec.DecodeError as error:
        raise StoreDamaged(str(path), line=line_number, reason=f"not an event: {error}") from error
    if recorded.stream != stream:
        raise StoreDamaged(str(path), line=line_number, reason=f"belongs to the stream {recorded.stream!r}")
    if recorded.seq != seq:
        raise StoreDamaged(str(path), line=line_number, reason=f"seq {recorded.seq} where {seq} is due")
    return recorded


def _require_whole(path: Path, end: Position) -> None:
    if end.segment == path.name and path.stat().st_size != end.offset_bytes:
        line_number = end.next_seq - first_seq_of(path.name) + 1
        raise StoreDamaged(str(path), line=line_number, reason="a line without its end, though a later segment exists")
