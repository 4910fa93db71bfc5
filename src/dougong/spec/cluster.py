"""The one noun: what there is. Sites, racks, nodes, accelerators, planes, storage, power and cooling, each with a path.

Nodes are held as ranges of paths with a type, so that a cluster of any size stays small until somebody walks over it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from dougong.errors import UserError
from dougong.spec.catalog import Accelerator, Precision
from dougong.spec.catalog import accelerator as find_accelerator
from dougong.spec.cluster_rules import cluster_flaws
from dougong.spec.dump import dump_typed
from dougong.spec.limits import AtLeastOne, Count, Name, NotNegative, Positive, Ratio
from dougong.spec.path import compress, parent, parse_range
from dougong.spec.typed import Flaw, Warn, load_typed, warn_python
from dougong.spec.values import did_you_mean

PlaneKind = Literal["ethernet", "infiniband", "roce", "other"]
PlanePurpose = Literal["compute", "storage", "management", "service"]
StorageKind = Literal["parallel", "object", "nfs", "block", "local"]
CoolingKind = Literal["air", "liquid", "hybrid", "immersion"]
Redundancy = Literal["none", "n+1", "2n"]


class Nic(msgspec.Struct, frozen=True, kw_only=True):
    """Equal network ports of a node on one plane. `speed_bytes_per_s` is one port's, one direction."""

    plane: Name
    speed_bytes_per_s: Positive | None = None
    num_ports: AtLeastOne = 1
    model: str = ""


class Disk(msgspec.Struct, frozen=True, kw_only=True):
    """Equal disks of a node."""

    capacity_bytes: NotNegative
    num_disks: AtLeastOne = 1
    kind: Literal["nvme", "ssd", "hdd", "virtual"] = "nvme"
    model: str = ""


class PcieDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device on the PCIe bus and the link it has now; `max_*` is the link it could have. `None` = not told."""

    address: str
    kind: Literal["accelerator", "nic", "storage", "other"]
    vendor_id: str
    device_id: str
    link_transfers_per_s: Positive | None = None
    link_lanes: AtLeastOne | None = None
    max_link_transfers_per_s: Positive | None = None
    max_link_lanes: AtLeastOne | None = None
    numa_node: Count | None = None


class PowerSupply(msgspec.Struct, frozen=True, kw_only=True):
    """Equal power supplies of a node; `num_needed` of them carry the full load."""

    capacity_w: Positive
    num_supplies: AtLeastOne = 1
    num_needed: AtLeastOne = 1


class NodeType(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of node. `scale_up` is `switch`, `pcie`, or the name of a link table of the catalog.

    `accelerator` is a name of the catalog or of the cluster's own `accelerators`; `cpu` stands for the host's cores.
    """

    name: Name
    num_sockets: AtLeastOne = 1
    cores_per_socket: AtLeastOne = 1
    memory_bytes: NotNegative = 0.0
    accelerator: str = "cpu"
    num_accelerators: Count = 1
    scale_up: str = "pcie"
    nics: tuple[Nic, ...] = ()
    disks: tuple[Disk, ...] = ()
    power_supplies: tuple[PowerSupply, ...] = ()
    pcie: tuple[PcieDevice, ...] = ()
    max_power_w: Positive | None = None
    height_units: AtLeastOne = 1
    cpu_model: str = ""
    vendor: str = ""
    model: str = ""

    @property
    def num_cores(self) -> int:
        return self.num_sockets * self.cores_per_socket


class RackGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Equal racks. `path` may be a range."""

    path: str
    height_units: AtLeastOne = 42
    max_power_w: Positive | None = None


class NodeGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Equal nodes. `path` may be a range; what stands before the last `/` is the rack."""

    path: str
    type: str


class Plane(msgspec.Struct, frozen=True, kw_only=True):
    """A network of its own. With rails, port i of every node hangs on rail i modulo `num_rails`."""

    name: Name
    kind: PlaneKind
    purpose: PlanePurpose = "compute"
    num_leaves: Count = 0
    num_spines: Count = 0
    num_rails: AtLeastOne = 1
    oversubscription: Annotated[float, Meta(ge=1)] = 1.0


