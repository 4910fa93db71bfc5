"""A discrete-event engine: a heap of (time, priority, sequence) with what to do, and a clock that jumps to the next.

Callbacks run one at a time and may schedule others; there are no threads, so the same schedule gives the same run.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from dougong.clock import ManualClock


class Scheduled:
    """A callback that waits for its time, until it is cancelled."""

    __slots__ = ("_callback", "time_ns")

    def __init__(self, time_ns: int, callback: Callable[[], None]) -> None:
        self.time_ns = time_ns
        self._callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Do nothing at its time. Cancelling what has run, or twice, does no harm."""
        self._callback = None

    def run(self) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()

    @property
    def is_waiting(self) -> bool:
        return self._callback is not None


class Engine:
    """Runs callbacks in the order of their time, then priority (low first), then the order they were scheduled in."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self._heap: list[tuple[int, int, int, Scheduled]] = []
        self._num_scheduled = 0

    @property
    def now_ns(self) -> int:
        return self.clock.wall_ns()

    def at(self, time_ns: int, callback: Callable[[], None], *, priority: int = 0) -> Scheduled:
        """Run `callback` at `time_ns`, which is not in the past."""
        assert time_ns >= self.now_ns, (time_ns, self.now_ns)
        scheduled = Scheduled(time_ns, callback)
        heapq.heappush(self._heap, (time_ns, priority, self._num_scheduled, scheduled))
        self._num_scheduled += 1
        return scheduled

    def after(self, delay_ns: int, callback: Callable[[], None], *, priority: int = 0) -> Scheduled:
        """Run `callback` in `delay_ns` from now."""
        return self.at(self.now_ns + delay_ns, callback, priority=priority)

    def run(self, *, until_ns: int, before_each: Callable[[int], None] | None = None) -> None:
        """Run everything due up to and including `until_ns`, and leave the clock there.

        `before_each` is called with the time of the next callback before the clock jumps: to keep pace with real time.
        """
        while self._heap and self._heap[0][0] <= until_ns:
            time_ns, _, _, scheduled = heapq.heappop(self._heap)
            if not scheduled.is_waiting:
                continue
            if before_each is not None:
                before_each(time_ns)
            self.clock.advance_to_ns(time_ns)
            scheduled.run()
        self.clock.advance_to_ns(until_ns)
