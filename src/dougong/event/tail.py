"""New events as they are written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from dougong.event.kinds import Recorded
from dougong.event.order import ordered
from dougong.event.segment import Position, Stored, read_stream, segment_name, stream_names


class Tail:
    """Remembers how far it has read in every stream; each `poll` brings what was written since.

    New streams and new segments are noticed. A last line that is only half written waits for its end.
    """

    def __init__(self, directory: Path, *, streams: Iterable[str] | None = None) -> None:
        """`directory` need not exist yet; `None` = all streams."""
        self._directory = directory
        self._streams = None if streams is None else frozenset(streams)
        self._positions: dict[str, Position] = {}

    def poll(self) -> list[Recorded]:
        """The events written since the last poll, in the one order among themselves; from the beginning at first.

        Raises `StoreDamaged`.
        """
        fresh: list[Stored] = []
        for stream in stream_names(self._directory):
            if self._streams is None or stream in self._streams:
                fresh.extend(self._read(stream))
        # Only now, so that damage in one stream loses nothing of the others.
        self._positions.update((stored.recorded.stream, stored.behind) for stored in fresh)
        return list(ordered(stored.recorded for stored in fresh))

    def _read(self, stream: str) -> Iterator[Stored]:
        folder = self._directory / stream
        position = self._positions.get(stream)
        if position is None or _has_grown(folder, position):
            yield from read_stream(folder, position=position)


def follow(directory: Path, *, poll_s: float = 0.1, stop: Callable[[], bool]) -> Iterator[Recorded]:
    """All events of `directory` and then the new ones as they come, until `stop()`; what is there by then still comes.

    Looks every `poll_s` seconds. Raises `StoreDamaged`.
    """
    tail = Tail(directory)
    while True:
        is_last = stop()
        yield from tail.poll()
        if is_last:
            return
        time.sleep(poll_s)


def _has_grown(stream_directory: Path, position: Position) -> bool:
    size_bytes = (stream_directory / position.segment).stat().st_size
    return size_bytes > position.offset_bytes or (stream_directory / segment_name(position.next_seq)).exists()
