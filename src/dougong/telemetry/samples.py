"""What a series of samples is, and what a place that keeps them must be able to do."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

import msgspec


class Samples(msgspec.Struct, frozen=True, kw_only=True):
    """One series, in the order it was written: `times_ns`, `indices` and `values` have one length.

    An index is the step number of a series that has one sample a step (`loss/rank-0`), else a running number.
    Typecodes: `q`, `q`, `d`. Values are the very bits that were appended, NaN payloads included.
    """

    times_ns: array[int]
    indices: array[int]
    values: array[float]

    def __len__(self) -> int:
        return len(self.times_ns)


class SampleSink(Protocol):
    """Where samples are written."""

    def append(self, series: str, times_ns: Sequence[int], indices: Sequence[int], values: Sequence[float]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class SampleStore(Protocol):
    """Where samples are read."""

    def series(self) -> tuple[str, ...]:
        """The names of all series, sorted."""
        ...

    def read(self, series: str, *, since_ns: int | None = None, until_ns: int | None = None) -> Samples:
        """The samples of `series` with `since_ns` <= time < `until_ns`; none if there is no such series."""
        ...
