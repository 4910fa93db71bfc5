"""The one order over all streams: by `(time_ns, stream, seq)`, yet no effect before its cause and no stream out of its
own order, so that clocks that disagree cannot turn a fold around."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from dougong.event.kinds import Recorded

_Key = tuple[int, str, int]


def ordered(records: Iterable[Recorded]) -> Iterator[Recorded]:
    """Every record once, in the one order, in whatever order they come; O(n log n).

    A cause that is not among `records` holds nothing up. A circle of causes is broken at its earliest record.
    """
    by_stream: defaultdict[str, list[Recorded]] = defaultdict(list)
    for record in records:
        by_stream[record.stream].append(record)
    for of_stream in by_stream.values():
        of_stream.sort(key=lambda record: (record.seq, record.time_ns))
    return merged({stream: iter(of_stream) for stream, of_stream in by_stream.items()})


def merged(streams: Mapping[str, Iterator[Recorded]]) -> Iterator[Recorded]:
    """The one order over streams that are each sorted by `seq` already; holds one record of each in memory."""
    merge = _Merge(streams)
    while (record := merge.take()) is not None:
        yield record


class _Merge:
    """The first record of each stream: either ready, or waiting until another stream has passed its cause."""

    def __init__(self, streams: Mapping[str, Iterator[Recorded]]) -> None:
        self._rest = dict(streams)
        self._head: dict[str, Recorded] = {}
        self._ready: list[_Key] = []
        # waiting[a] holds (seq, b): the head of stream b waits until stream a has passed seq.
        self._waiting: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
        for stream in sorted(self._rest):
            self._pull(stream)
        for stream in sorted(self._head):
            self._place(stream)

    def take(self) -> Recorded | None:
        if not self._ready:
            if not self._head:
                return None
            self._break_circle()
        _, stream, _ = heapq.heappop(self._ready)
        record = self._head.pop(stream)
        self._pull(stream)
        if stream in self._head:
            self._place(stream)
        self._release(stream)
        return record

    def _pull(self, stream: str) -> None:
        record = next(self._rest[stream], None)
        if record is not None:
            self._head[stream] = record

    def _place(self, stream: str) -> None:
        record = self._head[stream]
        cause = record.cause
        if cause is not None and self._is_ahead(cause.stream, cause.seq):
            heapq.heappush(self._waiting[cause.stream], (cause.seq, stream))
        else:
            heapq.heappush(self._ready, _key(record))

    def _is_ahead(self, stream: str, seq: int) -> bool:
        head = self._head.get(stream)
        return head is not None and head.seq <= seq

    def _release(self, stream: str) -> None:
        waiting = self._waiting[stream]
        while waiting and not self._is_ahead(stream, waiting[0][0]):
            _, freed = heapq.heappop(waiting)
            heapq.heappush(self._ready, _key(self._head[freed]))

    def _break_circle(self) -> None:
        """Every head waits for another: walk from the earliest to the circle, and free the circle's earliest."""
        stream = min(self._head.values(), key=_key).stream
        walked: dict[str, None] = {}
        while stream not in walked:
            walked[stream] = None
            cause = self._head[stream].cause
            assert cause is not None
            stream = cause.stream
        circle = list(walked)[list(walked).index(stream) :]
        earliest = min((self._head[name] for name in circle), key=_key)
        assert earliest.cause is not None
        waiting = self._waiting[earliest.cause.stream]
        waiting.remove((earliest.cause.seq, earliest.stream))
        heapq.heapify(waiting)
        heapq.heappush(self._ready, _key(earliest))


def _key(record: Recorded) -> _Key:
    return (record.time_ns, record.stream, record.seq)
