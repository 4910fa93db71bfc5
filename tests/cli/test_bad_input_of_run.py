from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dougong.cli.launch import take_lock
from dougong.errors import UserError
from dougong.run.layout import RunDirectory
from tests.run.runs import PLAIN, dougong


@pytest.mark.parametrize(
    ("options", "where"),
    [
        (("--webhook", "not-an-address"), "--webhook"),
        (("--webhook", "https://"), "--webhook"),
        (("--checkpoint-dir", "/proc/nothing"), "--checkpoint-dir"),
        (("--checkpoint-dir", "memory://c"), "--checkpoint-dir"),
    ],
)
def test_a_wrong_option_is_told_in_three_parts_before_anything_starts(tmp_path: Path, options, where):
    done = dougong("run", *options, "--run-dir", str(tmp_path / "r"), "--", str(PLAIN), cwd=tmp_path)
    assert done.returncode == 2
    assert f"where: {where}" in done.stderr and "mend:" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "r" / "run.json").exists()


def test_a_module_that_is_not_there_is_the_users_mistake(tmp_path: Path):
    done = dougong("run", "-m", "no_such_module.train", cwd=tmp_path)
    assert done.returncode == 2 and "mend:" in done.stderr


def test_a_run_directory_that_takes_no_lock_is_told_in_three_parts(tmp_path: Path):
    (tmp_path / "lock").mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        take_lock(RunDirectory(tmp_path))


@pytest.mark.parametrize("redirect", [">&-", ">/dev/full", "2>&-"])
def test_closed_or_full_output_shows_no_traceback(tmp_path: Path, redirect):
    command = f"{sys.executable} -m dougong.cli.main discover {redirect}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False, env=os.environ
    )
    assert "Traceback" not in done.stderr
