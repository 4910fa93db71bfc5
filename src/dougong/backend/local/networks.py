"""A network for each node that one host plays: a namespace with an address of its own, all on one bridge.

Needs root and the command `ip`. Links are cut as a broken switch would do it: packets vanish, and no side is told.
Source: ip-netns(8), ip-neighbour(8). A neighbour entry with an address that nobody has sends packets into nothing, and
needs no firewall module of the kernel.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Sequence

from dougong.backend.local.command import command
from dougong.errors import UserError

CONTROLLER = "controller"
EVERYTHING = "everything"
INTERFACE = "eth0"
_NOBODY = "02:00:00:00:00:01"
_MAX_NODES = 200


class NodeNetworks:
    """The networks of one run's nodes. The names of all that it makes carry the run's id."""

    def __init__(self, run_id: str, components: Sequence[str]) -> None:
        assert len(components) <= _MAX_NODES
        digest = hashlib.sha256(run_id.encode()).digest()
        self._subnet = f"10.{128 + digest[0] % 120}.{digest[1]}"
        self._short = run_id[:8]
        self._indices = {component: index for index, component in enumerate(components)}

    @property
    def controller_address(self) -> str:
        """The host's own address on the bridge."""
        return f"{self._subnet}.1"

    def address(self, component: str) -> str:
        if component == CONTROLLER:
            return self.controller_address
        return f"{self._subnet}.{self._indices[component] + 10}"

    def command_prefix(self, component: str) -> tuple[str, ...]:
        """What stands before a command that is to run inside the node's network."""
        return ("nsenter", f"--net=/run/netns/{self._namespace(component)}")

    def set_up(self) -> None:
        """Make them anew. Raises OSError with what the kernel said."""
        self.tear_down()
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self.controller_address}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for component in self._indices:
            namespace, link = self._namespace(component), self._link(component)
            _ip("netns", "add", namespace)
            _ip("link", "add", link, "type", "veth", "peer", "name", INTERFACE, "netns", namespace)
            _ip("link", "set", link, "master", self._bridge, "up")
            _ip("-n", namespace, "addr", "add", f"{self.address(component)}/24", "dev", INTERFACE)
            for name in (INTERFACE, "lo"):
                _ip("-n", namespace, "link", "set", name, "up")

    def tear_down(self) -> None:
        """Remove them; what is not there is fine."""
        for component in self._indices:
            _ip("netns", "del", self._namespace(component), is_checked=False)
            _ip("link", "del", self._link(component), is_checked=False)
        _ip("link", "del", self._bridge, is_checked=False)

    def cut(self, component: str, peer: str) -> None:
        """Packets between the two vanish, in both directions. Raises OSError; then nothing is cut."""
        try:
            for side, other in self._sides(component, peer):
                target = (self.address(other), "lladdr", _NOBODY, "nud", "permanent", "dev", self._device(side))
                _ip(*self._within(side), "neigh", "replace", *target)
        except OSError:
            self.heal(component, peer)
            raise

    def heal(self, component: str, peer: str) -> None:
        for side, other in self._sides(component, peer):
            target = (self.address(other), "dev", self._device(side))
            _ip(*self._within(side), "neigh", "del", *target, is_checked=False)

    def _sides(self, component: str, peer: str) -> tuple[tuple[str, str], ...]:
        others = (peer,) if peer != EVERYTHING else (CONTROLLER, *(name for name in self._indices if name != component))
        return tuple(pair for other in others for pair in ((component, other), (other, component)))

    def _within(self, side: str) -> tuple[str, ...]:
        return () if side == CONTROLLER else ("-n", self._namespace(side))

    def _device(self, side: str) -> str:
        return self._bridge if side == CONTROLLER else INTERFACE

    @property
    def _bridge(self) -> str:
        return f"dg{self._short}b"

    def _link(self, component: str) -> str:
        return f"dg{self._short}n{self._indices[component]}"

    def _namespace(self, component: str) -> str:
        return f"dougong-{self._short}-{self._indices[component]}"


def check_networks() -> None:
    """Raises UserError where nodes cannot have networks of their own."""
    missing = [name for name in ("ip", "nsenter") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        what = f"the command {missing[0]!r} is not here" if missing else "this user is not root"
        raise UserError(
            f"cut-network cannot be done: {what}",
            where="--chaos",
            mend="run as root on Linux with iproute2 and util-linux, or leave this fault out",
        )


def _ip(*arguments: str, is_checked: bool = True) -> None:
    with contextlib.nullcontext() if is_checked else contextlib.suppress(OSError):
        command("ip", *arguments)
