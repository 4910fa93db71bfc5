"""Nodes that do not reach each other are found, and are not used together."""

from __future__ import annotations

import asyncio
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dougong.event.kinds import LinkCut, LinkHealed
from dougong.run import wire
from dougong.run.cut_links import reach_each_other
from dougong.run.links import LinkDoor, Links
from dougong.run.node_session import NodeSession

NAMES = "abcde"
TOKEN = b"t" * 32


class Connection:
    """Keeps what is sent to an agent."""

    def __init__(self) -> None:
        self.sent: list[wire.ProbeLinks] = []

    def send(self, message: wire.ProbeLinks) -> None:
        self.sent.append(message)


def asked(names: str = "abc") -> tuple[Links, dict[str, NodeSession]]:
    nodes = {name: NodeSession(name, is_lost=False, now_s=0.0) for name in names}
    for node in nodes.values():
        node.connection, node.link_port, node.address = Connection(), 1, "host"  # type: ignore[assignment]
    links = Links(nodes)
    links.ask(now_s=10.0)
    return links, nodes


def test_a_link_is_cut_when_neither_side_reached_the_other() -> None:
    links, _ = asked()
    for name, unreachable in (("a", ("b",)), ("b", ("a", "c"))):
        links.hear(name, wire.LinksProbed(round=1, unreachable=unreachable))
    assert links.is_asking(now_s=10.5)
    links.hear("c", wire.LinksProbed(round=1, unreachable=()))
    assert not links.is_asking(now_s=10.5)
    assert links.look(now_s=10.5) == (LinkCut(component="a", peer="b"),)
    assert links.cut == (("a", "b"),)
    assert links.look(now_s=10.6) == ()


def test_what_is_cut_is_tried_again_until_it_is_healed() -> None:
    links, nodes = asked("ab")
    for name, other in ("ab", "ba"):
        links.hear(name, wire.LinksProbed(round=1, unreachable=(other,)))
    links.look(now_s=11.0)
    assert links.look(now_s=20.0) == () and links.is_asking(now_s=20.0)
    assert nodes["a"].connection is not None
    for name in "ab":
        links.hear(name, wire.LinksProbed(round=2, unreachable=()))
    assert links.look(now_s=20.1) == (LinkHealed(component="a", peer="b"),)
    assert links.cut == ()
    assert links.look(now_s=99.0) == () and not links.is_asking(now_s=99.0)


def test_an_agent_that_does_not_answer_is_waited_for_a_moment_only() -> None:
    links, nodes = asked()
    links.hear("a", wire.LinksProbed(round=1, unreachable=("b",)))
    assert links.is_asking(now_s=11.0) and not links.is_asking(now_s=20.0)
    nodes["b"].connection = nodes["c"].connection = None
    assert not links.is_asking(now_s=11.0)
    assert links.look(now_s=11.0) == (LinkCut(component="a", peer="b"),)


def test_an_answer_of_an_earlier_round_does_not_count() -> None:
    links, _ = asked("ab")
    links.ask(now_s=11.0)
    links.hear("a", wire.LinksProbed(round=1, unreachable=("b",)))
    assert links.is_asking(now_s=11.1)


PAIRS = st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)).filter(lambda pair: pair[0] < pair[1]))


@given(PAIRS)
def test_those_who_are_left_all_reach_each_other_and_nobody_is_left_out_for_nothing(pairs: list) -> None:
    left = reach_each_other(NAMES, cut=pairs)
    assert not any(set(pair) <= set(left) for pair in pairs)
    assert left if pairs else left == list(NAMES)
    assert left == [name for name in NAMES if name in left]


def test_of_two_the_preferred_one_stays_and_one_that_is_cut_off_from_all_is_left_out() -> None:
    assert reach_each_other("abc", cut=[("a", "b")]) == ["a", "c"]
    assert reach_each_other("abc", cut=[("a", "b"), ("a", "c")]) == ["b", "c"]


@pytest.mark.parametrize("host", ["127.0.0.1", ""], ids=["loopback", "everywhere"])
def test_an_agent_that_answers_is_reached_and_a_silent_one_is_not(host: str) -> None:
    async def knock() -> tuple[str, ...]:
        door, other = LinkDoor(token=TOKEN), LinkDoor(token=TOKEN)
        port = await door.open(host)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            peers = (
                wire.PeerAddress(component="there", host="127.0.0.1", port=port),
                wire.PeerAddress(component="silent", host="127.0.0.1", port=silent.getsockname()[1]),
            )
            unreachable = await other.unreachable(peers)
            await asyncio.sleep(0)  # closed connections are seen off
        door.close()
        return unreachable

    assert asyncio.run(knock()) == ("silent",)


@pytest.mark.parametrize("token", [TOKEN, b"x" * 32])
def test_who_does_not_know_the_token_is_not_told_anything(token: bytes) -> None:
    async def knock() -> tuple[str, ...]:
        door = LinkDoor(token=TOKEN)
        port = await door.open("127.0.0.1")
        peers = (wire.PeerAddress(component="there", host="127.0.0.1", port=port),)
        found = await LinkDoor(token=token).unreachable(peers)
        door.close()
        return found

    assert asyncio.run(knock()) == (() if token == TOKEN else ("there",))
