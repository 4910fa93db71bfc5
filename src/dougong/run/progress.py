"""The job's steps out of the ranks' steps: a step is finished when every rank has finished it.

Ranges of steps become one `StepFinished` event, at most one a second; the per-rank times go to telemetry. The records
of a step are folded into one when its last rank has told, so that no later question costs anything for each rank.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

import msgspec

from dougong.event.kinds import StepFinished
from dougong.run.hang import StepTimes
from dougong.run.page import StepRecord
from dougong.run.save_rhythm import JobStep

_RANGE_S = 1.0
_RANKS_A_SECOND = 256
_NUM_SAMPLED = 1024
_NUM_LEARNT = 512


class JobProgress:
    """Gathers the step records of one generation after the other."""

    def __init__(self, *, max_step: int = 0) -> None:
        self.max_step = max_step
        """The highest step ever finished by all ranks; steps up to it are redo."""
        self._generation = 0
        self._world_size = 0
        self._range_s = _RANGE_S
        self._by_step: dict[int, dict[int, StepRecord]] = {}
        self._last_seen: dict[int, int] = {}
        self._complete: list[_Whole] = []
        self._told: list[JobStep] = []
        self.last_step = 0
        """The last step finished by all ranks in this generation."""
        self._redo_until = 0
        self._durations = _Window(_NUM_LEARNT)
        self._longest_gap_s: float | None = None
        self._learnt: StepTimes | None = None
        self._start_s: float | None = None
        self._last_end_ns: int | None = None
        self._first_step_s: float | None = None

    def begin_generation(self, generation: int, *, world_size: int, last_step: int = 0) -> None:
        """The ranks start again; `last_step` = what was recorded already, for a controller that comes back."""
        self._generation = generation
        self._world_size = world_size
        self._range_s = range_s(world_size)
        self._by_step.clear()
        self._last_seen = dict.fromkeys(range(world_size), last_step) if last_step else {}
        self._complete.clear()
        self._told.clear()
        self._learnt = None
        self.last_step = last_step
        self._redo_until = self.max_step
        self._last_end_ns = None

    def add(self, rank: int, records: tuple[StepRecord, ...]) -> tuple[StepRecord, ...]:
        """Take in a rank's finished steps; those not seen before are returned."""
        last_seen = self._last_seen.get(rank, 0)
        fresh = tuple(record for record in records if record.step > last_seen)
        for record in fresh:
            self._last_seen[rank] = record.step
            ranks = self._by_step.setdefault(record.step, {})
            ranks[rank] = record
            if len(ranks) == self._world_size:
                self._finish(record.step)
        return fresh

    def take_ranges(self, *, is_forced: bool) -> tuple[StepFinished, ...]:
        """The ranges due: those that span a second (`range_s`), or all if forced. Redo and new steps never share a
        range."""
        if not self._complete:
            return ()
        span_s = (self._complete[-1].end_ns - self._complete[0].begin_ns) / 1e9
        if not is_forced and span_s < self._range_s:
            return ()
        runs = _runs(self._complete, redo_until=self._redo_until)
        self._complete.clear()
        return tuple(_range(run, generation=self._generation, is_redo=run[0].step <= self._redo_until) for run in runs)

    def take_steps(self) -> tuple[JobStep, ...]:
        """The job's steps finished since this was last asked, without the first one of a generation."""
        told = tuple(self._told)
        self._told.clear()
        return told

    def learnt(self) -> StepTimes:
        """What the hang rule needs."""
        if self._learnt is None:
            self._learnt = StepTimes(
                num_steps=len(self._durations),
                p99_s=self._durations.quantile(0.99),
                longest_gap_s=self._longest_gap_s,
                is_first_step=self._last_end_ns is None and self.last_step == 0,
                first_step_s=self._first_step_s,
                start_s=self._start_s,
            )
        return self._learnt

    @property
    def fast_step_s(self) -> float:
        """A short step: one of twenty is shorter. By it is told how far ranks may come in a given time; 1 s before the
        first one."""
        return self._durations.quantile(0.05) or 1.0

    def note_start(self, duration_s: float) -> None:
        """How long a generation took from the order to start to its first finished step."""
        self._start_s = max(self._start_s or 0.0, duration_s)
        self._learnt = None

    def _finish(self, step: int) -> None:
        whole = _folded(self._by_step.pop(step))
        for earlier in [key for key in self._by_step if key < step]:
            del self._by_step[earlier]
        self._complete.append(whole)
        self._learnt = None
        if self._last_end_ns is None and self.last_step == 0:
            self._first_step_s = max(self._first_step_s or 0.0, (whole.end_ns - whole.begin_ns) / 1e9)
        self.last_step = step
        self.max_step = max(self.max_step, step)
        if self._last_end_ns is not None:
            # the first step of a start is not counted: it warms caches up, or compiles
            self._durations.add((whole.end_ns - whole.begin_ns) / 1e9)
            gap_s = (whole.end_ns - self._last_end_ns) / 1e9
            self._longest_gap_s = max(self._longest_gap_s or 0.0, gap_s)
            self._told.append(JobStep(step=step, cycle_s=gap_s, stall_s=whole.stall_ns / 1e9))
            del self._told[:-_NUM_LEARNT]
            self._learnt = None
        self._last_end_ns = whole.end_ns


