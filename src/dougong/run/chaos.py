"""Replay a schedule of faults on the real processes of a run.

The injector stands outside of the system under test: it reads the event log to know where the job is, and harms
processes and files as an accident would. Each fault is written to the event stream `chaos` with the time just before
it was done: its true onset.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from dougong.clock import Clock
from dougong.errors import DougongError
from dougong.event.kinds import (
    FaultInjected,
    GenerationStarted,
    JobResumed,
    JobStarted,
    Placed,
    StepFinished,
    WarningRaised,
    WorkerLost,
)
from dougong.event.log import EventLog
from dougong.event.tail import Tail
from dougong.run.chaos_nodes import NodeFaults
from dougong.run.chaos_storage import StorageFaults
from dougong.run.chaos_workers import Reach, WorkerFaults
from dougong.run.page import Page
from dougong.spec.chaos import Fault

__all__ = ["Injector", "Reach"]

_POLL_S = 0.02
_UNTOLD_BY_ITSELF = ("kill-launcher", "sigterm-grace", "sigterm-launcher")
"""Faults of the process in which the injector lives: they are told before they are done."""


class Injector:
    """Does the faults of a schedule one after the other, in a thread of its own, and undoes what is to last a while.

    A fault at a step waits until the job has recovered from the one before; one at the same step as the fault before
    follows at once.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        *,
        seed: int,
        events: Path,
        job_stream: str,
        checkpoint_url: str,
        reach: Reach,
        log: EventLog,
        clock: Clock,
    ) -> None:
        self._faults = tuple(faults)
        self._tail = Tail(events, streams=(job_stream,))
        self._reach = reach
        self._log = log
        self._clock = clock
        self._placement: tuple[Placed, ...] = ()
        self._step = 0
        self._is_recovered = True
        self._num_lost = 0
        self._num_lost_before = 0
        self._last_at_step: int | None = None
        self._started_ns: int | None = None
        self._onset_ns = 0
        self._stop = threading.Event()
        self._undoing: dict[int, tuple[threading.Timer, Callable[[], None]]] = {}
        self._undo_lock = threading.Lock()
        self._keys = itertools.count()
        drawn = random.Random(seed)
        self._workers = WorkerFaults(reach, placement=self._now_placed, stop=self._stop)
        self._nodes = NodeFaults(reach, placement=self._now_placed, drawn=drawn)
        self._storage = StorageFaults(reach, checkpoint_url=checkpoint_url, drawn=drawn)
        self._thread = threading.Thread(target=self._work, name="dougong-chaos", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """No more faults, and those that last are undone; returns when the thread has ended."""
        self._stop.set()
        self._thread.join(timeout=5.0)
        for key in reversed(tuple(self._undoing)):
            self._undo(key)
        self._log.close()

    def _work(self) -> None:
        for fault in self._faults:
            while not self._stop.is_set() and not self._is_due(fault):
                self._look()
                self._stop.wait(_POLL_S)
            if self._stop.wait(fault.after_s):
                return
            self._look()
            self._inject(fault)
            self._last_at_step = fault.at_step
            self._num_lost_before = self._num_lost

    # --- when ---

    def _is_due(self, fault: Fault) -> bool:
        if self._started_ns is None or not self._placement:
            return False
        if fault.at_s is not None:
            return (self._clock.wall_ns() - self._started_ns) / 1e9 >= fault.at_s
        if fault.during is not None:
            return self._num_lost > self._num_lost_before and not self._is_recovered
        if fault.at_step == self._last_at_step:
            return True
        return self._is_recovered and self._current_step() >= (fault.at_step or 0)

    def _current_step(self) -> int:
        """What every rank has finished, read from the heartbeat pages: the events come only once a second."""
        steps: list[int] = []
        for placed in self._placement:
            try:
                page = Page.open(self._reach.node_directory(placed.component).page(placed.rank))
            except (OSError, ValueError):
                return self._step
            steps.append(page.step)
            page.close()
        return min(steps, default=self._step)

    def _now_placed(self) -> tuple[Placed, ...]:
        """Where the ranks are by what the log says now."""
        self._look()
        return self._placement

    def _look(self) -> None:
        for record in self._tail.poll():
            match record.event:
                case JobStarted():
                    self._started_ns = record.time_ns
                case GenerationStarted() as event:
                    self._placement = event.placement
                    self._is_recovered = event.generation == 1
                case WorkerLost():
                    self._is_recovered = False
                    self._num_lost += 1
                case JobResumed():
                    self._is_recovered = True
                case StepFinished() as event:
                    self._step = event.last_step
                case _:
                    continue

    # --- doing and undoing ---

    def _inject(self, fault: Fault) -> None:
        self._onset_ns = self._clock.wall_ns()
        if fault.kind in _UNTOLD_BY_ITSELF:
            self._tell(fault, "launcher", "told just before")
        try:
            component, detail = self._do(fault)
        except (DougongError, OSError, LookupError) as error:
            text = f"the fault {fault.kind} could not be done: {error}"
            self._log.append(WarningRaised(component=fault.node or "chaos", text=text))
            self._log.commit()
            return
        if fault.kind not in _UNTOLD_BY_ITSELF:
            self._tell(fault, component, detail)

    def _tell(self, fault: Fault, component: str, detail: str) -> None:
        rank = fault.rank if isinstance(fault.rank, int) else None
        event = FaultInjected(fault=fault.kind, component=component, rank=rank, detail=detail)
        self._log.append(event, time_ns=self._onset_ns)
        self._log.commit()

    def _do(self, fault: Fault) -> tuple[str, str]:
        """Do it; the component harmed, and what was done in words."""
        match fault.kind:
            case "kill-worker" | "hang-worker" | "raise-worker" | "flip-bit":
                return self._workers.do(fault)
            case "stop-worker":
                component, detail, undo = self._workers.stop(fault)
            case "slow-worker":
                component, detail, undo = self._workers.slow(fault)
            case "tear-checkpoint":
                victim = self._storage.wait_for_torn(self._stop, at_step=fault.at_step or 0, look=self._look)
                self._onset_ns = self._clock.wall_ns()
                component, detail = self._workers.do(fault)
                return component, f"{detail} while it wrote {victim}"
            case "corrupt-checkpoint":
                return self._storage.corrupt()
            case "fill-disk":
                component, detail, undo = self._storage.fill_disk()
            case "read-only-disk":
                component, detail, undo = self._storage.make_read_only()
            case "fill-shm":
                component, detail, undo = self._storage.fill_memory()
            case "cut-network":
                component, detail, undo = self._nodes.cut(fault)
            case "sigterm-grace":
                return self._nodes.preempt(fault)
            case _:
                return self._nodes.do(fault)
        self._later(fault.for_s, undo)
        return component, detail

    def _later(self, after_s: float | None, undo: Callable[[], None], *, key: int | None = None) -> None:
        """Undo it after a while, and at the latest at the end of the run."""
        key = next(self._keys) if key is None else key
        timer = threading.Timer(after_s or 0.0, self._undo, (key,))
        timer.daemon = True
        self._undoing[key] = (timer, undo)
        if after_s is not None:
            timer.start()

    def _undo(self, key: int) -> None:
        """What cannot be undone now, because another fault stands over it, is tried again."""
        with self._undo_lock:
            found = self._undoing.pop(key, None)
            if found is None:
                return
            found[0].cancel()
            try:
                found[1]()
            except OSError:
                self._later(_POLL_S * 10, found[1], key=key)
