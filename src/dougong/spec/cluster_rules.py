"""The rules between the parts of a cluster: what no single field can break by itself."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from dougong.errors import UserError
from dougong.spec.catalog import accelerator, canonical, link_table, link_table_names
from dougong.spec.path import MAX_PATHS, PathRange, compress, in_order, parent, parse_range
from dougong.spec.typed import Flaw
from dougong.spec.values import did_you_mean
from dougong.units import format_si

if TYPE_CHECKING:
    from dougong.spec.cluster import Cluster, NodeType

T = TypeVar("T")


def cluster_flaws(cluster: Cluster) -> Iterator[Flaw]:
    """Every rule that `cluster` breaks, errors and warnings."""
    yield from _names(cluster)
    yield from _node_types(cluster)
    yield from _groups(cluster)
    yield from _use(cluster)
    places = _Places(cluster)
    yield from places.flaws
    yield from _racks(cluster, places)
    yield from _budgets(cluster, places)


def _names(cluster: Cluster) -> Iterator[Flaw]:
    """Two parts of one sort never share a name."""
    sorts: tuple[tuple[str, Sequence[str]], ...] = (
        ("node_types", [one.name for one in cluster.node_types]),
        ("planes", [one.name for one in cluster.planes]),
        ("storage", [one.name for one in cluster.storage]),
        ("accelerators", [one.name for one in cluster.accelerators]),
        ("power.feeds", [one.name for one in cluster.power.feeds] if cluster.power else []),
    )
    for field, names in sorts:
        for index, name in _repeats(names):
            yield Flaw(f"{field}[{index}].name", f"{name!r} is the name of two {field}", mend="give each its own name")


def _node_types(cluster: Cluster) -> Iterator[Flaw]:
    for index, node_type in enumerate(cluster.node_types):
        at = f"node_types[{index}]"
        yield from _accelerators(cluster, node_type, at)
        yield from _scale_up(node_type, at)
        yield from _nics(cluster, node_type, at)
        yield from _node_power(cluster, node_type, at)


def _accelerators(cluster: Cluster, node_type: NodeType, at: str) -> Iterator[Flaw]:
    try:
        kind = accelerator(node_type.accelerator, own=cluster.accelerators)
    except UserError as error:
        yield Flaw(f"{at}.accelerator", error.what, mend=error.mend, needs=("accelerators",))
        return
    domain = kind.scale_up_domain
    if node_type.scale_up == "switch" and domain is not None and node_type.num_accelerators > domain:
        yield Flaw(
            f"{at}.num_accelerators",
            f"{node_type.num_accelerators} {kind.name} stand in one node; its scale-up network joins {domain}",
            mend="check the count, or describe the kind under accelerators:",
            is_warning=True,
        )


def _scale_up(node_type: NodeType, at: str) -> Iterator[Flaw]:
    if node_type.scale_up in ("switch", "pcie"):
        return
    try:
        table = link_table(node_type.scale_up)
    except UserError:
        choices = ["switch", "pcie", *link_table_names()]
        yield Flaw(
            f"{at}.scale_up",
            f"{node_type.scale_up!r} is neither switch nor pcie nor a link table",
            mend=did_you_mean(node_type.scale_up, choices),
        )
        return
    if table.num_modules != node_type.num_accelerators:
        yield Flaw(
            f"{at}.scale_up",
            f"link table {table.name} joins {table.num_modules} modules; the node has {node_type.num_accelerators}",
            mend=f"set num_accelerators to {table.num_modules} or choose another table",
            needs=(f"{at}.num_accelerators",),
        )


def _nics(cluster: Cluster, node_type: NodeType, at: str) -> Iterator[Flaw]:
    planes = {plane.name: plane for plane in cluster.planes}
    for index, nic in enumerate(node_type.nics):
        plane = planes.get(nic.plane)
        if plane is None:
            yield Flaw(
                f"{at}.nics[{index}].plane",
                f"no plane is called {nic.plane!r}",
                mend=did_you_mean(nic.plane, list(planes)),
                needs=("planes",),
            )
        elif nic.num_ports % plane.num_rails:
            yield Flaw(
                f"{at}.nics[{index}].num_ports",
                f"{nic.num_ports} ports do not spread evenly over the {plane.num_rails} rails of {nic.plane!r}",
                mend="make the ports a multiple of num_rails",
                is_warning=True,
            )


def _node_power(cluster: Cluster, node_type: NodeType, at: str) -> Iterator[Flaw]:
    max_w = node_type.max_power_w
    for index, supply in enumerate(node_type.power_supplies):
        if supply.num_needed > supply.num_supplies:
            yield Flaw(
                f"{at}.power_supplies[{index}].num_needed",
                f"{supply.num_needed} supplies are needed and there are {supply.num_supplies}",
                mend="num_needed is at most num_supplies",
            )
    if max_w is None:
        return
    supply_w = sum(supply.capacity_w * supply.num_needed for supply in node_type.power_supplies)
    if node_type.power_supplies and max_w > supply_w:
        yield _short_of_power(
            f"{at}.max_power_w", f"node type {node_type.name!r}", max_w, supply_w, "its power supplies"
        )
    try:
        tdp_w = accelerator(node_type.accelerator, own=cluster.accelerators).tdp_w
    except UserError:
        return
    if tdp_w is not None and tdp_w * node_type.num_accelerators > max_w:
        yield Flaw(
            f"{at}.max_power_w",
            f"the accelerators alone may draw {_w(tdp_w * node_type.num_accelerators)}, more than {_w(max_w)}",
            mend="raise max_power, or check the kind and number of accelerators",
            is_warning=True,
        )


def _groups(cluster: Cluster) -> Iterator[Flaw]:
    if not cluster.groups:
        yield Flaw("nodes", "the cluster has no node", mend="add nodes: [{path: hall-a/rack-01/node-1, type: …}]")
    type_names = [node_type.name for node_type in cluster.node_types]
    for index, group in enumerate(cluster.groups):
        if group.type not in type_names:
            yield Flaw(
                f"nodes[{index}].type",
                f"no node type is called {group.type!r}",
                mend=did_you_mean(group.type, type_names),
                needs=("node_types",),
            )


def _use(cluster: Cluster) -> Iterator[Flaw]:
    """What is described and used by nothing has no effect."""
    used_types = {group.type for group in cluster.groups}
    used_planes = {nic.plane for node_type in cluster.node_types for nic in node_type.nics}
    for index, node_type in enumerate(cluster.node_types):
        if node_type.name not in used_types:
            yield _idle(f"node_types[{index}]", f"no node is of the type {node_type.name!r}", needs=("nodes",))
    planes = [plane.name for plane in cluster.planes]
    for index, plane in enumerate(planes):
        if plane not in used_planes:
            yield _idle(f"planes[{index}]", f"no node has a port on the plane {plane!r}", needs=("node_types",))
    for index, storage in enumerate(cluster.storage):
        if storage.plane and storage.plane not in planes:
            yield Flaw(
                f"storage[{index}].plane",
                f"no plane is called {storage.plane!r}",
                mend=did_you_mean(storage.plane, planes),
                needs=("planes",),
            )
    used_kinds = {canonical(node_type.accelerator) for node_type in cluster.node_types}
    for index, kind in enumerate(cluster.accelerators):
        if used_kinds.isdisjoint(map(canonical, (kind.name, *kind.aliases))):
            yield _idle(
                f"accelerators[{index}]", f"no node type has the accelerator {kind.name!r}", needs=("node_types",)
            )


class _Places:
    """Where everything stands: the ranges that can be read, walked once, with the flaws met on the way."""

    def __init__(self, cluster: Cluster) -> None:
        self.flaws: list[Flaw] = []
        self.racks: dict[str, int] = {}
        self.nodes: dict[str, int] = {}
        self._walk("racks", [group.path for group in cluster.racks], self.racks)
        self._walk("nodes", [group.path for group in cluster.groups], self.nodes)
        self._check_nesting()

    def _walk(self, field: str, texts: Sequence[str], owners: dict[str, int]) -> None:
        """Fill `owners`, path -> index of its group; a path in two groups is a flaw of the second."""
        for index, text in enumerate(texts):
            paths = self._readable(f"{field}[{index}].path", text)
            if paths is None:
                continue
            if len(paths) + len(owners) > MAX_PATHS:
                self.flaws.append(
                    Flaw(f"{field}[{index}].path", f"more than {MAX_PATHS} {field}", mend="split the cluster")
                )
                return
            again = [path for path in paths if path in owners]
            if again:
                self.flaws.append(_twice(f"{field}[{index}].path", field, again, owners[again[0]]))
            owners.update((path, index) for path in paths if path not in owners)

    def _readable(self, at: str, text: str) -> PathRange | None:
        try:
            return parse_range(text)
        except UserError as error:
            self.flaws.append(Flaw(at, error.what, mend=error.mend))
            return None

    def _check_nesting(self) -> None:
        inside = {path: index for path, index in self.nodes.items() if parent(path) in self.nodes}
        for index, paths in _by_value(inside):
            self.flaws.append(
                Flaw(
                    f"nodes[{index}].path",
                    f"{_few(paths)} would stand inside another node",
                    mend="a node holds no nodes; check the number of '/'",
                )
            )


def _racks(cluster: Cluster, places: _Places) -> Iterator[Flaw]:
    if not cluster.racks:
        return
    homeless = {path: index for path, index in places.nodes.items() if parent(path) not in places.racks}
    for index, paths in _by_value(homeless):
        yield Flaw(
            f"nodes[{index}].path",
            f"{_few({parent(path) for path in paths})} is not among the racks",
            mend="add it under racks:, or leave racks: out",
            needs=("racks",),
        )
    for index, racks in _by_value(places.racks):
        yield from _loads(cluster, places, index, set(racks))


def _loads(cluster: Cluster, places: _Places, index: int, racks: set[str]) -> Iterator[Flaw]:
    """Whether the nodes of the racks of group `index` fit, by height and by power."""
    types = {node_type.name: node_type for node_type in cluster.node_types}
    units: Counter[str] = Counter()
    power_w: Counter[str] = Counter()
    for path, group_index in places.nodes.items():
        node_type = types.get(cluster.groups[group_index].type)
        rack = parent(path)
        if node_type is not None and rack in racks:
            units[rack] += node_type.height_units
            power_w[rack] += node_type.max_power_w or 0.0  # type: ignore[assignment]
    group = cluster.racks[index]
    full = [rack for rack, used in units.items() if used > group.height_units]
    if full:
        yield Flaw(
            f"racks[{index}].height_units",
            f"{_few(full)} has {group.height_units} height units and holds nodes of {units[full[0]]}",
            mend="move nodes to other racks, or mend height_units of the node type",
        )
    limit_w = group.max_power_w
    hot = [] if limit_w is None else [rack for rack, used_w in power_w.items() if used_w > limit_w]
    if hot and limit_w is not None:
        yield _short_of_power(f"racks[{index}].max_power_w", _few(hot), power_w[hot[0]], limit_w, "the rack")


def _budgets(cluster: Cluster, places: _Places) -> Iterator[Flaw]:
    types = {node_type.name: node_type for node_type in cluster.node_types}
    needed_w = 0.0
    for index, num_nodes in Counter(places.nodes.values()).items():
        node_type = types.get(cluster.groups[index].type)
        needed_w += num_nodes * ((node_type.max_power_w or 0.0) if node_type else 0.0)
    if cluster.power is not None and needed_w > cluster.power.usable_w:
        where = f"the power feeds (redundancy {cluster.power.redundancy})"
        yield _short_of_power("power", "all nodes together", needed_w, cluster.power.usable_w, where)
    capacity_w = cluster.cooling.capacity_w if cluster.cooling else None
    if capacity_w is not None and needed_w > capacity_w:
        yield _short_of_power("cooling.capacity_w", "all nodes together", needed_w, capacity_w, "the cooling")


def _short_of_power(at: str, who: str, needed_w: float, capacity_w: float, source: str) -> Flaw:
    return Flaw(
        at,
        f"{who} may draw {_w(needed_w)}; {source} can take {_w(capacity_w)}",
        mend="raise the capacity, lower max_power of the node type, or spread the nodes",
        is_warning=True,
    )


def _idle(at: str, what: str, *, needs: tuple[str, ...]) -> Flaw:
    return Flaw(at, f"{what}, so it has no effect", mend="use it or remove it", is_warning=True, needs=needs)


def _twice(at: str, field: str, paths: Sequence[str], first_index: int) -> Flaw:
    return Flaw(
        at,
        f"{_few(paths)} is already among {field}[{first_index}]",
        mend="name each path once; make the ranges disjoint",
    )


def _w(power_w: float) -> str:
    return format_si(power_w, "W")


def _few(paths: Iterable[str]) -> str:
    """The paths as ranges, cut after the third."""
    ranges = compress(itertools.islice(in_order(paths), 1000))
    return ", ".join(ranges[:3]) + (" …" if len(ranges) > 3 else "")


def _repeats(names: Sequence[str]) -> Iterator[tuple[int, str]]:
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:
            yield index, name
        seen.add(name)


def _by_value(owners: dict[str, int]) -> list[tuple[int, list[str]]]:
    """The keys of each value, in the order of the values."""
    groups: dict[int, list[str]] = {}
    for path, index in owners.items():
        groups.setdefault(index, []).append(path)
    return sorted(groups.items())
