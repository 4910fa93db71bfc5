"""A schedule of faults to inject on purpose, the same again from the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from dougong.errors import UserError
from dougong.spec.limits import Count, NotNegative, Positive, Ratio
from dougong.spec.typed import Flaw, Warn, load_typed, warn_python

FaultKind = Literal[
    "kill-worker",  # SIGKILL to one rank
    "stop-worker",  # SIGSTOP to one rank
    "hang-worker",  # one rank takes a lock that is never released
    "raise-worker",  # one rank raises a Python exception
    "flip-bit",  # one bit of one rank's parameters flips, without a word
    "slow-worker",  # one rank is stopped for a share of every tenth of a second: a straggler
    "kill-node",  # an agent with all its workers
    "return-node",  # a node killed earlier can be used again
    "kill-agent",  # an agent alone
    "kill-controller",
    "kill-agent-and-controller",  # both at once
    "kill-launcher",  # the command itself
    "sigterm-launcher",  # a scheduler asks the command to leave
    "sigterm-grace",  # pre-emption: SIGTERM to every process of the run, SIGKILL after a grace
    "corrupt-checkpoint",  # one byte of the newest durable checkpoint is flipped
    "tear-checkpoint",  # the writer of a durable checkpoint is killed half way
    "fill-disk",  # the file system of the durable checkpoints is full
    "read-only-disk",  # it cannot be written
    "fill-shm",  # the file system of the memory checkpoints is full
    "cut-network",  # a node reaches another, the controller, or nobody any more
    "jump-clock",  # the wall clock jumps
]

_TAKES: dict[FaultKind, tuple[str, ...]] = {
    "kill-worker": ("rank",),
    "stop-worker": ("rank", "for_s"),
    "hang-worker": ("rank",),
    "raise-worker": ("rank",),
    "flip-bit": ("rank",),
    "slow-worker": ("rank", "for_s", "stopped_ratio"),
    "kill-node": ("node",),
    "return-node": ("node",),
    "kill-agent": ("node",),
    "kill-controller": (),
    "kill-agent-and-controller": ("node",),
    "kill-launcher": (),
    "sigterm-launcher": (),
    "sigterm-grace": ("grace_s",),
    "corrupt-checkpoint": (),
    "tear-checkpoint": ("rank",),
    "fill-disk": ("for_s",),
    "read-only-disk": ("for_s",),
    "fill-shm": ("for_s",),
    "cut-network": ("node", "peer", "for_s"),
    "jump-clock": ("node", "jump_s"),
}
_NEEDS: dict[FaultKind, str] = {"slow-worker": "stopped_ratio", "sigterm-grace": "grace_s", "jump-clock": "jump_s"}
_TIMES = ("at_step", "at_s", "during")
EVERYTHING = "everything"
CONTROLLER = "controller"


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault, when and where.

    When: `at_step`, once that step is finished and the job has recovered from the fault before (with the same
    `at_step` as the fault before: together with it); `at_s`, seconds after the job's start; or `during: recovery`, as
    soon as the job is interrupted by the fault before. `after_s` puts it off from then on.

    Where: `rank` for faults of a worker, `node` for faults of a node; left out, they mean `random`. `return-node`
    without a node takes the one that was killed first. `peer` is the other side of a cut: a node, `controller`, or
    `everything` (the default). `jump-clock` without a node jumps everywhere; its node may be `controller`.

    `for_s` ends what lasts (a stop, a slow rank, a full disk, a cut); `None` = it stays.
    """

    kind: FaultKind
    at_step: Count | None = None
    at_s: NotNegative | None = None
    during: Literal["recovery"] | None = None
    after_s: NotNegative = 0.0
    rank: Count | Literal["random"] | None = None
    node: str | None = None
    peer: str | None = None
    for_s: Positive | None = None
    grace_s: Positive | None = None
    """From SIGTERM to SIGKILL."""
    jump_s: float | None = None
    """Forward; backward if negative."""
    stopped_ratio: Ratio | None = None
    """The share of the time in which a slow rank does not run."""
    detail: str = ""

    def flaws(self) -> Iterator[Flaw]:
        given = [name for name in _TIMES if getattr(self, name) is not None]
        if not given:
            yield Flaw("", f"{self.kind} has no time", mend=f"give one of {', '.join(_TIMES)}")
        if len(given) > 1:
            yield Flaw(given[-1], f"{self.kind} has two times", mend=f"give one of {', '.join(_TIMES)}")
        needed = _NEEDS.get(self.kind)
        if needed is not None and not getattr(self, needed):
            yield Flaw("", f"{self.kind} needs {needed}", mend=f"give {needed}")
        takes = _TAKES[self.kind]
        for field in ("rank", "node", "peer", "for_s", "grace_s", "jump_s", "stopped_ratio"):
            if getattr(self, field) is not None and field not in takes:
                yield Flaw(
                    field,
                    f"{field} has no effect on {self.kind}",
                    mend=f"it takes {', '.join(takes) or 'nothing'}; remove {field}",
                    is_warning=True,
                )


