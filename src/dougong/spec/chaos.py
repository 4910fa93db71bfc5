"""A schedule of faults to inject on purpose, the same again from the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from dougong.errors import UserError
from dougong.spec.limits import Count, NotNegative, Positive
from dougong.spec.typed import Flaw, Warn, load_typed, warn_python

FaultKind = Literal[
    "kill-worker",  # SIGKILL to one rank
    "stop-worker",  # SIGSTOP to one rank
    "hang-worker",  # one rank takes a lock that is never released
    "raise-worker",  # one rank raises a Python exception
    "flip-bit",  # one bit of one rank's parameters flips, without a word
    "kill-node",  # an agent with all its workers
    "kill-agent",  # an agent alone
    "kill-controller",
    "corrupt-checkpoint",  # one byte of the newest durable checkpoint is flipped
    "tear-checkpoint",  # the writer of a durable checkpoint is killed half way
]

_OF_RANK = ("kill-worker", "stop-worker", "hang-worker", "raise-worker", "flip-bit", "tear-checkpoint")
_OF_NODE = ("kill-node", "kill-agent")


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault, when (`at_step`: once that step is finished; `at_s`: seconds after the job's start) and where.

    `rank` is for faults of a worker, `node` for faults of a node; left out, they mean `random`. `for_s` ends a
    `stop-worker` again; `None` = it stays stopped.
    """

    kind: FaultKind
    at_step: Count | None = None
    at_s: NotNegative | None = None
    rank: Count | Literal["random"] | None = None
    node: str | None = None
    for_s: Positive | None = None
    detail: str = ""

    def flaws(self) -> Iterator[Flaw]:
        if self.at_step is None and self.at_s is None:
            yield Flaw("", f"{self.kind} has no time", mend="give one of at_step, at_s")
        if self.at_step is not None and self.at_s is not None:
            yield Flaw("at_s", f"{self.kind} has two times", mend="give one of at_step, at_s")
        if self.rank is not None and self.kind not in _OF_RANK:
            yield self._idle("rank", "node" if self.kind in _OF_NODE else "nothing")
        if self.node is not None and self.kind not in _OF_NODE:
            yield self._idle("node", "rank" if self.kind in _OF_RANK else "nothing")
        if self.for_s is not None and self.kind != "stop-worker":
            yield self._idle("for_s", "a time")

    def _idle(self, field: str, wanted: str) -> Flaw:
        return Flaw(
            field, f"{field} has no effect on {self.kind}", mend=f"it takes {wanted}; remove {field}", is_warning=True
        )


class Chaos(msgspec.Struct, frozen=True, kw_only=True):
    """Faults, and the seed that decides what `random` means."""

    seed: Annotated[int, Meta(ge=0)]
    faults: tuple[Fault, ...]


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
    if fault.kind in _OF_RANK:
        rank = draw.randrange(world_size) if fault.rank is None or fault.rank == "random" else fault.rank
        if rank >= world_size:
            raise UserError(
                f"there is no rank {rank}", where=f"faults[{index}].rank", mend=f"ranks are 0 to {world_size - 1}"
            )
        return msgspec.structs.replace(fault, rank=rank, node=None)
    if fault.kind in _OF_NODE:
        node = draw.choice(list(nodes)) if fault.node in (None, "random") else fault.node
        if node not in nodes:
            raise UserError(
                f"no node is called {node!r}", where=f"faults[{index}].node", mend=f"nodes: {', '.join(nodes)}"
            )
        return msgspec.structs.replace(fault, node=node, rank=None)
    return msgspec.structs.replace(fault, rank=None, node=None)
