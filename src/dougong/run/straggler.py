"""Which rank computes much more slowly than the others? Pure rules over the time before the first collective.

Whole steps cannot tell: in a step all ranks wait for the slowest. What a rank does alone, from the step's begin until
it enters the first collective, can. Per step z = (time - median) / (1.4826 MAD) over the ranks, the spread at least 2 %
of the median; a rank is behind in a step if its z and its ratio to the median are both above their limits.

With two ranks a median and a MAD mean nothing. There a rank is behind if its ratio to the other one *and* to its own
first steps is above the limit: it has become slow. One that was slow from the start is found by the pre-flight only.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from dougong.run.page import StepRecord
from dougong.run.settings import Policy
from dougong.run.spread import robust_spread

_LEAST_EXCESS_S = 0.01
_LEAST_SPREAD_RATIO = 0.02
_OVER_RATIO = 0.25


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that was behind in most of the last steps; medians over these. `z` None with two ranks."""

    rank: int
    step: int
    compute_s: float
    usual_s: float
    z: float | None
    reason: str


class _Behind(msgspec.Struct, frozen=True):
    compute_s: float
    usual_s: float
    z: float | None


class StragglerWatch:
    """Gathers the ranks' times of one generation after the other, and names each straggler once per episode."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._world_size = 0
        self._by_step: dict[int, dict[int, float]] = {}
        self._window: deque[dict[int, _Behind]] = deque(maxlen=policy.straggler_steps)
        self._own: dict[int, list[float]] = {}
        self._num_steps = 0
        self._named: set[int] = set()

    def begin_generation(self, *, world_size: int) -> None:
        """Ranks may run elsewhere now: all is learnt anew."""
        self._world_size = world_size
        self._by_step.clear()
        self._window.clear()
        self._own.clear()
        self._num_steps = 0
        self._named.clear()

    def add(self, rank: int, records: Sequence[StepRecord]) -> tuple[Straggler, ...]:
        """Take in a rank's finished steps; those who are named now. A step without a measured time says nothing."""
        named: list[Straggler] = []
        for record in records:
            if record.compute_ns <= 0:
                continue
            ranks = self._by_step.setdefault(record.step, {})
            ranks[rank] = record.compute_ns / 1e9
            if len(ranks) == self._world_size:
                named.extend(self._take(record.step))
        return tuple(named)

    def _take(self, step: int) -> tuple[Straggler, ...]:
        times_s = self._by_step.pop(step)
        for earlier in [key for key in self._by_step if key < step]:
            del self._by_step[earlier]
        self._num_steps += 1
        if self._num_steps == 1 or self._world_size < 2:
            return ()  # the first step warms up, or compiles
        own_s = {rank: statistics.median(first) for rank, first in self._own.items() if self._knows_own(first)}
        self._window.append(behind(times_s, own_s=own_s, policy=self._policy))
        for rank, time_s in times_s.items():
            first = self._own.setdefault(rank, [])
            if not self._knows_own(first):
                first.append(time_s)
        return self._judge(step)

    def _knows_own(self, first: Sequence[float]) -> bool:
        return len(first) >= self._policy.straggler_steps

    def _judge(self, step: int) -> tuple[Straggler, ...]:
        counts = {rank: sum(rank in part for part in self._window) for rank in range(self._world_size)}
        self._named -= {rank for rank, count in counts.items() if count < _OVER_RATIO * len(self._window)}
        if len(self._window) < self._policy.straggler_steps:
            return ()
        fresh = [rank for rank, count in counts.items() if 2 * count > len(self._window) and rank not in self._named]
        self._named.update(fresh)
        return tuple(self._describe(rank, step, counts[rank]) for rank in fresh)

    def _describe(self, rank: int, step: int, count: int) -> Straggler:
        parts = [part[rank] for part in self._window if rank in part]
        compute_s = statistics.median(part.compute_s for part in parts)
        usual_s = statistics.median(part.usual_s for part in parts)
        zs = [part.z for part in parts if part.z is not None]
        z = statistics.median(zs) if zs else None
        against = f"the median of {self._world_size} ranks (robust z {z:.1f})" if z is not None else "the other rank"
        reason = (
            f"{compute_s:.3f} s before the first collective, {compute_s / usual_s:.2f} x {against}, in {count} of the"
            f" last {len(self._window)} steps"
        )
        return Straggler(rank=rank, step=step, compute_s=compute_s, usual_s=usual_s, z=z, reason=reason)


def behind(times_s: Mapping[int, float], *, own_s: Mapping[int, float], policy: Policy) -> dict[int, _Behind]:
    """The ranks that are behind in one step. `own_s`: what each took in its first steps, where that is known."""
    if len(times_s) == 2:
        return _behind_of_two(times_s, own_s=own_s, policy=policy)
    usual_s = statistics.median(times_s.values())
    spread_s = max(robust_spread(times_s.values(), least_ratio=_LEAST_SPREAD_RATIO), 1e-9)
    found: dict[int, _Behind] = {}
    for rank, time_s in times_s.items():
        z = (time_s - usual_s) / spread_s
        if z > policy.straggler_z and _is_far(time_s, usual_s, policy):
            found[rank] = _Behind(time_s, usual_s, z)
    return found


def _behind_of_two(times_s: Mapping[int, float], *, own_s: Mapping[int, float], policy: Policy) -> dict[int, _Behind]:
    found: dict[int, _Behind] = {}
    for rank, time_s in times_s.items():
        other_s = next(value for key, value in times_s.items() if key != rank)
        if rank in own_s and _is_far(time_s, other_s, policy) and _is_far(time_s, own_s[rank], policy):
            found[rank] = _Behind(time_s, other_s, None)
    return found


def _is_far(time_s: float, usual_s: float, policy: Policy) -> bool:
    """A few milliseconds are the operating system's, however large the ratio."""
    return time_s > policy.straggler_ratio * usual_s and time_s - usual_s > _LEAST_EXCESS_S


def is_replaced(straggler: Straggler, *, policy: Policy, has_spare: bool, saved_step: int) -> bool:
    """Is it time to move the rank to a spare? Only by policy, and behind a checkpoint that the spare can go on from."""
    return policy.straggler == "replace" and has_spare and saved_step >= straggler.step
