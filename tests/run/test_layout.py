from __future__ import annotations

import os
from pathlib import Path

import pytest

from dougong.run.layout import node_directory, write_atomically


def test_nodes_of_one_name_in_two_racks_have_their_own_directories() -> None:
    paths = {
        node_directory(run, component, memory_root=Path("/dev/shm")).root
        for run in ("r1", "r2")
        for component in ("hall/rack-01/node-01", "hall/rack-02/node-01")
    }
    assert len(paths) == 4
    assert all(len(path.name) < 40 for path in paths)


def test_a_file_is_replaced_as_a_whole_with_the_mode_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "token"
    write_atomically(path, b"one", mode=0o600)
    write_atomically(path, b"two" * 1000, mode=0o600)
    assert path.read_bytes() == b"two" * 1000
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == ["token"]


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_disk_that_fails_leaves_the_old_content(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    write_atomically(path, b"old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["run.json"]
