"""Where events are kept: the small interface, and reading it as files.

The JSON-lines log (`dougong.event.log`) is one store; a table of a database can be another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from dougong.event.kinds import AnyEvent, Cause, Recorded, Unknown
from dougong.event.order import merged
from dougong.event.segment import read_stream, stream_names


class EventStore(Protocol):
    """One stream to write, all streams to read. An event is acknowledged when a commit behind it has returned."""

    @property
    def stream(self) -> str:
        """The stream that is written here."""
        ...

    def append(self, event: AnyEvent | Unknown, *, cause: Cause | None = None, time_ns: int | None = None) -> Recorded:
        """Buffer one event for the next commit; its record, with the next `seq`."""
        ...

    def append_many(
        self, events: Iterable[AnyEvent | Unknown], *, cause: Cause | None = None, time_ns: int | None = None
    ) -> tuple[Recorded, ...]:
        """Buffer several events, in this order."""
        ...

    def append_durable(
        self, event: AnyEvent | Unknown, *, cause: Cause | None = None, time_ns: int | None = None
    ) -> Recorded:
        """Append one event and return when it is acknowledged. Raises `StoreWriteFailed`."""
        ...

    def commit(self) -> None:
        """Acknowledge everything appended so far. Raises `StoreWriteFailed`: nothing of it is."""
        ...

    def streams(self) -> tuple[str, ...]:
        """All streams, sorted."""
        ...

    def read(
        self, *, streams: Iterable[str] | None = None, after: Mapping[str, int] | None = None
    ) -> Iterator[Recorded]:
        """Events in the one order."""
        ...

    def close(self) -> None:
        """Commit and let go of the stream."""
        ...


def read(
    directory: Path, *, streams: Iterable[str] | None = None, after: Mapping[str, int] | None = None
) -> Iterator[Recorded]:
    """The events under `directory` in the one order (`dougong.event.order`), holding one of each stream in memory.

    Only of `streams`, if given; of each stream only those behind `after[stream]`. A line still being written is left
    out. Raises `StoreDamaged`, with the path and the line.
    """
    present = stream_names(directory)
    wanted = present if streams is None else tuple(name for name in present if name in set(streams))
    return merged({name: _records(directory / name, after_seq=(after or {}).get(name, 0)) for name in wanted})


def _records(stream_directory: Path, *, after_seq: int) -> Iterator[Recorded]:
    for stored in read_stream(stream_directory, after_seq=after_seq):
        yield stored.recorded
