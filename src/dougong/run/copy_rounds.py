"""The controller's side of copies on other nodes: who keeps whose, when all ranks are copied, and what that left.

Copies are of use only if those of all ranks are of one step, and each node's own memory moves on every few steps. So
they are made in rounds: in each round every node takes the first memory checkpoint at or after the same step, keeps it
itself, and sends it to its keepers. The state that the last finished round left is the *anchor*, and is written over
nowhere before the next round is finished: as long as no node is lost together with all its keepers, the job can go back
to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from dougong.event.kinds import (
    AnyEvent,
    CheckpointRejected,
    CheckpointSaved,
    Keeper,
    PeersChosen,
    Placed,
    WarningRaised,
)
from dougong.run import wire
from dougong.run.copy_store import NO_ANCHOR, Anchor
from dougong.run.node_session import NodeSession, ranks_of
from dougong.run.peer_placement import PeerPlan, choose_peers, rack_of
from dougong.run.restore_choice import BadCopy, Copy
from dougong.run.save_rhythm import steps_within
from dougong.run.settings import RunSettings

_AHEAD_S = 0.3
"""How old the news about a rank's step may be, and how long an order may travel."""
_STALLED_S = 120.0
_GATHER_S = 5.0
_LOOK_S_PER_RANK = 1e-4
"""A look at all copies costs a little for each; so a large job is looked at less often."""


