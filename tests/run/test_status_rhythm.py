"""Who speaks when: nothing changes for a small fleet, a large one is not drowned, and what matters is told at once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dougong.run.page import Phase
from dougong.run.settings import HangRule
from dougong.run.status_rhythm import SUSPICION_S, fleet_rhythm, grown, is_news
from dougong.run.wire import RankStatus

CALM = RankStatus(
    rank=0,
    generation=1,
    pid=10,
    phase=Phase.STEP,
    step=5,
    idle_s=0.3,
    quiet_s=0.0,
    activity="running",
    is_attached=True,
)


def like(**changes: Any) -> RankStatus:
    return msgspec.structs.replace(CALM, **changes)


def test_a_small_fleet_speaks_five_times_a_second_and_is_looked_at_fifty_times() -> None:
    for num_nodes in (1, 2, 50):
        rhythm = fleet_rhythm(num_nodes)
        assert (rhythm.status_s, rhythm.look_s, rhythm.look_gap_s, rhythm.stale_s, rhythm.silent_s) == (
            0.2,
            0.02,
            0.0,
            2.0,
            5.0,
        )
        assert not rhythm.is_large


@given(st.integers(1, 200_000), st.integers(1, 200_000))
def test_a_larger_fleet_never_speaks_more_often(one: int, other: int) -> None:
    small, large = fleet_rhythm(min(one, other)), fleet_rhythm(max(one, other))
    for name in small.__struct_fields__:
        assert getattr(small, name) <= getattr(large, name)


@given(st.integers(1, 200_000))
def test_an_agent_is_not_taken_for_silent_because_it_may_be(num_nodes: int) -> None:
    rhythm = fleet_rhythm(num_nodes)
    assert rhythm.silent_s >= 3 * rhythm.status_s and rhythm.stale_s >= 2 * rhythm.status_s
    assert rhythm.look_gap_s <= rhythm.look_s


def test_ten_thousand_agents_say_two_thousand_things_a_second() -> None:
    assert 10_000 / fleet_rhythm(10_000).status_s <= 2_000


@pytest.mark.parametrize(
    "now",
    [
        like(activity="stopped"),
        like(activity="gone"),
        like(phase=Phase.UNWOUND),
        like(phase=Phase.DONE),
        like(pid=11),
        like(generation=2),
        like(is_attached=False),
        like(idle_s=2.0, quiet_s=1.5),
    ],
)
def test_what_a_decision_may_rest_on_is_news_and_so_is_its_end(now: RankStatus) -> None:
    assert is_news((CALM,), (now,))
    assert is_news((now,), (CALM,)) or now.activity == "gone"


@pytest.mark.parametrize(
    "now", [like(step=6), like(phase=Phase.BETWEEN), like(activity="timer"), like(idle_s=90.0), like(quiet_s=90.0)]
)
def test_the_course_of_training_is_no_news(now: RankStatus) -> None:
    assert not is_news((CALM,), (now,))


def test_another_set_of_ranks_is_news() -> None:
    assert is_news((), (CALM,)) and is_news((CALM,), ())


def test_silence_is_told_before_any_patience_of_the_hang_rule_ends() -> None:
    rule = HangRule()
    assert min(rule.attached_min_s, rule.unmodified_min_s, rule.outside_step_s) > SUSPICION_S


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0, 10))
def test_a_silence_counts_on_and_a_sign_of_life_does_not_fade(idle_s: float, quiet_s: float, age_s: float) -> None:
    told = like(idle_s=idle_s, quiet_s=quiet_s)
    later = grown(told, age_s=age_s)
    if min(idle_s, quiet_s) > SUSPICION_S:
        assert (later.idle_s, later.quiet_s) == (idle_s + age_s, quiet_s + age_s)
    else:
        assert later == told


def test_a_stop_and_a_broken_collective_count_on_from_the_first_word() -> None:
    assert grown(like(activity="stopped", quiet_s=0.1), age_s=1.0).quiet_s == pytest.approx(1.1)
    assert grown(like(phase=Phase.UNWOUND, idle_s=0.1), age_s=1.0).idle_s == pytest.approx(1.1)
