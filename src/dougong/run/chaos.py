"""Replay a schedule of faults on the real processes of a run.

The injector stands outside of the system under test: it reads the event log to know where the job is, and harms
processes and files as an accident would. Each fault is written to the event stream `chaos` with the time just before
it was done: its true onset.
"""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from dougong.backend.local import process
from dougong.backend.nodes import FaultDoor
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
)
from dougong.event.log import EventLog
from dougong.event.tail import Tail
from dougong.run.layout import NodeDirectory
from dougong.run.manifest import list_stored
from dougong.run.page import ControlFault, Page
from dougong.run.wire import RunningWorker
from dougong.spec.chaos import Fault

_POLL_S = 0.02
_TEAR_POLL_S = 0.001


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """How the injector reaches what it harms."""

    door: FaultDoor
    node_directory: Callable[[str], NodeDirectory]
    kill_controller: Callable[[], None]


class Injector:
    """Does the faults of a schedule one after the other, in a thread of its own.

    A fault waits until the job has recovered from the one before, unless it names a time in seconds.
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
        self._random = random.Random(seed)
        self._tail = Tail(events, streams=(job_stream,))
        self._checkpoint_url = checkpoint_url
        self._reach = reach
        self._log = log
        self._clock = clock
        self._placement: tuple[Placed, ...] = ()
        self._step = 0
        self._is_recovered = True
        self._started_ns: int | None = None
        self._onset_ns = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="dougong-chaos", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """No more faults; returns when the thread has ended."""
        self._stop.set()
        self._thread.join(timeout=5.0)
        self._log.close()

    def _work(self) -> None:
        for fault in self._faults:
            while not self._stop.is_set() and not self._is_due(fault):
                self._look()
                self._stop.wait(_POLL_S)
            if self._stop.is_set():
                return
            self._inject(fault)

    def _is_due(self, fault: Fault) -> bool:
        if self._started_ns is None or not self._placement:
            return False
        if fault.at_s is not None:
            return (self._clock.wall_ns() - self._started_ns) / 1e9 >= fault.at_s
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

    def _look(self) -> None:
        for record in self._tail.poll():
            match record.event:
                case JobStarted():
                    self._started_ns = record.time_ns
                case GenerationStarted() as event:
                    self._placement = event.placement
                    self._is_recovered = event.generation == 1
                case JobResumed():
                    self._is_recovered = True
                case StepFinished() as event:
                    self._step = event.last_step
                case _:
                    continue

    def _inject(self, fault: Fault) -> None:
        self._onset_ns = self._clock.wall_ns()
        try:
            component, detail = self._do(fault)
        except (DougongError, OSError, LookupError) as error:
            text = f"the fault {fault.kind} could not be done: {error}"
            self._log.append(WarningRaised(component=fault.node or "chaos", text=text))
        else:
            rank = fault.rank if isinstance(fault.rank, int) else None
            event = FaultInjected(fault=fault.kind, component=component, rank=rank, detail=detail)
            self._log.append(event, time_ns=self._onset_ns)
        self._log.commit()

    def _do(self, fault: Fault) -> tuple[str, str]:
        """Do it; the component harmed, and what was done in words."""
        match fault.kind:
            case "kill-worker":
                return self._signal(fault, signal.SIGKILL)
            case "stop-worker":
                return self._stop_worker(fault)
            case "hang-worker":
                return self._ask(fault, ControlFault.HANG)
            case "raise-worker":
                return self._ask(fault, ControlFault.RAISE)
            case "flip-bit":
                return self._ask(fault, ControlFault.FLIP)
            case "kill-node":
                component = self._node(fault)
                self._reach.door.kill_node(component)
                return component, "agent, workers and memory are gone"
            case "kill-agent":
                component = self._node(fault)
                self._reach.door.kill_agent(component)
                return component, "the agent alone"
            case "kill-controller":
                self._reach.kill_controller()
                return "controller", "SIGKILL"
            case "corrupt-checkpoint":
                return self._corrupt()
            case "tear-checkpoint":
                return self._tear(fault)

    def _signal(self, fault: Fault, number: signal.Signals) -> tuple[str, str]:
        placed, worker = self._worker(fault)
        process.kill(worker.pid, number)
        return placed.component, f"{number.name} to process {worker.pid}"

    def _stop_worker(self, fault: Fault) -> tuple[str, str]:
        placed, worker = self._worker(fault)
        process.kill(worker.pid, signal.SIGSTOP)
        if fault.for_s is not None:
            timer = threading.Timer(fault.for_s, process.kill, (worker.pid, signal.SIGCONT))
            timer.daemon = True
            timer.start()
        return placed.component, f"SIGSTOP to process {worker.pid}"

    def _ask(self, fault: Fault, control: ControlFault) -> tuple[str, str]:
        """What only the worker can do to itself is asked of it on its heartbeat page."""
        placed, worker = self._worker(fault)
        page = Page.open(self._reach.node_directory(placed.component).page(placed.rank))
        page.ask_fault(control)
        page.close()
        return placed.component, f"asked process {worker.pid} itself"

    def _corrupt(self) -> tuple[str, str]:
        """Flip one bit in the largest file of the newest durable checkpoint."""
        committed = [stored for stored in list_stored(self._checkpoint_url) if stored.is_committed]
        if not committed:
            raise LookupError("there is no durable checkpoint yet")
        newest = committed[0]
        directory = Path(self._checkpoint_url) / newest.directory
        victim = max(directory.iterdir(), key=lambda path: (path.stat().st_size, path.name))
        offset = self._random.randrange(victim.stat().st_size)
        with victim.open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 0x10]))
        return f"checkpoints/{newest.directory}", f"bit 4 of byte {offset} of {victim.name}"

    def _tear(self, fault: Fault) -> tuple[str, str]:
        """Kill the rank while a durable checkpoint is being written."""
        while not self._stop.is_set():
            self._look()
            torn = [stored for stored in list_stored(self._checkpoint_url) if not stored.is_committed]
            if torn and self._is_recovered and torn[0].step >= (fault.at_step or 0):
                placed, worker = self._worker(fault)
                self._onset_ns = self._clock.wall_ns()
                process.kill(worker.pid, signal.SIGKILL)
                return placed.component, f"SIGKILL to process {worker.pid} while it wrote {torn[0].directory}"
            self._stop.wait(_TEAR_POLL_S)
        raise LookupError("the run ended first")

    def _node(self, fault: Fault) -> str:
        """The node named, or, if it is no longer in use, the one that took its place in the schedule's draw."""
        in_use = sorted({placed.component for placed in self._placement})
        return fault.node if fault.node in in_use else self._random.choice(in_use)

    def _worker(self, fault: Fault) -> tuple[Placed, RunningWorker]:
        assert isinstance(fault.rank, int)
        placed = next(placed for placed in self._placement if placed.rank == fault.rank)
        listed = self._reach.node_directory(placed.component).workers.read_bytes()
        workers = msgspec.json.decode(listed, type=tuple[RunningWorker, ...])
        return placed, next(worker for worker in workers if worker.rank == fault.rank)