class Storage(msgspec.Struct, frozen=True, kw_only=True):
    """A storage system. Bandwidth is that of all clients together."""

    name: Name
    kind: StorageKind
    capacity_bytes: Positive
    read_bytes_per_s: Positive | None = None
    write_bytes_per_s: Positive | None = None
    plane: str = ""
    mount: str = ""


class Feed(msgspec.Struct, frozen=True, kw_only=True):
    """One supply of power to the site."""

    name: Name
    capacity_w: Positive


class Power(msgspec.Struct, frozen=True, kw_only=True):
    """Where the power comes from. `pue` is the facility's power over that of the machines."""

    feeds: tuple[Feed, ...]
    redundancy: Redundancy = "none"
    pue: Annotated[float, Meta(ge=1)] | None = None

    @property
    def usable_w(self) -> float:
        """What may be drawn so that the redundancy still holds."""
        total_w = sum(feed.capacity_w for feed in self.feeds)
        match self.redundancy:
            case "none":
                return total_w
            case "n+1":
                return total_w - max((feed.capacity_w for feed in self.feeds), default=0.0)
            case "2n":
                return total_w / 2


class Cooling(msgspec.Struct, frozen=True, kw_only=True):
    """How heat is carried away. `supply_c` is the temperature of the air or liquid that comes in."""

    kind: CoolingKind
    capacity_w: Positive | None = None
    supply_c: Annotated[float, Meta(ge=-50, le=100)] | None = None
    liquid_ratio: Ratio | None = None


class Node(msgspec.Struct, frozen=True):
    """One node: its path, what it is, and the rack it stands in ("" = none is described)."""

    path: str
    type: NodeType
    rack: str

    def accelerator_path(self, index: int) -> str:
        """The path of the accelerator `index`, from 0."""
        return f"{self.path}/accel-{index}"

    def parts(self) -> Iterator[str]:
        """The paths of everything inside the node."""
        yield from (f"{self.path}/accel-{index}" for index in range(self.type.num_accelerators))
        yield from (f"{self.path}/nic-{index}" for index in range(sum(nic.num_ports for nic in self.type.nics)))
        yield from (f"{self.path}/disk-{index}" for index in range(sum(disk.num_disks for disk in self.type.disks)))
        num_supplies = sum(supply.num_supplies for supply in self.type.power_supplies)
        yield from (f"{self.path}/psu-{index}" for index in range(num_supplies))


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """Everything there is. `accelerators` are kinds of the cluster's own, which go before the catalog's.

    The rules between the parts are checked when a file is loaded; a cluster built in code is checked by `flaws()`.
    """

    name: Name
    groups: tuple[NodeGroup, ...] = msgspec.field(name="nodes")
    node_types: tuple[NodeType, ...]
    racks: tuple[RackGroup, ...] = ()
    planes: tuple[Plane, ...] = ()
    storage: tuple[Storage, ...] = ()
    power: Power | None = None
    cooling: Cooling | None = None
    accelerators: tuple[Accelerator, ...] = ()

    def flaws(self) -> Iterator[Flaw]:
        return cluster_flaws(self)

    @property
    def num_nodes(self) -> int:
        return sum(len(parse_range(group.path)) for group in self.groups)

    @property
    def num_accelerators(self) -> int:
        """All accelerators of all nodes; a host that computes on its own cores counts as one."""
        types = self._types()
        return sum(len(parse_range(group.path)) * types[group.type].num_accelerators for group in self.groups)

    @property
    def num_racks(self) -> int:
        """The racks in which nodes stand, described under `racks` or not."""
        return len({node.rack for node in self.nodes() if node.rack})

    @property
    def max_power_w(self) -> float | None:
        """The sum of the nodes' `max_power_w`; `None` = a node's is not known."""
        types = self._types()
        total_w = 0.0
        for group in self.groups:
            node_w = types[group.type].max_power_w
            if node_w is None:
                return None
            total_w += len(parse_range(group.path)) * node_w
        return total_w

    def nodes(self) -> Iterator[Node]:
        """Every node, in the order of the file."""
        types = self._types()
        for group in self.groups:
            for path in parse_range(group.path):
                yield Node(path, types[group.type], parent(path))

    def ranges(self) -> tuple[NodeGroup, ...]:
        """The nodes of each type in the fewest ranges found, however the file lists them."""
        paths: dict[str, list[str]] = {}
        for group in self.groups:
            paths.setdefault(group.type, []).extend(parse_range(group.path))
        return tuple(NodeGroup(path=path, type=name) for name in paths for path in compress(paths[name]))

    def node(self, path: str) -> Node:
        """The node at `path`. Raises UserError."""
        for group in self.groups:
            if path in parse_range(group.path):
                return Node(path, self.node_type(group.type), parent(path))
        first = self.groups[0].path if self.groups else "none"
        raise UserError(f"no node has the path {path!r}", where=f"cluster {self.name}", mend=f"nodes are {first} …")

    def node_type(self, name: str) -> NodeType:
        """The node type called `name`. Raises UserError."""
        found = self._types().get(name)
        if found is None:
            raise UserError(
                f"no node type is called {name!r}",
                where=f"cluster {self.name}",
                mend=did_you_mean(name, list(self._types())),
            )
        return found

    def accelerator(self, name: str) -> Accelerator:
        """The accelerator kind called `name`, the cluster's own first. Raises UserError."""
        return find_accelerator(name, own=self.accelerators)

    def peak_flop_per_s(self, precision: Precision = "bf16") -> float | None:
        """The dense peak of all accelerators together; `None` = the peak of one of them is not known."""
        total = 0.0
        for group in self.groups:
            node_type = self.node_type(group.type)
            peak = self.accelerator(node_type.accelerator).peak_flop_per_s(precision)
            if peak is None:
                return None
            total += peak * node_type.num_accelerators * len(parse_range(group.path))
        return total

    def component_paths(self) -> Iterator[str]:
        """Every path: what stands above the nodes, each before what it holds; then each node with its parts."""
        seen: set[str] = set()
        for node in self.nodes():
            for above in _above(node.path):
                if above not in seen:
                    seen.add(above)
                    yield above
            yield node.path
            yield from node.parts()

    def _types(self) -> dict[str, NodeType]:
        return {node_type.name: node_type for node_type in self.node_types}


