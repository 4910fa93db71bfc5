"""Time as an argument: the wall clock for records, the monotonic clock for durations, and a manual one for tests."""

from __future__ import annotations

import time
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
