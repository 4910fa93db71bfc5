"""The agent's hold on its node's writer: started by the first order, and followed by another one when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from dougong.run.layout import NodeDirectory
from dougong.run.settings import RunSettings
from dougong.run.write_order import orders_in
from dougong.run.writer import OrderLine, WriterSettings

_RESTART_S = 0.2
_RESTART_MAX_S = 10.0


class WriterLink:
    """One writer at a time. `spawn` runs a coroutine under the agent's watch."""

    def __init__(
        self,
        settings: RunSettings,
        *,
        node: NodeDirectory,
        log_path: Path,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._settings = settings
        self._node = node
        self._log_path = log_path
        self._spawn = spawn
        self._process: asyncio.subprocess.Process | None = None
        self._restart_s = _RESTART_S
        self._is_started = False
        self._is_closed = False
        self._is_ended = False
        self._early: list[str] = []

    async def take_over(self) -> None:
        """Start a writer if an earlier agent has left orders."""
        if orders_in(self._node):
            await self._start()

    def pass_on(self, path: str) -> None:
        """Tell the writer of an order. One that dies over it is followed by another, which gives the order up."""
        if self._process is None:
            self._early.append(path)
            if not self._is_started and not self._is_closed:
                self._is_started = True
                self._spawn(self._start())
            return
        self._write_line(path)

    def close(self) -> None:
        """The writer ends when its stdin does, once it has finished what it has."""
        self._is_closed = True
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def end(self) -> None:
        """End it at once: the run is over, and nobody will commit what it writes."""
        self.close()
        self._is_ended = True
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _start(self) -> None:
        """The writer first gives up what one that was killed has begun."""
        self._is_started = True
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        given = WriterSettings(
            node_root=str(self._node.root),
            write_bytes_per_s=self._settings.save.write_bytes_per_s,
            checkpoint_key=self._settings.checkpoint_key,
        )
        with self._log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # the script's directory holds modules of the script, not of the writer
                "-m",
                "dougong.run.writer",
                msgspec.json.encode(given).decode(),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self._settings.working_directory,
                start_new_session=True,
            )
        self._spawn(self._watch(self._process))
        while self._early:
            self._write_line(self._early.pop(0))
        # asked while it was being started
        if self._is_ended:
            self.end()
        elif self._is_closed:
            self.close()

    def _write_line(self, path: str) -> None:
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(msgspec.json.encode(OrderLine(path=path)) + b"\n")

    async def _watch(self, writer: asyncio.subprocess.Process) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await writer.wait()
        if self._is_closed:
            return
        if loop.time() - began_s > _RESTART_MAX_S:
            self._restart_s = _RESTART_S
        await asyncio.sleep(self._restart_s)
        self._restart_s = min(2 * self._restart_s, _RESTART_MAX_S)
        if not self._is_closed:
            await self._start()
