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
from dougong.errors import NodeUnreachable

NODE_VARIABLE = "DOUGONG_NODE"
_KILL_S = 10.0


class LocalNodes:
    """The `local` node backend and its fault door. `memory_of` tells where a node's shared memory lies."""

    def __init__(self, run_root: Path, *, run_id: str, memory_of: Callable[[str], Path]) -> None:
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
                [sys.executable, "-m", "dougong.cli.agent", str(self._run_root), component],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, NODE_VARIABLE: self._mark(component)},
            )

    def end_agent(self, component: str) -> None:
        for pid in self._pids(component):
            if _is_agent(pid):
                process.kill(pid)

    def has_agent(self, component: str) -> bool:
        self._reap()
        return any(_is_agent(pid) for pid in self._pids(component))

    def fence(self, component: str) -> None:
        self._kill_all(component)

    def kill_agent(self, component: str) -> None:
        self.end_agent(component)

    def kill_node(self, component: str) -> None:
        mark = self._down_mark(component)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
        self._kill_all(component)
        shutil.rmtree(self._memory_of(component), ignore_errors=True)

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
        return self._run_root / "nodes" / f"{component.replace('/', '~')}.down"

    def _reap(self) -> None:
        for child in self._children.values():
            child.poll()


def _short(component: str) -> str:
    return component.rsplit("/", 1)[-1]


def _is_agent(pid: int) -> bool:
    return _runs_module(pid, b"dougong.cli.agent")


def _is_worker(pid: int) -> bool:
    """Or the zygote, of which every worker is a fork, or the courier."""
    return _runs_module(pid, b"dougong.run.zygote") or _runs_module(pid, b"dougong.run.courier")


def _runs_module(pid: int, module: bytes) -> bool:
    try:
        return module in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
