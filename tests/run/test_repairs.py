"""Lost nodes are asked for again, those that fail often less and less."""

from __future__ import annotations

import asyncio

from dougong.errors import NodeUnreachable
from dougong.run.node_session import NodeSession
from dougong.run.repairs import Repairs
from dougong.run.settings import Policy


class Backend:
    """Nodes that are down until they are not."""

    def __init__(self) -> None:
        self.down = {"a"}
        self.started: list[str] = []

    def start_agent(self, component: str) -> None:
        if component in self.down:
            raise NodeUnreachable(component, reason="down")
        self.started.append(component)

    def end_agent(self, component: str) -> None: ...
    def fence(self, component: str) -> None: ...

    def can_return(self, component: str) -> bool:
        return component not in self.down


def made() -> tuple[Repairs, NodeSession, Backend]:
    nodes = {name: NodeSession(name, is_lost=name == "a", now_s=0.0) for name in "ab"}
    backend = Backend()
    return Repairs(nodes, backend=backend, policy=Policy(return_every_s=2.0)), nodes["a"], backend


def test_a_lost_node_is_asked_for_every_few_seconds_and_others_never() -> None:
    repairs, node, _ = made()
    asked = [now_s for now_s in range(9) if repairs.due(now_s=float(now_s)) == (node,)]
    assert asked == [2, 4, 6, 8]


def test_a_node_that_is_still_down_is_not_expected() -> None:
    repairs, node, backend = made()
    asyncio.run(repairs.ask(node))
    assert (node.is_expected, backend.started) == (False, [])
    backend.down.clear()
    asyncio.run(repairs.ask(node))
    assert (node.is_expected, backend.started) == (True, ["a"])


def test_a_node_that_is_still_being_fenced_is_not_asked_for() -> None:
    repairs, node, _ = made()
    node.is_fenced = False
    assert [repairs.due(now_s=float(now_s)) for now_s in range(5)] == [()] * 5


def test_each_return_doubles_the_wait_before_the_next() -> None:
    repairs, node, _ = made()
    for wait_s in (2.0, 4.0, 8.0):
        assert repairs.due(now_s=100.0) == ()
        assert repairs.due(now_s=100.0 + wait_s) == (node,)
        repairs.take_back(node)
        assert not (node.is_lost or node.is_cleared)
        node.is_lost = node.is_fenced = True
