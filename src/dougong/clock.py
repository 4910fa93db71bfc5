"""Time as an argument: the wall clock for records, the monotonic clock for durations, and a manual one for tests."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol


class Clock(Protocol):
    """Where the time comes from. Everything that asks for the time takes one of these."""

    def wall_ns(self) -> int:
        """Nanoseconds since the Unix epoch; may jump."""
        ...

    def monotonic_ns(self) -> int:
        """Nanoseconds that never go back; comparable between processes of one host only."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def wall_ns(self) -> int:
        return time.time_ns()

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()


class OffClock:
    """The machine's own clocks, with a wall clock that is off by the nanoseconds that a file says: chaos turns it."""

    def __init__(self, offset_file: Path) -> None:
        self._offset_file = offset_file

    def wall_ns(self) -> int:
        try:
            return time.time_ns() + int(self._offset_file.read_text())
        except (OSError, ValueError):
            return time.time_ns()

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()


class CarriedClock:
    """A wall clock read once and carried on by the monotonic clock: no later jump of the machine's clock reaches it."""

    def __init__(self, clock: Clock, *, offset_ns: int) -> None:
        self._clock = clock
        self._offset_ns = offset_ns

    def wall_ns(self) -> int:
        return self._clock.monotonic_ns() + self._offset_ns

    def monotonic_ns(self) -> int:
        return self._clock.monotonic_ns()


class ManualClock:
    """A clock that stands still until it is told to move; both readings move together."""

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns

    def advance_s(self, duration_s: float) -> None:
        """Move forward by `duration_s` seconds."""
        assert duration_s >= 0
        self._now_ns += round(duration_s * 1e9)

    def advance_to_ns(self, now_ns: int) -> None:
        """Move forward to `now_ns`."""
        assert now_ns >= self._now_ns
        self._now_ns = now_ns

    def wall_ns(self) -> int:
        return self._now_ns

    def monotonic_ns(self) -> int:
        return self._now_ns
