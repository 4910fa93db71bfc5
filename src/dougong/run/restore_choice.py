"""From where a job goes on: a pure choice over all that is known to hold its state, with its reason.

Three places hold states: the memory of the node where a rank will run, copies in the memory of any node that lives, and
durable storage. A state is one (generation, step) of *every* rank, and ranks never mix: after a roll-back the same step
of two generations may differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import msgspec

from dougong.event.kinds import Placed
from dougong.run.wire import CourierAddress, Origin, Restore, SnapshotStatus

State = tuple[int, int]
"""(generation, step)."""


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's state in the memory of a living node, whose courier can give it to others if its port is known.

    `owner`: the node where the rank ran.
    """

    courier: CourierAddress
    owner: str
    snapshot: SnapshotStatus


class BadCopy(msgspec.Struct, frozen=True, kw_only=True):
    """A copy that was asked for and could not be had; it is not asked for again."""

    component: str
    rank: int
    generation: int
    step: int


def choose_restore(
    snapshots: Sequence[SnapshotStatus],
    *,
    durable: tuple[int, str] | None,
    world_size: int,
    is_attached: bool,
    copies: Sequence[Copy] = (),
    homes: Mapping[int, str] | None = None,
    refused: Collection[BadCopy] = (),
) -> Restore:
    """The newest state that every rank can have. At equal steps own memory goes before copies, both before durable.

    `snapshots` are the memory checkpoints of ranks on the nodes where they will run (`homes`: rank to node); `durable`
    is the newest one's step and directory. All are verified by who reads them. A script that is not attached is never
    restored behind its back: it starts again and loads its own.
    """
    if not is_attached:
        return Restore(source="none", reason="the script is not attached: it resumes from its own checkpoint")
    own = _own(snapshots, world_size=world_size)
    elsewhere = _usable(copies, homes or {}, world_size=world_size, refused=refused)
    state = _newest_complete(own, elsewhere, world_size=world_size)
    durable_step = durable[0] if durable is not None else 0
    if state is not None and state[1] >= durable_step:
        return _from_memory(state, own.get(state, set()), elsewhere.get(state, {}), homes or {}, world_size=world_size)
    why = _why_not_memory(own, elsewhere, world_size=world_size)
    if durable is not None:
        return Restore(source="durable", step=durable_step, directory=durable[1], reason=f"{why}; newest durable")
    return Restore(source="none", reason=f"{why}; no durable checkpoint: from the beginning")


def must_travel(restore: Restore, placement: Sequence[Placed], *, ranks: Collection[int]) -> tuple[int, ...]:
    """Those of the ranks whose state lies on another node than they."""
    homes = {placed.rank: placed.component for placed in placement}
    return tuple(
        origin.rank
        for origin in restore.origins
        if origin.rank in ranks and origin.courier.component != homes.get(origin.rank)
    )


def _own(snapshots: Sequence[SnapshotStatus], *, world_size: int) -> dict[State, set[int]]:
    found: dict[State, set[int]] = {}
    for snapshot in snapshots:
        if _counts(snapshot, world_size=world_size):
            found.setdefault((snapshot.generation, snapshot.step), set()).add(snapshot.rank)
    return found


def _usable(
    copies: Sequence[Copy], homes: Mapping[int, str], *, world_size: int, refused: Collection[BadCopy]
) -> dict[State, dict[int, list[Copy]]]:
    """By state and rank, who has a copy."""
    bad = {(item.component, item.rank, item.generation, item.step) for item in refused}
    found: dict[State, dict[int, list[Copy]]] = {}
    for copy in copies:
        held = copy.snapshot
        if not copy.courier.port and copy.courier.component != homes.get(held.rank):
            continue
        if (copy.courier.component, held.rank, held.generation, held.step) in bad:
            continue
        if _counts(held, world_size=world_size):
            found.setdefault((held.generation, held.step), {}).setdefault(held.rank, []).append(copy)
    return found


def _counts(snapshot: SnapshotStatus, *, world_size: int) -> bool:
    return snapshot.world_size == world_size and 0 <= snapshot.rank < world_size


def _newest_complete(
    own: dict[State, set[int]], elsewhere: dict[State, dict[int, list[Copy]]], *, world_size: int
) -> State | None:
    states = own.keys() | elsewhere.keys()
    complete = [state for state in states if len(own.get(state, set()) | elsewhere.get(state, {}).keys()) == world_size]
    return max(complete, default=None)


def _from_memory(
    state: State,
    own: set[int],
    elsewhere: dict[int, list[Copy]],
    homes: Mapping[int, str],
    *,
    world_size: int,
) -> Restore:
    chosen = _chosen([rank for rank in range(world_size) if rank not in own], elsewhere, homes)
    generation, step = state
    lost = [copy for copy in chosen if not copy.courier.component == copy.owner == homes.get(copy.snapshot.rank)]
    moved = {copy.snapshot.rank for copy in lost}
    here = [rank for rank in range(world_size) if rank not in moved]
    return Restore(
        source="peer" if lost else "memory",
        step=step,
        generation=generation,
        reason=_in_words(step, here, lost) if lost else f"step {step} is in the memory of every rank's node",
        origins=tuple(Origin(rank=copy.snapshot.rank, courier=copy.courier) for copy in chosen),
    )


def _chosen(ranks: Sequence[int], elsewhere: dict[int, list[Copy]], homes: Mapping[int, str]) -> list[Copy]:
    """For each rank the copy on its own node, else that on the node which is asked for the fewest others."""
    asked: Counter[str] = Counter()
    chosen: list[Copy] = []
    for rank in ranks:
        home = homes.get(rank)
        best = min(
            elsewhere[rank],
            key=lambda copy: (
                copy.courier.component != home,
                copy.owner != home,
                asked[copy.courier.component],
                copy.courier.component,
                copy.owner,
            ),
        )
        asked[best.courier.component] += best.courier.component != home
        chosen.append(best)
    return chosen


def _in_words(step: int, here: Sequence[int], lost: Sequence[Copy]) -> str:
    by_node: dict[str, list[int]] = {}
    for copy in lost:
        by_node.setdefault(copy.courier.component, []).append(copy.snapshot.rank)
    parts = [f"{_ranks(here)} from own memory"] if here else []
    parts += [f"{_ranks(ranks)} from the copy on {component}" for component, ranks in sorted(by_node.items())]
    return f"step {step}: {', '.join(parts)}"


def _why_not_memory(
    own: dict[State, set[int]], elsewhere: dict[State, dict[int, list[Copy]]], *, world_size: int
) -> str:
    if not own and not elsewhere:
        return "no memory checkpoint"
    newest = max(own.keys() | elsewhere.keys())
    there = own.get(newest, set()) | elsewhere.get(newest, {}).keys()
    if len(there) == world_size:
        return f"memory holds step {newest[1]}"
    missing = sorted(set(range(world_size)) - there)
    nor = ", and no living node has a copy" if elsewhere else ""
    return f"memory holds step {newest[1]} but not of rank(s) {', '.join(map(str, missing))}{nor}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
