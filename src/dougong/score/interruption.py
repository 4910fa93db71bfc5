"""One interruption of a job, from the onset of the fault until the lost steps are made good."""

from __future__ import annotations

import msgspec

from dougong.event.kinds import CauseClass, FaultInjected, Recorded, WorkerLost


class Interruption(msgspec.Struct, frozen=True, kw_only=True):
    """One fault and its repair. A fault that strikes during a repair is an interruption of its own.

    `onset_ns`: when it began; if no one could tell (`is_onset_known` false), the end of the last finished step. `*_ns`
    of the phases are durations. `fault` names the injected fault, where one was injected. `num_redone_steps` were
    finished before, lost, and made again. `resumed_ns` `None`: training has not gone on, or the next fault came first.
    """

    cause_class: CauseClass
    component: str
    rank: int
    generation: int
    detail: str
    onset_ns: int
    is_onset_known: bool
    detected_ns: int
    fault: str | None = None
    rung: str | None = None
    restore_source: str | None = None
    detect_ns: int = 0
    decide_ns: int = 0
    restart_ns: int = 0
    reload_ns: int = 0
    redo_ns: int = 0
    num_redone_steps: int = 0
    resumed_ns: int | None = None
    is_overtaken: bool = False

    @property
    def repair_ns(self) -> int:
        """From the onset until the lost steps are made good."""
        return self.detect_ns + self.decide_ns + self.restart_ns + self.reload_ns + self.redo_ns

    @property
    def is_closed(self) -> bool:
        """Whether its repair has ended: in training, or in the next fault."""
        return self.resumed_ns is not None or self.is_overtaken


def take_matching_fault(faults: list[Recorded], lost: WorkerLost, *, recorded: Recorded) -> Recorded | None:
    """Remove and return the injected fault that led to `lost`: the one it names as its cause, else the newest on the
    same rank or component. `faults` holds `FaultInjected` records that no loss has been matched with yet."""
    if recorded.cause is not None:
        named = (recorded.cause.stream, recorded.cause.seq)
        for place, fault in enumerate(faults):
            if (fault.stream, fault.seq) == named:
                return faults.pop(place)
    for place in reversed(range(len(faults))):
        event = faults[place].event
        assert isinstance(event, FaultInjected)
        if _strikes(event, lost):
            return faults.pop(place)
    return None


def _strikes(fault: FaultInjected, lost: WorkerLost) -> bool:
    if fault.rank is not None:
        return fault.rank == lost.rank
    return _is_within(lost.component, fault.component) or _is_within(fault.component, lost.component)


def _is_within(component: str, other: str) -> bool:
    return component == other or component.startswith(other + "/")
