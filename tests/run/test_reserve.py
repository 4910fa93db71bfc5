"""What is small and must be said can be said on a full node."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from dougong.run.reserve import SIZE_BYTES, fill_reserve, with_reserve


def full(num_pieces: int):
    """A write that fits once so many pieces of the reserve were given up."""
    tries = iter(range(num_pieces + 1))

    def write() -> str:
        if next(tries) < num_pieces:
            raise OSError(errno.ENOSPC, "No space left on device")
        return "written"

    return write


def test_room_is_made_from_the_reserve_until_it_fits(tmp_path: Path) -> None:
    fill_reserve(tmp_path)
    assert with_reserve(tmp_path, full(3)) == "written"
    assert 0 < (tmp_path / "reserve").stat().st_size < SIZE_BYTES
    fill_reserve(tmp_path)
    assert (tmp_path / "reserve").stat().st_size == SIZE_BYTES


def test_without_a_reserve_the_error_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        with_reserve(tmp_path, full(1))
    fill_reserve(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        with_reserve(tmp_path, full(1000))


def test_another_error_takes_nothing_from_the_reserve(tmp_path: Path) -> None:
    fill_reserve(tmp_path)
    with pytest.raises(OSError, match="missing"):
        with_reserve(tmp_path, lambda: (tmp_path / "missing" / "file").write_text("x"))
    assert (tmp_path / "reserve").stat().st_size == SIZE_BYTES
