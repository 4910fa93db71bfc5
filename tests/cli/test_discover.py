"""`dougong discover`."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from dougong.cli.discover import discover
from dougong.errors import UserError, WorldError
from dougong.spec.cluster import load_cluster


def test_what_is_written_loads_again(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    result = CliRunner().invoke(discover, ["--output", str(path)], catch_exceptions=False)
    assert result.stdout == ""
    assert load_cluster(path).num_nodes == 1
    assert list(tmp_path.iterdir()) == [path]


def test_stdout_is_the_same_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(CliRunner().invoke(discover, [], catch_exceptions=False).stdout, encoding="utf-8")
    assert load_cluster(path).num_nodes == 1


def test_a_file_is_overwritten_only_by_force(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("mine", encoding="utf-8")
    with pytest.raises(UserError, match="exists"):
        CliRunner().invoke(discover, ["--output", str(path)], catch_exceptions=False)
    assert path.read_text(encoding="utf-8") == "mine"
    CliRunner().invoke(discover, ["--output", str(path), "--force"], catch_exceptions=False)
    assert load_cluster(path).num_nodes == 1


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(WorldError, match="cannot write"):
        CliRunner().invoke(discover, ["--output", str(tmp_path / "none" / "c.yaml")], catch_exceptions=False)
