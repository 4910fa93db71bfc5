from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from dougong.run import stacks
from dougong.run.stacks import main_frames, name_culprit, take_stack

CAPTURED = Path(__file__).with_name("stacks")
"""Dumps of py-spy 0.4.3 of two ranks of a DDP script over gloo. Rank 1 takes a lock twice in the model's `forward`,
or in the body of the step, or sleeps before the `all_reduce` that rank 0 is in."""


def captured(how: str) -> dict[int, str]:
    return {rank: (CAPTURED / f"{how}-{rank}.txt").read_text() for rank in (0, 1)}


@pytest.mark.parametrize(
    ("how", "where"),
    [
        ("forward", "Net.forward (train.py:11)"),
        ("body", "train_step (train.py:15)"),
        ("reduce", "train_step (train.py:21)"),
    ],
)
@pytest.mark.parametrize("suspect", [0, 1])
def test_the_rank_that_makes_the_others_wait_is_named_whoever_was_suspected(how: str, where: str, suspect: int) -> None:
    rank, verdict = name_culprit(captured(how), suspect=suspect)
    assert rank == 1
    assert verdict == f"rank 1 is at {where}; the others wait for it"


def test_with_several_outside_of_a_collective_the_suspect_stays() -> None:
    both = {0: captured("body")[1], 1: captured("forward")[1]}
    assert name_culprit(both, suspect=0) == (0, "rank 0 is at train_step (train.py:15)")


def test_with_all_in_a_collective_the_suspect_stays() -> None:
    all_waiting = {rank: captured("reduce")[0] for rank in (0, 1)}
    rank, verdict = name_culprit(all_waiting, suspect=1)
    assert rank == 1 and "all_reduce" in verdict


@pytest.mark.parametrize(
    "texts", [{}, {0: "", 1: "no stack: py-spy is not installed"}, {1: "Error: Permission denied"}]
)
def test_without_a_stack_the_suspect_stays_and_it_is_said(texts: dict[int, str]) -> None:
    assert name_culprit(texts, suspect=1) == (1, "no stack names a culprit")


def test_a_rank_without_a_stack_is_not_the_culprit_of_the_others() -> None:
    assert name_culprit({0: "Error: gone", 1: captured("body")[1]}, suspect=0)[0] == 1


def test_frames_are_those_of_the_main_thread_innermost_first() -> None:
    text = captured("forward")[1]
    other = 'Thread 7 (idle): "dougong-persist"\n    wait (threading.py:327)\n'
    assert main_frames(text) == main_frames(f"{text}{other}") == main_frames(f"{other}{text}")
    assert main_frames(text)[0].startswith("Net.forward") and main_frames(text)[-1].startswith("<module>")


def test_local_variables_in_a_dump_are_no_frames() -> None:
    text = 'Thread 1 (idle): "MainThread"\n    f (a.py:1)\n        Arguments:\n            x: 3\n    g (a.py:2)\n'
    assert main_frames(text) == ("f (a.py:1)", "g (a.py:2)")


HUNG = """
import threading
def stuck(lock):
    print("ready", flush=True)
    lock.acquire()
lock = threading.Lock()
lock.acquire()
stuck(lock)
"""


@pytest.mark.processes
def test_the_stack_of_a_deadlocked_process_names_the_line(tmp_path: Path) -> None:
    if stacks._py_spy() is None:  # pyright: ignore[reportPrivateUsage]
        pytest.skip("py-spy is not installed")
    script = tmp_path / "hung.py"
    script.write_text(HUNG)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        text = asyncio.run(take_stack(child.pid))
        child.kill()
    if "Permission" in text or "ptrace" in text:
        pytest.skip("py-spy may not look into another process here")
    frames = main_frames(text)
    assert frames and frames[0].startswith("stuck (") and frames[0].endswith("hung.py:5)")


def test_a_process_that_is_gone_or_a_program_that_is_absent_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    assert main_frames(asyncio.run(take_stack(child.pid))) == ()
    monkeypatch.setattr(stacks, "_py_spy", lambda: None)
    assert "py-spy is not installed" in asyncio.run(take_stack(1))
