"""Finding events without reading all of them: a SQLite file beside the streams, which may be deleted at any time."""

from __future__ import annotations

import contextlib
import heapq
import sqlite3
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from dougong.event.codec import decode
from dougong.event.kinds import Recorded, Unknown
from dougong.event.order import ordered
from dougong.event.segment import Position, Stored, read_stream, stream_names
from dougong.event.store import read

INDEX_NAME = "index.sqlite3"

_VERSION = 1
_BUSY_S = 10.0
_BATCH = 10_000
_SCHEMA = """
CREATE TABLE events (
    kind TEXT, component TEXT, time_ns INTEGER, stream TEXT, seq INTEGER, segment TEXT, offset_bytes INTEGER,
    PRIMARY KEY (stream, seq)
) WITHOUT ROWID;
CREATE INDEX by_kind ON events (kind, time_ns);
CREATE INDEX by_component ON events (component, time_ns);
CREATE INDEX by_time ON events (time_ns);
CREATE TABLE positions (stream TEXT PRIMARY KEY, segment TEXT, offset_bytes INTEGER, next_seq INTEGER);
"""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which events: empty and `None` mean all. Times are in ns since the Unix epoch, `since_ns` <= t < `until_ns`.

    `component_prefix` "rack-01" also means rack-010; "rack-01/" is the part rack-01 and what is inside it.
    `limit`: only the newest so many.
    """

    kinds: tuple[str, ...] = ()
    component_prefix: str | None = None
    streams: tuple[str, ...] | None = None
    since_ns: int | None = None
    until_ns: int | None = None
    limit: int | None = None

    def takes(self, record: Recorded) -> bool:
        """Whether this record is wanted, `limit` aside."""
        component = component_of(record)
        prefix = self.component_prefix or ""
        return (
            (not self.kinds or kind_of(record) in self.kinds)
            and (component.startswith(prefix) or component + "/" == prefix)
            and (self.streams is None or record.stream in self.streams)
            and (self.since_ns is None or record.time_ns >= self.since_ns)
            and (self.until_ns is None or record.time_ns < self.until_ns)
        )


def query(
    directory: Path,
    *,
    kinds: Iterable[str] = (),
    component_prefix: str | None = None,
    streams: Iterable[str] | None = None,
    since_ns: int | None = None,
    until_ns: int | None = None,
    limit: int | None = None,
) -> Iterator[Recorded]:
    """The events that match (see `Wanted`), in the one order among themselves, through the index.

    The index is brought up to date first. One that is damaged or does not fit the log is rebuilt; where none can be
    written, all events are read instead. Raises `StoreDamaged`.
    """
    wanted = Wanted(
        kinds=tuple(kinds),
        component_prefix=component_prefix,
        streams=None if streams is None else tuple(streams),
        since_ns=since_ns,
        until_ns=until_ns,
        limit=limit,
    )
    if not directory.is_dir():
        return iter(())
    return _through_index(directory, wanted)


def scan(directory: Path, wanted: Wanted) -> Iterator[Recorded]:
    """The same events as `query`, by reading everything."""
    matches: Iterable[Recorded] = filter(wanted.takes, read(directory, streams=wanted.streams))
    if wanted.limit is not None:
        matches = heapq.nlargest(wanted.limit, matches, key=lambda record: (record.time_ns, record.stream, record.seq))
    return ordered(matches)


def kind_of(record: Recorded) -> str:
    """The name of the event's kind, known to this version or not."""
    return record.event.kind if isinstance(record.event, Unknown) else type(record.event).__name__


def component_of(record: Recorded) -> str:
    """The path of the part that the event is about; empty if it is about none."""
    return getattr(record.event, "component", "")


def _through_index(directory: Path, wanted: Wanted) -> Iterator[Recorded]:
    for _attempt in range(2):
        try:
            with contextlib.closing(_connect(directory / INDEX_NAME)) as index:
                _update(index, directory)
                places = _select(index, wanted)
            return ordered(_fetch(directory, places))
        except sqlite3.OperationalError:
            break  # read-only, full or busy: not the index's fault
        except (sqlite3.DatabaseError, _StaleIndex):
            with contextlib.suppress(OSError):
                (directory / INDEX_NAME).unlink(missing_ok=True)
    return scan(directory, wanted)


