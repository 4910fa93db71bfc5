"""Do the nodes reach each other? The agents try, when ranks hang or a collective breaks although no process was lost.

A cut network sends no error: a collective waits, and so does the next start if it takes the same nodes. So before nodes
are given work again after such a loss, every agent connects to every other one. A link counts as cut when neither side
reached the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Mapping, Sequence

from dougong.event.kinds import AnyEvent, LinkCut, LinkHealed
from dougong.run import wire
from dougong.run.cut_links import Pair
from dougong.run.node_session import NodeSession

_NUM_TRIES = 2
_TRY_S = 1.2
_ROUND_S = 4.0
_AGAIN_S = 2.0
_FEW_NODES = 64


class LinkDoor:
    """An agent's side: a port at which others may knock, and the knocking."""

    def __init__(self, *, token: bytes) -> None:
        self._token = token
        self._server: asyncio.Server | None = None

    async def open(self, host: str) -> int:
        """Listen; the port, or 0 if none can be had."""
        with contextlib.suppress(OSError):
            # one socket: asked to listen everywhere, asyncio opens one for IPv4 and one for IPv6, at different ports
            listening = socket.create_server((host, 0))
            self._server = await asyncio.start_server(self._answer, sock=listening)
            return listening.getsockname()[1]
        return 0

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def unreachable(self, peers: Sequence[wire.PeerAddress]) -> tuple[str, ...]:
        """Those of the peers that did not answer in time, all tried at once, and twice: a busy host may be late."""
        left = tuple(peers)
        for _ in range(_NUM_TRIES):
            answers = await asyncio.gather(*(self._knock(peer) for peer in left))
            left = tuple(peer for peer, has_answered in zip(left, answers, strict=True) if not has_answered)
        return tuple(peer.component for peer in left)

    async def _knock(self, peer: wire.PeerAddress) -> bool:
        try:
            async with asyncio.timeout(_TRY_S):
                connection = await wire.connect(peer.host, peer.port, token=self._token)
        except (wire.WireBroken, TimeoutError, OSError):
            return False
        connection.close()
        return True

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Who knows the token hears that there is an answer, and no more."""
        with contextlib.suppress(wire.WireBroken, OSError):
            (await wire.accept(reader, writer, token=self._token)).close()


class Links:
    """The controller's side: which pairs of nodes are cut off from each other, as far as was tried."""

    def __init__(self, nodes: Mapping[str, NodeSession]) -> None:
        self._nodes = nodes
        self._cut: frozenset[Pair] = frozenset()
        self._round = 0
        self._asked: dict[str, tuple[str, ...]] = {}
        self._answers: dict[str, tuple[str, ...]] = {}
        self._asked_s = float("-inf")

    @property
    def cut(self) -> tuple[Pair, ...]:
        return tuple(sorted(self._cut))

    def ask(self, *, now_s: float) -> None:
        """Have all agents that are there try each other."""
        there = [node for node in self._nodes.values() if node.connection is not None and node.link_port]
        addresses = {
            node.component: wire.PeerAddress(component=node.component, host=node.address, port=node.link_port)
            for node in there
        }
        self._round += 1
        self._answers = {}
        self._asked_s = now_s
        self._asked = _partners(tuple(addresses))
        for node in there:
            peers = tuple(addresses[other] for other in self._asked[node.component])
            node.send(wire.ProbeLinks(round=self._round, peers=peers))

    def hear(self, component: str, message: wire.LinksProbed) -> None:
        if message.round == self._round:
            self._answers[component] = message.unreachable

    def is_asking(self, *, now_s: float) -> bool:
        """Is an answer still to be waited for? An agent that was lost meanwhile owes none."""
        owed = {name for name in self._asked if self._nodes[name].connection is not None} - self._answers.keys()
        return bool(owed) and now_s - self._asked_s < _ROUND_S

    def look(self, *, now_s: float) -> tuple[AnyEvent, ...]:
        """What a round that is over has shown; while something is cut, the next round is begun."""
        if self._asked and not self.is_asking(now_s=now_s):
            return self._conclude()
        if not self._asked and now_s - self._asked_s > _AGAIN_S and any(map(self._can_try, self._cut)):
            self.ask(now_s=now_s)
        return ()

    def _can_try(self, pair: Pair) -> bool:
        return all(self._nodes[name].connection is not None for name in pair)

    def _conclude(self) -> tuple[AnyEvent, ...]:
        tried = {_pair(name, other) for name, others in self._asked.items() for other in others}
        found = {
            pair
            for pair in tried
            if all(pair[1 - side] in self._answers.get(pair[side], (pair[1 - side],)) for side in (0, 1))
            and any(name in self._answers for name in pair)
        }
        before, self._cut = self._cut, frozenset(found | (self._cut - tried))
        self._asked = {}
        news = [LinkCut(component=first, peer=second) for first, second in sorted(self._cut - before)]
        return (*news, *(LinkHealed(component=first, peer=second) for first, second in sorted(before - self._cut)))


def _partners(names: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Whom each node tries: all others, or in a large fleet those 1, 2, 4 … places away on either side.

    Both sides of a pair try it, and a node or rack that is cut off is tried from far away too.
    """
    if len(names) <= _FEW_NODES:
        return {name: tuple(other for other in names if other != name) for name in names}
    steps = [1 << power for power in range(len(names).bit_length() - 1)]
    return {
        name: tuple(dict.fromkeys(names[(index + way * step) % len(names)] for step in steps for way in (1, -1)))
        for index, name in enumerate(names)
    }


def _pair(first: str, second: str) -> Pair:
    return (first, second) if first < second else (second, first)
