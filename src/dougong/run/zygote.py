"""The zygote of a node: a process that has imported torch, and forks a worker from itself when its agent says so.

Importing torch takes seconds, forking milliseconds. It starts no thread of its own, opens no device and no socket, so
a fork of it is as good as a new process. Its stdin brings requests, one JSON line each; its stdout says pids and
exits. When stdin closes (the agent is gone) it ends; its workers live on and are taken over by the next agent.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import random
import select
import signal
import sys
import threading
from typing import NoReturn

import msgspec

from dougong.run.fork import Exited, Forked, ForkRequest, ZygoteMessage


def main() -> NoReturn:
    """Serve until stdin closes. In a forked child, run the worker instead."""
    # a Ctrl-C at the terminal is for the launcher, which asks the workers to save
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _preload()
    gc.freeze()
    request = _serve()
    if request is None:
        sys.exit(0)
    if request.entry == "preflight":
        from dougong.run.preflight_worker import main as test_node

        _leave(test_node())
    from dougong.run.worker import run_worker

    _leave(run_worker(request))


def _leave(exit_code: int) -> NoReturn:
    """End this child in order, but without taking the interpreter apart.

    A daemon thread that is inside torch then (a loader's, a logger's, gloo's own, which drops tensors) is ended by the
    interpreter in the middle of C++, and C++ aborts the whole process: a training that had ended well would count as
    crashed, and be started again.
    """
    # what the interpreter itself does first: it waits for threads that are not daemons, and calls exit functions
    threading._shutdown()  # pyright: ignore
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    _close_files()
    os._exit(exit_code & 0xFF)


def _close_files() -> None:
    """Every file that the script has left open: text first, then what Python code writes (the end of an archive is
    still to come), then what these lie on."""
    files = [file for file in gc.get_objects() if issubclass(type(file), io.IOBase)]
    for file in sorted(files, key=_layer):
        with contextlib.suppress(Exception):  # a full disk, a closed file: nobody can be told any more
            file.close()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _layer(file: io.IOBase) -> int:
    if isinstance(file, io.TextIOBase):
        return 0
    return 2 if type(file).__module__ in ("_io", "io") else 1


def _preload() -> None:
    """Import what nearly every training script imports. A missing or broken torch is the script's business."""
    import dougong.run.worker

    assert dougong.run.worker
    try:
        import torch

        # DistributedDataParallel imports it when it is built, which takes a second in every worker
        import torch._dynamo
        import torch.distributed
    except ImportError:
        return
    import dougong.run.attach
    import dougong.run.state

    assert torch._dynamo and torch.distributed and dougong.run.attach and dougong.run.state


def _serve() -> ForkRequest | None:
    """Returns None in the zygote at its end, and the request in each forked child."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, _wake)
    pending = b""
    while True:
        ready, _, _ = select.select([0, wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, 4096)
            _reap()
        if 0 in ready:
            chunk = os.read(0, 65536)
            if not chunk:
                return None
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                request = msgspec.json.decode(line, type=ForkRequest)
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    os.close(wake_read)
                    os.close(wake_write)
                    _become_worker(request)
                    return request
                _say(Forked(request=request.request, pid=pid))


def _wake(_number: int, _frame: object) -> None:
    """Only there so that the signal writes to the wake-up pipe."""


def _become_worker(request: ForkRequest) -> None:
    """Leave nothing of the zygote in the child: its pipes, signals and random numbers.

    Whether a worker ends at SIGTERM it decides itself, once it knows its place; until then it does not.
    """
    os.setsid()  # as under torchrun: a group of its own, by which all that it starts can be ended
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if request.entry == "preflight":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(request.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(null)
    os.close(log)
    random.seed()
    if "numpy" in sys.modules:
        import numpy

        numpy.random.seed()
    os.environ.update(request.variables)
    os.chdir(request.working_directory)


def _reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        code = os.waitstatus_to_exitcode(status)
        _say(Exited(pid=pid, exit_code=code if code >= 0 else None, signal=-code if code < 0 else None))


def _say(message: ZygoteMessage) -> None:
    with contextlib.suppress(BrokenPipeError):  # the agent is gone; stdin says so too
        os.write(1, msgspec.json.encode(message) + b"\n")


if __name__ == "__main__":
    main()
