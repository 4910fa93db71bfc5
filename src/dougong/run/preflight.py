"""Are the nodes fit to train? Which tests in which order, and a pure judgement over their results.

First every node alone multiplies matrices: its rate, and a result that is known bit for bit. Then those that passed
stand in a ring, and each does an all-reduce with either neighbour: a node that fails with both is bad; one that fails
with one partner only, which itself passes with another, points at what lies between the two.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from dougong.event.kinds import AnyEvent, LinkSuspected, NodeFigures, PreflightDone
from dougong.run.spread import robust_spread
from dougong.run.wire import Preflight, Preflighted

EXPECTED_DIGEST = "f16b26e210bf79adf64c82f7dbbf0c95"
"""xxh3-128 of the product that `preflight_worker` computes; the sums are whole numbers, so every machine gets it."""

_SLOW_RATIO = 0.7
_SLOW_LINK_RATIO = 0.3
_FAR_Z = 3.5
_LEAST_SPREAD_RATIO = 0.02
_FIRST_S = 90.0
_STAGE_S = 20.0
_GRACE_S = 5.0


class GemmResult(msgspec.Struct, frozen=True, kw_only=True):
    """A node alone. `flop_per_s`: of its slowest rank; `failure` "" = it answered."""

    component: str
    flop_per_s: float | None = None
    is_exact: bool = True
    failure: str = ""


class PairResult(msgspec.Struct, frozen=True, kw_only=True):
    """Two nodes together. `bytes_per_s`: the buffer's bytes over the time of one all-reduce."""

    first: str
    second: str
    bytes_per_s: float | None = None
    failure: str = ""


class BadNode(msgspec.Struct, frozen=True, kw_only=True):
    component: str
    reason: str
    is_usable: bool = False
    """Only slow: better than none where there is no spare."""