class _StaleIndex(Exception):
    """The index speaks of events that the log does not have at that place."""


class _Place(NamedTuple):
    stream: str
    seq: int
    segment: str
    offset_bytes: int


def _connect(path: Path) -> sqlite3.Connection:
    index = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
    try:
        # Nothing here is worth an fsync: after a crash it is rebuilt.
        index.execute("PRAGMA synchronous = OFF")
        (version,) = index.execute("PRAGMA user_version").fetchone()
        if version not in (0, _VERSION):
            raise _StaleIndex
    except BaseException:
        index.close()
        raise
    return index


def _update(index: sqlite3.Connection, directory: Path) -> None:
    index.execute("BEGIN IMMEDIATE")
    (version,) = index.execute("PRAGMA user_version").fetchone()
    if version == 0:
        for statement in _SCHEMA.split(";"):
            index.execute(statement)
        index.execute(f"PRAGMA user_version = {_VERSION}")
    known = {
        stream: Position(segment, offset_bytes, next_seq)
        for stream, segment, offset_bytes, next_seq in index.execute("SELECT * FROM positions")
    }
    present = stream_names(directory)
    if not known.keys() <= set(present):
        raise _StaleIndex
    for stream in present:
        _update_stream(index, directory / stream, known.get(stream))
    index.execute("COMMIT")


def _update_stream(index: sqlite3.Connection, folder: Path, position: Position | None) -> None:
    if position is not None:
        path = folder / position.segment
        if not path.exists() or path.stat().st_size < position.offset_bytes:
            raise _StaleIndex
    for some in _batches(read_stream(folder, position=position)):
        index.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?)", map(_row, some))
        behind = some[-1].behind
        index.execute("INSERT OR REPLACE INTO positions VALUES (?, ?, ?, ?)", (folder.name, *behind))


def _batches(stored: Iterator[Stored]) -> Iterator[list[Stored]]:
    while some := list(islice(stored, _BATCH)):
        yield some


def _row(stored: Stored) -> tuple[str, str, int, str, int, str, int]:
    record = stored.recorded
    return (
        kind_of(record),
        component_of(record),
        record.time_ns,
        record.stream,
        record.seq,
        stored.segment,
        stored.offset_bytes,
    )


def _select(index: sqlite3.Connection, wanted: Wanted) -> list[_Place]:
    conditions: list[str] = []
    values: list[str | int] = []

    def require(condition: str, *parameters: str | int) -> None:
        conditions.append(condition)
        values.extend(parameters)

    if wanted.kinds:
        require(f"kind IN ({', '.join('?' * len(wanted.kinds))})", *wanted.kinds)
    if wanted.streams is not None:
        require(f"stream IN ({', '.join('?' * len(wanted.streams))})", *wanted.streams)
    if wanted.component_prefix:
        prefix = wanted.component_prefix
        require("(substr(component, 1, ?) = ? OR component || '/' = ?)", len(prefix), prefix, prefix)
    if wanted.since_ns is not None:
        require("time_ns >= ?", wanted.since_ns)
    if wanted.until_ns is not None:
        require("time_ns < ?", wanted.until_ns)
    where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
    statement = f"SELECT stream, seq, segment, offset_bytes FROM events {where}"
    if wanted.limit is not None:
        statement += " ORDER BY time_ns DESC, stream DESC, seq DESC LIMIT ?"
        values.append(wanted.limit)
    return [_Place(*row) for row in index.execute(statement, values)]


def _fetch(directory: Path, places: list[_Place]) -> Iterator[Recorded]:
    for (stream, segment), some in groupby(sorted(places), key=lambda place: (place.stream, place.segment)):
        path = directory / stream / segment
        with path.open("rb") if path.exists() else contextlib.nullcontext() as file:
            if file is None:
                raise _StaleIndex
            for place in some:
                yield _read_place(file, place)


def _read_place(file: BinaryIO, place: _Place) -> Recorded:
    file.seek(place.offset_bytes)
    try:
        record = decode(file.readline())
    except msgspec.DecodeError as error:
        raise _StaleIndex from error
    if (record.stream, record.seq) != (place.stream, place.seq):
        raise _StaleIndex
    return record
