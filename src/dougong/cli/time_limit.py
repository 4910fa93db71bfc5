"""The wall-time limit of a job: when to save before it, and how to be put back into the queue afterwards."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping

from dougong.errors import UserError
from dougong.units import parse_duration_s

_REQUEUE_S = 30.0


def stop_at_s(
    *, time_limit: str | None, save_before: str, environment: Mapping[str, str], now_s: float
) -> float | None:
    """When to have the ranks save and leave, on the wall clock; None = no limit is known.

    `--time-limit` counts from now; without it Slurm's end of the job is taken (SLURM_JOB_END_TIME, seconds since the
    epoch; source: sbatch(1), "OUTPUT ENVIRONMENT VARIABLES"). Raises UserError for what is no duration, or no time.
    """
    before_s = _duration_s(save_before, option="--save-before")
    if time_limit is not None:
        end_s = now_s + _duration_s(time_limit, option="--time-limit")
    elif environment.get("SLURM_JOB_END_TIME", "").isdecimal():
        end_s = float(environment["SLURM_JOB_END_TIME"])
    else:
        return None
    if end_s - before_s <= now_s:
        if time_limit is None:
            return None  # a job of a few minutes: there is nothing to gain by ending it at once
        raise UserError(
            f"the limit is {time_limit}, and the save would begin {save_before} before it: at once",
            where="--time-limit, --save-before",
            mend="give a longer limit, or save later",
        )
    return end_s - before_s


def _duration_s(text: str, *, option: str) -> float:
    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise UserError(str(error), where=option, mend="write a time such as 90s, 30m or 4h") from error


def requeue(environment: Mapping[str, str]) -> str:
    """Put this Slurm job back into the queue; what came of it, in words."""
    job = environment.get("SLURM_JOB_ID")
    if job is None or shutil.which("scontrol") is None:
        return "not put back into the queue: this is no Slurm job (start it again with --resume)"
    try:
        done = subprocess.run(
            ["scontrol", "requeue", job], capture_output=True, text=True, timeout=_REQUEUE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not put back into the queue: {error}"
    if done.returncode != 0:
        return f"not put back into the queue: {done.stderr.strip() or done.returncode}"
    return f"job {job} is back in the queue"
