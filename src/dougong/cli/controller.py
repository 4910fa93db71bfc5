"""The entry point of a run's controller: `python -m dougong.cli.controller RUN_DIR [--resume]`. Started by `dougong
run`.

Its stdin is held by the launcher and brings orders, one JSON line each. When it closes the launcher is gone, and the
job is stopped in good order.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import traceback
from pathlib import Path

import msgspec

from dougong.backend.joined import JoinedNodes
from dougong.backend.nodes import NodeBackend
from dougong.cli.host_clock import CONTROLLER, host_clock
from dougong.event import store
from dougong.event.log import EventLog
from dougong.run.controller import Controller
from dougong.run.history import replay
from dougong.run.layout import RunDirectory
from dougong.run.settings import RunSettings, load_settings, run_directory
from dougong.run.timeline import run_clock
from dougong.telemetry.embedded import SampleWriter

STREAM = "job"
EXIT_CODES = {"finished": 0, "failed": 4, "stopped": 3}
"""None of them is what the interpreter itself exits with when it breaks."""


class Order(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An order of the launcher."""

    is_stop: bool


def main() -> int:
    # Slurm signals every process of a step; the launchers are those that answer, and have the ranks save
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    run = run_directory(Path(sys.argv[1]))
    settings = load_settings(run)
    clock = run_clock(run, host_clock(run, settings, CONTROLLER))
    log = EventLog.open(run.events, stream=STREAM, clock=clock)
    controller = Controller(
        run,
        settings,
        token=run.token.read_bytes(),
        log=log,
        samples=SampleWriter.open(run.telemetry, clock),
        backend=node_backend(run, settings),
        clock=clock,
        history=replay(store.read(run.events, streams=(STREAM,))),
        is_resume="--resume" in sys.argv[2:],
    )
    return EXIT_CODES[asyncio.run(_run(controller))]


def node_backend(run: RunDirectory, settings: RunSettings) -> NodeBackend:
    """The engine that holds the nodes of this run."""
    return JoinedNodes() if settings.backend == "joined" else local_nodes(run, settings)


def local_nodes(run: RunDirectory, settings: RunSettings):
    """The nodes that this machine plays."""
    from dougong.backend.local.nodes import LocalNodes
    from dougong.run.layout import node_directory

    memory_root = Path(settings.memory_root)
    return LocalNodes(
        run.root,
        run_id=settings.run_id,
        memory_of=lambda component: node_directory(settings.run_id, component, memory_root=memory_root).root,
        networks=node_networks(settings),
    )


def node_networks(settings: RunSettings):
    """The networks of the nodes, where each has its own."""
    from dougong.backend.local.networks import NodeNetworks

    return NodeNetworks(settings.run_id, (*settings.nodes, *settings.spares)) if settings.has_networks else None


async def _run(controller: Controller) -> str:
    asyncio.get_running_loop().add_reader(0, _hear, controller, bytearray())
    return await controller.run()


def _hear(controller: Controller, pending: bytearray) -> None:
    chunk = os.read(0, 65536)
    if not chunk:
        asyncio.get_running_loop().remove_reader(0)
        controller.ask_stop()
        return
    pending += chunk
    while b"\n" in pending:
        line, _, rest = bytes(pending).partition(b"\n")
        pending[:] = rest
        order = msgspec.json.decode(line, type=Order)
        if order.is_stop:
            controller.ask_stop()


if __name__ == "__main__":
    try:
        code = main()
    except Exception:
        with contextlib.suppress(OSError):  # the log may be on a full disk
            traceback.print_exc()
        sys.exit(70)
    sys.exit(code)
