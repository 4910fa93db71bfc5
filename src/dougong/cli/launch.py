"""The launcher: keeps a controller alive, shows what happens, passes Ctrl-C on, and leaves nothing running behind."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Protocol

import msgspec

from dougong.cli.controller import EXIT_CODES, STREAM, Order
from dougong.errors import UserError
from dougong.event.kinds import Recorded
from dougong.event.log import is_being_written
from dougong.event.tail import Tail
from dougong.run.layout import RunDirectory

_POLL_S = 0.05
_MAX_QUICK_DEATHS = 5
_QUICK_S = 10.0
EXIT_STOPPED = 130
_EXIT_CODES = {EXIT_CODES["finished"]: 0, EXIT_CODES["failed"]: 1, EXIT_CODES["stopped"]: EXIT_STOPPED}
_ORPHAN_S = 150.0


class View(Protocol):
    """What is shown while a run goes on."""

    def __enter__(self) -> View: ...
    def __exit__(self, *_: object) -> None: ...
    def show(self, records: list[Recorded]) -> None: ...
    def say(self, text: str) -> None: ...


class Launcher:
    """One `dougong run`. Holds the run's lock, so that two at once cannot harm it."""

    def __init__(self, run: RunDirectory, *, is_resume: bool, view: View, stop_at_s: float | None = None) -> None:
        self._run = run
        self._is_resume = is_resume
        self._view = view
        self._controller: subprocess.Popen[bytes] | None = None
        self._num_interrupts = 0
        self._stop_at_s = stop_at_s
        self.is_out_of_time = False
        """It was stopped for the sake of a time limit."""
        self._deaths_s: list[float] = []
        self._lock_fd = take_lock(run)

    def supervise(self) -> int:
        """Until the job has ended; the exit code: 0 finished, 1 failed, 130 stopped and resumable."""
        previous = {number: signal.signal(number, self._interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        tail = Tail(self._run.events)
        if self._is_resume:
            tail.poll()
        self._start_controller(is_resume=self._is_resume)
        try:
            with self._view:
                while True:
                    code = self._look(tail)
                    if code is not None:
                        return code
                    self._look_at_the_clock()
                    time.sleep(_POLL_S)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            os.close(self._lock_fd)

    def signal_controller(self, number: signal.Signals) -> None:
        """For a chaos schedule."""
        if self._controller is not None:
            self._controller.send_signal(number)

    def _look(self, tail: Tail) -> int | None:
        assert self._controller is not None
        code = self._controller.poll()
        self._view.show(tail.poll())
        if code is None:
            return None
        if code in _EXIT_CODES:
            self._view.show(tail.poll())
            return _EXIT_CODES[code]
        self._view.say(f"the controller ended ({_how(code)}); starting it again")
        self._deaths_s = [then_s for then_s in self._deaths_s if time.monotonic() - then_s < _QUICK_S]
        self._deaths_s.append(time.monotonic())
        if len(self._deaths_s) >= _MAX_QUICK_DEATHS:
            self._view.say(f"the controller died {_MAX_QUICK_DEATHS} times within {_QUICK_S:g} s; see its log")
            return 1
        self._start_controller(is_resume=False)
        if self._num_interrupts:
            self._order(Order(is_stop=True))
        return None

    def _look_at_the_clock(self) -> None:
        """The limit is one of the wall clock: a scheduler's."""
        if self._stop_at_s is None or self._num_interrupts or time.time() < self._stop_at_s:
            return
        self.is_out_of_time = True
        self._num_interrupts += 1
        self._view.say("the time limit is near: every rank saves after its step")
        self._order(Order(is_stop=True))

    def _start_controller(self, *, is_resume: bool) -> None:
        self._run.logs.mkdir(parents=True, exist_ok=True)
        with (self._run.logs / "controller.log").open("ab") as log:
            self._controller = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "dougong.cli.controller",
                    str(self._run.root),
                    *(["--resume"] if is_resume else []),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """The first asks for a save; the third gives up waiting, the workers then end by themselves."""
        self._num_interrupts += 1
        if self._num_interrupts == 1:
            self._view.say("stopping: every rank saves after its step (press Ctrl-C twice more to give up waiting)")
            self._order(Order(is_stop=True))
        elif self._num_interrupts >= 3:
            raise KeyboardInterrupt

    def _order(self, order: Order) -> None:
        if self._controller is None or self._controller.stdin is None:
            return
        try:
            self._controller.stdin.write(msgspec.json.encode(order) + b"\n")
            self._controller.stdin.flush()
        except BrokenPipeError:
            # it just died; the next one is asked again
            return


def take_lock(run: RunDirectory) -> int:
    """Hold the run for this process. Raises UserError if another one holds it."""
    try:
        fd = os.open(run.lock, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise UserError(
            f"{run.root} cannot be written: {error.strerror}",
            where="run directory",
            mend="mend its permissions, or copy it to a disk that is writable",
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise UserError(
            f"the run in {run.root} is going on already",
            where="run directory",
            mend="wait for it, or stop it with Ctrl-C there; watch it with `dougong events --follow`",
        ) from None
    return fd


def wait_for_orphan(run: RunDirectory) -> None:
    """Until the controller of a launcher that was killed has saved and left.

    Raises UserError if another launcher holds the run, or if that controller does not leave.
    """
    os.close(take_lock(run))
    if not is_being_written(run.events, stream=STREAM):
        return
    sys.stderr.write("an earlier launcher was killed; waiting until its controller has saved and left\n")
    deadline_s = time.monotonic() + _ORPHAN_S
    while is_being_written(run.events, stream=STREAM):
        if time.monotonic() > deadline_s:
            raise UserError(
                f"the controller of an earlier launcher has not left within {_ORPHAN_S:.0f} s",
                where=str(run.events),
                mend="end the process whose id stands in the file `lock` there, then resume again",
            )
        time.sleep(_POLL_S)


def point_latest(run_root: Path) -> None:
    """Let `latest` beside the run directory lead to it."""
    link = run_root.parent / "latest"
    if link.exists() and not link.is_symlink():
        return
    staging = run_root.parent / f".latest.{os.getpid()}"
    staging.unlink(missing_ok=True)
    staging.symlink_to(run_root.name)
    staging.replace(link)


def _how(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
