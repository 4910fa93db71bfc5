"""How often to save, in steps: pure rules from what a save was seen to cost and how often the job was interrupted.

All ranks must save after the same steps, so a rhythm begins at a step that none of them has reached. Between two
rhythms nothing else changes: a step is saved if its number is a multiple of the interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from dougong.cost.interval import daly_interval_s
from dougong.cost.reliability import job_mttf_s
from dougong.run.settings import SaveRule

FAILURES_PER_1000_NODE_DAYS = 6.5
"""When nobody tells better. Source: Kokolis et al., HPCA'25 (arXiv 2410.21680), RSC-1."""

_START_MEMORY_STEPS = 5
_START_DURABLE_STEPS = 50
_FEW_SAVES = 3
_MAX_WRITING_RATIO = 0.5
_NOTICED_RATIO = 1.25
_MIN_NOTICE_STEPS = 2
_NOTICE_S = 3.0


class FailureBelief(msgspec.Struct, frozen=True, kw_only=True):
    """What is believed of a constant rate of failures: a Gamma distribution, `num` failures in `observed_s`.

    Source: the conjugate prior of a Poisson rate, Gelman et al., "Bayesian Data Analysis", 3rd ed., section 2.6. A
    prior counts as one failure, so the job's own record soon outweighs it.
    """

    num: float
    observed_s: float

    @property
    def mtbf_s(self) -> float:
        """One over the mean of the rate."""
        return self.observed_s / self.num

    def after(self, *, num_failures: int, duration_s: float) -> FailureBelief:
        """The belief once so many failures were seen in `duration_s` more."""
        return FailureBelief(num=self.num + num_failures, observed_s=self.observed_s + duration_s)


class JobStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step that all ranks have finished. `cycle_s` since the end of the step before, `stall_s` of it in a save."""

    step: int
    cycle_s: float
    stall_s: float


class SaveCost(msgspec.Struct, frozen=True, kw_only=True):
    """What one save costs training: `stall_s` at a standstill, `slowed_s` by steps that took longer beside it.

    `busy_s` is how long it keeps memory or storage busy, training or not.
    """

    stall_s: float
    slowed_s: float
    busy_s: float = 0.0

    @property
    def cost_s(self) -> float:
        return self.stall_s + self.slowed_s


class Rhythm(msgspec.Struct, frozen=True, kw_only=True):
    """Save to memory and durably after every so many steps."""

    memory_every_steps: int
    durable_every_steps: int
    reason: str = ""

    def is_like(self, other: Rhythm) -> bool:
        """Not different enough to be worth a change: intervals near the best one cost nearly the same."""
        return _is_near(self.memory_every_steps, other.memory_every_steps) and _is_near(
            self.durable_every_steps, other.durable_every_steps
        )


def prior_belief(rule: SaveRule, *, num_nodes: int) -> FailureBelief:
    """Before anything was seen: `rule.mtbf_s`, or what published clusters of so many nodes have."""
    known_s = job_mttf_s(num_nodes=num_nodes, rate_per_1000_node_days=FAILURES_PER_1000_NODE_DAYS)
    return FailureBelief(num=1.0, observed_s=rule.mtbf_s or known_s)


def first_rhythm(rule: SaveRule) -> Rhythm:
    """Before a save was measured."""
    return Rhythm(
        memory_every_steps=rule.memory_every_steps or _START_MEMORY_STEPS,
        durable_every_steps=rule.durable_every_steps or _START_DURABLE_STEPS,
        reason="as told" if not is_chosen(rule) else "nothing measured yet",
    )


def is_chosen(rule: SaveRule) -> bool:
    """Is one of the intervals left to us?"""
    return not (rule.memory_every_steps and rule.durable_every_steps)


def choose_rhythm(
    before: Rhythm,
    rule: SaveRule,
    *,
    step_s: float,
    memory: SaveCost | None,
    durable: SaveCost | None,
    any_loss: FailureBelief,
    memory_loss: FailureBelief,
) -> Rhythm:
    """The rhythm that loses the least time; what is told in `rule` or not measured yet stays as it was `before`.

    A failure costs the steps since the last save in memory; one that takes the memory along costs those since the last
    durable save. The two do not meddle with each other to first order, so each has Daly's interval for its own cost and
    its own failures: `any_loss`, `memory_loss`. Bounded from below by what memory and storage can take, from above by
    the rule.
    """
    memory_steps, memory_why = before.memory_every_steps, "as told"
    if not rule.memory_every_steps:
        memory_why = "not measured yet"
        if memory is not None:
            memory_steps, memory_why = _interval(memory, any_loss, step_s=step_s, longest_s=rule.memory_max_s)
    durable_steps, durable_why = before.durable_every_steps, "as told"
    if not rule.durable_every_steps:
        durable_why = "not measured yet"
        if durable is not None:
            durable_steps, durable_why = _interval(durable, memory_loss, step_s=step_s, longest_s=rule.durable_max_s)
            # a durable save is one in memory as well, so that the two coincide where they can
            durable_steps = memory_steps * max(1, round(durable_steps / memory_steps))
    return Rhythm(
        memory_every_steps=memory_steps,
        durable_every_steps=durable_steps,
        reason=f"memory: {memory_why}; durable: {durable_why}",
    )


def notice_steps(*, step_s: float) -> int:
    """How many steps ahead of the fastest rank a rhythm must begin, for every agent to have passed it on."""
    return _MIN_NOTICE_STEPS + steps_within(_NOTICE_S, step_s=step_s)


def steps_within(duration_s: float, *, step_s: float) -> int:
    """How many steps may end in that time, rounded up; of steps that are shorter than a millisecond, as if of one."""
    return math.ceil(duration_s / max(step_s, 1e-3))


def measured_cost(
    steps: Sequence[JobStep], *, every_steps: int, but_not_every_steps: int, busy_s: float
) -> SaveCost | None:
    """What a save after every `every_steps`-th step cost, from consecutive `steps`; None = too few were seen.

    Saves that fall together with those of `but_not_every_steps` (0 = none) are left out: they are of another sort. A
    save ends with step n and shows in the steps after it, for as long as it is `busy_s`, or until the next one.
    Medians, since an evaluation or a slow disk may hit any of them.
    """
    typical_s = undisturbed_s(steps, every_steps=every_steps)
    if typical_s is None:
        return None
    width = max(1, min(every_steps, math.ceil(busy_s / max(typical_s, 1e-9))))
    stalls_s: list[float] = []
    slowed_s: list[float] = []
    for place, step in enumerate(steps):
        is_other = but_not_every_steps > 0 and step.step % but_not_every_steps == 0
        after = steps[place + 1 : place + 1 + width]
        if step.step % every_steps or is_other or len(after) < width or after[-1].step != step.step + width:
            continue
        stall_s = sum(one.stall_s for one in after)
        stalls_s.append(stall_s)
        slowed_s.append(sum(one.cycle_s - typical_s for one in after) - stall_s)
    if len(stalls_s) < _FEW_SAVES:
        return None
    slowed = max(0.0, statistics.median(slowed_s))
    return SaveCost(stall_s=statistics.median(stalls_s), slowed_s=slowed, busy_s=busy_s)


def undisturbed_s(steps: Sequence[JobStep], *, every_steps: int) -> float | None:
    """The median cycle without what a save held it up; of steps that follow no save, if there are such."""
    free = [after.cycle_s for before, after in pairwise(steps) if before.step % every_steps or every_steps == 1]
    if not free:
        return None
    if every_steps == 1:
        return statistics.median(max(0.0, step.cycle_s - step.stall_s) for step in steps)
    return statistics.median(free)


def _interval(cost: SaveCost, failures: FailureBelief, *, step_s: float, longest_s: float) -> tuple[int, str]:
    """(steps, why)."""
    best_s = daly_interval_s(cost_s=cost.cost_s, mtbf_s=failures.mtbf_s)
    least_s = cost.busy_s / _MAX_WRITING_RATIO
    chosen_s = min(max(best_s, least_s, step_s), max(longest_s, least_s))
    why = f"{cost.cost_s:.3g} s a save, {failures.mtbf_s:.3g} s between failures: {best_s:.3g} s"
    if chosen_s > best_s:
        why += f", not below {chosen_s:.3g} s"
    elif chosen_s < best_s:
        why += f", not above {chosen_s:.3g} s"
    return max(1, round(chosen_s / max(step_s, 1e-9))), why


def _is_near(one: int, other: int) -> bool:
    return max(one, other) <= _NOTICED_RATIO * min(one, other)