def range_s(world_size: int) -> float:
    """The least span of a range: a second, and up to four for a thousand ranks and more.

    The samples of a range are flushed before its event, which takes a file of its own for each rank. What a controller
    that dies has not written yet, its successor hears again from the agents.
    """
    return max(_RANGE_S, min(world_size, _NUM_SAMPLED) / _RANKS_A_SECOND)


def is_sampled(rank: int, *, world_size: int) -> bool:
    """Do this rank's times and losses go to telemetry? All of them, or of a larger world every n-th."""
    return rank % -(-world_size // _NUM_SAMPLED) == 0


class _Whole(msgspec.Struct, frozen=True):
    """A step of all ranks; durations are those of the slowest."""

    step: int
    begin_ns: int
    end_ns: int
    slowest_ns: int
    between_ns: int
    data_wait_ns: int
    stall_ns: int
    tokens: int | None
    loss: float | None


class _Window:
    """The newest `length` values, and their quantiles without sorting anew."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._in_order: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._in_order)

    def add(self, value: float) -> None:
        self._in_order.append(value)
        insort(self._sorted, value)
        if len(self._in_order) > self._length:
            del self._sorted[bisect_left(self._sorted, self._in_order.popleft())]

    def quantile(self, share: float) -> float | None:
        count = len(self._sorted)
        return self._sorted[min(count - 1, round(share * count))] if count else None


def _folded(ranks: dict[int, StepRecord]) -> _Whole:
    records = ranks.values()
    tokens = 0
    is_told = True
    for record in records:
        if record.tokens is None:
            is_told = False
            break
        tokens += record.tokens
    first = ranks[min(ranks)]
    return _Whole(
        step=first.step,
        begin_ns=min(record.begin_ns for record in records),
        end_ns=max(record.end_ns for record in records),
        slowest_ns=max(record.end_ns - record.begin_ns for record in records),
        between_ns=max(record.between_ns for record in records),
        data_wait_ns=max(record.data_wait_ns for record in records),
        stall_ns=max(record.checkpoint_stall_ns for record in records),
        tokens=tokens if is_told else None,
        loss=first.loss,
    )


def _runs(complete: list[_Whole], *, redo_until: int) -> list[list[_Whole]]:
    """Consecutive steps of one sort. There is a gap where a page's ring overflowed while nobody read it."""
    runs: list[list[_Whole]] = []
    for whole in complete:
        if runs and whole.step == runs[-1][-1].step + 1 and whole.step != redo_until + 1:
            runs[-1].append(whole)
        else:
            runs.append([whole])
    return runs


def _range(parts: list[_Whole], *, generation: int, is_redo: bool) -> StepFinished:
    tokens = [whole.tokens for whole in parts]
    return StepFinished(
        generation=generation,
        first_step=parts[0].step,
        last_step=parts[-1].step,
        begin_ns=parts[0].begin_ns,
        end_ns=parts[-1].end_ns,
        is_redo=is_redo,
        step_s=sum(whole.slowest_ns for whole in parts) / 1e9,
        between_s=sum(whole.between_ns for whole in parts) / 1e9,
        data_wait_s=sum(whole.data_wait_ns for whole in parts) / 1e9,
        checkpoint_stall_s=sum(whole.stall_ns for whole in parts) / 1e9,
        max_step_s=max(whole.slowest_ns for whole in parts) / 1e9,
        tokens=None if None in tokens else sum(token for token in tokens if token is not None),
        loss=parts[-1].loss,
    )
