"""A worker from the inside: the user's script, run as `python script.py` would, with a heartbeat and an obituary."""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dougong.run.ahead import read_ahead
from dougong.run.flight import answer_asks
from dougong.run.fork import ForkRequest
from dougong.run.letters import ErrorRaised, ScriptEnded, post
from dougong.run.page import ControlFault, Page, Phase, StepRecord
from dougong.run.place import WorkerPlace, worker_place

if TYPE_CHECKING:
    import torch


_BROKEN_MARKS = ("gloo/transport", "Connection closed by peer", "BrokenCollective")


class BrokenCollective(RuntimeError):
    """A collective did not finish because a peer is gone."""


def run_worker(request: ForkRequest) -> int:
    """Run the script of a fork request in this process; the exit code. The heartbeat page must exist."""
    place = worker_place()
    assert place is not None
    page = Page.open(place.node.page(place.rank))
    if page.generation != place.generation:
        return 1  # this rank was started again meanwhile; the page is the new one's
    page.begin(pid=os.getpid(), now_ns=time.monotonic_ns())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if place.restore_source == "none":
        # else it will attach, and a scheduler's signal is the launcher's, which has all ranks save at one step
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _name_process(f"rank{place.rank}")
    if "torch" in sys.modules:
        answer_asks(page, place.node.flight(place.rank))
        read_ahead(place)
        _watch_optimizer(page, place)
    try:
        _run_script(request.command)
    except SystemExit as leaving:
        return _leave(page, place, _exit_code(leaving))
    except BaseException as error:
        _report(place, page, error)
        return 1
    return _leave(page, place, 0)


def is_broken_collective(error: BaseException) -> bool:
    """Does the error say that a peer is gone, rather than that this rank did wrong?

    gloo raises RuntimeError with its source place in the text; NCCL and the store raise typed errors.
    """
    names = {type_.__name__ for type_ in type(error).__mro__}
    if names & {"BrokenCollective", "DistBackendError", "DistNetworkError", "DistStoreError"}:
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(mark in text for mark in _BROKEN_MARKS)


def do_control_fault(fault: ControlFault) -> None:
    """Do the fault that a chaos schedule asked this rank for, if any; what it takes the model for is done elsewhere."""
    match fault:
        case ControlFault.NONE | ControlFault.FLIP:
            return
        case ControlFault.HANG:
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        case ControlFault.RAISE:
            raise RuntimeError("chaos: an exception was asked for in this rank")


def _run_script(command: tuple[str, ...]) -> None:
    """`script.py ARGS…` or `-m module ARGS…`, as the interpreter itself would run it."""
    if command[0] == "-m":
        sys.argv = list(command[1:])
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(command)
    sys.path[0] = str(Path(command[0]).absolute().parent)
    runpy.run_path(command[0], run_name="__main__")


def _watch_optimizer(page: Page, place: WorkerPlace) -> None:
    """Count optimizer steps as heartbeats, for scripts that do not attach. Only the first optimizer seen counts.

    An optimizer that keeps a count of its own, as those of the Adam family do, tells at its first step where the script
    has resumed, and so which steps are done again.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    first: list[int] = []
    began_ns = [time.monotonic_ns()]

    def after_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if page.is_attached:
            return
        if not first:
            first.append(id(optimizer))
        if id(optimizer) != first[0]:
            return
        now_ns = time.monotonic_ns()
        step = page.step + 1 if page.step else max(1, _own_count(optimizer))
        page.finish_step(
            StepRecord(
                step=step,
                begin_ns=began_ns[0],
                end_ns=now_ns,
                data_wait_ns=0,
                loss=None,
                tokens=None,
                checkpoint_stall_ns=0,
                between_ns=0,
            )
        )
        page.enter(Phase.STEP, now_ns=now_ns)
        began_ns[0] = now_ns
        if place.is_chaos:
            do_control_fault(page.take_fault())

    register_optimizer_step_post_hook(after_step)


def _own_count(optimizer: torch.optim.Optimizer) -> int:
    """The steps that the optimizer itself has counted, those before a restart included; 0 if it does not count."""
    state: Any = next(iter(optimizer.state.values()), None)
    return int(state["step"]) if state and "step" in state else 0


def _leave(page: Page, place: WorkerPlace, exit_code: int) -> int:
    page.enter(Phase.DONE, now_ns=time.monotonic_ns())
    letter = ScriptEnded(generation=page.generation, rank=place.rank, exit_code=exit_code, step=page.step)
    with contextlib.suppress(OSError):  # no memory for a letter; the exit code says the same
        post(place.node.outbox(place.rank), letter)
    return exit_code


def _exit_code(leaving: SystemExit) -> int:
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code
    sys.stderr.write(f"{leaving.code}\n")
    return 1


def _report(place: WorkerPlace, page: Page, error: BaseException) -> None:
    """Write the traceback to the log and, as a letter, to the agent; only the user's frames.

    The page knows the generation that the rank belongs to by now; its place is that of its start.
    """
    text = "".join(traceback.format_exception(type(error), error, _user_frames(error.__traceback__)))
    sys.stderr.write(text)
    sys.stderr.flush()
    letter = ErrorRaised(
        generation=page.generation,
        rank=place.rank,
        time_ns=time.time_ns(),
        error=f"{type(error).__name__}: {error}",
        traceback=text,
        is_broken_collective=is_broken_collective(error),
    )
    with contextlib.suppress(OSError):  # no memory for a letter; the end of the log says the same
        post(place.node.outbox(place.rank), letter)


def _user_frames(frames: TracebackType | None) -> TracebackType | None:
    """Drop our own frames and runpy's from the top."""
    own = {__file__, runpy.__file__, "<frozen runpy>"}
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename in own:
        frames = frames.tb_next
    return frames


def _name_process(name: str) -> None:
    """Show the rank in `ps` and `top`; not worth failing for."""
    try:
        Path("/proc/self/comm").write_text(name)
    except OSError:
        return
