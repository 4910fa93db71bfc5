"""The cluster description: laws, and all its rules at their lines."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dougong.errors import Problems, UserError
from dougong.spec.catalog import Accelerator, accelerator_names
from dougong.spec.cluster import (
    Cluster,
    Cooling,
    Disk,
    Feed,
    Nic,
    NodeGroup,
    NodeType,
    PcieDevice,
    Plane,
    Power,
    PowerSupply,
    RackGroup,
    Storage,
    dump_cluster,
    load_cluster,
    uniform_cluster,
)
from dougong.spec.typed import convert
from dougong.spec.values import short_key
from dougong.spec.yaml_source import parse_yaml

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "clusters").glob("*.yaml"))

GOOD = """\
name: c
racks:
  - {path: "h/r-[1-2]", height_units: 8, max_power: 10kW}
nodes:
  - {path: "h/r-[1-2]/n-[1-2]", type: t}
node_types:
  t:
    memory: 1TB
    accelerator: h100
    num_accelerators: 8
    scale_up: switch
    nics: [{plane: p, num_ports: 4, speed: 400Gb/s}]
    max_power: 5.7kW
    height_units: 4
planes:
  p: {kind: roce, num_rails: 4}
power: {feeds: {a: 30kW}}
cooling: {kind: air, capacity: 30kW}
"""


def read(text: str, warned: list[UserError] | None = None) -> Cluster:
    return convert(parse_yaml(text, file="cluster.yaml"), Cluster, warn=[].append if warned is None else warned.append)


def problems(text: str) -> list[tuple[str, str, str]]:
    with pytest.raises(Problems) as caught:
        read(text)
    return [(problem.where, problem.what, problem.mend) for problem in caught.value.problems]


def warnings(text: str) -> list[tuple[str, str]]:
    warned: list[UserError] = []
    read(text, warned)
    return [(problem.where, problem.what) for problem in warned]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_loads_without_a_warning_and_dumps_the_same(path: Path) -> None:
    warned: list[UserError] = []
    cluster = load_cluster(path, warn=warned.append)
    assert warned == []
    assert read(dump_cluster(cluster)) == cluster


def test_the_large_example_has_16384_accelerators() -> None:
    cluster = load_cluster(next(path for path in EXAMPLES if path.stem == "h100-16384"))
    assert (cluster.num_nodes, cluster.num_accelerators, cluster.num_racks) == (2048, 16384, 1024)
    assert cluster.peak_flop_per_s() == pytest.approx(16384 * 989e12)


def test_nodes_are_walked_and_found_by_path() -> None:
    cluster = read(GOOD.replace("10kW", "20kW"))
    nodes = list(cluster.nodes())
    assert [node.path for node in nodes] == ["h/r-1/n-1", "h/r-1/n-2", "h/r-2/n-1", "h/r-2/n-2"]
    assert nodes[1] == cluster.node("h/r-1/n-2")
    assert nodes[1].rack == "h/r-1"
    assert nodes[1].accelerator_path(7) == "h/r-1/n-2/accel-7"
    with pytest.raises(UserError, match="h/r-9"):
        cluster.node("h/r-9/n-1")


def test_every_component_has_one_path_after_what_holds_it() -> None:
    paths = list(read(GOOD.replace("10kW", "20kW")).component_paths())
    assert len(paths) == len(set(paths))
    assert paths[:4] == ["h", "h/r-1", "h/r-1/n-1", "h/r-1/n-1/accel-0"]
    assert "h/r-2/n-2/nic-3" in paths
    seen: set[str] = set()
    for path in paths:
        assert "/" not in path or path.rpartition("/")[0] in seen
        seen.add(path)


def test_nodes_listed_one_by_one_are_shown_as_ranges() -> None:
    groups = tuple(NodeGroup(path=f"r-{rack}/n-{node}", type="t") for rack in range(3) for node in range(2))
    cluster = Cluster(name="c", groups=groups, node_types=(NodeType(name="t"),))
    assert cluster.ranges() == (NodeGroup(path="r-[0-2]/n-[0-1]", type="t"),)


def test_the_rules_between_parts_are_told_at_once_with_their_lines() -> None:
    text = """\
name: c
nodes:
  - {path: "r/n-[1-4]", type: a}
  - {path: "r/n-[3-6]", type: a}
  - {path: "r/m-1", type: aa}
  - {path: "r/n-1/deep", type: b}
  - {path: "r/[9-1]", type: b}
node_types:
  a:
    accelerator: MI300
    nics:
      - {plane: comptue, num_ports: 8, speed: 400Gb/s}
  b:
    accelerator: MI300X
    num_accelerators: 4
    scale_up: FC8_7P_x8_r2.0
  b2:
    scale_up: ring
planes:
  - {name: compute, kind: roce}
  - {name: compute, kind: ethernet}
storage:
  s: {kind: nfs, capacity: 1TB, plane: nowhere}
