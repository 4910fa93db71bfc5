"""The faults of one seed of the campaign: each kind alone first, then pairs, then longer sequences."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import yaml

from dougong.spec.chaos import Fault, FaultKind

NUM_STEPS = 120
NUM_RANKS = 2
# What ends or stops a rank, or may; the others must pass without an interruption.
INTERRUPTING: dict[FaultKind, int] = {
    "kill-worker": 1,
    "stop-worker": 1,
    "hang-worker": 1,
    "raise-worker": 1,
    "kill-node": 1,
    "tear-checkpoint": 1,
    "cut-network": 9,  # each start while the link is cut may fail
}
ENDING: tuple[FaultKind, ...] = ("kill-launcher", "sigterm-launcher", "sigterm-grace")
"""The command leaves, and the run is resumed."""
HARMLESS: tuple[FaultKind, ...] = (
    "kill-agent",
    "kill-controller",
    "kill-agent-and-controller",
    "corrupt-checkpoint",
    "slow-worker",
    "fill-disk",
    "read-only-disk",
    "fill-shm",
    "jump-clock",
    "return-node",
)
KINDS: tuple[FaultKind, ...] = (*tuple(INTERRUPTING), *HARMLESS, *ENDING)
_LAST_FAULT_STEP = 90
_NOT_TIMED: tuple[FaultKind, ...] = ("hang-worker", "tear-checkpoint", "corrupt-checkpoint", "return-node", *ENDING)
"""Before the first steps are known a hang is given a minute, so it strikes later."""


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """The faults of one seed."""

    seed: int
    num_spares: int
    faults: tuple[Fault, ...]

    @property
    def is_resumed(self) -> bool:
        """Does the command leave before the job has finished, so that it is resumed?"""
        return any(fault.kind in ENDING for fault in self.faults) or self.may_give_up

    @property
    def may_give_up(self) -> bool:
        """More nodes die than can be replaced."""
        num_dead = sum(fault.kind == "kill-node" for fault in self.faults)
        return num_dead > self.num_spares

    @property
    def text(self) -> str:
        """The file for `--chaos`."""
        fields = (msgspec.to_builtins(fault) for fault in self.faults)
        defaults = msgspec.to_builtins(Fault(kind="kill-worker"))
        faults = [
            {name: value for name, value in fault.items() if name == "kind" or value != defaults[name]}
            for fault in fields
        ]
        return yaml.safe_dump({"seed": self.seed, "faults": faults}, sort_keys=False)


def draw(seed: int, *, without: Sequence[FaultKind] = ()) -> Schedule:
    """The schedule, as a function of the seed and of what the machine does not allow.

    Seed 1 to the number of kinds: that kind alone. After that half are pairs, half sequences of three or four.
    """
    dice = random.Random(f"campaign/{seed}")
    num_spares = dice.randint(1, 2)
    drawn: tuple[FaultKind, ...]
    if seed <= len(KINDS):
        drawn = _alone(KINDS[seed - 1])
    else:
        drawn = tuple(dice.choice(KINDS) for _ in range(2 if dice.random() < 0.5 else dice.randint(3, 4)))
    kinds = _sensible([kind for kind in drawn if kind not in without], num_spares=num_spares, dice=dice)
    return Schedule(seed=seed, num_spares=num_spares, faults=_faults(kinds, dice))


def said(fault: Fault) -> str:
    """`kill-worker at step 12`."""
    when = f"at step {fault.at_step}" if fault.at_step is not None else f"at {fault.at_s} s"
    when = f"during {fault.during}" if fault.during is not None else when
    after = f" + {fault.after_s} s" if fault.after_s else ""
    lasting = f" for {fault.for_s} s" if fault.for_s is not None else ""
    return f"{fault.kind} {when}{after}{lasting}"


def _alone(kind: FaultKind) -> tuple[FaultKind, ...]:
    return ("kill-node", "return-node", "kill-node") if kind == "return-node" else (kind,)


def _sensible(kinds: Sequence[FaultKind], *, num_spares: int, dice: random.Random) -> tuple[FaultKind, ...]:
    """An end comes last and once; a node returns only after one was killed; two more dead than spares is one too many;
    a damaged checkpoint is looked at only when a node dies after it."""
    ends: tuple[FaultKind, ...] = tuple(kind for kind in kinds if _is_ending(kind))
    rest: tuple[FaultKind, ...] = tuple(kind for kind in kinds if not _is_ending(kind))
    chosen: list[FaultKind] = []
    num_dead = 0
    for kind in rest:
        if kind == "return-node" and num_dead == 0:
            chosen.append("kill-node")
            num_dead += 1
        if kind == "kill-node":
            if num_dead > num_spares:
                continue
            num_dead += 1
        if kind == "return-node":
            num_dead -= 1
        chosen.append(kind)
        if kind == "corrupt-checkpoint" and num_dead < num_spares and dice.random() < 0.5:
            chosen.append("kill-node")
            num_dead += 1
    return (*chosen, *ends[:1])


def _is_ending(kind: FaultKind) -> bool:
    return kind in ENDING


def _faults(kinds: Sequence[FaultKind], dice: random.Random) -> tuple[Fault, ...]:
    """When and how long. A second fault may strike at once with the one before, or in the recovery from it."""
    steps = sorted(dice.sample(range(10, _LAST_FAULT_STEP), len(kinds)))
    faults: list[Fault] = []
    num_timed = 0
    for index, kind in enumerate(kinds):
        before = faults[-1] if faults else None
        way = dice.random()
        at_step: int | None = steps[index]
        at_s: float | None = None
        during = None
        after_s = 0.0
        if before is not None and way < 0.3 and before.at_step is not None and kind not in ("return-node", *ENDING):
            at_step = before.at_step
        elif before is not None and way < 0.6 and _interrupts(before) and kind != "tear-checkpoint":
            at_step, during, after_s = None, "recovery", round(dice.choice((0.0, 0.05, 0.3)), 2)
        elif way > 0.85 and kind not in _NOT_TIMED and num_timed < 2:
            # they may hit a start, and three failed starts in a row are given up
            at_step, at_s = None, round(dice.uniform(0.5, 6.0), 2)
            num_timed += 1
        faults.append(
            Fault(
                kind=kind,
                at_step=at_step,
                at_s=at_s,
                during=during,
                after_s=after_s,
                for_s=_lasting_s(kind, dice),
                grace_s=20.0 if kind == "sigterm-grace" else None,
                jump_s=dice.choice((-7200.0, -30.0, 30.0, 7200.0)) if kind == "jump-clock" else None,
                stopped_ratio=dice.choice((0.3, 0.5, 0.7)) if kind == "slow-worker" else None,
                peer="controller" if kind == "cut-network" and dice.random() < 0.3 else None,
            )
        )
    return tuple(faults)


def _interrupts(fault: Fault) -> bool:
    """For certain; else a fault in the recovery from it would never come, nor those after."""
    is_passing = fault.kind == "stop-worker" and fault.for_s is not None
    return fault.kind in INTERRUPTING and not is_passing and fault.kind != "cut-network"


def _lasting_s(kind: FaultKind, dice: random.Random) -> float | None:
    if kind == "stop-worker":
        return 0.3 if dice.random() < 0.25 else None
    if kind in ("slow-worker", "fill-disk", "read-only-disk", "fill-shm"):
        return round(dice.uniform(0.3, 1.5), 2)
    return round(dice.uniform(0.5, 4.0), 2) if kind == "cut-network" else None
