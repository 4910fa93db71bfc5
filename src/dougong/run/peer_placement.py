"""Which nodes keep copies of which node's memory checkpoints: a pure choice, with its reason.

A copy is of use when its owner is gone, so it must not go with it: the keeper lies in another failure group (a rack, as
far as paths tell). Source of the idea: GEMINI (SOSP '23) places copies in groups of machines, ByteRobust (arXiv
2509.16293) outside of what is evicted together.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec


class PeerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Owner and keepers, in the order of the owners. `warning`: what is worse than it should be; "" = nothing."""

    keepers: tuple[tuple[str, tuple[str, ...]], ...]
    reason: str
    warning: str = ""


def rack_of(component: str) -> str:
    """The failure group of a node unless told otherwise: the path above it."""
    return component.rpartition("/")[0]


def choose_peers(
    nodes: Sequence[str],
    *,
    owners: Collection[str],
    num_copies: int,
    failure_group_of: Callable[[str], str] = rack_of,
    previous: Mapping[str, Sequence[str]] | None = None,
) -> PeerPlan:
    """For each owner `num_copies` other nodes, or as many as there are.

    `nodes` are all that can keep copies, spares too. Keepers are chosen in this order: in another failure group than
    the owner; with the fewest states in memory, its own counted (so a spare comes first); next in a ring through which
    groups take turns. What `previous` says stays where it is, as long as the keeper is there and no group is broken
    for it.
    """
    ring = _ring(nodes, failure_group_of)
    with_state = frozenset(owners)
    owning = [node for node in ring if node in with_state]
    if num_copies <= 0:
        return PeerPlan(keepers=(), reason="copies on other nodes are switched off (save.peer_copies=0)")
    if len(ring) < 2 or not owning:
        return PeerPlan(keepers=(), reason="there is no other node to keep a copy")
    shelf = _Shelf(ring, owning, failure_group_of)
    chosen: dict[str, list[str]] = {}
    for owner in owning:
        known = [keeper for keeper in (previous or {}).get(owner, ()) if shelf.may_stay(owner, keeper)]
        chosen[owner] = known[:num_copies]
        for keeper in chosen[owner]:
            shelf.add(keeper)
    for _ in range(num_copies):
        for owner in owning:
            if len(chosen[owner]) < min(num_copies, len(ring) - 1):
                chosen[owner].append(shelf.take(owner, besides=chosen[owner]))
    return _explained(chosen, failure_group_of, num_copies=num_copies)


def _ring(nodes: Sequence[str], failure_group_of: Callable[[str], str]) -> list[str]:
    """All nodes, each group having its turn, so that neighbours are of different groups as long as that is possible."""
    groups: dict[str, list[str]] = {}
    for node in dict.fromkeys(nodes):
        groups.setdefault(failure_group_of(node), []).append(node)
    turns = [(turn, place, node) for place, group in enumerate(groups.values()) for turn, node in enumerate(group)]
    return [node for _, _, node in sorted(turns)]


class _Shelf:
    """The nodes by how many states they have in memory, each level in the order of the ring."""

    def __init__(self, ring: list[str], owning: list[str], failure_group_of: Callable[[str], str]) -> None:
        self._ring = ring
        self._place = {node: place for place, node in enumerate(ring)}
        self._group = [failure_group_of(node) for node in ring]
        self._next_other = _next_other(self._group)
        self._load = Counter(owning)
        self._levels: dict[int, list[int]] = {}
        for place, node in enumerate(ring):
            self._levels.setdefault(self._load[node], []).append(place)

    def may_stay(self, owner: str, keeper: str) -> bool:
        """Is the keeper there, and in another group than the owner if there is one?"""
        if keeper not in self._place or keeper == owner:
            return False
        own_place = self._place[owner]
        return self._group[self._place[keeper]] != self._group[own_place] or self._next_other[own_place] is None

    def add(self, keeper: str) -> None:
        """The keeper has one state more."""
        place = self._place[keeper]
        level = self._levels[self._load[keeper]]
        level.pop(bisect_left(level, place))
        self._load[keeper] += 1
        insort(self._levels.setdefault(self._load[keeper], []), place)

    def take(self, owner: str, *, besides: Collection[str]) -> str:
        """The best keeper for one more copy of the owner's."""
        taken = {self._place[node] for node in besides}
        place = self._best(self._place[owner], taken, is_other_group=True)
        if place is None:
            place = self._best(self._place[owner], taken, is_other_group=False)
        assert place is not None
        self.add(self._ring[place])
        return self._ring[place]

    def _best(self, own_place: int, taken: set[int], *, is_other_group: bool) -> int | None:
        for load in sorted(self._levels):
            place = self._first_after(self._levels[load], own_place, taken, is_other_group=is_other_group)
            if place is not None:
                return place
        return None

    def _first_after(self, level: list[int], own_place: int, taken: set[int], *, is_other_group: bool) -> int | None:
        """The first of a level behind the owner in the ring. Rows of the owner's own group are jumped over."""
        position, passed = bisect_left(level, own_place), 0
        while passed < len(level):
            place = level[position % len(level)]
            if is_other_group and self._group[place] == self._group[own_place]:
                target = self._next_other[place]
                if target is None:
                    return None
                step = max(1, (bisect_left(level, target) - position) % len(level))
                position, passed = (position + step) % len(level), passed + step
                continue
            if place != own_place and place not in taken:
                return place
            position, passed = (position + 1) % len(level), passed + 1
        return None


def _next_other(group: list[str]) -> list[int | None]:
    """For each place the next one in the ring that is of another group; None = there is none."""
    length = len(group)
    found: list[int | None] = [None] * length
    upcoming: int | None = None
    for place in range(2 * length - 1, -1, -1):
        here, behind = place % length, (place + 1) % length
        if group[here] != group[behind]:
            upcoming = behind
        found[here] = upcoming
    return found


def _explained(chosen: dict[str, list[str]], failure_group_of: Callable[[str], str], *, num_copies: int) -> PeerPlan:
    keepers = tuple((owner, tuple(names)) for owner, names in chosen.items())
    together = sorted(
        {failure_group_of(owner) for owner, names in keepers if failure_group_of(owner) in map(failure_group_of, names)}
    )
    loads = Counter(keeper for _, names in keepers for keeper in names)
    low, high = min(loads.values()), max(loads.values())
    spread = str(high) if low == high else f"{low} to {high}"
    noun = "node keeps" if len(loads) == 1 else "nodes keep"
    reason = f"{len(loads)} {noun} copies for {len(keepers)}, {spread} each"
    if short := [owner for owner, names in keepers if len(names) < num_copies]:
        reason = f"{reason}; {len(short)} have fewer than {num_copies}: there are too few nodes"
    if not together:
        return PeerPlan(keepers=keepers, reason=f"{reason}, all outside the owner's failure group")
    where = ", ".join(together[:3]) + (f" and {len(together) - 3} more" if len(together) > 3 else "")
    warning = f"copies of nodes in {where} lie in the same failure group: what takes all of it takes them too"
    return PeerPlan(keepers=keepers, reason=reason, warning=warning)
