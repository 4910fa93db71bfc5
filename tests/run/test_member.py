"""Several launchers that form one run, as `srun dougong run` starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dougong.event.kinds import JobFinished, JobStopped, NodeJoined, StateRestored
from tests.run import runs

pytest.importorskip("torch", reason="torch is not installed (extra: train)")
pytestmark = pytest.mark.processes


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "run"
    yield path
    runs.end_all(path)


def task(run_dir: Path, rank: int, *arguments: str, job: str = "77") -> subprocess.Popen[str]:
    """One task of a Slurm step on two hosts; the hosts are both this one."""
    return subprocess.Popen(
        [sys.executable, "-m", "dougong.cli.main", "run", "--run-dir", str(run_dir), "--", str(runs.SMALL), *arguments],
        cwd=run_dir.parent,
        env={
            **os.environ,
            "SLURM_JOB_ID": job,
            "SLURM_PROCID": str(rank),
            "SLURM_NTASKS": "2",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": "127.0.0.[1-2]",
            "GLOO_SOCKET_IFNAME": "lo",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> int:
    process.communicate(timeout=30)
    return process.returncode


def test_the_tasks_of_a_slurm_step_form_one_run(run_dir: Path) -> None:
    follower, head = task(run_dir, 1, "--steps", "20"), task(run_dir, 0, "--steps", "20")
    done = runs.finish(head, run_dir)
    assert done.code == 0, done.report
    assert ended(follower) == 0
    assert {event.component for event in done.events(NodeJoined)} == {"slurm-77-0/127.0.0.1", "slurm-77-0/127.0.0.2"}
    assert done.events(JobFinished)[0].step == 20
    assert runs.left_behind(run_dir) == []


def test_a_requeued_step_goes_on_where_it_stopped(run_dir: Path) -> None:
    head, follower = task(run_dir, 0), task(run_dir, 1)
    runs.wait_for_step(run_dir, 10)
    for process in (head, follower):
        process.send_signal(signal.SIGTERM)
    # Slurm signals every process of a step, not the launchers alone
    for pid in runs.living(run_dir):
        os.kill(pid, signal.SIGTERM)
    stopped = runs.finish(head, run_dir)
    assert stopped.code == 130, stopped.report
    assert ended(follower) == 130
    (event,) = stopped.events(JobStopped)
    follower, head = task(run_dir, 1, job="78"), task(run_dir, 0, job="78")
    done = runs.finish(head, run_dir)
    assert done.code == 0, done.report
    assert ended(follower) == 0
    assert done.events(NodeJoined)[-1].component.startswith("slurm-78-0/"), "the hosts of the new job"
    assert done.events(StateRestored)[-1].step == event.step
