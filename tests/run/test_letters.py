from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings

from dougong.run.letters import (
    AgentLetter,
    DropCheckpoint,
    ErrorRaised,
    ScriptEnded,
    WorkerLetter,
    post,
    read_from_agent,
    read_from_worker,
    unread,
)
from tests.run.made_messages import values


def ended(step: int) -> ScriptEnded:
    return ScriptEnded(generation=1, rank=0, exit_code=0, step=step)


def test_letters_are_read_in_the_order_of_writing(tmp_path: Path) -> None:
    for step in range(200):
        post(tmp_path / "box", ended(step))
    letters = [read_from_worker(path) for path in unread(tmp_path / "box")]
    assert letters == [ended(step) for step in range(200)]


@given(letter=values(WorkerLetter))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_letter_of_a_worker_comes_back_as_it_was(tmp_path: Path, letter: WorkerLetter) -> None:
    post(tmp_path, letter)
    (path,) = unread(tmp_path)
    assert read_from_worker(path) == letter
    path.unlink()


@given(letter=values(AgentLetter))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_letter_of_an_agent_comes_back_as_it_was(tmp_path: Path, letter: AgentLetter) -> None:
    post(tmp_path, letter)
    (path,) = unread(tmp_path)
    assert read_from_agent(path) == letter
    path.unlink()


def test_an_absent_box_is_empty(tmp_path: Path) -> None:
    assert unread(tmp_path / "absent") == ()


def test_a_letter_that_is_being_written_is_not_seen(tmp_path: Path) -> None:
    (tmp_path / ".00001-1-000001").write_bytes(b"half")
    assert unread(tmp_path) == ()


def test_two_threads_lose_no_letter(tmp_path: Path) -> None:
    def write() -> None:
        for step in range(100):
            post(tmp_path, ended(step))

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(unread(tmp_path)) == 200


def test_a_letter_of_the_other_side_is_not_understood(tmp_path: Path) -> None:
    post(tmp_path, DropCheckpoint(generation=1, rank=0, step=3))
    with pytest.raises(msgspec.ValidationError):
        read_from_worker(unread(tmp_path)[0])


def test_text_of_any_script_survives(tmp_path: Path) -> None:
    letter = ErrorRaised(
        generation=1, rank=0, time_ns=1, error="Fehler: ü \x00 \U0001f4a5", traceback="…", is_broken_collective=False
    )
    post(tmp_path, letter)
    assert read_from_worker(unread(tmp_path)[0]) == letter
