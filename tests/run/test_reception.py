"""When a connection counts as silent. The controller's own absence is not held against its agents."""

from __future__ import annotations

from typing import Any, cast

import pytest

from dougong.clock import ManualClock
from dougong.run.node_session import NodeSession
from dougong.run.reception import Reception


class Line:
    """A connection that was closed or not."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start_ns=1_000_000_000)


def reception(clock: ManualClock, session: NodeSession, gone: list[str]) -> Reception:
    return Reception(
        {session.component: session},
        token=b"token",
        clock=clock,
        on_hello=lambda *_: None,
        on_message=lambda *_: None,
        on_gone=lambda session, reason: gone.append(reason),
    )


def connected(clock: ManualClock) -> NodeSession:
    session = NodeSession("hall/node-1", is_lost=False, now_s=clock.monotonic_ns() / 1e9)
    session.connection = cast("Any", Line())
    session.heard_s = clock.monotonic_ns() / 1e9
    return session


def test_an_agent_that_says_nothing_for_long_is_dropped(clock: ManualClock) -> None:
    session, gone = connected(clock), list[str]()
    desk = reception(clock, session, gone)
    dropped: tuple[str, ...] = ()
    for _ in range(20):
        clock.advance_s(0.5)
        dropped += desk.drop_silent()
    assert dropped == ("hall/node-1",)
    assert gone == ["silent for 5 s"]
    assert session.connection is None


def test_a_controller_that_was_stopped_itself_drops_nobody_for_it(clock: ManualClock) -> None:
    session, gone = connected(clock), list[str]()
    desk = reception(clock, session, gone)
    desk.drop_silent()
    clock.advance_s(60)
    assert desk.drop_silent() == ()
    assert gone == []
