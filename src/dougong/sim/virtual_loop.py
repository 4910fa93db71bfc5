"""An asyncio loop in virtual time: where nothing is left to do now, the clock jumps to what is due next.

Real coroutines run in it unchanged, hours in seconds and always in the same order. Nothing comes from outside:
threads run in place, and a program that would wait for ever is an error.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from dougong.clock import ManualClock

_P = ParamSpec("_P")
_T = TypeVar("_T")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop whose time is that of `clock`, which it alone moves."""

    def __init__(self, clock: ManualClock) -> None:
        self._virtual_clock = clock
        self._begin_ns = clock.monotonic_ns()  # seconds since the epoch have too few digits behind the point
        super().__init__(_JumpingSelector(clock))
        self._clock_resolution = 1e-9
        self.set_default_executor(_InPlace())

    def time(self) -> float:
        return (self._virtual_clock.monotonic_ns() - self._begin_ns) / 1e9


class _JumpingSelector(selectors.SelectSelector):
    """Selects nothing, and lets the time to wait pass at once."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("every task waits, and nothing is due: in virtual time that is for ever")
        if timeout > 0:
            self._clock.advance_to_ns(self._clock.monotonic_ns() + math.ceil(timeout * 1e9))
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return super().get_map() or {}


class _InPlace(ThreadPoolExecutor):
    """Runs what was meant for a thread at once: it takes no virtual time."""

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        future: Future[_T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future
