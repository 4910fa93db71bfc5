"""Where agents come in: the controller's listening socket, and the connections of all nodes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from dougong.clock import Clock
from dougong.run import wire
from dougong.run.agent import Address
from dougong.run.node_session import NodeSession
from dougong.run.settings import RunSettings
from dougong.run.status_rhythm import fleet_rhythm

_AWAY_S = 1.0


class Reception:
    """Lets agents of known nodes in that know the token, and passes on what they say.

    `on_hello(session, connection, hello)`, which opens the session or leaves it as it is, `on_message(session,
    message)`, `on_gone(session, reason)`. A node has one connection: a new one of the same node takes the place of
    the old.
    """

    def __init__(
        self,
        sessions: Mapping[str, NodeSession],
        *,
        token: bytes,
        clock: Clock,
        on_hello: Callable[[NodeSession, wire.Connection, wire.Hello], None],
        on_message: Callable[[NodeSession, wire.AgentMessage], None],
        on_gone: Callable[[NodeSession, str], None],
    ) -> None:
        self._sessions = sessions
        self._token = token
        self._silent_s = fleet_rhythm(len(sessions)).silent_s
        self._clock = clock
        self._on_hello = on_hello
        self._on_message = on_message
        self._on_gone = on_gone
        self._server: asyncio.Server | None = None
        self._looked_s = self._now_s()
        self._farewell: wire.Dismiss | None = None
        self._dismissed: set[str] = set()

    async def open(self, settings: RunSettings) -> Address:
        """Listen; where. Raises OSError if the port cannot be had."""
        self._server = await asyncio.start_server(self._accept, settings.listen_host, settings.listen_port)
        host, port = self._server.sockets[0].getsockname()[:2]
        return Address(host=settings.advertised_host or host, port=port)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def dismiss(self, *, is_memory_kept: bool) -> None:
        """Send all agents away, also those that have yet to come."""
        self._farewell = wire.Dismiss(is_memory_kept=is_memory_kept)
        for session in self._sessions.values():
            if session.connection is not None:
                session.send(self._farewell)
                self._dismissed.add(session.component)

    def not_dismissed(self) -> tuple[str, ...]:
        """The nodes that have an agent, as far as is known, which has not left."""
        return tuple(
            session.component
            for session in self._sessions.values()
            if session.connection is not None
            or (
                (session.is_agent_asked or session.was_connected)
                and not session.is_lost
                and session.component not in self._dismissed
            )
        )

    def drop_silent(self) -> tuple[str, ...]:
        """Close connections that say nothing, which is as bad as none: the agent may be stopped, or its host dead.

        Returns the components dropped.
        """
        now_s = self._now_s()
        if now_s - self._looked_s > _AWAY_S:
            # the controller itself was stopped, or its host: what was said meanwhile is still to be read
            for session in self._sessions.values():
                session.heard_s = now_s
        self._looked_s = now_s
        dropped: list[str] = []
        for session in self._sessions.values():
            if session.connection is not None and now_s - session.heard_s > self._silent_s:
                session.connection.close()
                self._lose(session, f"silent for {self._silent_s:g} s")
                dropped.append(session.component)
        return tuple(dropped)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            connection = await wire.accept(reader, writer, token=self._token)
        except wire.WireBroken:
            writer.close()
            return
        await self.admit(connection)

    async def admit(self, connection: wire.Connection) -> None:
        """Let an agent in that has proved the token, and listen to it until it leaves."""
        try:
            hello = await connection.receive_for_controller()
        except wire.WireBroken:
            connection.close()
            return
        session = self._sessions.get(hello.component) if isinstance(hello, wire.Hello) else None
        if session is None or (session.is_lost and not session.is_expected) or not isinstance(hello, wire.Hello):
            # a node that was given up: others do its work now
            connection.send(wire.Dismiss(is_memory_kept=False))
            connection.close()
            return
        if self._farewell is not None:
            await self._see_off(session, connection, self._farewell)
            return
        self._on_hello(session, connection, hello)
        await self._listen(session, connection)

    async def _see_off(self, session: NodeSession, connection: wire.Connection, farewell: wire.Dismiss) -> None:
        """An agent that comes when all is over. What it says is read, else closing could lose the farewell."""
        session.connection = connection
        connection.send(farewell)
        self._dismissed.add(session.component)
        with contextlib.suppress(wire.WireBroken):
            while True:
                await connection.receive_for_controller()
        connection.close()
        session.lose_connection(now_s=self._now_s())

    async def _listen(self, session: NodeSession, connection: wire.Connection) -> None:
        try:
            while True:
                message = await connection.receive_for_controller()
                session.heard_s = self._now_s()
                if session.connection is connection:
                    self._on_message(session, message)
        except wire.WireBroken as error:
            connection.close()
            if session.connection is connection:
                self._lose(session, str(error))

    def _lose(self, session: NodeSession, reason: str) -> None:
        session.lose_connection(now_s=self._now_s())
        self._on_gone(session, reason)

    def _now_s(self) -> float:
        return self._clock.monotonic_ns() / 1e9
