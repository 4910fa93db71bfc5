"""The state of the world at a time is the fold of all events up to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from dougong.event.kinds import Recorded

State = TypeVar("State")


def fold(records: Iterable[Recorded], *, initial: State, step: Callable[[State, Recorded], State]) -> State:
    """The state after all `records`. `step` must be pure; then a fold of two parts, the second starting from the
    result of the first, is the fold of the whole."""
    state = initial
    for record in records:
        state = step(state, record)
    return state
