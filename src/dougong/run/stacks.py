"""Stacks of the ranks of a node, taken from outside, and who the culprit is among all of them.

`py-spy` reads a process's memory without stopping it, so it works on a stopped or deadlocked rank too.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dougong.run.flight import Flight, who_is_behind

_TIMEOUT_S = 5.0
_WAITING = ("torch/distributed/", "torch/autograd/", "torch/nn/parallel/")


async def take_stack(pid: int) -> str:
    """The Python stack of a process, or why it could not be had."""
    program = _py_spy()
    if program is None:
        return "no stack: py-spy is not installed (pip install 'dougong[train]')"
    try:
        process = await asyncio.create_subprocess_exec(
            program,
            "dump",
            "--nonblocking",
            "--pid",
            str(pid),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
    except OSError as error:
        return f"no stack: {error}"
    try:
        output, _ = await asyncio.wait_for(process.communicate(), _TIMEOUT_S)
    except TimeoutError:
        process.kill()
        return f"no stack: py-spy did not answer within {_TIMEOUT_S:g} s"
    return output.decode(errors="replace")


def name_culprit(
    stacks: Mapping[int, str], *, suspect: int, flights: Mapping[int, Flight] | None = None
) -> tuple[int, str]:
    """The rank that makes the others wait, and why: the one that has entered the fewest collectives, or, where that
    does not tell, the one whose main thread is not in a collective.

    With several such ranks, or none, the suspect stays.
    """
    behind, counted = who_is_behind(flights or {}, num_ranks=len(stacks))
    if len(behind) == 1:
        frames = main_frames(stacks.get(behind[0], ""))
        return behind[0], counted + (f"; it is at {frames[0]}" if frames else "")
    outside = [
        rank for rank, text in sorted(stacks.items()) if (frames := main_frames(text)) and not _is_waiting(frames)
    ]
    if len(outside) == 1:
        where = main_frames(stacks[outside[0]])[0]
        return outside[0], f"rank {outside[0]} is at {where}; the others wait for it"
    frames = main_frames(stacks.get(suspect, ""))
    if frames:
        return suspect, f"rank {suspect} is at {frames[0]}"
    return suspect, "no stack names a culprit"


def main_frames(text: str) -> tuple[str, ...]:
    """The frames of the main thread in a py-spy dump, innermost first."""
    frames: list[str] = []
    is_main = False
    for line in text.splitlines():
        if line.startswith("Thread "):
            is_main = '"MainThread"' in line
        elif is_main and line.startswith("    ") and not line.startswith("        "):
            frames.append(line.strip())
    return tuple(frames)


def _is_waiting(frames: Sequence[str]) -> bool:
    """Only the innermost frame tells: a model's own code runs below frames of DDP and autograd too."""
    return any(mark in frames[0] for mark in _WAITING)


def _py_spy() -> str | None:
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.exists() else shutil.which("py-spy")
