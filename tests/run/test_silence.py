"""It may ask for a look too often, never too rarely: whatever `find_hang` would find, it does not miss."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from dougong.run import wire
from dougong.run.hang import StepTimes, find_hang
from dougong.run.page import Phase
from dougong.run.settings import HangRule
from dougong.run.silence import Silence

RULE = HangRule()
NUM_RANKS = 600
CALM = wire.RankStatus(
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

PHASES = st.sampled_from([Phase.STARTING, Phase.STEP, Phase.BETWEEN, Phase.CHECKPOINT, Phase.UNWOUND, Phase.DONE])
ACTIVITIES = st.sampled_from(["running", "idle", "lock", "timer", "stopped", "gone"])
SECONDS = st.one_of(st.floats(0, 5), st.floats(0, 4000))
RANKS = st.builds(
    lambda phase, activity, idle_s, quiet_s, is_attached: msgspec.structs.replace(
        CALM, phase=phase, activity=activity, idle_s=idle_s, quiet_s=quiet_s, is_attached=is_attached
    ),
    PHASES,
    ACTIVITIES,
    SECONDS,
    SECONDS,
    st.booleans(),
)


def watching(nodes: list[list[wire.RankStatus]], *, now_s: float) -> Silence:
    silence = Silence(RULE)
    silence.begin_generation(num_ranks=NUM_RANKS)
    assert silence.is_worth_a_look(now_s=now_s)  # for the first time, always
    for index, ranks in enumerate(nodes):
        silence.hear(f"node-{index}", wire.Status(ranks=tuple(ranks), snapshots=()), generation=1, now_s=now_s)
    return silence


@given(st.lists(st.lists(RANKS, max_size=3), min_size=1, max_size=4))
def test_what_the_rule_would_find_is_looked_for(nodes: list[list[wire.RankStatus]]) -> None:
    now_s = 10_000.0
    silence = watching(nodes, now_s=now_s)
    learnt = StepTimes(num_steps=100, p99_s=0.1, longest_gap_s=0.2)
    if find_hang([rank for ranks in nodes for rank in ranks], learnt=learnt, rule=RULE) is not None:
        assert silence.is_worth_a_look(now_s=now_s)


def test_a_large_fleet_in_good_health_is_rarely_looked_at() -> None:
    silence = watching([[CALM]], now_s=100.0)
    assert [second for second in range(60) if silence.is_worth_a_look(now_s=100.0 + second / 50)] == []


def test_one_silent_node_is_no_reason_to_look_and_silence_of_all_is() -> None:
    silent = msgspec.structs.replace(CALM, idle_s=5.0, quiet_s=5.0)
    assert not watching([[silent], [CALM]], now_s=100.0).is_worth_a_look(now_s=100.1)
    assert watching([[silent], [silent]], now_s=100.0).is_worth_a_look(now_s=100.1)


def test_few_ranks_are_always_looked_at() -> None:
    silence = Silence(RULE)
    silence.begin_generation(num_ranks=8)
    assert all(silence.is_worth_a_look(now_s=second / 50) for second in range(100))
