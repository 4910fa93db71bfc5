from __future__ import annotations

from pathlib import Path

import pytest

from dougong.errors import UserError
from dougong.run.layout import RunDirectory
from dougong.run.settings import load_settings, run_directory, save_settings
from tests.run.made_settings import settings_at


def test_settings_come_back_as_they_were(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    save_settings(RunDirectory(tmp_path), settings)
    assert load_settings(RunDirectory(tmp_path)) == settings
    assert settings.world_size == 4


def test_a_directory_of_something_else_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_settings(RunDirectory(tmp_path))
    assert "not a run directory" in caught.value.what and "runs/latest" in caught.value.mend


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"not json", b'{"format_version": 99}', b'{"format_version": "1"}']
)
def test_another_format_or_none_is_a_mistake_that_says_how_to_go_on(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_settings(RunDirectory(tmp_path))
    assert "this program reads 1" in caught.value.what and caught.value.mend


def test_a_file_of_this_format_that_is_not_whole_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(b'{"format_version": 1, "run_id": "r"}')
    with pytest.raises(UserError, match=r"run\.json cannot be read"):
        load_settings(RunDirectory(tmp_path))


def test_a_run_directory_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_directory(Path("runs/a")).root == tmp_path / "runs" / "a"
