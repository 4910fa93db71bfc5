"""The cluster description of the machine this runs on, from /proc, sysfs and the drivers of the accelerators.

SOURCE: the kernel's own documents: proc(5) for cpuinfo and meminfo; ABI/testing/sysfs-class-net, sysfs-bus-pci and
ABI/stable/sysfs-block for the rest. PCI class codes are those of the PCI Code and ID Assignment Specification.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from dougong.backend.device import DeviceProbe, FoundAccelerator
from dougong.errors import UserError
from dougong.spec.catalog import Accelerator, accelerator
from dougong.spec.cluster import Cluster, Disk, Nic, NodeGroup, NodeType, PcieDevice, Plane, PlaneKind, PlanePurpose

SECTOR_BYTES = 512

_ETHERNET, _INFINIBAND = 1, 32
_NO_DISK = ("loop", "ram", "zram", "dm-", "md", "sr", "fd", "nbd")
_ASPEED = "1a03"  # the display of a management controller, never an accelerator
_PURPOSES: dict[PlaneKind, PlanePurpose] = {
    "infiniband": "compute",
    "roce": "compute",
    "ethernet": "service",
    "other": "service",
}


class Discovered(msgspec.Struct, frozen=True):
    """A cluster of one node, and what could not be found out, in words."""

    cluster: Cluster
    notes: tuple[str, ...]


def discover(
    *, hostname: str, probes: Sequence[DeviceProbe], proc: Path = Path("/proc"), sys: Path = Path("/sys")
) -> Discovered:
    """What this machine is. A file that a container hides is left out and told in `notes`; nothing is guessed."""
    notes: list[str] = []
    name = _as_name(hostname)
    pcie = tuple(_pcie_devices(sys))
    found = _probe(probes, pcie, notes)
    ports = tuple(_nics(sys, notes))
    own = _own_kind(found)
    node_type = _with_cpu(
        NodeType(
            name=name,
            memory_bytes=_memory_bytes(proc, notes),
            accelerator=_kind_name(found),
            num_accelerators=len(found) or 1,
            scale_up="switch" if any((one.num_scale_up_links or 0) > 0 for one in found) else "pcie",
            nics=_joined(ports),
            disks=tuple(_disks(sys, notes)),
            pcie=pcie,
        ),
        proc,
        notes,
    )
    cluster = Cluster(
        name=name,
        groups=(NodeGroup(path=f"local/{name}", type=name),),
        node_types=(node_type,),
        planes=tuple(_planes(ports)),
        accelerators=() if own is None else (own,),
    )
    return Discovered(cluster, tuple(notes))


def _as_name(hostname: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", hostname).strip("-._+") or "host"


# --- CPU and memory ------------------------------------------------------------------------------------------------


def _with_cpu(node_type: NodeType, proc: Path, notes: list[str]) -> NodeType:
    text = _read(proc / "cpuinfo")
    blocks = [dict(_pairs(block)) for block in re.split(r"\n\s*\n", text or "")]
    processors = [block for block in blocks if "processor" in block]
    if not processors:
        notes.append("CPU: /proc/cpuinfo lists no processor; one core is written")
        return node_type
    # Where the kernel tells no topology (most Arm machines), each processor counts as a core of one socket.
    sockets = {block.get("physical id", "0") for block in processors}
    cores = {(block.get("physical id", "0"), block.get("core id", block["processor"])) for block in processors}
    model = next((block["model name"] for block in processors if block.get("model name")), "")
    return msgspec.structs.replace(
        node_type, num_sockets=len(sockets), cores_per_socket=max(len(cores) // len(sockets), 1), cpu_model=model
    )


def _pairs(block: str) -> Iterator[tuple[str, str]]:
    for line in block.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            yield key.strip(), value.strip()


def _memory_bytes(proc: Path, notes: list[str]) -> float:
    match = re.search(r"^MemTotal:\s*([0-9]+) kB", _read(proc / "meminfo") or "", re.MULTILINE)
    if match is None:
        notes.append("memory: /proc/meminfo has no MemTotal; 0 is written")
        return 0.0
    return float(match[1]) * 1024


# --- PCIe ----------------------------------------------------------------------------------------------------------


def _pcie_devices(sys: Path) -> Iterator[PcieDevice]:
    """Accelerators, network ports and storage controllers that sit on a PCIe link."""
    for folder in _entries(sys / "bus" / "pci" / "devices"):
        kind = _pcie_kind(folder)
        if kind == "other":
            continue
        yield PcieDevice(
            address=folder.name,
            kind=kind,
            vendor_id=_hex(folder / "vendor"),
            device_id=_hex(folder / "device"),
            link_transfers_per_s=_transfers_per_s(folder / "current_link_speed"),
            link_lanes=_positive(folder / "current_link_width"),
            max_link_transfers_per_s=_transfers_per_s(folder / "max_link_speed"),
            max_link_lanes=_positive(folder / "max_link_width"),
            numa_node=_not_negative(folder / "numa_node"),
        )


def _pcie_kind(folder: Path) -> Literal["accelerator", "nic", "storage", "other"]:
    code = _hex(folder / "class").zfill(6)
    if _hex(folder / "vendor") == _ASPEED:
        return "other"
    if code.startswith(("12", "03")):  # processing accelerator; display and 3D controller
        return "accelerator"
    if code.startswith("02"):
        return "nic"
    return "storage" if code.startswith("01") else "other"


def _transfers_per_s(path: Path) -> float | None:
    """`16.0 GT/s PCIe` as transfers a second."""
    match = re.match(r"([0-9.]+) GT/s", _read(path) or "")
    return float(match[1]) * 1e9 if match and float(match[1]) > 0 else None


# --- accelerators --------------------------------------------------------------------------------------------------


def _probe(probes: Sequence[DeviceProbe], pcie: Sequence[PcieDevice], notes: list[str]) -> tuple[FoundAccelerator, ...]:
    """The accelerators of the first probe that finds any."""
    reasons: list[str] = []
    for probe in probes:
        probed = probe.accelerators()
        if probed.accelerators:
            names = sorted({one.name for one in probed.accelerators})
            if len(names) > 1:
                notes.append(
                    f"accelerators: more than one kind in this node ({', '.join(names)}); the first is written"
                )
            return probed.accelerators
        reasons.append(probed.reason)
    num_on_bus = sum(device.kind == "accelerator" for device in pcie)
    if num_on_bus:
        notes.append(f"accelerators: {num_on_bus} on the PCIe bus, but no driver answers ({'; '.join(reasons)})")
    return ()


def _kind_name(found: Sequence[FoundAccelerator]) -> str:
    if not found:
        return "cpu"
    own = _own_kind(found)
    return accelerator(found[0].name).name if own is None else own.name


def _own_kind(found: Sequence[FoundAccelerator]) -> Accelerator | None:
    """A kind of the cluster's own for an accelerator that the catalog does not know."""
    if not found:
        return None
    first = found[0]
    try:
        accelerator(first.name)
    except UserError:
        return Accelerator(
            name=first.name,
            vendor=first.vendor,
            memory_bytes=float(first.memory_bytes) if first.memory_bytes else None,
            tdp_w=first.power_limit_w,
            source="asked of the driver by dougong discover; peaks are not known",
        )
    return None


