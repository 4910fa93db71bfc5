from __future__ import annotations

import math
import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dougong import telemetry
from dougong.clock import ManualClock
from dougong.telemetry import embedded

_I64 = st.integers(min_value=-(2**63), max_value=2**63 - 1)
_NAMES = st.text(min_size=1, max_size=20).filter(lambda text: not any("\ud800" <= char <= "\udfff" for char in text))


def _bits(values: object) -> list[bytes]:
    return [struct.pack("<d", value) for value in values]  # type: ignore[attr-defined]


@given(st.lists(st.tuples(_I64, _I64, st.floats(allow_nan=True)), max_size=40), _NAMES)
def test_what_is_read_is_bit_for_bit_what_was_appended(rows: list[tuple[int, int, float]], name: str) -> None:
    times, indices, values = [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        writer = telemetry.SampleWriter.open(Path(folder), ManualClock())
        writer.append(name, times, indices, values)
        writer.close()
        samples = telemetry.read(Path(folder), name)
        if rows:
            assert telemetry.series(Path(folder)) == (name,)
    assert list(samples.times_ns) == times
    assert list(samples.indices) == indices
    assert _bits(samples.values) == _bits(values)


@pytest.mark.parametrize("torn_bytes", range(1, 24))
def test_a_torn_tail_is_ignored_by_readers_and_cut_by_the_next_writer(tmp_path: Path, torn_bytes: int) -> None:
    _append(tmp_path, 1, 0.1)
    _append(tmp_path, 2, 0.2)
    path = tmp_path / embedded.file_name("loss/rank-0")
    path.write_bytes(path.read_bytes()[:-torn_bytes])
    assert list(telemetry.read(tmp_path, "loss/rank-0").indices) == [1]
    _append(tmp_path, 3, 0.3)
    samples = telemetry.read(tmp_path, "loss/rank-0")
    assert (list(samples.indices), list(samples.values)) == ([1, 3], [0.1, 0.3])


def test_the_window_is_closed_at_its_begin_and_open_at_its_end(tmp_path: Path) -> None:
    for step in range(5):
        _append(tmp_path, step, math.pi * step)
    store = telemetry.EmbeddedStore(tmp_path)
    assert list(store.read("loss/rank-0", since_ns=10, until_ns=30).indices) == [1, 2]
    assert list(store.read("loss/rank-0", since_ns=30).indices) == [3, 4]
    assert list(store.read("loss/rank-0", until_ns=10).indices) == [0]


def test_samples_reach_the_file_once_a_second_without_a_flush(tmp_path: Path) -> None:
    clock = ManualClock()
    writer = telemetry.SampleWriter.open(tmp_path, clock)
    writer.append("a", [0], [0], [1.0])
    assert len(telemetry.read(tmp_path, "a")) == 0
    clock.advance_s(1)
    writer.append("b", [0], [0], [1.0])
    assert len(telemetry.read(tmp_path, "a")) == len(telemetry.read(tmp_path, "b")) == 1


def test_a_series_or_a_directory_that_is_absent_holds_no_samples(tmp_path: Path) -> None:
    assert len(telemetry.read(tmp_path / "none", "loss")) == 0
    assert telemetry.series(tmp_path / "none") == ()


@pytest.mark.parametrize("name", ["", "x" * 250, "/" * 90])
def test_a_name_that_no_file_can_carry_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="cannot name a series"):
        telemetry.SampleWriter.open(tmp_path, ManualClock()).append(name, [0], [0], [0.0])


def test_columns_of_different_lengths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2 times, 1 indices, 1 values"):
        telemetry.SampleWriter.open(tmp_path, ManualClock()).append("a", [0, 1], [0], [0.0])


def _append(directory: Path, step: int, value: float) -> None:
    writer = telemetry.SampleWriter.open(directory, ManualClock())
    writer.append("loss/rank-0", [step * 10], [step], [value])
    writer.close()
