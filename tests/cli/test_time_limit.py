from __future__ import annotations

import stat
from pathlib import Path

import pytest

from dougong.cli.time_limit import requeue, stop_at_s
from dougong.errors import UserError


@pytest.mark.parametrize(
    ("time_limit", "environment", "expected"),
    [
        (None, {}, None),
        ("4h", {}, 1000 + 4 * 3600 - 120),
        ("10m", {"SLURM_JOB_END_TIME": "9999999"}, 1000 + 600 - 120),
        (None, {"SLURM_JOB_END_TIME": "5000"}, 4880),
        (None, {"SLURM_JOB_END_TIME": "1050"}, None),
        (None, {"SLURM_JOB_END_TIME": "soon"}, None),
    ],
)
def test_the_limit_is_given_or_slurm_s(
    time_limit: str | None, environment: dict[str, str], expected: float | None
) -> None:
    assert stop_at_s(time_limit=time_limit, save_before="120s", environment=environment, now_s=1000.0) == expected


@pytest.mark.parametrize(("time_limit", "save_before"), [("1m", "2m"), ("soon", "2m"), ("1h", "2x")])
def test_a_limit_that_cannot_be_is_refused(time_limit: str, save_before: str) -> None:
    with pytest.raises(UserError):
        stop_at_s(time_limit=time_limit, save_before=save_before, environment={}, now_s=0.0)


def scontrol(folder: Path, *, code: int) -> None:
    path = folder / "scontrol"
    path.write_text(f'#!/bin/sh\necho "$@" > {folder}/asked\necho no such job >&2\nexit {code}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_a_slurm_job_is_put_back_into_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol(tmp_path, code=0)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert requeue({"SLURM_JOB_ID": "17"}) == "job 17 is back in the queue"
    assert (tmp_path / "asked").read_text() == "requeue 17\n"


def test_why_it_was_not_put_back_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no Slurm job" in requeue({})
    scontrol(tmp_path, code=1)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert requeue({"SLURM_JOB_ID": "17"}) == "not put back into the queue: no such job"
