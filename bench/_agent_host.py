"""Many real agents in one process, for `bench/scale_agents.py`: python bench/_agent_host.py RUN_DIR STEP_S COMPONENT…

Each is an `Agent` with its own connection, node directory and workers, as `dougong.cli.agent` would run it; only the
process and the fork service are shared. Orders come by stdin, a line each: `kill COMPONENT` (its connection closes and
it is forgotten, as after SIGKILL; its workers live on) and `start COMPONENT`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from dougong.clock import SystemClock
from dougong.run import agent as agents
from dougong.run import wire
from dougong.run.agent import Agent
from dougong.run.layout import node_directory
from dougong.run.settings import RunSettings, load_settings, run_directory
from dougong.run.zygote_link import ZygoteLink

SCRIPT = Path(__file__).resolve().parent / "scripts" / "light_workers.py"


class LightLink(ZygoteLink):
    """A fork service without torch."""

    step_s = 1.0

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(SCRIPT),
            str(self.step_s),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        self._spawn(self._hear(self._process))


def shared_link(link: LightLink) -> type[ZygoteLink]:
    """Links that all lead to `link`, which lives as long as the process."""

    class Shared(ZygoteLink):
        def __init__(
            self, settings: RunSettings, *, log_path: Path, spawn: Callable[[Coroutine[Any, Any, None]], None]
        ) -> None:
            self.fork = link.fork
            self.how_it_ended = link.how_it_ended

        async def start(self) -> None:
            return

        async def renew(self) -> None:
            return

        def close(self) -> None:
            return

    return Shared


class Host:
    """The agents of this process, by component."""

    def __init__(self, run_dir: Path, link: LightLink) -> None:
        self._run = run_directory(run_dir)
        self._settings = load_settings(self._run)
        self._link_of = shared_link(link)
        self._agents: dict[str, tuple[Agent, asyncio.Task[None]]] = {}

    def start(self, component: str) -> None:
        settings = self._settings
        agent = Agent(
            component,
            run=self._run,
            node=node_directory(settings.run_id, component, memory_root=Path(settings.memory_root)),
            settings=settings,
            token=self._run.token.read_bytes(),
            clock=SystemClock(),
            link_of=self._link_of,
        )
        self._agents[component] = agent, asyncio.create_task(agent.run())

    def kill(self, component: str) -> None:
        agent, task = self._agents.pop(component)
        for worker in agent._workers.values():  # pyright: ignore[reportPrivateUsage]
            asyncio.get_running_loop().remove_reader(worker.pidfd)
            os.close(worker.pidfd)
        task.cancel()

    async def gone(self) -> None:
        """Until every agent has left."""
        while self._agents:
            await asyncio.wait([task for _, task in self._agents.values()], timeout=1.0)
            self._agents = {name: pair for name, pair in self._agents.items() if not pair[1].done()}


async def serve(run_dir: Path, step_s: float, components: list[str]) -> None:
    LightLink.step_s = step_s
    tasks: set[asyncio.Task[None]] = set()

    def spawn(work: Coroutine[Any, Any, None]) -> None:
        tasks.add(asyncio.ensure_future(work))

    settings = load_settings(run_directory(run_dir))
    link = LightLink(settings, log_path=run_dir / "logs" / "light.log", spawn=spawn)
    await link.start()
    host = Host(run_dir, link)
    for component in components:
        host.start(component)

    def hear() -> None:
        for line in os.read(0, 65536).decode().splitlines():
            order, _, component = line.partition(" ")
            host.kill(component) if order == "kill" else host.start(component)

    asyncio.get_running_loop().add_reader(0, hear)
    await host.gone()
    link.close()


class NoWriter:
    """In place of a node's writer process: light workers save nothing durably."""

    def __init__(self, *_: object, **__: object) -> None: ...

    async def start(self) -> None: ...

    def pass_on(self, path: str) -> None: ...

    def close(self) -> None: ...

    def end(self) -> None: ...


async def no_evidence(rank: int, **_: object) -> wire.RankEvidence:
    """256 debuggers at once would be a measurement of this machine; each host of a real fleet has its own."""
    return wire.RankEvidence(rank=rank, stack="not taken", threads="", flight="")


if __name__ == "__main__":
    for name, stand_in in (("take_evidence", no_evidence), ("WriterLink", NoWriter)):
        setattr(agents, name, stand_in)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