class Chaos(msgspec.Struct, frozen=True, kw_only=True):
    """Faults, and the seed that decides what `random` means."""

    seed: Annotated[int, Meta(ge=0)]
    faults: tuple[Fault, ...]

    @property
    def wants_networks(self) -> bool:
        """Must each node have a network of its own?"""
        return any(fault.kind == "cut-network" for fault in self.faults)


def load_chaos(path: Path | str, *, warn: Warn = warn_python) -> Chaos:
    """The schedule in the file at `path`. Raises Problems with everything that is wrong in it."""
    return load_typed(path, Chaos, warn=warn)


def resolve(chaos: Chaos, *, world_size: int, nodes: Sequence[str]) -> tuple[Fault, ...]:
    """The faults with every `random` drawn, a function of its arguments alone. Raises UserError for a missing target.

    A fault's draw depends on the seed and its own place in the list, so that a change to one leaves the others alone.
    """
    return tuple(
        _drawn(fault, random.Random(f"{chaos.seed}/{index}"), index, world_size=world_size, nodes=nodes)
        for index, fault in enumerate(chaos.faults)
    )


def _drawn(fault: Fault, draw: random.Random, index: int, *, world_size: int, nodes: Sequence[str]) -> Fault:
    takes = _TAKES[fault.kind]
    rank, node, peer = None, None, None
    if "rank" in takes:
        rank = draw.randrange(world_size) if fault.rank is None or fault.rank == "random" else fault.rank
        if rank >= world_size:
            raise UserError(
                f"there is no rank {rank}", where=f"faults[{index}].rank", mend=f"ranks are 0 to {world_size - 1}"
            )
    if "node" in takes:
        node = _drawn_node(fault, draw, index, nodes=nodes)
    if "peer" in takes:
        peer = _known(fault.peer or EVERYTHING, f"faults[{index}].peer", (*nodes, CONTROLLER, EVERYTHING))
        if peer == node:
            raise UserError(
                f"{node} cannot be cut off from itself", where=f"faults[{index}].peer", mend="give another node"
            )
    return msgspec.structs.replace(fault, rank=rank, node=node, peer=peer)


def _drawn_node(fault: Fault, draw: random.Random, index: int, *, nodes: Sequence[str]) -> str | None:
    """A node of the run. None = for the injector to find: all of them, or the one that was killed first."""
    if fault.node is None and fault.kind in ("jump-clock", "return-node"):
        return None
    if fault.node in (None, "random"):
        return draw.choice([node for node in nodes if node != fault.peer])
    known = (*nodes, CONTROLLER) if fault.kind == "jump-clock" else tuple(nodes)
    return _known(fault.node, f"faults[{index}].node", known)


def _known(name: str, where: str, known: Sequence[str]) -> str:
    if name not in known:
        raise UserError(f"no node is called {name!r}", where=where, mend=f"nodes: {', '.join(known)}")
    return name