def load_cluster(path: Path | str, *, warn: Warn = warn_python) -> Cluster:
    """The cluster in the file at `path`, checked. Raises Problems with everything that is wrong in it."""
    return load_typed(path, Cluster, warn=warn)


def dump_cluster(cluster: Cluster) -> str:
    """The YAML of `cluster`, which loads as the same cluster."""
    return dump_typed(cluster)


def uniform_cluster(
    *, accelerator: str, num_nodes: int, accelerators_per_node: int = 8, nodes_per_rack: int = 8, name: str = "uniform"
) -> Cluster:
    """A cluster of `num_nodes` equal nodes, known by its accelerator alone. Raises UserError for an unknown one."""
    kind = find_accelerator(accelerator)
    num_full, num_left = divmod(num_nodes, nodes_per_rack)
    width = len(str(num_full + (num_left > 0)))
    groups: list[NodeGroup] = []
    if num_full:
        racks = _span(1, num_full, width=width)
        groups.append(NodeGroup(path=f"hall-a/rack-{racks}/node-{_span(1, nodes_per_rack)}", type="node"))
    if num_left:
        groups.append(NodeGroup(path=f"hall-a/rack-{num_full + 1:0{width}d}/node-{_span(1, num_left)}", type="node"))
    node_type = NodeType(
        name="node",
        accelerator=kind.name,
        num_accelerators=accelerators_per_node,
        scale_up="switch" if kind.scale_up_bytes_per_s is not None else "pcie",
    )
    return Cluster(name=name, groups=tuple(groups), node_types=(node_type,))


def _above(path: str) -> Iterator[str]:
    segments = path.split("/")
    for depth in range(1, len(segments)):
        yield "/".join(segments[:depth])


def _span(first: int, last: int, *, width: int = 1) -> str:
    return f"{first:0{width}d}" if first == last else f"[{first:0{width}d}-{last:0{width}d}]"
