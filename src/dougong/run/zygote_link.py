"""The agent's hold on its zygote: asks it to fork, hears of ends, and starts another one when it dies."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Literal

import msgspec

from dougong.run.fork import Exited, Forked, ForkRequest, ZygoteMessage
from dougong.run.settings import RunSettings

_RESTART_S = 0.2
_POLL_S = 0.002


class ZygoteLink:
    """One zygote at a time. `spawn` runs a coroutine under the agent's watch."""

    def __init__(
        self, settings: RunSettings, *, log_path: Path, spawn: Callable[[Coroutine[Any, Any, None]], None]
    ) -> None:
        self._settings = settings
        self._log_path = log_path
        self._spawn = spawn
        self._process: asyncio.subprocess.Process | None = None
        self._requests: dict[int, asyncio.Future[int]] = {}
        self._exits: dict[int, tuple[int | None, int | None]] = {}
        self._num_requests = 0
        self._is_closed = False

    async def start(self) -> None:
        """Start a zygote; it imports what training scripts import."""
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "dougong.run.zygote",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                cwd=self._settings.working_directory,
                env=self._environment(),
            )
        self._spawn(self._hear(self._process))

    async def renew(self) -> None:
        """End this zygote, so that the next fork comes from a fresh interpreter."""
        old = self._process
        if old is not None and old.returncode is None:
            old.kill()
            await old.wait()
        while self._process is old:
            await asyncio.sleep(_POLL_S)

    async def fork(
        self, *, variables: dict[str, str], log_path: Path, entry: Literal["script", "preflight"] = "script"
    ) -> int:
        """The pid of a new worker. Raises ConnectionError if the zygote dies over it."""
        if self._process is None or self._process.stdin is None:
            raise ConnectionError("there is no zygote")
        self._num_requests += 1
        request = ForkRequest(
            request=self._num_requests,
            variables=variables,
            command=self._settings.command,
            working_directory=self._settings.working_directory,
            log_path=str(log_path),
            entry=entry,
        )
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._requests[request.request] = future
        self._process.stdin.write(msgspec.json.encode(request) + b"\n")
        await self._process.stdin.drain()
        return await future

    async def how_it_ended(self, pid: int, *, timeout_s: float) -> tuple[int | None, int | None]:
        """(exit code, signal) of a worker that has ended; (None, None) if this zygote did not see it."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while pid not in self._exits and loop.time() < deadline_s:
            await asyncio.sleep(_POLL_S)
        return self._exits.pop(pid, (None, None))

    def close(self) -> None:
        """The zygote ends when its stdin does; its workers live on."""
        self._is_closed = True
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def _environment(self) -> dict[str, str]:
        """Threads must be told before torch is imported: libgomp reads them once."""
        environment = dict(os.environ)
        environment.setdefault("OMP_NUM_THREADS", str(self._settings.threads_per_worker))
        environment.setdefault("PYTHONUNBUFFERED", "1")
        if self._settings.backend == "local":
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return environment

    async def _hear(self, zygote: asyncio.subprocess.Process) -> None:
        assert zygote.stdout is not None
        while line := await zygote.stdout.readline():
            message = msgspec.json.decode(line, type=ZygoteMessage)
            match message:
                case Forked():
                    if not (future := self._requests.pop(message.request)).done():
                        future.set_result(message.pid)
                case Exited():
                    self._exits[message.pid] = (message.exit_code, message.signal)
        for future in self._requests.values():
            if not future.done():
                future.set_exception(ConnectionError("the zygote died"))
        self._requests.clear()
        if not self._is_closed:
            await asyncio.sleep(_RESTART_S)
            await self.start()
