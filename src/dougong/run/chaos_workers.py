"""Faults of one rank: killed, stopped, slowed down, or asked to hang or raise."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from dougong.backend.local import process
from dougong.backend.nodes import FaultDoor
from dougong.event.kinds import Placed
from dougong.run.layout import NodeDirectory
from dougong.run.page import ControlFault, Page
from dougong.run.wire import RunningWorker
from dougong.spec.chaos import Fault, FaultKind

_PERIOD_S = 0.1
_FIND_S = 15.0
_POLL_S = 0.02

Undo = Callable[[], None]


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """How the injector reaches what it harms."""

    door: FaultDoor
    node_directory: Callable[[str], NodeDirectory]
    memory_root: Path
    kill_controller: Callable[[], None]
    signal_launcher: Callable[[signal.Signals], None]
    signal_run: Callable[[signal.Signals], None]
    """To every process of the run, the launcher last."""


_ASKED: dict[FaultKind, ControlFault] = {
    "hang-worker": ControlFault.HANG,
    "raise-worker": ControlFault.RAISE,
    "flip-bit": ControlFault.FLIP,
}


class WorkerFaults:
    """Harms ranks where they run now."""

    def __init__(self, reach: Reach, *, placement: Callable[[], tuple[Placed, ...]], stop: threading.Event) -> None:
        self._reach = reach
        self._placement = placement
        self._stop = stop

    def do(self, fault: Fault) -> tuple[str, str]:
        """Kill it, or ask it for what only it can do to itself."""
        placed, worker = self._find(fault)
        if (wanted := _ASKED.get(fault.kind)) is not None:
            page = Page.open(self._reach.node_directory(placed.component).page(placed.rank))
            page.ask_fault(wanted)
            page.close()
            return placed.component, f"asked process {worker.pid} itself"
        process.kill(worker.pid, signal.SIGKILL)
        return placed.component, f"SIGKILL to process {worker.pid}"

    def stop(self, fault: Fault) -> tuple[str, str, Undo]:
        placed, worker = self._find(fault)
        process.kill(worker.pid, signal.SIGSTOP)
        return placed.component, f"SIGSTOP to process {worker.pid}", lambda: _go_on(worker)

    def slow(self, fault: Fault) -> tuple[str, str, Undo]:
        """The rank is stopped for a share of every tenth of a second, until it is undone or the process ends."""
        assert fault.stopped_ratio is not None
        placed, worker = self._find(fault)
        over = threading.Event()
        arguments = (worker, fault.stopped_ratio, over)
        threading.Thread(target=self._brake, args=arguments, name="dougong-brake", daemon=True).start()
        return placed.component, f"process {worker.pid} is stopped for {fault.stopped_ratio:.0%} of the time", over.set

    def _brake(self, worker: RunningWorker, stopped_ratio: float, over: threading.Event) -> None:
        while _lives(worker) and not over.is_set() and not self._stop.is_set():
            process.kill(worker.pid, signal.SIGSTOP)
            time.sleep(stopped_ratio * _PERIOD_S)
            _go_on(worker)
            over.wait((1.0 - stopped_ratio) * _PERIOD_S)

    def _find(self, fault: Fault) -> tuple[Placed, RunningWorker]:
        """The living process of the rank; in the middle of a recovery it is waited for. Raises LookupError."""
        assert isinstance(fault.rank, int)
        deadline_s = time.monotonic() + _FIND_S
        while not self._stop.is_set() and time.monotonic() < deadline_s:
            placed = next(placed for placed in self._placement() if placed.rank == fault.rank)
            worker = self._running(placed)
            if worker is not None and _lives(worker):
                return placed, worker
            self._stop.wait(_POLL_S)
        raise LookupError(f"rank {fault.rank} does not run")

    def _running(self, placed: Placed) -> RunningWorker | None:
        try:
            listed = self._reach.node_directory(placed.component).workers.read_bytes()
        except OSError:
            return None
        workers = msgspec.json.decode(listed, type=tuple[RunningWorker, ...])
        return next((worker for worker in workers if worker.rank == placed.rank), None)


def _lives(worker: RunningWorker) -> bool:
    return process.is_alive(worker.pid, start_ticks_expected=worker.start_ticks)


def _go_on(worker: RunningWorker) -> None:
    """A pid may be another's by now."""
    if _lives(worker):
        process.kill(worker.pid, signal.SIGCONT)
