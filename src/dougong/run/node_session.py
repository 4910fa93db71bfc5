"""A node in the controller's hands: its connection and the last that was heard of it."""

from __future__ import annotations

from collections.abc import Iterable

from dougong.event.kinds import Placed
from dougong.run import wire
from dougong.run.decide import NodeView

_ASK_AGAIN_S = 5.0


class NodeSession:
    """One node of the run, connected or not."""

    def __init__(self, component: str, *, is_lost: bool, now_s: float) -> None:
        self.component = component
        self.is_lost = is_lost
        self.is_fenced = is_lost
        """All that could be done to end what ran on a lost node has been done."""
        self.is_expected = False
        """It is lost, and an agent was asked for: it may come back."""
        self.is_cleared = True
        """Nothing of a time before it was lost runs on it."""
        self.connection: wire.Connection | None = None
        self.gone_since_s = now_s
        self.heard_s = now_s
        self.is_agent_asked = False
        self.agent_asked_s = now_s
        self.was_connected = False
        self.address = ""
        self.free_port = 0
        self.link_port = 0
        self.status: wire.Status | None = None
        self.status_s = 0.0
        self.snapshots: tuple[wire.SnapshotStatus, ...] = ()
        self.courier_port = 0
        self.copies: tuple[wire.CopyStatus, ...] = ()
        self.undead = ""

    def open(self, connection: wire.Connection, hello: wire.Hello, *, now_s: float) -> None:
        """Its agent is there, for the first time or again."""
        self.connection = connection
        self.was_connected = True
        self.is_agent_asked = False
        self.heard_s = now_s
        self.address = hello.address
        self.free_port = hello.free_port
        self.link_port = hello.link_port
        self.status = None
        self.snapshots = hello.snapshots
        self.courier_port = hello.courier_port
        self.copies = hello.copies
        self.undead = ""

    def ask_agent(self, *, now_s: float) -> None:
        """Its backend is asked for an agent; after a while again, for that one may die too."""
        self.is_agent_asked = True
        self.agent_asked_s = now_s

    def lose_connection(self, *, now_s: float) -> None:
        """What was last heard does not count any more."""
        self.connection = None
        self.gone_since_s = now_s
        self.status = None

    def note_undead(self, message: wire.Killed) -> None:
        """Its agent has tried to end the workers; those that will not die, in words."""
        states = zip(message.undead, message.undead_states, strict=False)
        self.undead = ", ".join(f"rank {rank} in state {state}" for rank, state in states)

    def send(self, message: wire.ToAgent) -> None:
        """Say something to the agent; nothing if there is none, which `decide` will see to."""
        if self.connection is not None:
            self.connection.send(message)

    def view(self, *, now_s: float, was_known: bool, is_ready: bool, is_quarantined: bool = False) -> NodeView:
        """The node as decisions see it. `was_known`: an earlier controller had it."""
        return NodeView(
            component=self.component,
            is_connected=self.connection is not None,
            is_lost=self.is_lost,
            is_ready=is_ready and self.is_cleared,
            is_expected=self.is_expected,
            is_quarantined=is_quarantined,
            undead=self.undead,
            was_connected=self.was_connected or was_known,
            silent_s=0.0 if self.connection is not None else now_s - self.gone_since_s,
            is_agent_asked=self.is_agent_asked and now_s - self.agent_asked_s < _ASK_AGAIN_S,
        )


def ranks_by_node(placement: Iterable[Placed]) -> dict[str, tuple[tuple[int, int], ...]]:
    """(rank, local rank) of each node, in the order of the placement."""
    found: dict[str, list[tuple[int, int]]] = {}
    for placed in placement:
        found.setdefault(placed.component, []).append((placed.rank, placed.local_rank))
    return {component: tuple(ranks) for component, ranks in found.items()}


def ranks_of(sessions: Iterable[NodeSession]) -> tuple[wire.RankStatus, ...]:
    """All ranks as last seen."""
    return tuple(rank for session in sessions if session.status is not None for rank in session.status.ranks)


def onset_of_silence_ns(ranks: Iterable[wire.RankStatus], *, now_ns: int) -> int:
    """When it began: a stop when the process was first seen stopped, a hang when the last rank gave its last sign."""
    seen = tuple(ranks)
    stopped = [rank.quiet_s for rank in seen if rank.activity == "stopped"]
    silent_s = min((max(rank.idle_s, 0.0) for rank in seen if rank.activity != "gone"), default=0.0)
    return now_ns - round((max(stopped) if stopped else silent_s) * 1e9)
