from __future__ import annotations

from pathlib import Path

import pytest

from dougong.clock import ManualClock
from dougong.event.kinds import Cause, NodeRepaired
from dougong.event.log import EventLog
from dougong.event.store import read

EVENT = NodeRepaired(component="n")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Stream a: times 10..19 in small segments. Stream b: times 3..5, its first caused by a#2."""
    with EventLog.open(tmp_path, stream="a", clock=ManualClock(), segment_max_bytes=200) as log:
        for time_ns in range(10, 20):
            log.append_durable(EVENT, time_ns=time_ns)
    with EventLog.open(tmp_path, stream="b", clock=ManualClock()) as log:
        log.append(EVENT, time_ns=3, cause=Cause(stream="a", seq=2))
        log.append_many([EVENT, EVENT], time_ns=5)
    return tmp_path


def places(records: object) -> list[str]:
    return [f"{record.stream}{record.seq}" for record in records]  # type: ignore[attr-defined]


def test_reading_merges_the_streams_in_the_one_order(directory: Path) -> None:
    assert places(read(directory))[:6] == ["a1", "a2", "b1", "b2", "b3", "a3"]


def test_reading_some_streams_leaves_out_the_others(directory: Path) -> None:
    assert places(read(directory, streams=["b", "never"])) == ["b1", "b2", "b3"]


@pytest.mark.parametrize("after", range(11))
def test_reading_behind_a_seq_begins_right_there_in_any_segment(directory: Path, after: int) -> None:
    records = read(directory, after={"a": after, "b": 3})
    assert places(records) == [f"a{seq}" for seq in range(after + 1, 11)]


def test_a_directory_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert list(read(tmp_path / "none")) == []


def test_folders_and_files_that_are_no_streams_are_passed_over(directory: Path) -> None:
    (directory / "empty").mkdir()
    (directory / "a" / "notes.txt").write_text("x")
    (directory / "index.sqlite3").write_text("x")
    assert len(list(read(directory))) == 13
