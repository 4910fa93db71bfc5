"""What time went into: every nanosecond of a job's life belongs to exactly one phase."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

import msgspec

Phase = Literal[
    "train",  # inside steps that were finished for the first time
    "between",  # between steps: evaluation, the script's own saving; reported, no badput
    "data_wait",  # the training thread waited for data
    "checkpoint_stall",  # the training thread waited for a checkpoint
    "init",  # from the start of the job (or a resume by hand) to its first step
    "unfinished",  # the step under way when a fault came
    "detect",  # from the onset of a fault until it was noticed
    "decide",  # until it was decided what to do
    "restart",  # back-off, starting processes, joining, and the way to the first step
    "reload",  # loading the state
    "redo",  # steps that had been finished before and were lost
    "shutdown",  # from the last step to the end
    "idle",  # stopped by hand or given up; outside the wall time
]

PHASES: tuple[Phase, ...] = get_args(Phase)
REPAIR_PHASES: tuple[Phase, ...] = ("detect", "decide", "restart", "reload", "redo")
DOWN_PHASES: tuple[Phase, ...] = ("detect", "decide", "restart", "reload")
GOOD_PHASES: tuple[Phase, ...] = ("train", "between")
BADPUT_PHASES: tuple[Phase, ...] = tuple(phase for phase in PHASES if phase not in (*GOOD_PHASES, "idle"))

# The parts of a range of steps, in the order in which they are drawn.
_RANGE_PHASES: tuple[Phase, ...] = ("data_wait", "train", "checkpoint_stall", "between")
_WINDOWS = 1000


class Band(msgspec.Struct, frozen=True):
    """A stretch of time in one phase. `interruption` is the index of the one it belongs to."""

    begin_ns: int
    end_ns: int
    phase: Phase
    interruption: int | None = None


class Accounts:
    """Time booked so far: each call continues where the last one ended, so that nothing is booked twice or left out.

    A job of months has millions of ranges of steps. So the drawing of undisturbed training is coarse: within a
    thousandth of the time booked so far, the parts of successive ranges are put together. The sums stay exact.
    """

    def __init__(self) -> None:
        self.booked_ns = 0
        self.spent_ns: dict[Phase, int] = dict.fromkeys(PHASES, 0)
        self._bands: list[Band] = []
        self._begin_ns: int | None = None
        self._window_ns: dict[Phase, int] = {}

    def open(self, begin_ns: int) -> None:
        """Begin at `begin_ns`; once open, does nothing."""
        if self._begin_ns is None:
            self.booked_ns = self._begin_ns = begin_ns

    def book(self, until_ns: int, *, phase: Phase, interruption: int | None = None) -> int:
        """Book the time from the last booking up to `until_ns`, none if that lies in the past; the ns booked."""
        assert self._begin_ns is not None
        booked_ns = until_ns - self.booked_ns
        if booked_ns <= 0:
            return 0
        self.spent_ns[phase] += booked_ns
        if phase in _RANGE_PHASES:
            self._window_ns[phase] = self._window_ns.get(phase, 0) + booked_ns
            is_full = sum(self._window_ns.values()) * _WINDOWS >= until_ns - self._begin_ns
            self.booked_ns = until_ns
            if is_full:
                self._close_window()
        else:
            self._close_window()
            _append(self._bands, Band(self.booked_ns, until_ns, phase, interruption))
            self.booked_ns = until_ns
        return booked_ns

    def bands(self) -> tuple[Band, ...]:
        """All booked time in order, without a gap; neighbours differ in phase or interruption."""
        bands = list(self._bands)
        for band in self._window_bands():
            _append(bands, band)
        return tuple(bands)

    @property
    def wall_ns(self) -> int:
        """All booked time but the idle."""
        return sum(self.spent_ns.values()) - self.spent_ns["idle"]

    def _close_window(self) -> None:
        for band in self._window_bands():
            _append(self._bands, band)
        self._window_ns.clear()

    def _window_bands(self) -> Iterator[Band]:
        begin_ns = self.booked_ns - sum(self._window_ns.values())
        for phase in _RANGE_PHASES:
            if part_ns := self._window_ns.get(phase, 0):
                yield Band(begin_ns, begin_ns + part_ns, phase)
                begin_ns += part_ns


def _append(bands: list[Band], band: Band) -> None:
    last = bands[-1] if bands else None
    if last is not None and last.phase == band.phase and last.interruption == band.interruption:
        bands[-1] = Band(last.begin_ns, band.end_ns, band.phase, band.interruption)
    else:
        bands.append(band)