"""
    found = problems(text)
    assert [where for where, _, _ in found] == [
        "cluster.yaml:4 nodes[1].path",
        "cluster.yaml:5 nodes[2].type",
        "cluster.yaml:6 nodes[3].path",
        "cluster.yaml:7 nodes[4].path",
        "cluster.yaml:10 node_types.a.accelerator",
        "cluster.yaml:12 node_types.a.nics[0].plane",
        "cluster.yaml:16 node_types.b.scale_up",
        "cluster.yaml:18 node_types.b2.scale_up",
        "cluster.yaml:21 planes[1].name",
        "cluster.yaml:23 storage.s.plane",
    ]
    assert "r/n-[3-4]" in found[0][1]
    assert "did you mean 'MI300X'?" in found[4][2]
    assert "did you mean 'compute'?" in found[5][2]


def test_mistakes_of_form_and_between_parts_are_told_together() -> None:
    text = GOOD.replace("memory: 1TB", "memroy: 1TXB").replace("type: t}", "type: tt}").replace("10kW", "20kW")
    assert [where for where, _, _ in problems(text)] == [
        "cluster.yaml:5 nodes[0].type",
        "cluster.yaml:8 node_types.t.memroy",
        "cluster.yaml:8 node_types.t.memory",
    ]


def test_a_rack_holds_what_fits() -> None:
    ((where, what, _),) = problems(GOOD.replace("height_units: 4", "height_units: 5").replace("10kW", "20kW"))
    assert where == "cluster.yaml:3 racks[0].height_units"
    assert "h/r-[1-2]" in what


def test_a_node_stands_in_a_described_rack() -> None:
    ((where, what, _),) = problems(GOOD.replace('path: "h/r-[1-2]/n', 'path: "h/r-[1-3]/n').replace("10kW", "20kW"))
    assert where == "cluster.yaml:5 nodes[0].path"
    assert "h/r-3" in what


def test_a_power_budget_that_is_exceeded_is_a_warning() -> None:
    assert warnings(GOOD.replace("10kW", "20kW")) == []
    assert [where for where, _ in warnings(GOOD)] == ["cluster.yaml:3 racks[0].max_power"]
    small = GOOD.replace("10kW", "20kW").replace("30kW", "20kW")
    assert [where for where, _ in warnings(small)] == ["cluster.yaml:17 power", "cluster.yaml:18 cooling.capacity"]


def test_redundancy_lowers_what_may_be_drawn() -> None:
    feeds = (Feed(name="a", capacity_w=10.0), Feed(name="b", capacity_w=30.0))
    assert [Power(feeds=feeds, redundancy=kind).usable_w for kind in ("none", "n+1", "2n")] == [40, 10, 20]


def test_what_has_no_effect_is_a_warning() -> None:
    text = GOOD.replace("10kW", "20kW").replace("planes:\n", "  u: {memory: 1GB}\nplanes:\n  q: {kind: ethernet}\n")
    found = warnings(text)
    assert [where for where, _ in found] == ["cluster.yaml:15 node_types.u", "cluster.yaml:17 planes.q"]
    assert all("no effect" in what for _, what in found)


def test_ports_that_do_not_fill_the_rails_are_a_warning() -> None:
    ((where, _),) = warnings(GOOD.replace("num_ports: 4", "num_ports: 6").replace("10kW", "20kW"))
    assert where == "cluster.yaml:12 node_types.t.nics[0].num_ports"


def test_accelerators_that_draw_more_than_the_node_are_a_warning() -> None:
    ((where, _),) = warnings(GOOD.replace("5.7kW", "5kW"))
    assert where == "cluster.yaml:13 node_types.t.max_power"


def test_a_cluster_may_describe_its_own_accelerator() -> None:
    own = "{ZZ-9: {bf16: 10TFLOP/s, memory: 80GB}}"
    text = f"name: c\nnodes: {{r/n: t}}\nnode_types: {{t: {{accelerator: zz-9}}}}\naccelerators: {own}\n"
    cluster = read(text)
    assert cluster.peak_flop_per_s() == 10e12
    assert cluster.accelerators[0].memory_bytes == 80e9
    assert read(dump_cluster(cluster)) == cluster
    assert warnings(text) == []


@given(st.integers(1, 3000), st.integers(1, 16), st.sampled_from(accelerator_names()))
@settings(deadline=None, max_examples=30)
def test_a_uniform_cluster_has_the_size_asked_for(num_nodes: int, per_node: int, name: str) -> None:
    cluster = uniform_cluster(accelerator=name, num_nodes=num_nodes, accelerators_per_node=per_node)
    assert (cluster.num_nodes, cluster.num_accelerators) == (num_nodes, num_nodes * per_node)
    assert [flaw for flaw in cluster.flaws() if not flaw.is_warning] == []


def test_the_reference_page_names_every_key() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "cluster-yaml.md").read_text(encoding="utf-8")
    structs = (Cluster, NodeType, NodeGroup, RackGroup, Nic, Disk, PowerSupply, PcieDevice, Plane, Storage, Power, Feed)
    for struct in (*structs, Cooling, Accelerator):
        for field in msgspec.structs.fields(struct):
            keys = {field.encode_name, short_key(field.encode_name, struct)}
            assert any(f"`{key}`" in page or f".{key}`" in page for key in keys), f"{struct.__name__}.{field.name}"


NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,6}", fullmatch=True)
POSITIVE = st.floats(1e-3, 1e18) | st.integers(1, 10**15).map(float)
TEXTS = st.text(alphabet=st.characters(blacklist_categories=["Cs"]), max_size=8)


KINDS = st.sampled_from(["roce", "other"])
PLANES = st.lists(st.builds(Plane, name=NAMES, kind=KINDS), max_size=3, unique_by=lambda plane: plane.name)
DISKS = st.lists(st.builds(Disk, capacity_bytes=POSITIVE, model=TEXTS), max_size=2).map(tuple)
STORAGE = st.lists(
    st.builds(Storage, name=NAMES, kind=st.sampled_from(["nfs", "object"]), capacity_bytes=POSITIVE, mount=TEXTS),
    max_size=2,
    unique_by=lambda storage: storage.name,
).map(tuple)
FEEDS = st.lists(st.builds(Feed, name=NAMES, capacity_w=POSITIVE), max_size=3, unique_by=lambda feed: feed.name)
POWER = st.builds(Power, feeds=FEEDS.map(tuple), redundancy=st.sampled_from(["none", "n+1", "2n"]))
COOLING = st.builds(
    Cooling,
    kind=st.sampled_from(["air", "liquid"]),
    capacity_w=st.none() | POSITIVE,
    supply_c=st.none() | st.floats(-50, 100),
)

ACCELERATORS = st.lists(
    st.builds(
        Accelerator,
        name=TEXTS.map(lambda text: f"own {text}"),
        bf16_flop_per_s=st.none() | POSITIVE,
        memory_bytes=st.none() | POSITIVE,
        memory_bytes_per_s=st.none() | POSITIVE,
        tdp_w=st.none() | POSITIVE,
        note=TEXTS,
    ),
    max_size=2,
    unique_by=lambda kind: kind.name,
).map(tuple)


def nics(planes: list[Plane]) -> st.SearchStrategy[tuple[Nic, ...]]:
    if not planes:
        return st.just(())
    names = st.sampled_from([plane.name for plane in planes])
    speed = st.none() | POSITIVE
    nic = st.builds(Nic, plane=names, speed_bytes_per_s=speed, num_ports=st.integers(1, 8), model=TEXTS)
    return st.lists(nic, max_size=2).map(tuple)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    planes = draw(PLANES)
    node_type = st.builds(
        NodeType,
        name=NAMES,
        num_sockets=st.integers(1, 4),
        memory_bytes=POSITIVE,
        accelerator=st.sampled_from(accelerator_names()),
        num_accelerators=st.integers(0, 72),
        scale_up=st.sampled_from(["switch", "pcie"]),
        nics=nics(planes),
        disks=DISKS,
        max_power_w=st.none() | POSITIVE,
        cpu_model=TEXTS,
    )
    types = draw(st.lists(node_type, min_size=1, max_size=3, unique_by=lambda node_type: node_type.name))
    last_racks = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    racks = [f"h/r-[{10 * index + 1}-{10 * index + last}]" for index, last in enumerate(last_racks)]
    return Cluster(
        name=draw(NAMES),
        racks=tuple(RackGroup(path=rack) for rack in racks) if draw(st.booleans()) else (),
        groups=tuple(NodeGroup(path=f"{rack}/n-[1-4]", type=draw(st.sampled_from(types)).name) for rack in racks),
        node_types=tuple(types),
        planes=tuple(planes),
        storage=draw(STORAGE),
        power=draw(st.none() | POWER),
        cooling=draw(st.none() | COOLING),
        accelerators=draw(ACCELERATORS),
    )


@given(clusters())
@settings(deadline=None)
def test_load_of_dump_is_the_same_cluster(cluster: Cluster) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.yaml"
        path.write_text(dump_cluster(cluster), encoding="utf-8")
        assert load_cluster(path, warn=lambda _: None) == cluster


JUNK = ["", "-1", "[]", "{}", "~", "x", "1e400", "[1-3]", "0", ":", "é", "- ", '"', "80GB"]


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_no_change_to_a_file_crashes_the_loader(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from([path.read_text(encoding="utf-8") for path in EXAMPLES] + [GOOD]))
    for _ in range(data.draw(st.integers(1, 4))):
        words = [match.span() for match in re.finditer(r"[^\s{},:\[\]]+|[{}\[\],:\n]", text)]
        start, end = data.draw(st.sampled_from(words))
        junk = data.draw(st.sampled_from(JUNK))
        text = text[:start] + junk + text[end:]
    problems: tuple[UserError, ...]
    try:
        read(text)
    except Problems as caught:
        problems = caught.problems
    except UserError as caught:
        problems = (caught,)
    else:
        problems = ()
    assert all(problem.where.startswith("cluster.yaml") and problem.mend for problem in problems)


@given(st.text(alphabet=st.characters(blacklist_categories=["Cs"]), max_size=100))
@settings(deadline=None)
def test_no_text_crashes_the_loader(text: str) -> None:
    with pytest.raises((Problems, UserError)):
        read(text)