class CopiedJob(msgspec.Struct, frozen=True, kw_only=True):
    """What a round depends on."""

    generation: int
    placement: tuple[Placed, ...]
    is_running: bool
    is_attached: bool
    step_s: float

    @property
    def homes(self) -> dict[int, str]:
        return {placed.rank: placed.component for placed in self.placement}


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """A round of copies in hand. `kept_s`: when the first rank had taken its checkpoint; 0 = none has."""

    number: int
    generation: int
    from_step: int
    plan: PeerPlan
    kept_s: float = 0.0


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a round is. `state` = what all ranks have at home and with all their keepers; None = not yet."""

    has_begun: bool
    state: Anchor | None = None
    num_bytes: int = 0
    failure: str = ""


class CopyRounds:
    """Opens rounds, sends the orders, and hands out the copies that a restore may use."""

    def __init__(
        self,
        settings: RunSettings,
        sessions: Mapping[str, NodeSession],
        *,
        failure_group_of: Callable[[str], str] = rack_of,
    ) -> None:
        self._settings = settings
        self._sessions = sessions
        self._failure_group_of = failure_group_of
        self._plan = PeerPlan(keepers=(), reason="")
        self._plan_of: tuple[tuple[str, ...], tuple[str, ...]] | None = None
        self._anchor = NO_ANCHOR
        self._round: Round | None = None
        self._num_rounds = 0
        self._next_s = 0.0
        self._look_s = 0.0
        self._patience_s = 0.0
        self._refused: list[BadCopy] = []
        self._problems: set[tuple[str, str]] = set()
        self._has_problem = False
        self._seen: set[str] = set()
        self._told: dict[str, tuple[wire.Connection, wire.CopyOrder]] = {}

    def hear(self, session: NodeSession, held: wire.CopiesHeld) -> tuple[AnyEvent, ...]:
        """What a node keeps by now. A problem is told once."""
        session.courier_port, session.copies = held.courier_port, held.copies
        if not held.problem:
            return ()
        self._has_problem = True
        kind = held.problem.rpartition(": ")[2]
        if (session.component, kind) in self._problems:
            return ()
        self._problems.add((session.component, kind))
        text = f"a copy of a memory checkpoint was not made: {held.problem}"
        return (WarningRaised(component=session.component, text=text),)

    def copies(self, *, trusts: Callable[[int, int], bool] = lambda generation, step: True) -> tuple[Copy, ...]:
        """All that living nodes have of trusted states (`trusts(generation, step)`). Where the port is 0 only the
        node's own ranks can have them."""
        return tuple(
            Copy(courier=_address(session), owner=copy.owner, snapshot=copy.snapshot)
            for session in self._sessions.values()
            if session.connection is not None and not session.is_lost
            for copy in session.copies
            if trusts(copy.snapshot.generation, copy.snapshot.step)
        )

    @property
    def keepers(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Owners, and the nodes that keep copies of theirs."""
        return self._plan.keepers

    @property
    def refused(self) -> tuple[BadCopy, ...]:
        return tuple(self._refused)

    def refuse(self, origin: wire.Origin, restore: wire.Restore, *, reason: str) -> CheckpointRejected:
        """This copy could not be had; choose without it from now on."""
        component = origin.courier.component
        bad = BadCopy(component=component, rank=origin.rank, generation=restore.generation, step=restore.step)
        self._refused.append(bad)
        return CheckpointRejected(step=restore.step, tier="peer", path=component, reason=reason)

    def look(self, job: CopiedJob, *, now_s: float) -> tuple[AnyEvent, ...]:
        """Once in a while: take stock, open a round if it is time, tell the nodes."""
        if self._settings.save.peer_copies <= 0 or not job.is_attached or not job.placement or now_s < self._look_s:
            return ()
        self._look_s = now_s + _LOOK_S_PER_RANK * len(job.placement)
        events = [*self._choose_peers(job, now_s=now_s), *self._take_stock(job, now_s=now_s)]
        if self._round is None and self._may_open(job, now_s=now_s):
            self._open(job, now_s=now_s)
        self._tell_all()
        return tuple(events)

    # --- who keeps whose ---

    def _choose_peers(self, job: CopiedJob, *, now_s: float) -> list[AnyEvent]:
        owners = tuple(dict.fromkeys(placed.component for placed in job.placement))
        # a courier that is being started anew keeps what it has, so it stays in the plan
        self._seen |= {session.component for session in self._sessions.values() if session.courier_port}
        able = tuple(s.component for s in self._sessions.values() if not s.is_lost and s.component in self._seen)
        if self._plan_of == (owners, able) or not set(owners) <= set(able):
            return []
        if self._plan_of is None and self._is_gathering(len(able), now_s=now_s):
            return []
        plan = choose_peers(
            able,
            owners=owners,
            num_copies=self._settings.save.peer_copies,
            failure_group_of=self._failure_group_of,
            previous=dict(self._plan.keepers) or self._kept_now(),
        )
        is_news, self._plan, self._plan_of = plan.keepers != self._plan.keepers, plan, (owners, able)
        if not is_news:
            return []
        self._round = None
        keepers = tuple(Keeper(owner=owner, keepers=names) for owner, names in plan.keepers)
        events: list[AnyEvent] = [PeersChosen(keepers=keepers, reason=plan.reason)]
        # nodes that are played on one host share their fate anyway
        if plan.warning and self._settings.backend != "local":
            events.append(WarningRaised(component="checkpoints", text=plan.warning))
        return events

    def _is_gathering(self, num_able: int, *, now_s: float) -> bool:
        """A plan is made once all couriers are up, or a while after the first: what is sent once should not move."""
        self._patience_s = self._patience_s or now_s + _GATHER_S
        num_expected = sum(not session.is_lost for session in self._sessions.values())
        return num_able < num_expected and now_s < self._patience_s

    def _kept_now(self) -> dict[str, tuple[str, ...]]:
        """Who keeps whose copies already: a controller that was started anew goes on with the same."""
        found: dict[str, list[str]] = {}
        for session in self._living():
            for copy in session.copies:
                if copy.owner != session.component and session.component not in found.setdefault(copy.owner, []):
                    found[copy.owner].append(session.component)
        return {owner: tuple(names) for owner, names in found.items()}

    # --- rounds ---

    def _take_stock(self, job: CopiedJob, *, now_s: float) -> list[AnyEvent]:
        round_ = self._round
        if round_ is None and self._anchor != NO_ANCHOR:
            return []
        copies = self.copies()
        if self._anchor == NO_ANCHOR:
            self._anchor = newest_complete(copies, world_size=len(job.placement))
        if round_ is None:
            return []
        if round_.generation != job.generation or not job.is_running:
            self._round = None
            return []
        progress = progress_of(round_, copies, homes=job.homes)
        if progress.has_begun and not round_.kept_s:
            round_ = self._round = msgspec.structs.replace(round_, kept_s=now_s)
        save = self._settings.save
        if progress.state is not None:
            took_s = now_s - round_.kept_s
            self._anchor, self._round = progress.state, None
            self._next_s = now_s + max(save.peer_every_s, took_s * (1.0 / max(save.peer_busy_ratio, 1e-3) - 1.0))
            return [_saved(progress, took_s=took_s)]
        is_stalled = round_.kept_s > 0 and now_s - round_.kept_s > _STALLED_S
        if progress.failure or self._has_problem or is_stalled:
            self._round, self._has_problem = None, False
            self._next_s = now_s + save.peer_every_s
        return []

    def _may_open(self, job: CopiedJob, *, now_s: float) -> bool:
        if not job.is_running or not self._plan.keepers or now_s < self._next_s:
            return False
        needed = {name for owner, keepers in self._plan.keepers for name in (owner, *keepers)}
        return needed <= {session.component for session in self._living()}

    def _open(self, job: CopiedJob, *, now_s: float) -> None:
        """From a step that no rank has reached yet, so that all can take the same."""
        steps = [rank.step for rank in ranks_of(self._sessions.values()) if rank.generation == job.generation]
        if len(steps) < len(job.placement):
            return
        if self._anchor.generation == job.generation:
            steps.append(self._anchor.step)
        self._num_rounds += 1
        self._has_problem = False
        self._round = Round(
            number=self._num_rounds,
            generation=job.generation,
            from_step=max(steps) + 1 + steps_within(_AHEAD_S, step_s=job.step_s),
            plan=self._plan,
        )

    # --- telling ---

    def _tell_all(self) -> None:
        """The first order has an agent start its courier, so it goes to all."""
        keepers = dict(self._plan.keepers) if self._round is not None else {}
        for session in self._sessions.values():
            order = self._order_for(keepers.get(session.component, ()))
            known = self._told.get(session.component)
            if session.connection is not None and not session.is_lost and known != (session.connection, order):
                self._told[session.component] = (session.connection, order)
                session.send(order)

    def _order_for(self, keepers: Sequence[str]) -> wire.CopyOrder:
        peers = [self._sessions[keeper] for keeper in keepers]
        return wire.CopyOrder(
            generation=self._round.generation if self._round is not None else 0,
            round=self._round.number if self._round is not None and peers else 0,
            from_step=self._round.from_step if self._round is not None else 0,
            anchor_generation=self._anchor.generation,
            anchor_step=self._anchor.step,
            peers=tuple(_address(peer) for peer in peers),
        )

    def _living(self) -> list[NodeSession]:
        return [
            session
            for session in self._sessions.values()
            if session.connection is not None and session.courier_port and not session.is_lost
        ]


def newest_complete(copies: Iterable[Copy], *, world_size: int) -> Anchor:
    """The newest state of which some living node has a copy of every rank; `NO_ANCHOR` if there is none."""
    held: dict[Anchor, set[int]] = {}
    for copy in copies:
        if copy.snapshot.world_size == world_size:
            held.setdefault(Anchor(copy.snapshot.generation, copy.snapshot.step), set()).add(copy.snapshot.rank)
    return max((state for state, ranks in held.items() if len(ranks) == world_size), default=NO_ANCHOR)


def progress_of(round_: Round, copies: Sequence[Copy], *, homes: Mapping[int, str]) -> Progress:
    """How far a round is, from what the nodes say they keep."""
    at_home: dict[int, Copy] = {}
    holders: dict[tuple[int, Anchor], set[str]] = {}
    for copy in copies:
        held = copy.snapshot
        if held.generation != round_.generation or held.step < round_.from_step or held.rank not in homes:
            continue
        holders.setdefault((held.rank, Anchor(held.generation, held.step)), set()).add(copy.courier.component)
        is_kept = copy.courier.component == copy.owner == homes[held.rank]
        if is_kept and (held.rank not in at_home or held.step < at_home[held.rank].snapshot.step):
            at_home[held.rank] = copy
    if len(at_home) < len(homes):
        return Progress(has_begun=bool(at_home))
    steps = {copy.snapshot.step for copy in at_home.values()}
    if len(steps) > 1:
        return Progress(has_begun=True, failure=f"ranks took different steps: {sorted(steps)}")
    state = Anchor(round_.generation, steps.pop())
    keepers = {owner: frozenset(names) for owner, names in round_.plan.keepers}
    if all(keepers.get(home, frozenset()) <= holders[rank, state] for rank, home in homes.items()):
        num_bytes = sum(copy.snapshot.num_bytes for copy in at_home.values())
        return Progress(has_begun=True, state=state, num_bytes=num_bytes)
    return Progress(has_begun=True)


def _saved(progress: Progress, *, took_s: float) -> CheckpointSaved:
    assert progress.state is not None
    return CheckpointSaved(
        step=progress.state.step,
        generation=progress.state.generation,
        tier="peer",
        num_bytes=progress.num_bytes,
        stall_s=0.0,
        write_s=took_s,
    )


def _address(session: NodeSession) -> wire.CourierAddress:
    return wire.CourierAddress(component=session.component, host=session.address, port=session.courier_port)
