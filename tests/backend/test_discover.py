"""What `discover` makes of /proc and sysfs, from trees that the tests write."""

from __future__ import annotations

from pathlib import Path

import pytest

from dougong.backend.device import FoundAccelerator, Probed
from dougong.backend.local.discover import Discovered, discover
from dougong.spec.cluster import Cluster, NodeType, dump_cluster
from dougong.spec.typed import convert
from dougong.spec.yaml_source import parse_yaml


class Cards:
    """A probe that finds `found`."""

    def __init__(self, *found: FoundAccelerator, reason: str = "") -> None:
        self.probed = Probed(accelerators=found, reason=reason)

    def accelerators(self) -> Probed:
        return self.probed


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")


def processor(index: int, *, socket: int, core: int) -> str:
    return f"processor\t: {index}\nmodel name\t: Some CPU @ 2.0GHz\nphysical id\t: {socket}\ncore id\t\t: {core}\n"


def pcie(address: str, **fields: str) -> dict[str, str]:
    return {f"bus/pci/devices/{address}/{name}": text for name, text in fields.items()}


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Two sockets of two cores with two threads each, two ports of 100 Gb/s and one of another sort, three disks."""
    blocks = [processor(index, socket=index % 2, core=(index // 2) % 2) for index in range(8)]
    write(tmp_path / "proc", {"cpuinfo": "\n".join(blocks), "meminfo": "MemTotal:  1048576 kB\nMemFree: 1 kB"})
    sys = tmp_path / "sys"
    write(
        sys,
        {
            **pcie(
                "0000:19:00.0",
                **{"class": "0x030200"},
                vendor="0x10de",
                device="0x2330",
                current_link_speed="32.0 GT/s PCIe",
                current_link_width="8",
                max_link_speed="32.0 GT/s PCIe",
                max_link_width="16",
                numa_node="0",
            ),
            **pcie("0000:02:00.0", **{"class": "0x030000"}, vendor="0x1a03", device="0x2000"),
            **pcie("0000:00:00.0", **{"class": "0x060000"}, vendor="0x8086", device="0x0d57"),
            **pcie("0000:5e:00.0", **{"class": "0x020000"}, vendor="0x15b3", device="0x1021", numa_node="-1"),
            "class/net/eth0/speed": "100000",
            "class/net/eth0/type": "1",
            "class/net/eth0/device/vendor": "0x15b3",
            "class/net/eth0/device/device": "0x1021",
            "class/net/eth1/speed": "100000",
            "class/net/eth1/type": "1",
            "class/net/eth1/device/vendor": "0x15b3",
            "class/net/eth1/device/device": "0x1021",
            "class/net/ib0/speed": "400000",
            "class/net/ib0/type": "32",
            "class/net/ib0/device/vendor": "0x15b3",
            "class/net/lo/speed": "-1",
            "class/net/lo/type": "772",
            "block/nvme0n1/size": "7501476528",
            "block/nvme0n1/queue/rotational": "0",
            "block/nvme0n1/device/model": "Fast Disk   ",
            "block/sda/size": "1000",
            "block/sda/queue/rotational": "1",
            "block/vda/size": "2000",
            "block/loop0/size": "100",
        },
    )
    return tmp_path


def found(folder: Path, *probes: Cards) -> Discovered:
    discovered = discover(hostname="node-7.example", probes=probes, proc=folder / "proc", sys=folder / "sys")
    again = convert(parse_yaml(dump_cluster(discovered.cluster), file="c.yaml"), Cluster)
    assert again == discovered.cluster, "what is written must load again, without a warning"
    return discovered


def only_type(discovered: Discovered) -> NodeType:
    (node_type,) = discovered.cluster.node_types
    return node_type


def test_cpu_and_memory_are_counted_by_socket_and_core(machine: Path) -> None:
    node_type = only_type(found(machine))
    assert (node_type.num_sockets, node_type.cores_per_socket) == (2, 2)
    assert node_type.cpu_model == "Some CPU @ 2.0GHz"
    assert node_type.memory_bytes == 2**30


def test_a_cpu_without_topology_counts_processors(machine: Path) -> None:
    write(machine / "proc", {"cpuinfo": "processor\t: 0\nBogoMIPS\t: 50\n\nprocessor\t: 1\n\nHardware\t: board"})
    node_type = only_type(found(machine))
    assert (node_type.num_sockets, node_type.cores_per_socket) == (1, 2)


def test_pcie_devices_have_the_link_they_have_and_could_have(machine: Path) -> None:
    accelerator, nic = only_type(found(machine)).pcie
    assert (accelerator.kind, accelerator.vendor_id, accelerator.numa_node) == ("accelerator", "10de", 0)
    assert (accelerator.link_transfers_per_s, accelerator.link_lanes, accelerator.max_link_lanes) == (32e9, 8, 16)
    assert (nic.kind, nic.link_lanes, nic.numa_node) == ("nic", None, None)


def test_equal_ports_are_joined_and_each_kind_has_a_plane(machine: Path) -> None:
    discovered = found(machine)
    nics = only_type(discovered).nics
    assert [(nic.plane, nic.num_ports, nic.speed_bytes_per_s) for nic in nics] == [
        ("ethernet", 2, 12.5e9),
        ("infiniband", 1, 50e9),
    ]
    assert [plane.name for plane in discovered.cluster.planes] == ["ethernet", "infiniband"]


def test_disks_have_size_and_kind(machine: Path) -> None:
    disks = {disk.kind: disk for disk in only_type(found(machine)).disks}
    assert set(disks) == {"nvme", "hdd", "virtual"}
    assert disks["nvme"].capacity_bytes == 7501476528 * 512
    assert disks["nvme"].model == "Fast Disk"


def test_a_known_accelerator_gets_its_name_of_the_catalog(machine: Path) -> None:
    cards = [FoundAccelerator(index=n, name="NVIDIA H200", vendor="NVIDIA", num_scale_up_links=18) for n in range(8)]
    node_type = only_type(found(machine, Cards(reason="no driver"), Cards(*cards)))
    assert (node_type.accelerator, node_type.num_accelerators) == ("H200-141G-SXM5", 8)
    assert node_type.scale_up == "switch"


def test_an_unknown_accelerator_is_described_in_the_file(machine: Path) -> None:
    card = FoundAccelerator(index=0, name="NVIDIA T9: [new]", vendor="NVIDIA", memory_bytes=123, power_limit_w=70.0)
    discovered = found(machine, Cards(card))
    (own,) = discovered.cluster.accelerators
    assert (own.name, own.memory_bytes, own.tdp_w) == ("NVIDIA T9: [new]", 123, 70)
    assert discovered.cluster.num_accelerators == 1


def test_an_accelerator_without_a_driver_is_told(machine: Path) -> None:
    discovered = found(machine, Cards(reason="nobody home"))
    assert only_type(discovered).accelerator == "cpu"
    assert any("no driver answers (nobody home)" in note for note in discovered.notes)


def test_a_container_without_proc_and_sysfs_is_still_described(tmp_path: Path) -> None:
    discovered = found(tmp_path)
    assert discovered.cluster.num_nodes == 1
    assert {note.partition(":")[0] for note in discovered.notes} == {"CPU", "memory", "network", "disks"}


@pytest.mark.parametrize("hostname", ["", "---", "a b/c", "näme", "x" * 70])
def test_any_host_name_makes_a_path(tmp_path: Path, hostname: str) -> None:
    cluster = discover(hostname=hostname, probes=(), proc=tmp_path, sys=tmp_path).cluster
    assert [flaw for flaw in cluster.flaws() if not flaw.is_warning] == []
    assert convert(parse_yaml(dump_cluster(cluster), file="c.yaml"), Cluster) == cluster


def test_this_machine_is_described() -> None:
    assert discover(hostname="here", probes=()).cluster.num_nodes == 1
