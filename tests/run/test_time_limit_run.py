"""Before the wall time is over a run saves and leaves, and the next start goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from dougong.event.kinds import JobFinished, JobStopped
from tests.run import runs

pytest.importorskip("torch", reason="torch is not installed (extra: train)")
pytestmark = pytest.mark.processes

STEPS = ("--steps", "400")


def test_a_run_saves_before_its_time_limit_and_goes_on_exactly(tmp_path: Path) -> None:
    quiet = runs.run(tmp_path / "quiet" / "run", "--no-score", arguments=(*STEPS, "--step-s", "0"))
    run_dir = tmp_path / "limited" / "run"
    stopped = runs.run(run_dir, "--no-score", "--time-limit", "60s", "--save-before", "50s", arguments=STEPS)
    assert stopped.code == 130, stopped.report
    assert "the time limit is near" in stopped.stderr and stopped.events(JobStopped)
    done = runs.finish(runs.resume(run_dir, "--no-score"), run_dir)
    assert done.code == 0 and done.events(JobFinished), done.report
    assert done.losses(0) == quiet.losses(0) and done.losses(1) == quiet.losses(1)
    assert done.samples() == quiet.samples()
