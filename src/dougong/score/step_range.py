"""Finished ranges of steps: what their time went into, and what percentiles and throughput need of them."""

from __future__ import annotations

from array import array

from dougong.event.kinds import StepFinished
from dougong.score.accounts import Phase

_NS = 1_000_000_000


class StepRanges:
    """The ranges finished for the first time, reduced to a few bytes each.

    A range is warm if it is not the first after a start; the first holds compilation, filling caches and the like.
    """

    def __init__(self) -> None:
        self.max_step_s = 0.0
        self._num_steps = array("q")
        self._mean_s = array("d")
        self._tokens = {True: 0, False: 0}
        self._tokens_s = {True: 0.0, False: 0.0}

    def __len__(self) -> int:
        return len(self._num_steps)

    def add(self, event: StepFinished, *, is_warm: bool) -> None:
        """Take in one range."""
        num_steps = event.last_step - event.first_step + 1
        if num_steps > 0:
            self._num_steps.append(num_steps)
            self._mean_s.append(event.step_s / num_steps)
        self.max_step_s = max(self.max_step_s, event.max_step_s)
        if event.tokens is not None and event.step_s > 0:
            self._tokens[is_warm] += event.tokens
            self._tokens_s[is_warm] += event.step_s

    def mean_step_times(self) -> list[tuple[float, int]]:
        """The mean step time of each range in seconds, and how many steps it has."""
        return list(zip(self._mean_s, self._num_steps, strict=True))

    @property
    def steady_tokens_per_s(self) -> float | None:
        """Tokens over the time inside steps, in warm ranges; a job so short that it has none is measured cold."""
        for is_warm in (True, False):
            if self._tokens_s[is_warm] > 0:
                return self._tokens[is_warm] / self._tokens_s[is_warm]
        return None


def parts_of(event: StepFinished, *, room_ns: int, is_first: bool) -> tuple[tuple[Phase, int], ...]:
    """`room_ns` divided among the phases of a range, in the order to draw them.

    Each is that of the slowest rank, so together they may claim more than there is: while one rank evaluates, the
    others wait for it inside their step. Then the time outside the step is believed. Only in the first range after a
    start is the step believed first, because what came before it has been booked as the start.
    """
    step_ns = min(room_ns, max(0, round(event.step_s * _NS)))
    left_ns = room_ns - step_ns if is_first else room_ns
    outside_ns: list[int] = []
    for part_s in (event.between_s, event.checkpoint_stall_s, event.data_wait_s):
        part_ns = min(left_ns, max(0, round(part_s * _NS)))
        outside_ns.append(part_ns)
        left_ns -= part_ns
    between_ns, stall_ns, wait_ns = outside_ns
    train_ns = min(step_ns, room_ns - between_ns - stall_ns - wait_ns)
    rest_ns = room_ns - train_ns - between_ns - stall_ns - wait_ns
    return (
        ("data_wait", wait_ns),
        ("train", train_ns),
        ("checkpoint_stall", stall_ns),
        ("between", between_ns + rest_ns),
    )
