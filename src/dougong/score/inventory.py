"""How much of the hardware in the job's hands was usable, over time."""

from __future__ import annotations

import msgspec


class _Node(msgspec.Struct):
    num_accelerators: int
    joined_ns: int
    down_ns: int = 0
    lost_ns: int | None = None


class Inventory:
    """The nodes that joined, with the time they were lost. A node that joins again is repaired."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._repairs_ns: list[int] = []

    def join(self, component: str, *, num_accelerators: int, now_ns: int) -> None:
        if component in self._nodes:
            self.repair(component, now_ns=now_ns)
        else:
            self._nodes[component] = _Node(num_accelerators, now_ns)

    def lose(self, component: str, *, now_ns: int) -> None:
        node = self._nodes.get(component)
        if node is not None and node.lost_ns is None:
            node.lost_ns = now_ns

    def repair(self, component: str, *, now_ns: int) -> None:
        node = self._nodes.get(component)
        if node is not None and node.lost_ns is not None:
            node.down_ns += max(0, now_ns - node.lost_ns)
            self._repairs_ns.append(max(0, now_ns - node.lost_ns))
            node.lost_ns = None

    @property
    def num_accelerators(self) -> int:
        """Accelerators of all nodes that ever joined, spares included."""
        return sum(node.num_accelerators for node in self._nodes.values())

    @property
    def mean_repair_s(self) -> float | None:
        """Mean seconds from the loss of a node until it could be used again; `None` if none was repaired."""
        return sum(self._repairs_ns) / len(self._repairs_ns) / 1e9 if self._repairs_ns else None

    def usable_ratio(self, *, until_ns: int) -> float | None:
        """Usable accelerator-time over installed accelerator-time up to `until_ns`; `None` if no node joined."""
        installed = down = 0
        for node in self._nodes.values():
            down_ns = node.down_ns + (max(0, until_ns - node.lost_ns) if node.lost_ns is not None else 0)
            installed += node.num_accelerators * max(0, until_ns - node.joined_ns)
            down += node.num_accelerators * down_ns
        return 1 - down / installed if installed else None
