"""Kills a real process with SIGKILL at any chosen one of its system calls on given paths, by strace."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

_CALL = re.compile(r"^(\d+)\s+(\w+)\(")
_CHANGING = (
    "write,pwrite64,pwritev,pwritev2,fsync,ftruncate,fallocate,rename,renameat,unlink,mkdir,chmod,fchmod,fchmodat"
)
_TIMEOUT_S = 120.0


class Moment(msgspec.Struct, frozen=True):
    """The `count`-th call of `name` in one thread of a process."""

    name: str
    count: int


def need_strace() -> None:
    """Skip the test where there is no strace, or where a process may not be traced."""
    command = ["strace", "-f", "-e", "trace=none", "true"]
    if shutil.which("strace") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("strace is not there or may not trace (make deps)")


def moments(command: Sequence[str], *, paths: Sequence[Path], log: Path, stdin: bytes = b"") -> tuple[Moment, ...]:
    """Every system call that the command makes on one of the paths, when nobody kills it.

    Without paths: every one that changes files, wherever (a rename is not found by where it leads to).
    """
    done = _traced(command, paths=paths, log=log, stdin=stdin, options=())
    assert done == 0, log.read_text()
    counts: Counter[tuple[str, str]] = Counter()
    found: dict[Moment, None] = {}
    for line in log.read_text().splitlines():
        call = _CALL.match(line)
        if call is not None:
            counts[call[1], call[2]] += 1
            found[Moment(call[2], counts[call[1], call[2]])] = None
    return tuple(found)


def kill_at(moment: Moment, command: Sequence[str], *, paths: Sequence[Path], log: Path, stdin: bytes = b"") -> bool:
    """Run the command and kill it as it enters that call; False = it never came to it."""
    inject = ("-e", f"inject={moment.name}:signal=KILL:when={moment.count}")
    return _traced(command, paths=paths, log=log, stdin=stdin, options=inject) != 0


def _traced(command: Sequence[str], *, paths: Sequence[Path], log: Path, stdin: bytes, options: Sequence[str]) -> int:
    watched = [text for path in paths for text in ("-P", str(path))] or ["-e", f"trace={_CHANGING}"]
    return subprocess.run(
        ["strace", "-f", "-qq", "-e", "signal=none", "-o", str(log), *watched, *options, *command],
        input=stdin,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        timeout=_TIMEOUT_S,
        check=False,
    ).returncode
