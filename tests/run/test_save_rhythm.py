"""How often to save: what is told wins, what is measured decides the rest, storage and the rule bound it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dougong.cost.interval import daly_interval_s
from dougong.run import save_rhythm
from dougong.run.save_rhythm import FailureBelief, JobStep, Rhythm, SaveCost, choose_rhythm, measured_cost
from dougong.run.settings import SaveRule

AUTO = SaveRule(memory_every_steps=0, durable_every_steps=0)
BEFORE = Rhythm(memory_every_steps=5, durable_every_steps=50)
HOURLY = FailureBelief(num=1.0, observed_s=3600.0)
DAILY = FailureBelief(num=1.0, observed_s=86_400.0)


def chosen(rule: SaveRule = AUTO, **changes: Any) -> Rhythm:
    facts: dict[str, Any] = {
        "step_s": 0.5,
        "memory": SaveCost(stall_s=0.01, slowed_s=0.01),
        "durable": SaveCost(stall_s=0.01, slowed_s=0.1, busy_s=2.0),
        "any_loss": HOURLY,
        "memory_loss": DAILY,
    }
    return choose_rhythm(BEFORE, rule, **{**facts, **changes})


def test_each_tier_has_the_interval_of_its_own_cost_and_failures() -> None:
    rhythm = chosen()
    assert rhythm.memory_every_steps * 0.5 == pytest.approx(daly_interval_s(cost_s=0.02, mtbf_s=3600), rel=0.05)
    assert rhythm.durable_every_steps * 0.5 == pytest.approx(daly_interval_s(cost_s=0.11, mtbf_s=86_400), rel=0.1)


def test_a_durable_save_falls_together_with_one_in_memory() -> None:
    rhythm = chosen()
    assert rhythm.durable_every_steps % rhythm.memory_every_steps == 0


@given(st.integers(1, 500), st.integers(1, 5000))
def test_numbers_that_were_told_always_win(memory: int, durable: int) -> None:
    told = SaveRule(memory_every_steps=memory, durable_every_steps=durable)
    before = save_rhythm.first_rhythm(told)
    rhythm = choose_rhythm(
        before,
        told,
        step_s=0.1,
        memory=SaveCost(stall_s=9.0, slowed_s=9.0),
        durable=SaveCost(stall_s=9.0, slowed_s=9.0, busy_s=99.0),
        any_loss=HOURLY,
        memory_loss=HOURLY,
    )
    assert (rhythm.memory_every_steps, rhythm.durable_every_steps) == (memory, durable)
    assert not save_rhythm.is_chosen(told)


def test_what_was_not_measured_stays_as_it_was() -> None:
    rhythm = chosen(memory=None, durable=None)
    assert (rhythm.memory_every_steps, rhythm.durable_every_steps) == (5, 50)
    assert "not measured" in rhythm.reason


def test_storage_is_never_asked_to_write_more_than_half_of_the_time() -> None:
    slow = SaveCost(stall_s=0.0, slowed_s=0.0, busy_s=120.0)
    assert chosen(durable=slow).durable_every_steps * 0.5 >= 240


def test_the_rule_bounds_the_interval_from_above() -> None:
    never = FailureBelief(num=1.0, observed_s=1e12)
    rhythm = chosen(any_loss=never, memory_loss=never)
    assert rhythm.memory_every_steps * 0.5 <= AUTO.memory_max_s
    assert rhythm.durable_every_steps * 0.5 <= AUTO.durable_max_s + rhythm.memory_every_steps * 0.5


def test_a_save_that_costs_nothing_is_made_after_every_step() -> None:
    assert chosen(memory=SaveCost(stall_s=0.0, slowed_s=0.0)).memory_every_steps == 1


@given(st.floats(1e-4, 10), st.floats(60, 1e6), st.floats(1.0, 20.0))
def test_more_failures_never_make_saves_rarer(cost_s: float, mtbf_s: float, factor: float) -> None:
    cost = SaveCost(stall_s=cost_s, slowed_s=0.0)
    often = chosen(memory=cost, any_loss=FailureBelief(num=1.0, observed_s=mtbf_s))
    rare = chosen(memory=cost, any_loss=FailureBelief(num=1.0, observed_s=mtbf_s * factor))
    assert often.memory_every_steps <= rare.memory_every_steps


@given(st.integers(0, 50), st.floats(1.0, 1e6))
def test_the_prior_is_outweighed_by_what_is_seen(num_failures: int, seen_s: float) -> None:
    prior = FailureBelief(num=1.0, observed_s=3600.0)
    belief = prior.after(num_failures=num_failures, duration_s=seen_s)
    assert belief.mtbf_s == pytest.approx((3600.0 + seen_s) / (1 + num_failures))
    in_two = prior.after(num_failures=num_failures, duration_s=seen_s / 2).after(num_failures=0, duration_s=seen_s / 2)
    assert in_two.mtbf_s == pytest.approx(belief.mtbf_s)


def test_the_prior_is_what_the_user_knows_or_what_published_clusters_have() -> None:
    assert save_rhythm.prior_belief(SaveRule(mtbf_s=7200.0), num_nodes=99).mtbf_s == 7200.0
    assert save_rhythm.prior_belief(SaveRule(), num_nodes=2048).mtbf_s == pytest.approx(1.8 * 3600, rel=0.01)


def training(
    num_steps: int, *, memory: tuple[int, float], durable: tuple[int, float, int], seed: int = 1
) -> tuple[JobStep, ...]:
    """Steps of 100 ms, noise, pauses now and then. `memory`: (every, stall); `durable`: (every, slow-down, steps)."""
    chance = random.Random(seed)
    slow = 0
    steps: list[JobStep] = []
    for step in range(1, num_steps + 1):
        stall_s = memory[1] if (step - 1) % memory[0] == 0 and step > 1 else 0.0
        slow = durable[2] if (step - 1) % durable[0] == 0 and step > 1 else max(0, slow - 1)
        cycle_s = 0.1 + stall_s + (durable[1] if slow else 0.0) + chance.uniform(0, 0.002)
        steps.append(JobStep(step=step, cycle_s=cycle_s + (5.0 if step % 97 == 0 else 0.0), stall_s=stall_s))
    return tuple(steps)


def test_the_cost_of_a_save_is_its_stall_and_the_slower_steps_after_it() -> None:
    steps = training(500, memory=(5, 0.02), durable=(50, 0.05, 8))
    memory = measured_cost(steps, every_steps=5, but_not_every_steps=50, busy_s=0.0)
    durable = measured_cost(steps, every_steps=50, but_not_every_steps=0, busy_s=0.8)
    assert memory is not None and durable is not None
    assert memory.stall_s == pytest.approx(0.02) and memory.slowed_s < 0.004
    # eight slow steps, and the stall of the memory save that falls into their time
    assert durable.cost_s == pytest.approx(8 * 0.05 + 2 * 0.02, abs=0.03)


def test_two_saves_measure_nothing() -> None:
    steps = training(14, memory=(5, 0.02), durable=(50, 0.0, 1))
    assert measured_cost(steps, every_steps=5, but_not_every_steps=50, busy_s=0.0) is None


def test_saves_after_every_step_are_measured_by_their_stall_alone() -> None:
    steps = training(100, memory=(1, 0.02), durable=(50, 0.0, 1))
    cost = measured_cost(steps, every_steps=1, but_not_every_steps=50, busy_s=0.0)
    assert cost is not None and cost.cost_s == pytest.approx(0.02, abs=0.002)


def test_a_small_difference_is_not_worth_a_change() -> None:
    assert BEFORE.is_like(Rhythm(memory_every_steps=6, durable_every_steps=60))
    assert not BEFORE.is_like(Rhythm(memory_every_steps=5, durable_every_steps=100))
    assert not BEFORE.is_like(Rhythm(memory_every_steps=1, durable_every_steps=50))
