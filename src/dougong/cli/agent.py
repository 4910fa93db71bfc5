"""The entry point of a node agent: `python -m dougong.cli.agent RUN_DIR COMPONENT`. Started by a node backend."""

from __future__ import annotations

import asyncio
import signal
import sys
import traceback
from pathlib import Path

from dougong.cli.host_clock import host_clock
from dougong.run.agent import Agent
from dougong.run.layout import node_directory
from dougong.run.settings import load_settings, run_directory


def main() -> None:
    # Slurm signals every process of a step; the launchers are those that answer, and have the ranks save
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    run = run_directory(Path(sys.argv[1]))
    component = sys.argv[2]
    settings = load_settings(run)
    agent = Agent(
        component,
        run=run,
        node=node_directory(settings.run_id, component, memory_root=Path(settings.memory_root)),
        settings=settings,
        token=run.token.read_bytes(),
        clock=host_clock(run, settings, component),
    )
    asyncio.run(agent.run())


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
        sys.exit(1)
