"""Is a rank, or the whole job, hanging? Pure rules over what the agents see.

Time alone cannot tell a hang from a long save, so the rule also asks what the processes do. A rank is *active* while
any of its processes uses the CPU or the disk, or sleeps on a timer that will ring. Ranks of one job wait for each
other, so a rank that waits for a busy one looks idle too: the job hangs only when no rank has made progress and no
rank is active.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from dougong.run.page import Phase
from dougong.run.settings import HangRule
from dougong.run.wire import RankStatus

_FEW_STEPS = 5
_UNMODIFIED_FEW_STEPS = 20


FindingKind = Literal["stopped", "hang", "unwound"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A hang was found. `rank` is the first suspect; stacks may name a better one."""

    rank: int
    kind: FindingKind
    idle_s: float
    reason: str


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What has been learnt about the job's steps. `p99_s` and `longest_gap_s` are None before the first step."""

    num_steps: int = 0
    p99_s: float | None = None
    longest_gap_s: float | None = None
    is_first_step: bool = False
    """No step of this generation is finished by all ranks yet."""
    first_step_s: float | None = None
    """The longest first step of a generation; it may compile, or warm caches up."""
    start_s: float | None = None
    """The longest start so far, from the order to the first finished step."""


def find_hang(ranks: Sequence[RankStatus], *, learnt: StepTimes, rule: HangRule) -> Finding | None:
    """The first hang among the ranks of one generation, or None.

    A stopped process (state T) is found by itself: it cannot be anything else. The rest is asked of all ranks together.
    """
    living = [rank for rank in ranks if rank.activity != "gone" and rank.phase != Phase.DONE]
    for rank in living:
        if rank.activity == "stopped" and rank.quiet_s >= rule.stopped_s:
            return Finding(
                rank=rank.rank, kind="stopped", idle_s=rank.quiet_s, reason=f"process {rank.pid} is stopped (state T)"
            )
    if not living:
        return None
    if (broken := _broken_link(living, rule=rule)) is not None:
        return broken
    quiet_s = min(min(rank.idle_s, rank.quiet_s) for rank in living)
    silent_s = min(rank.idle_s for rank in living)
    limit_s, why = patience(living, learnt=learnt, rule=rule)
    if quiet_s > limit_s:
        suspect = _suspect(living)
        return Finding(
            rank=suspect.rank,
            kind="hang",
            idle_s=suspect.idle_s,
            reason=f"no rank has made progress or used the CPU for {quiet_s:.1f} s (limit {limit_s:.1f} s: {why})",
        )
    active_limit_s = max(rule.active_s, limit_s)
    if silent_s > active_limit_s and not _is_starting(living):
        suspect = _suspect(living)
        return Finding(
            rank=suspect.rank,
            kind="hang",
            idle_s=suspect.idle_s,
            reason=f"busy, but no rank has finished a step for {silent_s:.0f} s (limit {active_limit_s:.0f} s)",
        )
    return None


def _broken_link(living: Sequence[RankStatus], *, rule: HangRule) -> Finding | None:
    """Ranks have left a broken collective, and nothing that explains it is heard of.

    While another rank has not, it may be the one that broke it and is still ending: that is given twice as long.
    """
    unwound = [rank for rank in living if rank.phase == Phase.UNWOUND]
    limit_s = rule.unwound_s * (1 if len(unwound) == len(living) else 2)
    late = next((rank for rank in unwound if rank.idle_s > limit_s), None)
    if late is None:
        return None
    reason = "a collective broke, although no process was lost: a link between two nodes"
    return Finding(rank=late.rank, kind="unwound", idle_s=late.idle_s, reason=reason)


def patience(ranks: Sequence[RankStatus], *, learnt: StepTimes, rule: HangRule) -> tuple[float, str]:
    """How long all ranks may be without progress and without activity, and why that long."""
    if _is_starting(ranks):
        return _starting_patience(learnt, rule)
    if not all(rank.is_attached for rank in ranks):
        return _unmodified_patience(learnt, rule)
    phases = {rank.phase for rank in ranks}
    # one rank in such a phase keeps the others waiting
    if Phase.COMPILE in phases:
        return rule.compile_s, "compiling"
    if phases & {Phase.CHECKPOINT, Phase.RESTORING}:
        return rule.checkpoint_s, "in a checkpoint"
    if Phase.EVALUATION in phases:
        return rule.evaluation_s, "in an evaluation"
    # one rank between its steps keeps the others waiting in theirs; only a lock there is surely no upload
    if any(rank.phase == Phase.BETWEEN and rank.activity != "lock" for rank in ranks):
        return rule.outside_step_s, "between steps"
    if learnt.p99_s is None or learnt.num_steps < _FEW_STEPS:
        return max(rule.attached_min_s, 10 * (learnt.longest_gap_s or rule.outside_step_s / 10)), "few steps known yet"
    limit_s = max(rule.attached_min_s, rule.attached_p99_factor * learnt.p99_s)
    if learnt.is_first_step:
        first_s = rule.first_step_s
        if learnt.first_step_s is not None:
            first_s = rule.attached_p99_factor * learnt.first_step_s
        return max(limit_s, first_s), "in the first step of a start"
    return limit_s, f"max({rule.attached_min_s:g} s, {rule.attached_p99_factor:g} x p99 step {learnt.p99_s:.2f} s)"


def _starting_patience(learnt: StepTimes, rule: HangRule) -> tuple[float, str]:
    """Nobody knows how long a first start may take; the later ones are like it, unless their ranks cannot meet."""
    if learnt.start_s is None:
        return rule.startup_s, "before the first step"
    limit_s = min(rule.startup_s, max(rule.restart_min_s, rule.restart_factor * learnt.start_s))
    return limit_s, f"a start; {rule.restart_factor:g} x the longest so far, {learnt.start_s:.1f} s"


def _unmodified_patience(learnt: StepTimes, rule: HangRule) -> tuple[float, str]:
    if learnt.num_steps < _UNMODIFIED_FEW_STEPS or learnt.longest_gap_s is None:
        return rule.unmodified_first_s, "unmodified script, few steps known yet"
    limit_s = min(rule.unmodified_first_s, max(rule.unmodified_min_s, rule.unmodified_factor * learnt.longest_gap_s))
    return limit_s, f"unmodified script, {rule.unmodified_factor:g} x the longest gap between optimizer steps"


def _is_starting(ranks: Sequence[RankStatus]) -> bool:
    """One rank still in its first step's compilation makes the others wait, so one is enough."""
    return any(rank.phase in (Phase.STARTING, Phase.RESTORING) for rank in ranks)


def _suspect(ranks: Sequence[RankStatus]) -> RankStatus:
    """Without stacks: the rank that is furthest behind, then the one silent for longest."""
    return min(ranks, key=lambda rank: (rank.step, rank.phase != Phase.BETWEEN, -rank.idle_s))
