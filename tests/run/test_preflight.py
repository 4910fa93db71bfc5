from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dougong.event.kinds import LinkSuspected, PreflightDone
from dougong.run.preflight import GemmResult, PairResult, PreflightRound, Verdict, judge, ring
from dougong.run.wire import Preflight, Preflighted

NODES = tuple(f"node-{index}" for index in range(1, 9))


def gemm(component: str, flop_per_s: float = 100e9, *, is_exact: bool = True, failure: str = "") -> GemmResult:
    return GemmResult(component=component, flop_per_s=flop_per_s, is_exact=is_exact, failure=failure)


def judged(
    count: int, *, failed: tuple[tuple[str, str], ...] = (), rates: Mapping[str, float] | None = None
) -> Verdict:
    """The verdict over a ring of so many nodes whose pairs all pass but those named."""
    names = NODES[:count]
    pairs = [
        PairResult(first=first, second=second, bytes_per_s=1e9, failure="broken" if (first, second) in failed else "")
        for part in ring(names)
        for first, second in part
    ]
    return judge([gemm(name, (rates or {}).get(name, 100e9)) for name in names], pairs)


def bad(verdict: Verdict) -> list[str]:
    return [node.component for node in verdict.bad]


# --- alone ---


def test_sound_nodes_are_all_fit() -> None:
    verdict = judged(4, rates={"node-1": 90e9, "node-2": 110e9})
    assert (verdict.bad, verdict.links, verdict.reason) == ((), (), "all are fit")


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_a_wrong_product_or_no_answer_is_bad_whatever_the_others_do(count: int) -> None:
    others = [gemm(name) for name in NODES[1:count]]
    for spoilt in (gemm("node-1", is_exact=False), gemm("node-1", failure="no answer in time")):
        verdict = judge([spoilt, *others], [])
        assert bad(verdict) == ["node-1"]
        assert not verdict.bad[0].is_usable


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_a_node_of_half_the_rate_is_slow_but_better_than_none(count: int) -> None:
    (found,) = judged(count, rates={"node-2": 50e9}).bad
    assert (found.component, found.is_usable) == ("node-2", True)
    assert "50%" in found.reason


def test_a_wide_spread_makes_none_of_them_slow() -> None:
    spread = dict(zip(NODES, (40e9, 60e9, 80e9, 100e9, 120e9, 140e9, 160e9, 180e9), strict=True))
    assert bad(judged(8, rates=spread)) == []


