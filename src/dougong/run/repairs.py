"""Lost nodes that can be used again: their backend is asked now and then, and an agent that comes is let in.

A node that comes back is the last of the spares: it has just shown that it can fail. One that fails again and again is
asked less and less often.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from dougong.backend.nodes import NodeBackend
from dougong.errors import NodeUnreachable
from dougong.run.node_session import NodeSession
from dougong.run.settings import Policy

_MAX_DOUBLINGS = 6


class Repairs:
    """The lost nodes of one run. A node is expected once its backend has it and its agent was asked for."""

    def __init__(self, nodes: Mapping[str, NodeSession], *, backend: NodeBackend, policy: Policy) -> None:
        self._nodes = nodes
        self._backend = backend
        self._policy = policy
        self._ask_s: dict[str, float] = {}
        self._num_returns: dict[str, int] = {}

    def due(self, *, now_s: float) -> tuple[NodeSession, ...]:
        """The lost nodes to ask about now. A node that was just lost is given its first interval."""
        lost = [node for node in self._nodes.values() if node.is_lost and node.is_fenced]
        for node in lost:
            self._ask_s.setdefault(node.component, now_s + self._interval_s(node.component))
        found = tuple(node for node in lost if now_s >= self._ask_s[node.component])
        for node in found:
            self._ask_s[node.component] = now_s + self._interval_s(node.component)
        return found

    async def ask(self, node: NodeSession) -> None:
        """Have the backend start an agent there if it can. What it does with it is the agent's to show."""
        if not node.is_expected and not await asyncio.to_thread(self._backend.can_return, node.component):
            return
        with contextlib.suppress(NodeUnreachable, OSError):
            await asyncio.to_thread(self._backend.start_agent, node.component)
            node.is_expected = node.is_lost

    def take_back(self, node: NodeSession) -> None:
        """It is there: a spare again, ready once nothing of an earlier start runs on it."""
        self._num_returns[node.component] = self._num_returns.get(node.component, 0) + 1
        self._ask_s.pop(node.component, None)
        node.is_lost = node.is_expected = node.is_fenced = False
        node.is_cleared = False

    def _interval_s(self, component: str) -> float:
        return self._policy.return_every_s * 2.0 ** min(self._num_returns.get(component, 0), _MAX_DOUBLINGS)
