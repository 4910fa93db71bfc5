"""Which nodes may be given work: those to be tested first, those in quarantine, and the pre-flight under way."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from dougong.event.kinds import AnyEvent, NodeQuarantined
from dougong.run.history import JobHistory
from dougong.run.preflight import BadNode, PreflightRound
from dougong.run.settings import RunSettings
from dougong.run.wire import Preflight, Preflighted


class FitnessNews(msgspec.Struct, frozen=True, kw_only=True):
    """What a look at the pre-flight brought: orders to send, events to write, and whether it is over."""

    orders: tuple[tuple[str, Preflight], ...] = ()
    events: tuple[AnyEvent, ...] = ()
    is_over: bool = False


class Fitness:
    """One run's nodes. `untested` ones are tested before they are next given work."""

    def __init__(self, *, untested: Iterable[str] = (), quarantined: Iterable[str] = ()) -> None:
        self._untested = dict.fromkeys(untested)
        self._quarantined = set(quarantined)
        self._round: PreflightRound | None = None
        self._serial = 0

    @property
    def untested(self) -> tuple[str, ...]:
        return tuple(self._untested)

    @property
    def quarantined(self) -> frozenset[str]:
        return frozenset(self._quarantined)

    @property
    def is_testing(self) -> bool:
        return self._round is not None

    def doubt(self, components: Iterable[str]) -> None:
        """These nodes must pass a test before they are used again."""
        self._untested.update(dict.fromkeys(components))

    def readmit(self, component: str) -> None:
        """A node that was lost or in quarantine is offered again: it will be tested first."""
        self._quarantined.discard(component)
        self.doubt((component,))

    def quarantine(self, component: str, reason: str) -> tuple[AnyEvent, ...]:
        """Give the node no more work. Twice does no harm."""
        if component in self._quarantined:
            return ()
        self._quarantined.add(component)
        self._untested.pop(component, None)
        return (NodeQuarantined(component=component, reason=reason),)

    def begin(self, addresses: Mapping[str, str], *, now_s: float) -> tuple[tuple[str, Preflight], ...]:
        """Test these nodes; the first orders. `addresses`: host of each, as the others reach it."""
        self._serial += 1
        self._round = PreflightRound(addresses, serial=self._serial, now_s=now_s)
        return self._round.begin()

    def hear(self, component: str, answer: Preflighted) -> None:
        if self._round is not None:
            self._round.hear(component, answer)

    def lose(self, component: str) -> None:
        """The node's agent is gone."""
        if self._round is not None:
            self._round.lose(component)

    def proceed(self, *, now_s: float, usable: Sequence[str], num_needed: int) -> FitnessNews:
        """One look at the pre-flight under way. `usable`: the nodes that could be given work as things stand."""
        if self._round is None:
            return FitnessNews(is_over=True)
        orders = self._round.proceed(now_s=now_s)
        if self._round.verdict is None:
            return FitnessNews(orders=orders)
        events = list(self._round.events())
        for tested in self._round.components:
            self._untested.pop(tested, None)
        for node in to_quarantine(self._round.verdict.bad, usable=usable, num_needed=num_needed):
            events.extend(self.quarantine(node.component, node.reason))
        self._round = None
        return FitnessNews(events=tuple(events), is_over=True)


def untested_at_start(settings: RunSettings, history: JobHistory, *, is_resume: bool) -> tuple[str, ...]:
    """All nodes if a pre-flight is wanted and not done yet; at a resume at least those that come back from a loss."""
    names = (*settings.nodes, *settings.spares)
    if is_resume:
        returning = history.lost_nodes | history.quarantined_nodes
        return names if settings.wants_preflight else tuple(name for name in names if name in returning)
    return names if settings.wants_preflight and not history.is_preflight_done else ()


def to_quarantine(bad: Sequence[BadNode], *, usable: Collection[str], num_needed: int) -> tuple[BadNode, ...]:
    """A node that fails or computes wrongly is never used; one that is only slow is, if there is no other."""
    chosen = [node for node in bad if not node.is_usable]
    num_left = len(set(usable) - {node.component for node in chosen})
    for node in bad:
        if node.is_usable and num_left > num_needed:
            chosen.append(node)
            num_left -= node.component in usable
    return tuple(chosen)
