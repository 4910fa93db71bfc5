from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dougong.clock import ManualClock
from dougong.errors import StoreDamaged
from dougong.event.kinds import NodeRepaired
from dougong.event.log import EventLog
from dougong.event.store import read
from dougong.event.tail import Tail, follow

EVENT = NodeRepaired(component="n")


def open_log(directory: Path, stream: str = "a") -> EventLog:
    return EventLog.open(directory, stream=stream, clock=ManualClock(), segment_max_bytes=300, fsync=False)


def test_each_poll_brings_only_what_is_new_over_segments_and_streams(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "events")
    assert tail.poll() == []
    seen: list[tuple[str, int]] = []
    with open_log(tmp_path / "events") as log, open_log(tmp_path / "events", "b") as other:
        for number in range(20):
            log.append_durable(EVENT)
            if number == 10:
                other.append_durable(EVENT)
            if number % 3 == 0:
                seen.extend((record.stream, record.seq) for record in tail.poll())
    seen.extend((record.stream, record.seq) for record in tail.poll())
    assert tail.poll() == []
    assert sorted(seen) == sorted((record.stream, record.seq) for record in read(tmp_path / "events"))
    assert len(seen) == 21


def test_a_half_written_line_waits_for_its_end(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.append_many([EVENT, EVENT])
    segment = tmp_path / "a" / "00000001.jsonl"
    whole = segment.read_bytes()
    tail = Tail(tmp_path)
    seen: list[int] = []
    for end in range(len(whole) + 1):
        segment.write_bytes(whole[:end])
        seen.extend(record.seq for record in tail.poll())
        assert len(seen) == whole[:end].count(b"\n")


def test_a_tail_of_some_streams_does_not_see_the_others(tmp_path: Path) -> None:
    with open_log(tmp_path) as log, open_log(tmp_path, "b") as other:
        log.append(EVENT)
        other.append(EVENT)
    assert [record.stream for record in Tail(tmp_path, streams=["b"]).poll()] == ["b"]


def test_damage_in_one_stream_loses_nothing_of_another(tmp_path: Path) -> None:
    for stream in ("a", "b"):
        with open_log(tmp_path, stream) as log:
            log.append(EVENT)
    damaged = tmp_path / "b" / "00000001.jsonl"
    whole = damaged.read_bytes()
    damaged.write_bytes(b"?" + whole[1:])
    tail = Tail(tmp_path)
    with pytest.raises(StoreDamaged):
        tail.poll()
    damaged.write_bytes(whole)
    assert len(tail.poll()) == 2


def test_following_ends_after_what_was_there_when_it_was_told_to_stop(tmp_path: Path) -> None:
    answers = iter([False, False, True])
    log = open_log(tmp_path)

    def stop() -> bool:
        log.append_durable(EVENT)
        return next(answers)

    assert [record.seq for record in follow(tmp_path, poll_s=0.0, stop=stop)] == [1, 2, 3]
    log.close()


@given(st.lists(st.integers(0, 9), max_size=8))
def test_polling_at_any_moments_brings_the_same_as_reading_once(batches: list[int]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        tail = Tail(Path(directory))
        seen: list[int] = []
        with open_log(Path(directory)) as log:
            for size in batches:
                log.append_many([EVENT] * size)
                log.commit()
                seen.extend(record.seq for record in tail.poll())
        assert seen == list(range(1, sum(batches) + 1))