class BadLink(msgspec.Struct, frozen=True, kw_only=True):
    first: str
    second: str
    reason: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What follows from the results, in words too."""

    bad: tuple[BadNode, ...]
    links: tuple[BadLink, ...]
    reason: str


def judge(gemms: Sequence[GemmResult], pairs: Sequence[PairResult]) -> Verdict:
    """Which nodes are bad, and which links are suspect.

    Slow means: below 0.7 of the median of all nodes and more than 3.5 robust standard deviations (1.4826 MAD, at
    least 2 % of the median) from it. Of two nodes there is no median to speak of; there the slower one is bad if it
    is below 0.7 of the other.
    """
    bad = {node.component: node for node in _bad_alone(gemms)}
    failed = [pair for pair in _failed_pairs(pairs) if pair.first not in bad and pair.second not in bad]
    with_both = _bad_with_every_partner(failed, pairs)
    links = [
        BadLink(first=pair.first, second=pair.second, reason=pair.failure)
        for pair in failed
        if not {pair.first, pair.second} & set(with_both)
    ]
    for component, reason in with_both.items():
        bad[component] = BadNode(component=component, reason=reason)
    return Verdict(bad=tuple(bad.values()), links=tuple(links), reason=_in_words(len(gemms), bad, links))


def ring(components: Sequence[str]) -> tuple[tuple[tuple[str, str], ...], ...]:
    """Rounds of pairs in which every node meets both its neighbours; nobody is in two pairs of one round.

    Two rounds for an even number of nodes, three for an odd one, whose ring cannot be coloured with two colours.
    """
    num = len(components)
    if num < 2:
        return ()
    if num == 2:
        return (((components[0], components[1]),),)
    edges = [(components[index], components[(index + 1) % num]) for index in range(num)]
    rounds = [edges[0 : num - num % 2 : 2], edges[1 : num - num % 2 : 2]]
    if num % 2:
        rounds.append(edges[-1:])
    return tuple(tuple(part) for part in rounds)


class PreflightRound:
    """One pre-flight over some nodes: what to order next, and the verdict when all is in. Driven by the controller."""

    def __init__(self, addresses: Mapping[str, str], *, serial: int, now_s: float) -> None:
        """`addresses`: host of each node to test, as the others reach it. `serial` marks the answers to this one."""
        self._addresses = dict(addresses)
        self._serial = serial
        self._began_s = now_s
        self._ends_s = now_s + _FIRST_S
        self._rounds: list[tuple[tuple[str, str], ...]] | None = None
        self._waiting: dict[str, str] = {}
        """Component to its partner in this stage, "" = alone."""
        self._ports: dict[str, int] = {}
        self._gemms: dict[str, GemmResult] = {}
        self._pairs: dict[tuple[str, str], PairResult] = {}
        self._stage = 0
        self.verdict: Verdict | None = None
        self._took_s = 0.0

    @property
    def components(self) -> tuple[str, ...]:
        """The nodes under test."""
        return tuple(self._addresses)

    def begin(self) -> tuple[tuple[str, Preflight], ...]:
        """The first orders: every node alone."""
        self._waiting = dict.fromkeys(self._addresses, "")
        return tuple(
            (name, Preflight(serial=self._serial, stage=0, timeout_s=_FIRST_S - _GRACE_S)) for name in self._addresses
        )

    def hear(self, component: str, answer: Preflighted) -> None:
        """An answer; one to another round, or to an earlier stage, is too late to count."""
        if answer.serial != self._serial or answer.stage != self._stage or component not in self._waiting:
            return
        partner = self._waiting.pop(component)
        self._ports[component] = answer.free_port
        if partner == "":
            self._gemms[component] = _gemm_of(component, answer)
        else:
            self._note_pair(component, partner, answer)

    def lose(self, component: str) -> None:
        """The node's agent is gone; it will not answer."""
        if component in self._waiting:
            self._give_up_on(component, reason="its agent went away")

    def proceed(self, *, now_s: float) -> tuple[tuple[str, Preflight], ...]:
        """The orders of the next stage, once this one is over; with none left, `verdict` is set."""
        if self.verdict is not None:
            return ()
        if self._waiting and now_s >= self._ends_s:
            for component in tuple(self._waiting):
                self._give_up_on(component, reason="no answer in time")
        if self._waiting:
            return ()
        if self._rounds is None:
            self._rounds = list(ring([name for name, gemm in self._gemms.items() if gemm.failure == ""]))
        if not self._rounds:
            self._took_s = now_s - self._began_s
            self.verdict = judge(tuple(self._gemms.values()), tuple(self._pairs.values()))
            return ()
        self._stage += 1
        self._ends_s = now_s + _STAGE_S
        return tuple(self._orders(self._rounds.pop(0)))

    def events(self) -> tuple[AnyEvent, ...]:
        """The figures, and the links that are suspect. `verdict` must be set."""
        assert self.verdict is not None
        done = PreflightDone(
            nodes=tuple(self._figures(name) for name in self._addresses),
            bad=tuple(node.component for node in self.verdict.bad),
            took_s=self._took_s,
            reason=self.verdict.reason,
        )
        links = (LinkSuspected(first=link.first, second=link.second, reason=link.reason) for link in self.verdict.links)
        return (done, *links)

    def _orders(self, pairs: Sequence[tuple[str, str]]) -> Iterator[tuple[str, Preflight]]:
        for pair in pairs:
            for index, component in enumerate(pair):
                self._waiting[component] = pair[1 - index]
                yield (
                    component,
                    Preflight(
                        serial=self._serial,
                        stage=self._stage,
                        timeout_s=_STAGE_S - _GRACE_S,
                        node_index=index,
                        master_address=self._addresses[pair[0]],
                        master_port=self._ports[pair[0]],
                    ),
                )

    def _note_pair(self, component: str, partner: str, answer: Preflighted) -> None:
        """Both nodes answer; the pair is as bad as the worse of the two."""
        key = (min(component, partner), max(component, partner))
        earlier = self._pairs.get(key)
        rates = [rate for rate in (answer.bytes_per_s, earlier.bytes_per_s if earlier else None) if rate is not None]
        failure = answer.failure or ("" if answer.is_exact else "the sums that came out are wrong")
        self._pairs[key] = PairResult(
            first=key[0],
            second=key[1],
            bytes_per_s=min(rates, default=None),
            failure=(earlier.failure if earlier else "") or failure,
        )

    def _give_up_on(self, component: str, *, reason: str) -> None:
        partner = self._waiting.pop(component)
        if partner == "":
            self._gemms[component] = GemmResult(component=component, failure=reason)
            return
        silent = Preflighted(serial=self._serial, stage=self._stage, free_port=0, failure=f"{component}: {reason}")
        self._note_pair(component, partner, silent)

    def _figures(self, component: str) -> NodeFigures:
        gemm = self._gemms.get(component)
        rates = [
            pair.bytes_per_s for key, pair in self._pairs.items() if component in key and pair.bytes_per_s is not None
        ]
        return NodeFigures(
            component=component,
            flop_per_s=gemm.flop_per_s if gemm is not None else None,
            bytes_per_s=min(rates, default=None),
        )


