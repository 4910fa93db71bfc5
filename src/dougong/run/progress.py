"""The job's steps out of the ranks' steps: a step is finished when every rank has finished it.

Ranges of steps become one `StepFinished` event, at most one a second; the per-rank times go to telemetry.
"""

from __future__ import annotations

from collections import deque

from dougong.event.kinds import StepFinished
from dougong.run.hang import StepTimes
from dougong.run.page import StepRecord

_RANGE_S = 1.0
_NUM_LEARNT = 512


class JobProgress:
    """Gathers the step records of one generation after the other."""

    def __init__(self, *, max_step: int = 0) -> None:
        self.max_step = max_step
        """The highest step ever finished by all ranks; steps up to it are redo."""
        self._generation = 0
        self._world_size = 0
        self._by_step: dict[int, dict[int, StepRecord]] = {}
        self._last_seen: dict[int, int] = {}
        self._complete: list[dict[int, StepRecord]] = []
        self.last_step = 0
        """The last step finished by all ranks in this generation."""
        self._redo_until = 0
        self._durations_s: deque[float] = deque(maxlen=_NUM_LEARNT)
        self._longest_gap_s: float | None = None
        self._start_s: float | None = None
        self._last_end_ns: int | None = None
        self._first_step_s: float | None = None

    def begin_generation(self, generation: int, *, world_size: int, last_step: int = 0) -> None:
        """The ranks start again; `last_step` = what was recorded already, for a controller that comes back."""
        self._generation = generation
        self._world_size = world_size
        self._by_step.clear()
        self._last_seen = dict.fromkeys(range(world_size), last_step) if last_step else {}
        self._complete.clear()
        self.last_step = last_step
        self._redo_until = self.max_step
        self._last_end_ns = None

    def add(self, rank: int, records: tuple[StepRecord, ...]) -> tuple[StepRecord, ...]:
        """Take in a rank's finished steps; those not seen before are returned."""
        fresh = tuple(record for record in records if record.step > self._last_seen.get(rank, 0))
        for record in fresh:
            self._last_seen[rank] = record.step
            ranks = self._by_step.setdefault(record.step, {})
            ranks[rank] = record
            if len(ranks) == self._world_size:
                self._finish(record.step)
        return fresh

    def take_ranges(self, *, is_forced: bool) -> tuple[StepFinished, ...]:
        """The ranges due: those that span a second, or all if forced. Redo and new steps never share a range."""
        if not self._complete:
            return ()
        span_s = (_end_ns(self._complete[-1]) - _begin_ns(self._complete[0])) / 1e9
        if not is_forced and span_s < _RANGE_S:
            return ()
        runs = _runs(self._complete, redo_until=self._redo_until)
        self._complete.clear()
        return tuple(
            _range(run, generation=self._generation, is_redo=_step(run[0]) <= self._redo_until) for run in runs
        )

    def learnt(self) -> StepTimes:
        """What the hang rule needs."""
        is_first_step = self._last_end_ns is None and self.last_step == 0
        if not self._durations_s:
            return StepTimes(is_first_step=is_first_step, first_step_s=self._first_step_s, start_s=self._start_s)
        ordered = sorted(self._durations_s)
        return StepTimes(
            num_steps=len(ordered),
            p99_s=ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))],
            longest_gap_s=self._longest_gap_s,
            is_first_step=is_first_step,
            first_step_s=self._first_step_s,
            start_s=self._start_s,
        )

    def note_start(self, duration_s: float) -> None:
        """How long a generation took from the order to start to its first finished step."""
        self._start_s = max(self._start_s or 0.0, duration_s)

    def _finish(self, step: int) -> None:
        ranks = self._by_step.pop(step)
        for earlier in [key for key in self._by_step if key < step]:
            del self._by_step[earlier]
        self._complete.append(ranks)
        if self._last_end_ns is None and self.last_step == 0:
            self._first_step_s = max(self._first_step_s or 0.0, (_end_ns(ranks) - _begin_ns(ranks)) / 1e9)
        self.last_step = step
        self.max_step = max(self.max_step, step)
        if self._last_end_ns is not None:
            # the first step of a start is not counted: it warms caches up, or compiles
            self._durations_s.append((_end_ns(ranks) - _begin_ns(ranks)) / 1e9)
            gap_s = (_end_ns(ranks) - self._last_end_ns) / 1e9
            self._longest_gap_s = max(self._longest_gap_s or 0.0, gap_s)
        self._last_end_ns = _end_ns(ranks)


def _runs(complete: list[dict[int, StepRecord]], *, redo_until: int) -> list[list[dict[int, StepRecord]]]:
    """Consecutive steps of one sort. There is a gap where a page's ring overflowed while nobody read it."""
    runs: list[list[dict[int, StepRecord]]] = []
    for ranks in complete:
        step = _step(ranks)
        if runs and step == _step(runs[-1][-1]) + 1 and step != redo_until + 1:
            runs[-1].append(ranks)
        else:
            runs.append([ranks])
    return runs


def _range(parts: list[dict[int, StepRecord]], *, generation: int, is_redo: bool) -> StepFinished:
    slowest_s = [max((r.end_ns - r.begin_ns) / 1e9 for r in ranks.values()) for ranks in parts]
    tokens = [record.tokens for ranks in parts for record in ranks.values()]
    return StepFinished(
        generation=generation,
        first_step=_step(parts[0]),
        last_step=_step(parts[-1]),
        begin_ns=_begin_ns(parts[0]),
        end_ns=_end_ns(parts[-1]),
        is_redo=is_redo,
        step_s=sum(slowest_s),
        between_s=sum(max(r.between_ns for r in ranks.values()) for ranks in parts) / 1e9,
        data_wait_s=sum(max(r.data_wait_ns for r in ranks.values()) for ranks in parts) / 1e9,
        checkpoint_stall_s=sum(max(r.checkpoint_stall_ns for r in ranks.values()) for ranks in parts) / 1e9,
        max_step_s=max(slowest_s),
        tokens=None if None in tokens else sum(token for token in tokens if token is not None),
        loss=parts[-1][min(parts[-1])].loss,
    )


def _step(ranks: dict[int, StepRecord]) -> int:
    return next(iter(ranks.values())).step


def _begin_ns(ranks: dict[int, StepRecord]) -> int:
    return min(record.begin_ns for record in ranks.values())


def _end_ns(ranks: dict[int, StepRecord]) -> int:
    return max(record.end_ns for record in ranks.values())
