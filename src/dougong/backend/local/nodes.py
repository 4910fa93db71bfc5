"""Several nodes on one host: an agent process for each, with all that it starts marked by one environment variable."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from dougong.backend.local import process
from dougong.backend.local.networks import INTERFACE, NodeNetworks
from dougong.errors import NodeUnreachable

NODE_VARIABLE = "DOUGONG_NODE"
_KILL_S = 10.0
_AGENT_DIES_S = 1.0
_DOWN = ".down"


class LocalNodes:
    """The `local` node backend and its fault door. `memory_of` tells where a node's shared memory lies.

    With `networks` each node has a network of its own; otherwise all share the host's.
    """

    def __init__(
        self, run_root: Path, *, run_id: str, memory_of: Callable[[str], Path], networks: NodeNetworks | None = None
    ) -> None:
        self._networks = networks
        self._run_root = run_root
        self._run_id = run_id
        self._memory_of = memory_of
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def start_agent(self, component: str) -> None:
        self._reap()
        if self._down_mark(component).exists():
            raise NodeUnreachable(component, reason="the node is down")
        if any(_is_agent(pid) for pid in self._pids(component)):
            return
        log_path = self._run_root / "logs" / f"agent-{_short(component)}.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            self._children[component] = subprocess.Popen(
                [*self._prefix(component), sys.executable, "-m", "dougong.cli.agent", str(self._run_root), component],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **self._network_variables(), NODE_VARIABLE: self._mark(component)},
            )

    def end_agent(self, component: str) -> None:
        agents = [pid for pid in self._pids(component) if _is_agent(pid)]
        for pid in agents:
            process.kill(pid)
        deadline_s = time.monotonic() + _AGENT_DIES_S
        while any(process.is_alive(pid) for pid in agents) and time.monotonic() < deadline_s:
            time.sleep(0.002)

    def has_agent(self, component: str) -> bool:
        self._reap()
        return any(_is_agent(pid) for pid in self._pids(component))

    def fence(self, component: str) -> None:
        self._kill_all(component)

    def can_return(self, component: str) -> bool:
        """Not while a process of it lives: one in an endless disk wait makes a node unusable."""
        self._reap()
        return not self._down_mark(component).exists() and not self._pids(component)

    def kill_agent(self, component: str) -> None:
        self.end_agent(component)

    def kill_node(self, component: str) -> None:
        mark = self._down_mark(component)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text(str(time.monotonic_ns()))  # file times are too coarse to tell which was first
        self._kill_all(component)
        shutil.rmtree(self._memory_of(component), ignore_errors=True)

    def return_node(self, component: str) -> None:
        self._down_mark(component).unlink(missing_ok=True)

    def killed_nodes(self) -> tuple[str, ...]:
        marks = sorted((self._run_root / "nodes").glob(f"*{_DOWN}"), key=lambda path: int(path.read_text() or "0"))
        return tuple(mark.name.removesuffix(_DOWN).replace("~", "/") for mark in marks)

    def jump_clock(self, component: str, *, jump_s: float) -> None:
        path = clock_offset_file(self._run_root, component)
        path.parent.mkdir(parents=True, exist_ok=True)
        before_ns = int(path.read_text()) if path.exists() else 0
        staging = path.with_name(f".{path.name}")
        staging.write_text(str(before_ns + round(jump_s * 1e9)))
        staging.replace(path)

    def cut(self, component: str, peer: str) -> None:
        if self._networks is None:
            raise OSError("the nodes of this run share one network")
        self._networks.cut(component, peer)

    def heal(self, component: str, peer: str) -> None:
        assert self._networks is not None
        self._networks.heal(component, peer)

    def signal_all(self, components: Iterable[str], number: signal.Signals) -> None:
        """A signal to every process of the nodes, as a scheduler sends it."""
        for component in components:
            for pid in self._pids(component):
                process.kill(pid, number)

    def end_leftovers(self, components: Iterable[str]) -> None:
        """End the run's own processes that are still there when it is over: of a node that was given up, or slow to
        leave. Another program that a script started and left is not touched."""
        for component in components:
            for pid in self._pids(component):
                if _is_agent(pid) or _is_worker(pid):
                    process.kill(pid)

    def _kill_all(self, component: str) -> None:
        # a process may fork while it is being killed, so go on until none is left;
        # one in an endless disk wait never dies, so not for ever
        deadline_s = time.monotonic() + _KILL_S
        while (pids := self._pids(component)) and time.monotonic() < deadline_s:
            for pid in pids:
                process.kill(pid, signal.SIGKILL)

    def _pids(self, component: str) -> tuple[int, ...]:
        return tuple(
            pid for pid in process.pids_with_variable(NODE_VARIABLE, self._mark(component)) if process.is_alive(pid)
        )

    def _mark(self, component: str) -> str:
        return f"{self._run_id}:{component}"

    def _down_mark(self, component: str) -> Path:
        return self._run_root / "nodes" / f"{component.replace('/', '~')}{_DOWN}"

    def _prefix(self, component: str) -> tuple[str, ...]:
        return () if self._networks is None else self._networks.command_prefix(component)

    def _network_variables(self) -> dict[str, str]:
        return {} if self._networks is None else {"GLOO_SOCKET_IFNAME": INTERFACE}

    def _reap(self) -> None:
        for child in self._children.values():
            child.poll()


def clock_offset_file(run_root: Path, component: str) -> Path:
    """By how many nanoseconds the wall clock of a node, or of the controller, is off, for `dougong.clock.OffClock`."""
    return run_root / "nodes" / f"{component.replace('/', '~')}.clock"


def _short(component: str) -> str:
    return component.rsplit("/", 1)[-1]


def _is_agent(pid: int) -> bool:
    return _runs_module(pid, b"dougong.cli.agent")


def _is_worker(pid: int) -> bool:
    """Or the zygote, of which every worker is a fork, or what copies and writes checkpoints beside it."""
    return any(_runs_module(pid, b"dougong.run." + name) for name in (b"zygote", b"courier", b"writer"))


def _runs_module(pid: int, module: bytes) -> bool:
    try:
        return module in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
