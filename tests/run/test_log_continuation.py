"""Experiment logs go on: loggers find their run again by the environment, and no step is shown twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from dougong.run import log_continuation
from dougong.run.layout import RunDirectory
from dougong.run.log_continuation import TensorBoardLog, keep_mlflow_run, log_directory, log_variables


def test_loggers_are_told_their_run(tmp_path: Path) -> None:
    found = log_variables(RunDirectory(tmp_path), run_id="ab12", rank=0, environment={})
    assert found == {
        "WANDB_RUN_ID": "dougong-ab12",
        "WANDB_RESUME": "allow",
        "TENSORBOARD_LOGGING_DIR": str(tmp_path / "tracking"),
    }


def test_what_the_user_has_set_stays(tmp_path: Path) -> None:
    own = {"WANDB_RUN_ID": "mine", "TENSORBOARD_LOGGING_DIR": "/logs"}
    assert log_variables(RunDirectory(tmp_path), run_id="ab12", rank=0, environment=own) == {}


def test_an_mlflow_run_is_known_once_the_server_has_made_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Place:
        run = RunDirectory(tmp_path)
        rank = 1

    monkeypatch.setattr(log_continuation, "worker_place", lambda: Place)
    keep_mlflow_run("0af3")
    found = log_variables(RunDirectory(tmp_path), run_id="ab12", rank=1, environment={})
    assert (found["MLFLOW_RUN_ID"], found["WANDB_RUN_ID"]) == ("0af3", "dougong-ab12-rank-1")
    assert "MLFLOW_RUN_ID" not in log_variables(RunDirectory(tmp_path), run_id="ab12", rank=0, environment={})
    assert log_directory() == tmp_path / "tracking"


def test_without_a_run_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keep_mlflow_run("0af3")
    assert list(tmp_path.iterdir()) == []
    assert log_directory() == Path("tracking")


def test_a_curve_shows_the_steps_done_again_once(tmp_path: Path) -> None:
    """Read by TensorBoard's own reader: within a process, and after a restart that lost what was not flushed."""
    pytest.importorskip("torch", reason="torch is not installed (extra: train)")
    pytest.importorskip("tensorboard", reason="tensorboard is not installed (extra: hf)")
    from torch.utils.tensorboard import SummaryWriter

    from tests.frameworks.tensorboard_events import scalars

    first = SummaryWriter(str(tmp_path))
    log = TensorBoardLog(first)
    for step in range(1, 8):
        first.add_scalar("loss", 100.0 + step, step)
    log.go_back(4)
    for step in (5, 6):
        first.add_scalar("loss", 200.0 + step, step)
    log.flush()
    second = SummaryWriter(str(tmp_path), filename_suffix=".later")
    TensorBoardLog(second).go_back(5)
    for step in (6, 7):
        second.add_scalar("loss", 300.0 + step, step)
    second.close()
    expected = [(1, 101.0), (2, 102.0), (3, 103.0), (4, 104.0), (5, 205.0), (6, 306.0), (7, 307.0)]
    assert scalars(tmp_path, "loss") == expected
    first.close()
