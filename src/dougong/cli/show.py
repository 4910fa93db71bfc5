"""`dougong show`: what a cluster description says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dougong.errors import UserError
from dougong.units import format_bytes, format_si

if TYPE_CHECKING:
    from rich.table import Table

    from dougong.spec.cluster import Cluster, NodeType


@click.command()
@click.argument("cluster_file", metavar="CLUSTER.yaml", type=click.Path(path_type=Path))
@click.option("--tree", "form", flag_value="tree", help="Every component, equal ones as ranges.")
@click.option("--json", "form", flag_value="json", help="The whole description and its totals, for programs.")
def show(cluster_file: Path, form: str | None) -> None:
    """Check a cluster description and show what it says."""
    from dougong.spec.cluster import load_cluster

    cluster = load_cluster(cluster_file, warn=_warn)
    match form:
        case "json":
            click.echo(cluster_json(cluster))
        case "tree":
            for line in tree_lines(cluster):
                click.echo(line)
        case _:
            _print_tables(cluster)


def cluster_json(cluster: Cluster) -> str:
    """The description in SI base units, with the totals that follow from it."""
    import msgspec

    totals = {
        "num_nodes": cluster.num_nodes,
        "num_racks": cluster.num_racks,
        "num_accelerators": cluster.num_accelerators,
        "peak_bf16_flop_per_s": cluster.peak_flop_per_s("bf16"),
        "max_power_w": cluster.max_power_w,
    }
    whole = {"totals": totals, "cluster": msgspec.to_builtins(cluster)}
    return msgspec.json.format(msgspec.json.encode(whole), indent=2).decode()


def tree_lines(cluster: Cluster) -> Iterator[str]:
    """The tree of components, one line each; places that hold the same are one line with a range."""
    yield f"{cluster.name}: {cluster.num_nodes} nodes, {cluster.num_accelerators} accelerators"
    shown: tuple[str, ...] = ()
    for group in cluster.ranges():
        *above, last = group.path.split("/")
        for depth, segment in enumerate(above):
            if shown[: depth + 1] != tuple(above[: depth + 1]):
                yield f"{'  ' * (depth + 1)}{segment}"
        shown = tuple(above)
        indent = "  " * (len(above) + 1)
        yield f"{indent}{last}  ({group.type})"
        for part in _part_ranges(cluster.node_type(group.type)):
            yield f"{indent}  {part}"


def _warn(problem: UserError) -> None:
    click.echo(f"warning: {problem}", err=True)


def _part_ranges(node_type: NodeType) -> tuple[str, ...]:
    from dougong.spec.cluster import Node
    from dougong.spec.path import compress

    node = Node("x", node_type, "")
    return compress(part.removeprefix("x/") for part in node.parts())


def _print_tables(cluster: Cluster) -> None:
    from rich.console import Console

    console = Console()
    console.print(f"{cluster.name}: {', '.join(_totals(cluster))}", style="bold", highlight=False, markup=False)
    console.print(_node_table(cluster))
    for node_type in cluster.node_types:
        for line in _type_lines(node_type):
            console.print(line, highlight=False, markup=False)
    if cluster.planes:
        console.print(_plane_table(cluster))
    if cluster.storage:
        console.print(_storage_table(cluster))
    for line in _site_lines(cluster):
        console.print(line, highlight=False, markup=False)


def _totals(cluster: Cluster) -> Iterator[str]:
    yield f"{cluster.num_nodes} nodes in {cluster.num_racks} racks"
    yield f"{cluster.num_accelerators} accelerators"
    peak = cluster.peak_flop_per_s("bf16")
    yield f"peak {format_si(peak, 'FLOP/s')} bf16 dense" if peak is not None else "peak not known"
    if cluster.max_power_w is not None:
        yield f"at most {format_si(cluster.max_power_w, 'W')}"


def _node_table(cluster: Cluster) -> Table:
    from dougong.spec.path import parse_range

    table = _table("nodes", "number", "type")
    for group in cluster.ranges():
        table.add_row(group.path, str(len(parse_range(group.path))), group.type)
    return table


def _type_lines(node_type: NodeType) -> Iterator[str]:
    """What one node of the type is, in short lines."""
    yield f"{node_type.name}: {node_type.num_accelerators} x {node_type.accelerator}, scale-up {node_type.scale_up}"
    memory = format_bytes(node_type.memory_bytes)
    yield f"  {node_type.num_cores} cores in {node_type.num_sockets} sockets, {memory} memory"
    for nic in node_type.nics:
        yield f"  {nic.num_ports} x {_speed(nic.speed_bytes_per_s)} on plane {nic.plane}"
    for disk in node_type.disks:
        yield f"  {disk.num_disks} x {format_bytes(disk.capacity_bytes)} {disk.kind}"
    if node_type.max_power_w is not None:
        yield f"  at most {format_si(node_type.max_power_w, 'W')}"


def _plane_table(cluster: Cluster) -> Table:
    table = _table("plane", "kind", "purpose", "leaves", "spines", "rails", "oversubscription")
    for plane in cluster.planes:
        row = (plane.num_leaves or "-", plane.num_spines or "-", plane.num_rails, f"{plane.oversubscription:g} : 1")
        table.add_row(plane.name, plane.kind, plane.purpose, *map(str, row))
    return table


def _storage_table(cluster: Cluster) -> Table:
    table = _table("storage", "kind", "capacity", "read", "write")
    for storage in cluster.storage:
        speeds = (storage.read_bytes_per_s, storage.write_bytes_per_s)
        cells = ("-" if speed is None else format_si(speed, "B/s") for speed in speeds)
        table.add_row(storage.name, storage.kind, format_bytes(storage.capacity_bytes), *cells)
    return table


def _site_lines(cluster: Cluster) -> Iterator[str]:
    power, cooling = cluster.power, cluster.cooling
    if power is not None:
        yield f"power: {len(power.feeds)} feeds, {format_si(power.usable_w, 'W')} usable, redundancy {power.redundancy}"
    if cooling is not None:
        capacity = "" if cooling.capacity_w is None else f", {format_si(cooling.capacity_w, 'W')}"
        supply = "" if cooling.supply_c is None else f", supply at {cooling.supply_c:g} °C"
        yield f"cooling: {cooling.kind}{capacity}{supply}"


def _table(*columns: str) -> Table:
    from rich.table import Table as NewTable

    table = NewTable(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _speed(bytes_per_s: float | None) -> str:
    return "unknown speed" if bytes_per_s is None else format_si(bytes_per_s * 8, "b/s")
