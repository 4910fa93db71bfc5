"""How far a job gets without a fault: arithmetic instead of an event for each step."""

from __future__ import annotations

import msgspec

from dougong.spec.scenario import SimJob

NS = 1_000_000_000


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """A step takes `step_ns`; after every `interval_steps`-th step a checkpoint holds training up for `stall_ns`."""

    step_ns: int
    stall_ns: int
    interval_steps: int

    def num_checkpoints(self, first_step: int, last_step: int) -> int:
        """How many checkpoints follow the steps `first_step`..`last_step`."""
        return last_step // self.interval_steps - (first_step - 1) // self.interval_steps

    def duration_ns(self, first_step: int, last_step: int) -> int:
        """From the begin of `first_step` to the end of `last_step`, checkpoint included."""
        num_steps = last_step - first_step + 1
        return num_steps * self.step_ns + self.num_checkpoints(first_step, last_step) * self.stall_ns

    def last_finished(self, first_step: int, *, elapsed_ns: int) -> int:
        """The last step finished `elapsed_ns` after `first_step` began; `first_step - 1` if none is. A step followed
        by a checkpoint is finished with it."""
        low, high = first_step - 1, first_step + elapsed_ns // self.step_ns
        while low < high:
            middle = (low + high + 1) // 2
            if self.duration_ns(first_step, middle) <= elapsed_ns:
                low = middle
            else:
                high = middle - 1
        return low

    def last_checkpoint(self, last_step: int) -> int:
        """The newest step with a checkpoint once `last_step` is finished; 0 = none."""
        return last_step // self.interval_steps * self.interval_steps


def pace_of(job: SimJob) -> Pace:
    """The pace of a job of a scenario; an interval in seconds is rounded to whole steps, at least one."""
    policy = job.checkpoint
    interval_steps = policy.interval_steps
    if interval_steps is None:
        assert policy.interval_s is not None
        interval_steps = max(1, round(policy.interval_s / job.step_s))
    return Pace(
        step_ns=max(1, round(job.step_s * NS)), stall_ns=round(policy.stall_s * NS), interval_steps=interval_steps
    )
