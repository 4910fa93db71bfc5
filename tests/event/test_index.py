from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dougong.clock import ManualClock
from dougong.errors import StoreDamaged
from dougong.event.index import INDEX_NAME, Wanted, query, scan
from dougong.event.kinds import Cause, NodeRepaired, Recorded, Unknown, WarningRaised
from dougong.event.log import EventLog

QUERIES: list[dict[str, Any]] = [
    {},
    {"kinds": ("WarningRaised",)},
    {"kinds": ("WarningRaised", "Struck")},
    {"component_prefix": "rack-1"},
    {"component_prefix": "rack-1/"},
    {"component_prefix": "%"},
    {"streams": ("b",)},
    {"since_ns": 12, "until_ns": 15},
    {"limit": 3},
    {"limit": 3, "kinds": ("NodeRepaired",), "component_prefix": "rack-10"},
]


def write(directory: Path, *, stream: str, times_ns: range) -> None:
    with EventLog.open(directory, stream=stream, clock=ManualClock(), segment_max_bytes=400, fsync=False) as log:
        for time_ns in times_ns:
            cause = Cause(stream="a", seq=1) if stream == "b" else None
            log.append(NodeRepaired(component=f"rack-{time_ns % 3}"), time_ns=time_ns, cause=cause)
            log.append(WarningRaised(component=f"rack-1{time_ns % 3}/n", text="hot"), time_ns=time_ns)
            log.append_durable(Unknown(kind="Struck", fields_json='{"kind":"Struck"}'), time_ns=time_ns)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write(tmp_path, stream="a", times_ns=range(10, 20))
    write(tmp_path, stream="b", times_ns=range(5, 15))
    return tmp_path


def found(records: Iterator[Recorded]) -> list[tuple[str, int]]:
    return [(record.stream, record.seq) for record in records]


@pytest.mark.parametrize("wanted", QUERIES, ids=str)
def test_the_index_finds_what_reading_everything_finds(directory: Path, wanted: dict[str, Any]) -> None:
    assert found(query(directory, **wanted)) == found(scan(directory, Wanted(**wanted)))
    assert (directory / INDEX_NAME).is_file()


def test_the_index_is_brought_up_to_date_at_a_query(directory: Path) -> None:
    assert len(list(query(directory, kinds=["Struck"]))) == 20
    write(directory, stream="a", times_ns=range(30, 33))
    write(directory, stream="c", times_ns=range(1, 3))
    assert len(list(query(directory, kinds=["Struck"]))) == 25


@pytest.mark.parametrize("contents", [None, b"", b"not a database at all, but long enough to look like one" * 50])
def test_an_index_that_was_deleted_or_damaged_is_rebuilt(directory: Path, contents: bytes | None) -> None:
    before = found(query(directory, component_prefix="rack-1/"))
    index = directory / INDEX_NAME
    index.unlink()
    if contents is not None:
        index.write_bytes(contents)
    assert found(query(directory, component_prefix="rack-1/")) == before
    assert index.read_bytes()[:6] == b"SQLite"


def test_an_index_of_another_version_is_rebuilt(directory: Path) -> None:
    list(query(directory))
    connection = sqlite3.connect(directory / INDEX_NAME)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    assert len(list(query(directory))) == 60


def test_an_index_of_a_log_that_was_replaced_is_rebuilt(directory: Path) -> None:
    list(query(directory))
    for segment in (directory / "a").glob("*.jsonl"):
        segment.unlink()
    write(directory, stream="a", times_ns=range(40, 42))
    assert found(query(directory, since_ns=40)) == [("a", seq) for seq in range(1, 7)]


def test_where_no_index_can_be_written_everything_is_read(directory: Path) -> None:
    (directory / INDEX_NAME).mkdir()
    assert len(list(query(directory, kinds=["Struck"], limit=4))) == 4


def test_a_damaged_log_is_reported_not_hidden(directory: Path) -> None:
    segment = directory / "a" / "00000001.jsonl"
    segment.write_bytes(b"?" + segment.read_bytes()[1:])
    with pytest.raises(StoreDamaged, match=r"00000001\.jsonl:1:"):
        list(query(directory))


def test_a_directory_that_is_not_there_has_no_events_and_gets_no_index(tmp_path: Path) -> None:
    assert list(query(tmp_path / "none")) == []
    assert not (tmp_path / "none").exists()