@given(st.lists(st.floats(0.75, 1.3), min_size=1, max_size=8))
def test_nodes_within_a_quarter_of_each_other_are_never_slow(factors: list[float]) -> None:
    usual = sorted(factors)[len(factors) // 2]
    near = [usual * (1 + 0.2 * (factor - 1)) for factor in factors]
    assert judge([gemm(name, 1e11 * rate) for name, rate in zip(NODES, near, strict=False)], []).bad == ()


# --- in pairs ---


@given(st.integers(2, 8))
def test_each_node_meets_both_neighbours_and_is_never_in_two_pairs_at_once(count: int) -> None:
    names = NODES[:count]
    rounds = ring(names)
    for part in rounds:
        at_once = [name for pair in part for name in pair]
        assert len(at_once) == len(set(at_once))
    met = Counter(name for part in rounds for pair in part for name in pair)
    assert met == dict.fromkeys(names, 1 if count == 2 else 2)
    assert len(rounds) == (1 if count == 2 else 2 + count % 2)


@pytest.mark.parametrize("count", [3, 4, 7, 8])
def test_a_node_that_fails_with_both_partners_is_bad_and_its_partners_are_not(count: int) -> None:
    failed = tuple(pair for part in ring(NODES[:count]) for pair in part if "node-2" in pair)
    verdict = judged(count, failed=failed)
    assert bad(verdict) == ["node-2"]
    assert verdict.links == ()
    assert "every partner" in verdict.bad[0].reason


def test_a_pair_whose_nodes_pass_with_others_points_at_the_link() -> None:
    verdict = judged(4, failed=(("node-2", "node-3"),))
    assert verdict.bad == ()
    assert [(link.first, link.second) for link in verdict.links] == [("node-2", "node-3")]


def test_two_neighbours_may_both_be_bad() -> None:
    failed = tuple(pair for part in ring(NODES[:6]) for pair in part if {"node-1", "node-2"} & set(pair))
    assert bad(judged(6, failed=failed)) == ["node-1", "node-2"]


def test_if_every_pair_fails_it_is_the_network_and_no_node() -> None:
    failed = tuple(pair for part in ring(NODES[:4]) for pair in part)
    verdict = judged(4, failed=failed)
    assert verdict.bad == ()
    assert len(verdict.links) == 4


def test_two_nodes_that_cannot_reach_each_other_are_both_kept_and_the_link_is_named() -> None:
    verdict = judged(2, failed=(("node-1", "node-2"),))
    assert (verdict.bad, len(verdict.links)) == ((), 1)


def test_a_pair_far_slower_than_the_others_is_a_bad_link() -> None:
    rates = {("node-1", "node-2"): 0.1e9}
    pairs = [
        PairResult(first=a, second=b, bytes_per_s=rates.get((a, b), 1e9)) for part in ring(NODES[:4]) for a, b in part
    ]
    verdict = judge([gemm(name) for name in NODES[:4]], pairs)
    assert [(link.first, link.second) for link in verdict.links] == [("node-1", "node-2")]
    assert "10%" in verdict.links[0].reason


# --- the round ---


def play(
    names: tuple[str, ...], answer: Callable[[str, Preflight], Preflighted | None], *, until_s: float = 600.0
) -> PreflightRound:
    """A pre-flight with nodes that answer at once, or never."""
    now_s = 0.0
    test = PreflightRound(dict.fromkeys(names, "host"), serial=7, now_s=now_s)
    orders = test.begin()
    while test.verdict is None:
        assert now_s < until_s
        for component, order in orders:
            given_back = answer(component, order)
            if given_back is not None:
                test.hear(component, given_back)
        now_s += 1.0
        orders = test.proceed(now_s=now_s)
    return test


def sound(component: str, order: Preflight) -> Preflighted:
    return Preflighted(
        serial=order.serial,
        stage=order.stage,
        free_port=4000 + NODES.index(component),
        flop_per_s=1e11 if order.stage == 0 else None,
        bytes_per_s=1e9 if order.stage else None,
    )


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_a_round_over_sound_nodes_ends_with_their_figures(count: int) -> None:
    test = play(NODES[:count], sound)
    assert test.verdict is not None and test.verdict.reason == "all are fit"
    (done,) = test.events()
    assert isinstance(done, PreflightDone)
    assert [node.flop_per_s for node in done.nodes] == [1e11] * count
    assert [node.bytes_per_s for node in done.nodes] == [1e9 if count > 1 else None] * count


def test_both_nodes_of_a_pair_meet_at_the_port_of_the_first() -> None:
    orders: list[tuple[str, Preflight]] = []

    def noted(component: str, order: Preflight) -> Preflighted:
        orders.append((component, order))
        return sound(component, order)

    play(NODES[:4], noted)
    for stage in (1, 2):
        for first, second in ring(NODES[:4])[stage - 1]:
            ports = {order.master_port for name, order in orders if name in (first, second) and order.stage == stage}
            assert ports == {4000 + NODES.index(first)}


def test_a_node_that_never_answers_is_bad_and_spoils_no_pair() -> None:
    test = play(NODES[:4], lambda name, order: None if name == "node-3" else sound(name, order))
    assert test.verdict is not None and bad(test.verdict) == ["node-3"]
    assert test.verdict.links == ()


def test_a_node_that_goes_silent_in_the_pairs_is_bad_with_both_partners() -> None:
    def answer(name: str, order: Preflight) -> Preflighted | None:
        return None if name == "node-3" and order.stage else sound(name, order)

    test = play(NODES[:4], answer)
    assert test.verdict is not None and bad(test.verdict) == ["node-3"]


def test_a_broken_link_is_an_event_of_its_own() -> None:
    def answer(name: str, order: Preflight) -> Preflighted:
        if order.stage == 1 and name in ("node-1", "node-2"):
            return Preflighted(serial=7, stage=1, free_port=1, failure="the connection broke")
        return sound(name, order)

    events = play(NODES[:4], answer).events()
    assert [(event.first, event.second) for event in events if isinstance(event, LinkSuspected)] == [
        ("node-1", "node-2")
    ]


def test_an_answer_to_another_round_or_stage_does_not_count() -> None:
    test = PreflightRound({"node-1": "host"}, serial=7, now_s=0.0)
    test.begin()
    test.hear("node-1", Preflighted(serial=6, stage=0, free_port=1))
    test.hear("node-1", Preflighted(serial=7, stage=1, free_port=1))
    test.proceed(now_s=1.0)
    assert test.verdict is None
    test.lose("node-1")
    test.proceed(now_s=2.0)
    assert test.verdict is not None and bad(test.verdict) == ["node-1"]