def _gemm_of(component: str, answer: Preflighted) -> GemmResult:
    return GemmResult(
        component=component, flop_per_s=answer.flop_per_s, is_exact=answer.is_exact, failure=answer.failure
    )


def _bad_alone(gemms: Sequence[GemmResult]) -> Iterator[BadNode]:
    rates = {gemm.component: gemm.flop_per_s for gemm in gemms if gemm.flop_per_s is not None}
    for gemm in gemms:
        if gemm.failure:
            yield BadNode(component=gemm.component, reason=f"its test did not end well: {gemm.failure}")
        elif not gemm.is_exact:
            yield BadNode(component=gemm.component, reason="it computes wrongly: a product differs from the known one")
        elif gemm.flop_per_s is not None and (reason := _why_slow(gemm.component, rates)):
            yield BadNode(component=gemm.component, reason=reason, is_usable=True)


def _why_slow(component: str, rates: Mapping[str, float]) -> str:
    """ "" = it is not."""
    rate = rates[component]
    if len(rates) < 2:
        return ""
    if len(rates) == 2:
        other = max(rates.values())
        return f"slow: {rate / other:.0%} of the other node's rate" if rate < _SLOW_RATIO * other else ""
    usual = statistics.median(rates.values())
    z = (usual - rate) / robust_spread(rates.values(), least_ratio=_LEAST_SPREAD_RATIO)
    if rate >= _SLOW_RATIO * usual or z <= _FAR_Z:
        return ""
    return f"slow: {rate / usual:.0%} of the median of {len(rates)} nodes (robust z {z:.1f})"


def _failed_pairs(pairs: Sequence[PairResult]) -> list[PairResult]:
    """Those that failed, and those far slower than the rest; with fewer than three pairs nothing tells what is slow."""
    rates = [pair.bytes_per_s for pair in pairs if not pair.failure and pair.bytes_per_s is not None]
    usual = statistics.median(rates) if len(rates) >= 3 else None
    failed: list[PairResult] = []
    for pair in pairs:
        if pair.failure:
            failed.append(pair)
        elif usual is not None and pair.bytes_per_s is not None and pair.bytes_per_s < _SLOW_LINK_RATIO * usual:
            reason = f"slow: {pair.bytes_per_s / usual:.0%} of the median of {len(rates)} pairs"
            failed.append(msgspec.structs.replace(pair, failure=reason))
    return failed


def _bad_with_every_partner(failed: Sequence[PairResult], pairs: Sequence[PairResult]) -> dict[str, str]:
    """Nodes that failed with two partners. Would that be more than half of them, it is the network, not the nodes."""
    tested: dict[str, int] = {}
    for pair in pairs:
        for component in (pair.first, pair.second):
            tested[component] = tested.get(component, 0) + 1
    reasons: dict[str, list[str]] = {}
    for pair in failed:
        reasons.setdefault(pair.first, []).append(f"with {pair.second}: {pair.failure}")
        reasons.setdefault(pair.second, []).append(f"with {pair.first}: {pair.failure}")
    found = {name: "; ".join(why) for name, why in reasons.items() if len(why) >= 2 and len(why) == tested[name]}
    if 2 * len(found) > len(tested):
        return {}
    return {name: f"it failed with every partner ({why})" for name, why in found.items()}


def _in_words(num_nodes: int, bad: Mapping[str, BadNode], links: Sequence[BadLink]) -> str:
    if not bad and not links:
        return "all are fit"
    parts = [f"{node.component} is bad: {node.reason}" for node in bad.values()]
    parts += [f"the link {link.first} - {link.second} is suspect: {link.reason}" for link in links]
    return f"{len(bad)} of {num_nodes} bad; " + "; ".join(parts)
