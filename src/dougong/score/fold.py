"""The fold over a job's events that everything in a scorecard is computed from."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from typing import assert_never

import msgspec

from dougong.event.kinds import (
    AgentLost,
    AgentReturned,
    BatchesSkipped,
    Cause,
    CheckpointDeleted,
    CheckpointRejected,
    CheckpointSaved,
    ControllerStarted,
    CorruptionSuspected,
    FaultInjected,
    GenerationStarted,
    JobCreated,
    JobFailed,
    JobFinished,
    JobResumed,
    JobStarted,
    JobStopped,
    LinkCut,
    LinkHealed,
    LinkSuspected,
    ModelDescribed,
    NodeJoined,
    NodeLost,
    NodeQuarantined,
    NodeRepaired,
    PeakDescribed,
    PeersChosen,
    PreflightDone,
    Recorded,
    RecoveryDecided,
    ReplicasCompared,
    SaveRhythmChosen,
    SnapshotRefused,
    StateRestored,
    StepFinished,
    StorageFailing,
    StorageRecovered,
    StragglerNamed,
    Unknown,
    WarningRaised,
    WebhookSent,
    WorkerLost,
    WorldResized,
)
from dougong.score.accounts import DOWN_PHASES, Accounts, Phase
from dougong.score.interruption import Interruption, take_matching_fault
from dougong.score.inventory import Inventory
from dougong.score.step_range import StepRanges, parts_of

_NS = 1_000_000_000
_UNENDED = "the run ended without a word and was resumed by hand"


class JobFold:
    """The state of one job's score. `advance` takes the events in the order of the log; the reading properties may be
    asked at any time.

    A loss is booked only when its recovery begins, since a range of steps finished before it may be reported after it.
    """

    def __init__(self) -> None:
        self.accounts = Accounts()
        self.interruptions: list[Interruption] = []
        self.ranges = StepRanges()
        self.inventory = Inventory()
        self.created: JobCreated | None = None
        self.model: ModelDescribed | None = None
        self.peak: PeakDescribed | None = None
        self.outcome = "running"
        self.last_step: int | None = None
        self.last_time_ns = 0
        self.tokens = 0
        self.has_tokens = False
        self.num_redone_steps = 0
        self.num_checkpoints: Counter[str] = Counter()
        self.num_rejected_checkpoints = 0
        self.num_repairs = 0
        self.unknown_kinds: Counter[str] = Counter()
        self._loss_steps = array("q")
        self._losses = array("d")
        self._phase: Phase | None = None
        self._turns: list[tuple[int, Phase]] = []
        self._current: int | None = None
        self._generation = 0
        self._faults: list[Recorded] = []
        self._matched: set[tuple[str, int]] = set()
        self._decided_ns = 0
        self._is_warm = False

    @property
    def ettr(self) -> float | None:
        """The share of the wall time so far that trained; `None` before any time has passed. Cheap."""
        spent_ns = dict(self.accounts.spent_ns)
        for phase, begin_ns, end_ns in self._pending(self.last_time_ns):
            spent_ns[phase] += end_ns - begin_ns
        return ettr_of(spent_ns)

    def losses(self) -> tuple[tuple[int, float], ...]:
        """(step, loss) of rank 0 at the end of each range, in the order of the final trajectory."""
        return tuple(zip(self._loss_steps, self._losses, strict=True))

    def advance(self, recorded: Recorded) -> None:
        """Take the next event."""
        event, now_ns = recorded.event, recorded.time_ns
        self.last_time_ns = max(self.last_time_ns, now_ns)
        match event:
            case JobCreated():
                self.created = event
            case JobStarted():
                self._start(now_ns, is_resume=event.is_resume)
            case ModelDescribed():
                self.model = event
            case PeakDescribed():
                self.peak = event
            case GenerationStarted():
                self._start_generation(event, now_ns=now_ns)
            case StateRestored():
                self._restore(event, now_ns=now_ns)
            case StepFinished():
                self._finish_steps(event)
            case FaultInjected():
                self._faults.append(recorded)
            case WorkerLost():
                self._lose(event, recorded=recorded)
            case RecoveryDecided():
                self._decide(event, now_ns=now_ns)
            case JobResumed():
                self._resume(now_ns)
            case JobStopped() | JobFinished() | JobFailed():
                self._end(event, now_ns=now_ns)
            case CheckpointSaved():
                self.num_checkpoints[event.tier] += 1
            case CheckpointRejected():
                self.num_rejected_checkpoints += 1
            case NodeJoined():
                self.inventory.join(event.component, num_accelerators=event.num_accelerators, now_ns=now_ns)
            case NodeLost() | NodeQuarantined():
                self.inventory.lose(event.component, now_ns=now_ns)
            case NodeRepaired():
                self.inventory.repair(event.component, now_ns=now_ns)
            case Unknown():
                self.unknown_kinds[event.kind] += 1
            case (
                CheckpointDeleted()
                | AgentLost()
                | AgentReturned()
                | ControllerStarted()
                | WorldResized()
                | LinkCut()
                | LinkHealed()
                | WebhookSent()
                | PeersChosen()
                | WarningRaised()
                | SaveRhythmChosen()
                | StorageFailing()
                | StorageRecovered()
                | PreflightDone()
                | LinkSuspected()
                | SnapshotRefused()
                | BatchesSkipped()
                | StragglerNamed()
                | CorruptionSuspected()
                | ReplicasCompared()
            ):
                pass
            case _:
                assert_never(event)

    def close(self) -> None:
        """Book what is still open up to the last event. A running job's time since its last finished step stays out:
        what it went into is not known yet. Nothing may be advanced afterwards."""
        self._settle(self.last_time_ns)

    # --- life of the job ---

    def _start(self, now_ns: int, *, is_resume: bool) -> None:
        self.accounts.open(now_ns)
        self.outcome = "running"
        if self._phase in (None, "idle"):
            self.accounts.book(now_ns, phase="idle")
            self._current = None
            self._phase = "init"
        elif is_resume:
            self._note_silent_end(now_ns)

    def _note_silent_end(self, now_ns: int) -> None:
        silent = Interruption(
            cause_class="unknown",
            component=self.created.job if self.created is not None else "",
            rank=0,
            generation=self._generation,
            detail=_UNENDED,
            onset_ns=self.accounts.booked_ns,
            is_onset_known=False,
            detected_ns=now_ns,
        )
        self._settle(silent.onset_ns)
        self._interrupt(silent)
        self._settle(now_ns)
        self._phase = "restart"

    def _end(self, event: JobStopped | JobFinished | JobFailed, *, now_ns: int) -> None:
        if self._phase is None:
            return
        self._settle(now_ns)
        # In a repair the time goes to the repair: the job was given up in the middle of it.
        if self._phase == "train":
            self.accounts.book(now_ns, phase="shutdown")
        self._phase = "idle"
        self.outcome = {JobStopped: "stopped", JobFinished: "finished", JobFailed: "failed"}[type(event)]

    # --- losses and repairs ---

    def _lose(self, event: WorkerLost, *, recorded: Recorded) -> None:
        if self._phase in (None, "idle"):
            return
        fault = self._take_fault(event, recorded=recorded)
        if self._is_same_incident(event, fault=fault, cause=recorded.cause):
            return
        onset_ns = fault.time_ns if fault is not None else event.onset_ns
        known_ns = recorded.time_ns if onset_ns is None else min(onset_ns, recorded.time_ns)
        if self._is_in_repair:
            self._settle(known_ns)
        injected = fault.event if fault is not None else None
        self._interrupt(
            Interruption(
                cause_class=event.cause_class,
                component=event.component,
                rank=event.rank,
                generation=event.generation,
                detail=event.detail,
                onset_ns=known_ns if onset_ns is not None else self.accounts.booked_ns,
                is_onset_known=onset_ns is not None,
                detected_ns=recorded.time_ns,
                fault=injected.fault if isinstance(injected, FaultInjected) else None,
            )
        )

    def _take_fault(self, event: WorkerLost, *, recorded: Recorded) -> Recorded | None:
        fault = take_matching_fault(self._faults, event, recorded=recorded)
        if fault is not None:
            self._matched.add((fault.stream, fault.seq))
        return fault

    @property
    def _is_in_repair(self) -> bool:
        return self._current is not None and self.interruptions[self._current].resumed_ns is None

    def _is_same_incident(self, event: WorkerLost, *, fault: Recorded | None, cause: Cause | None) -> bool:
        if not self._is_in_repair or self._current is None:
            return False
        if self._turns and self._turns[-1][1] == "decide":
            return True  # nothing has been decided yet: one decision will answer both
        if fault is not None:
            return False
        if cause is not None and (cause.stream, cause.seq) in self._matched:
            return True
        # The ranks of a generation that has been given up go on being found dead while the next one starts.
        return event.generation <= self.interruptions[self._current].generation

    def _interrupt(self, interruption: Interruption) -> None:
        if self._is_in_repair:
            self._change(is_overtaken=True)
        self._current = len(self.interruptions)
        self.interruptions.append(interruption)
        if self._phase == "train":
            self._phase = "unfinished"
        self._turns = [(interruption.onset_ns, "detect"), (interruption.detected_ns, "decide")]

    def _decide(self, event: RecoveryDecided, *, now_ns: int) -> None:
        # After a start by hand there is nothing to recover from: it is how the job begins.
        if self._phase in (None, "idle") or (self._phase == "init" and not self._is_in_repair):
            return
        if self._phase == "train":
            self._interrupt(_planned(event, now_ns=now_ns, generation=self._generation))
        self._turns.append((now_ns, "restart"))
        self._decided_ns = now_ns
        if self._current is not None:
            self._change(rung=event.rung, restore_source=event.restore_source)

    def _start_generation(self, event: GenerationStarted, *, now_ns: int) -> None:
        self._generation = event.generation
        self._is_warm = False
        # What was injected before the decision has struck by now, or struck nothing.
        self._faults = [fault for fault in self._faults if fault.time_ns >= self._decided_ns]
        if self._phase in (None, "idle"):
            return
        self._settle(now_ns)
        if self._phase != "init":
            self._book(now_ns, phase="restart")
            self._phase = "restart"

    def _restore(self, event: StateRestored, *, now_ns: int) -> None:
        self._is_warm = False
        if self._phase in (None, "idle", "init"):
            return
        begin_ns = now_ns - round(event.reload_s * _NS)
        self._settle(begin_ns)
        self._book(begin_ns, phase="restart")
        self._book(now_ns, phase="reload")
        self._turns = []
        self._phase = "restart"

    def _resume(self, now_ns: int) -> None:
        if self._is_in_repair:
            self._change(resumed_ns=now_ns)

    # --- steps ---

    def _finish_steps(self, event: StepFinished) -> None:
        if self._phase not in (None, "idle"):
            if self._is_in_repair and self._is_from_before_loss(event):
                self._book_late_range(event)
            else:
                self._book_new_range(event)
        self._count_steps(event)

    def _is_from_before_loss(self, event: StepFinished) -> bool:
        return self._current is not None and event.generation <= self.interruptions[self._current].generation

    def _book_late_range(self, event: StepFinished) -> None:
        if not self._turns:
            return  # its time has been booked as lost already
        assert self._phase is not None
        self._book_range(event, gap="between" if self._phase == "unfinished" else self._phase)
        self._phase = "unfinished"

    def _book_new_range(self, event: StepFinished) -> None:
        self._settle(event.begin_ns)
        assert self._phase is not None
        self._book_range(event, gap="between" if self._phase == "train" else self._phase)
        self._phase = "train"
        self._turns = []
        if not event.is_redo:
            self._resume(event.begin_ns)
            self._current = None

    def _book_range(self, event: StepFinished, *, gap: Phase) -> None:
        """Book from the last booking to the end of the range. The time before a step is its own: it waits for data and
        for checkpoints before it begins. Before the first step after a start it belongs to the start, `gap`."""
        is_first = gap != "between"
        if is_first:
            self._book(event.begin_ns, phase=gap)
        if event.is_redo:
            self._book(event.end_ns, phase="redo")
            return
        room_ns = max(0, event.end_ns - self.accounts.booked_ns)
        for phase, part_ns in parts_of(event, room_ns=room_ns, is_first=is_first):
            self.accounts.book(self.accounts.booked_ns + part_ns, phase=phase)

    def _count_steps(self, event: StepFinished) -> None:
        num_steps = event.last_step - event.first_step + 1
        if event.is_redo:
            self.num_redone_steps += num_steps
            if self._current is not None:
                redone = self.interruptions[self._current].num_redone_steps
                self._change(num_redone_steps=redone + num_steps)
        else:
            if event.tokens is not None:
                self.tokens += event.tokens
                self.has_tokens = True
            if event.loss is not None:
                self._loss_steps.append(event.last_step)
                self._losses.append(event.loss)
            self.ranges.add(event, is_warm=self._is_warm)
        self.last_step = max(self.last_step or 0, event.last_step)
        self._is_warm = True

    # --- booking ---

    def _settle(self, until_ns: int) -> None:
        """Book the repair under way up to `until_ns`; time in training is left for the next range of steps."""
        for phase, _, end_ns in self._pending(until_ns):
            self._book(end_ns, phase=phase)
        passed = [turn for turn in self._turns if turn[0] <= until_ns]
        if passed:
            self._phase = passed[-1][1]
            self._turns = [turn for turn in self._turns if turn[0] > until_ns]

    def _pending(self, until_ns: int) -> Iterable[tuple[Phase, int, int]]:
        if self._phase in (None, "idle", "train"):
            return
        begin_ns, phase = self.accounts.booked_ns, self._phase
        turns: list[tuple[int, Phase]] = [*self._turns, (until_ns, phase)]
        for turn_ns, next_phase in turns:
            end_ns = min(turn_ns, until_ns)
            if end_ns > begin_ns:
                yield phase, begin_ns, end_ns
                begin_ns = end_ns
            phase = next_phase

    def _book(self, until_ns: int, *, phase: Phase) -> None:
        in_repair = phase in DOWN_PHASES or phase == "redo"
        current = self._current if in_repair else None
        booked_ns = self.accounts.book(until_ns, phase=phase, interruption=current)
        if current is not None and booked_ns:
            name = f"{phase}_ns"
            self._change(**{name: getattr(self.interruptions[current], name) + booked_ns})

    def _change(self, **fields: object) -> None:
        assert self._current is not None
        self.interruptions[self._current] = msgspec.structs.replace(self.interruptions[self._current], **fields)


def ettr_of(spent_ns: dict[Phase, int]) -> float | None:
    """The share of the wall time that was spent in training, waiting for data, or between steps."""
    wall_ns = sum(spent_ns.values()) - spent_ns["idle"]
    trained_ns = spent_ns["train"] + spent_ns["between"] + spent_ns["data_wait"]
    return trained_ns / wall_ns if wall_ns > 0 else None


def _planned(event: RecoveryDecided, *, now_ns: int, generation: int) -> Interruption:
    """A recovery that no loss led to: work by people, or a move on purpose."""
    return Interruption(
        cause_class="maintenance",
        component="",
        rank=0,
        generation=generation,
        detail=event.reason,
        onset_ns=now_ns,
        is_onset_known=True,
        detected_ns=now_ns,
    )
