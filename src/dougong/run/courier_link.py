"""The agent's hold on its courier: passes orders on, hears of copies, and starts another one when it dies."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Collection, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from dougong.errors import WorldError
from dougong.run import wire
from dougong.run.courier_orders import Bring, Brought, CourierMessage, Report
from dougong.run.layout import RunDirectory

_RESTART_S = 1.0
_LEAVE_S = 2.0
_START_S = 5.0
_POLL_S = 0.01
_MAX_LINE_BYTES = 2**24
"""A line names all copies."""


class CopyUnavailable(WorldError):
    """The state of a rank could not be brought into its node's memory."""

    def __init__(self, origin: wire.Origin, *, step: int, reason: str) -> None:
        where = origin.courier.component
        super().__init__(f"step {step} of rank {origin.rank} could not be had from {where}: {reason}")
        self.origin = origin


class CourierLink:
    """One courier at a time, none before it is needed.

    `spawn` runs a coroutine under the agent's watch; `tell` passes a message on to the controller.
    """

    def __init__(
        self,
        component: str,
        *,
        run: RunDirectory,
        log_path: Path,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        tell: Callable[[wire.CopiesHeld], None],
    ) -> None:
        self._component = component
        self._run = run
        self._log_path = log_path
        self._spawn = spawn
        self._tell = tell
        self._process: asyncio.subprocess.Process | None = None
        self._order: wire.CopyOrder | None = None
        self._requests: dict[int, asyncio.Future[str]] = {}
        self._num_requests = 0
        self._is_started = False
        self._is_closed = False
        self.held = wire.CopiesHeld(courier_port=0, copies=())

    def order(self, order: wire.CopyOrder) -> None:
        """What to copy from now on. The first order starts the courier; one that is started anew hears the last."""
        self._order = order
        self._have_one()
        self._say(order)

    async def bring(self, restore: wire.Restore, *, ranks: Collection[int]) -> None:
        """Have the states of these ranks brought into this node's memory. Raises CopyUnavailable."""
        wanted = [origin for origin in restore.origins if origin.rank in ranks]
        if wanted:
            self._have_one()
        reasons = await asyncio.gather(*(self._bring(restore, origin) for origin in wanted))
        for origin, reason in zip(wanted, reasons, strict=True):
            if reason:
                raise CopyUnavailable(origin, reason=reason, step=restore.step)

    async def close(self) -> None:
        """The courier ends with its stdin; what it writes into does not come back after this."""
        self._is_closed = True
        courier = self._process
        if courier is None or courier.stdin is None:
            return
        courier.stdin.close()
        try:
            await asyncio.wait_for(courier.wait(), _LEAVE_S)
        except TimeoutError:
            courier.kill()
            await courier.wait()

    def _have_one(self) -> None:
        if not self._is_started:
            self._is_started = True
            self._spawn(self._start())

    async def _start(self) -> None:
        """It says itself when it is up."""
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "dougong.run.courier",
                str(self._run.root),
                self._component,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=_MAX_LINE_BYTES,
            )
        self._spawn(self._hear(self._process))
        if self._is_closed:
            await self.close()
        elif self._order is not None:
            self._say(self._order)

    async def _bring(self, restore: wire.Restore, origin: wire.Origin) -> str:
        if not await self._is_up():
            return "this node's courier is not up"
        self._num_requests += 1
        request = Bring(
            request=self._num_requests,
            rank=origin.rank,
            generation=restore.generation,
            step=restore.step,
            origin=origin.courier,
        )
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._requests[request.request] = future
        self._say(request)
        return await future

    async def _is_up(self) -> bool:
        """Is there a courier, perhaps after a moment: another one may be starting?"""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _START_S
        while not self.held.courier_port and loop.time() < deadline_s:
            await asyncio.sleep(_POLL_S)
        return self.held.courier_port > 0

    def _say(self, message: wire.CopyOrder | Bring) -> None:
        """To one that has died it is not said; its end is seen elsewhere."""
        if self._process is not None and self._process.stdin is not None and self._process.returncode is None:
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")

    async def _hear(self, courier: asyncio.subprocess.Process) -> None:
        assert courier.stdout is not None
        while line := await courier.stdout.readline():
            match msgspec.json.decode(line, type=CourierMessage):
                case Brought() as brought:
                    if not (future := self._requests.pop(brought.request)).done():
                        future.set_result(brought.reason)
                case Report() as report:
                    self._note(report.port, report.copies, report.problem)
        await courier.wait()
        for future in self._requests.values():
            if not future.done():
                future.set_result("this node's courier died")
        self._requests.clear()
        if not self._is_closed:
            self._note(0, self.held.copies, "the courier died; another one is started")
            await asyncio.sleep(_RESTART_S)
            if not self._is_closed:
                await self._start()

    def _note(self, port: int, copies: tuple[wire.CopyStatus, ...], problem: str) -> None:
        self.held = wire.CopiesHeld(courier_port=port, copies=copies, problem=problem)
        self._tell(self.held)
