from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dougong.clock import ManualClock
from dougong.errors import StoreDamaged, StoreWriteFailed, UserError
from dougong.event.kinds import Cause, NodeRepaired, Recorded
from dougong.event.log import EventLog
from dougong.event.segment import segment_names
from dougong.event.store import EventStore, read


def open_log(directory: Path, *, stream: str = "run", segment_max_bytes: int = 1 << 26) -> EventLog:
    return EventLog.open(directory, stream=stream, clock=ManualClock(7), segment_max_bytes=segment_max_bytes)


def event(number: int) -> NodeRepaired:
    return NodeRepaired(component=f"node-{number}")


def seqs(directory: Path) -> list[int]:
    return [record.seq for record in read(directory)]


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """A disk that is full: a write past this size of a file is cut short, and the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_record_comes_back_as_append_returned_it(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        first = log.append(event(1))
        second = log.append(event(2), cause=Cause(stream="run", seq=1), time_ns=99)
    assert first == Recorded(stream="run", seq=1, time_ns=7, event=event(1))
    assert list(read(tmp_path)) == [first, second]


def test_nothing_is_on_disk_before_the_commit_and_all_of_it_after(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.append_many([event(1), event(2)])
        assert seqs(tmp_path) == []
        assert (log.last_seq, log.durable_seq) == (2, 0)
        log.commit()
        assert seqs(tmp_path) == [1, 2]
        assert log.durable_seq == 2


def test_seq_goes_on_without_a_gap_after_reopening(tmp_path: Path) -> None:
    for life in range(1, 4):
        with open_log(tmp_path) as log:
            assert log.append(event(life)).seq == life
    assert seqs(tmp_path) == [1, 2, 3]


def test_a_second_writer_of_a_stream_is_refused_and_one_of_another_stream_is_not(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        with pytest.raises(UserError, match="being written by another process"):
            open_log(tmp_path)
        with open_log(tmp_path, stream="other") as other:
            other.append(event(1))
            other.commit()
            assert log.streams() == ("other", "run")
    open_log(tmp_path).close()


@pytest.mark.parametrize("stream", ["", ".", "../up", "a/b", "a b", "-x"])
def test_a_stream_name_that_is_not_a_plain_folder_name_is_refused(tmp_path: Path, stream: str) -> None:
    with pytest.raises(UserError, match="is not a stream name"):
        open_log(tmp_path, stream=stream)


def test_a_directory_that_cannot_be_made_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="events cannot be written"):
        open_log(tmp_path / "file")


def test_segments_are_named_by_their_first_seq_and_read_as_one(tmp_path: Path) -> None:
    with open_log(tmp_path, segment_max_bytes=300) as log:
        for number in range(1, 11):
            log.append_durable(event(number))
    names = segment_names(tmp_path / "run")
    assert len(names) > 2
    assert names[0] == "00000001.jsonl"
    assert seqs(tmp_path) == list(range(1, 11))
    with open_log(tmp_path, segment_max_bytes=300) as log:
        assert log.append(event(11)).seq == 11


def test_a_last_line_torn_at_any_byte_is_cut_kept_aside_and_written_over(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.append_many([event(1), event(2)])
    segment = tmp_path / "run" / "00000001.jsonl"
    whole = segment.read_bytes()
    begin = whole.index(b"\n") + 1
    for end in range(begin, len(whole)):
        segment.write_bytes(whole[:end])
        torn = segment.with_suffix(".torn")
        torn.unlink(missing_ok=True)
        assert seqs(tmp_path) == [1], "a reader leaves the torn line out"
        with open_log(tmp_path) as log:
            assert log.repaired_bytes == end - begin
            assert log.append(event(2)).seq == 2
        assert segment.read_bytes() == whole
        assert end == begin or torn.read_bytes() == whole[begin:end] + b"\n"


def test_the_only_line_torn_leaves_an_empty_log(tmp_path: Path) -> None:
    open_log(tmp_path).close()
    (tmp_path / "run" / "00000001.jsonl").write_bytes(b'{"stream":"ru')
    with open_log(tmp_path) as log:
        assert log.append(event(1)).seq == 1


def test_a_last_line_of_pages_never_written_is_torn_too(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.append(event(1))
    segment = tmp_path / "run" / "00000001.jsonl"
    whole = segment.read_bytes()
    segment.write_bytes(whole + b'\0\0\0\0,"x":1}\n')
    with open_log(tmp_path) as log:
        assert log.repaired_bytes > 0
    assert segment.read_bytes() == whole


def test_a_roll_that_a_crash_cut_short_goes_on_in_the_empty_segment(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.append_many([event(1), event(2)])
    (tmp_path / "run" / "00000003.jsonl").touch()
    with open_log(tmp_path) as log:
        assert log.append(event(3)).seq == 3
    assert seqs(tmp_path) == [1, 2, 3]


def test_a_damaged_line_in_the_middle_is_named_by_path_and_line(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.append_many([event(number) for number in range(1, 6)])
    segment = tmp_path / "run" / "00000001.jsonl"
    lines = segment.read_bytes().splitlines(keepends=True)
    segment.write_bytes(b"".join([*lines[:2], lines[2].replace(b'"kind"', b'"kin"'), *lines[3:]]))
    with pytest.raises(StoreDamaged) as raised:
        seqs(tmp_path)
    assert (raised.value.path, raised.value.line) == (str(segment), 3)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_line_that_vanished_is_damage(tmp_path: Path, lost: int) -> None:
    with open_log(tmp_path) as log:
        log.append_many([event(number) for number in range(1, 5)])
    segment = tmp_path / "run" / "00000001.jsonl"
    lines = segment.read_bytes().splitlines(keepends=True)
    segment.write_bytes(b"".join(lines[:lost] + lines[lost + 1 :]))
    with pytest.raises(StoreDamaged, match=f":{lost + 1}: seq {lost + 2} where {lost + 1} is due"):
        seqs(tmp_path)


def test_a_segment_that_vanished_or_ends_in_half_a_line_is_damage(tmp_path: Path) -> None:
    with open_log(tmp_path, segment_max_bytes=100) as log:
        for number in range(1, 4):
            log.append_durable(event(number))
    second = tmp_path / "run" / "00000002.jsonl"
    whole = second.read_bytes()
    second.write_bytes(whole[:-5])
    with pytest.raises(StoreDamaged, match="without its end"):
        seqs(tmp_path)
    second.unlink()
    with pytest.raises(StoreDamaged, match="begins with seq 2 is missing"):
        seqs(tmp_path)


def test_a_whole_last_line_that_is_no_event_is_not_cut_but_refused(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.append_many([event(1), event(2)])
    segment = tmp_path / "run" / "00000001.jsonl"
    damaged = segment.read_bytes()[:-3] + b"?}\n"
    segment.write_bytes(damaged)
    with pytest.raises(StoreDamaged, match=r"jsonl:2: "):
        open_log(tmp_path)
    assert segment.read_bytes() == damaged
    with pytest.raises(StoreDamaged):  # and the lock was given back
        open_log(tmp_path)


@pytest.mark.parametrize("room_bytes", [0, 1, 60, 150])
def test_a_full_disk_acknowledges_nothing_and_a_later_commit_writes_all(tmp_path: Path, room_bytes: int) -> None:
    with open_log(tmp_path) as log:
        log.append_durable(event(1))
        segment = tmp_path / "run" / "00000001.jsonl"
        before = segment.read_bytes()
        log.append_many([event(2), event(3)])
        with files_of_at_most(len(before) + room_bytes), pytest.raises(StoreWriteFailed, match="2 events not written"):
            log.commit()
        assert log.durable_seq == 1
        assert segment.read_bytes() == before
        assert log.append(event(4)).seq == 4
        log.commit()
    assert seqs(tmp_path) == [1, 2, 3, 4]


def test_a_disk_that_is_full_at_a_roll_loses_nothing(tmp_path: Path) -> None:
    with open_log(tmp_path, segment_max_bytes=100) as log:
        log.append_durable(event(1))
        log.append(event(2))
        with files_of_at_most(10), pytest.raises(StoreWriteFailed):
            log.commit()
        log.append(event(3))
        log.commit()
    assert seqs(tmp_path) == [1, 2, 3]


def test_a_commit_cut_short_by_an_interrupt_writes_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_fd: int) -> None:
        raise KeyboardInterrupt

    with open_log(tmp_path) as log:
        log.append_durable(event(1))
        log.append_many([event(2), event(3)])
        monkeypatch.setattr("dougong.event.writer.os.fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            log.commit()
        monkeypatch.undo()
        log.append(event(4))
    assert seqs(tmp_path) == [1, 2, 3, 4]


def test_closing_lets_go_of_the_stream_even_when_the_disk_is_full(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.append(event(1))
    with files_of_at_most(0), pytest.raises(StoreWriteFailed):
        log.close()
    open_log(tmp_path).close()
    log.close()


def test_threads_that_wait_for_their_own_events_share_commits_and_lose_none(tmp_path: Path) -> None:
    num_threads, num_each = 8, 25
    durable: list[tuple[int, int]] = []

    with open_log(tmp_path, segment_max_bytes=2000) as log:

        def write(thread: int) -> None:
            for number in range(num_each):
                record = log.append_durable(event(thread * 1000 + number))
                durable.append((record.seq, log.durable_seq))

        threads = [threading.Thread(target=write, args=(thread,)) for thread in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seqs(tmp_path) == list(range(1, num_threads * num_each + 1))
    assert all(seq <= known for seq, known in durable)


def test_an_event_that_cannot_be_encoded_takes_no_seq(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        with pytest.raises(TypeError):
            log.append(NodeRepaired(component=object()))  # type: ignore[arg-type]
        assert log.append(event(1)).seq == 1


def test_the_log_is_an_event_store(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        store: EventStore = log
        store.append_durable(event(1))
        assert [record.seq for record in store.read()] == [1]