# --- network -------------------------------------------------------------------------------------------------------


class _Port(msgspec.Struct, frozen=True):
    kind: PlaneKind
    speed_bytes_per_s: float | None
    model: str


def _nics(sys: Path, notes: list[str]) -> Iterator[_Port]:
    """Network ports with a device behind them; bridges, loops and container pairs have none."""
    folder = sys / "class" / "net"
    if not folder.is_dir():
        notes.append("network: /sys/class/net is not there")
    for port in _entries(folder):
        if not (port / "device").exists():
            continue
        kind = _plane_kind(port)
        megabits = _positive(port / "speed")
        if megabits is None:
            notes.append(f"network: {port.name} does not tell its speed")
        model = ":".join(word for word in (_hex(port / "device" / "vendor"), _hex(port / "device" / "device")) if word)
        yield _Port(kind, None if megabits is None else megabits * 1e6 / 8, model)


def _plane_kind(port: Path) -> PlaneKind:
    link = _not_negative(port / "type")
    if link == _INFINIBAND:
        return "infiniband"
    if link == _ETHERNET:
        return "roce" if (port / "device" / "infiniband").is_dir() else "ethernet"
    return "other"


def _joined(ports: Sequence[_Port]) -> tuple[Nic, ...]:
    return tuple(
        Nic(plane=port.kind, speed_bytes_per_s=port.speed_bytes_per_s, num_ports=num_ports, model=port.model)
        for port, num_ports in Counter(ports).items()
    )


def _planes(ports: Sequence[_Port]) -> Iterator[Plane]:
    kinds: dict[PlaneKind, None] = dict.fromkeys(port.kind for port in ports)
    for kind in kinds:
        yield Plane(name=kind, kind=kind, purpose=_PURPOSES[kind])


# --- disks ---------------------------------------------------------------------------------------------------------


def _disks(sys: Path, notes: list[str]) -> Iterator[Disk]:
    folder = sys / "block"
    if not folder.is_dir():
        notes.append("disks: /sys/block is not there")
    yield from (
        msgspec.structs.replace(disk, num_disks=num_disks) for disk, num_disks in Counter(_each_disk(folder)).items()
    )


def _each_disk(folder: Path) -> Iterator[Disk]:
    for block in _entries(folder):
        sectors = _positive(block / "size")
        if block.name.startswith(_NO_DISK) or sectors is None:
            continue
        model = (_read(block / "device" / "model") or "").strip()
        yield Disk(capacity_bytes=float(sectors * SECTOR_BYTES), kind=_disk_kind(block), model=model)


def _disk_kind(block: Path) -> Literal["nvme", "ssd", "hdd", "virtual"]:
    if block.name.startswith("nvme"):
        return "nvme"
    if block.name.startswith(("vd", "xvd")):
        return "virtual"
    return "hdd" if (_read(block / "queue" / "rotational") or "").strip() == "1" else "ssd"


# --- files that may not be there -----------------------------------------------------------------------------------


def _read(path: Path) -> str | None:
    """The text, or `None` where the kernel (or the container) does not show it."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _hex(path: Path) -> str:
    return (_read(path) or "").strip().lower().removeprefix("0x")


def _positive(path: Path) -> int | None:
    number = _not_negative(path)
    return number or None


def _not_negative(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if re.fullmatch(r"[0-9]{1,20}", text) else None
