"""The embedded store of samples: a directory with one append-only file a series.

A record is 24 bytes, little-endian: i64 time_ns, i64 index, f64 value. A crash can tear the last record only; readers
ignore the torn tail and the next writer cuts it off. A series has one writer at a time.
"""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote, unquote

from dougong.clock import Clock
from dougong.telemetry.samples import Samples

RECORD_BYTES = 24

_SUFFIX = ".samples"
_MAX_NAME_BYTES = 255
_FLUSH_NS = 1_000_000_000
_FLUSH_BYTES = 1 << 16
_SERIES_A_SECOND = 256


class SampleWriter:
    """Appends samples. They reach the file once a second (hundreds of series less often), at 64 KiB, at `flush` and
    `close`."""

    def __init__(self, directory: Path, *, clock: Clock) -> None:
        self._directory = directory
        self._clock = clock
        self._flushed_ns = clock.monotonic_ns()
        self._pending: dict[str, bytearray] = {}
        self._repaired: set[str] = set()

    @classmethod
    def open(cls, directory: Path, clock: Clock) -> SampleWriter:
        """A writer on `directory`, which is made if absent. Raises OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        return cls(directory, clock=clock)

    def append(self, series: str, times_ns: Sequence[int], indices: Sequence[int], values: Sequence[float]) -> None:
        """Add samples to `series`; the three sequences have one length. Raises ValueError, and OSError at a flush."""
        if not len(times_ns) == len(indices) == len(values):
            raise ValueError(f"{series}: {len(times_ns)} times, {len(indices)} indices, {len(values)} values")
        name = file_name(series)
        pending = self._pending.setdefault(name, bytearray())
        pending += _encode(times_ns, indices, values)
        # a file for each series: a thousand of them are not opened every second
        patience_ns = _FLUSH_NS * max(1, len(self._pending) // _SERIES_A_SECOND)
        if len(pending) >= _FLUSH_BYTES or self._clock.monotonic_ns() - self._flushed_ns >= patience_ns:
            self.flush()

    def flush(self) -> None:
        """Hand every pending sample to the operating system: it survives this process, not a loss of power."""
        self._flushed_ns = self._clock.monotonic_ns()
        for name, pending in self._pending.items():
            if pending:
                self._write(name, pending)

    def close(self) -> None:
        """Flush. Closing twice does no harm."""
        self.flush()

    def _write(self, name: str, pending: bytearray) -> None:
        # Opened per flush: thousands of series would otherwise need as many file descriptors.
        with open(self._directory / name, "ab", buffering=0) as file:
            if name not in self._repaired:
                size_bytes = file.seek(0, os.SEEK_END)
                file.truncate(size_bytes - size_bytes % RECORD_BYTES)
                self._repaired.add(name)
            while pending:
                written = file.write(pending)
                torn = written % RECORD_BYTES
                if torn:  # a full disk: what is pending must go on at the begin of a record
                    file.truncate(file.tell() - torn)
                del pending[: written - torn]


class EmbeddedStore:
    """The samples under `directory`; may be read while they are written. A directory that is absent holds none."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def series(self) -> tuple[str, ...]:
        """The names of all series, sorted."""
        return series(self._directory)

    def read(self, series: str, *, since_ns: int | None = None, until_ns: int | None = None) -> Samples:
        """The samples of `series` with `since_ns` <= time < `until_ns`; none if there is no such series."""
        return read(self._directory, series, since_ns=since_ns, until_ns=until_ns)


def series(directory: Path) -> tuple[str, ...]:
    """The names of all series under `directory`, sorted."""
    return tuple(sorted(unquote(path.name.removesuffix(_SUFFIX)) for path in directory.glob(f"*{_SUFFIX}")))


def read(directory: Path, series: str, *, since_ns: int | None = None, until_ns: int | None = None) -> Samples:
    """The samples of `series` with `since_ns` <= time < `until_ns`; none if there is no such series. Raises OSError."""
    try:
        content = (directory / file_name(series)).read_bytes()
    except FileNotFoundError:
        content = b""
    samples = _decode(content[: len(content) - len(content) % RECORD_BYTES])
    if since_ns is None and until_ns is None:
        return samples
    return _within(samples, since_ns=since_ns, until_ns=until_ns)


def file_name(series: str) -> str:
    """The file of a series: its name, percent-encoded. Raises ValueError for an empty or too long name."""
    name = quote(series, safe="") + _SUFFIX
    if not series or len(name) > _MAX_NAME_BYTES:
        raise ValueError(f"{series!r} cannot name a series: 1 to {_MAX_NAME_BYTES - len(_SUFFIX)} bytes when encoded")
    return name


def _encode(times_ns: Sequence[int], indices: Sequence[int], values: Sequence[float]) -> bytes:
    block = array("q", bytes(RECORD_BYTES * len(values)))
    block[0::3] = array("q", times_ns)
    block[1::3] = array("q", indices)
    block[2::3] = array("q", array("d", values).tobytes())
    if sys.byteorder == "big":
        block.byteswap()
    return block.tobytes()


def _decode(content: bytes) -> Samples:
    block = array("q", content)
    if sys.byteorder == "big":
        block.byteswap()
    return Samples(times_ns=block[0::3], indices=block[1::3], values=array("d", block[2::3].tobytes()))


def _within(samples: Samples, *, since_ns: int | None, until_ns: int | None) -> Samples:
    kept = [
        place
        for place, time_ns in enumerate(samples.times_ns)
        if (since_ns is None or time_ns >= since_ns) and (until_ns is None or time_ns < until_ns)
    ]
    return Samples(
        times_ns=array("q", (samples.times_ns[place] for place in kept)),
        indices=array("q", (samples.indices[place] for place in kept)),
        values=array("d", (samples.values[place] for place in kept)),
    )
