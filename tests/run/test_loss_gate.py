from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dougong.run.loss_gate import LossGate

GOOD = [2.0 + 0.01 * (index % 7) for index in range(40)]


def taken(gate: LossGate, losses: list[float], *, first_step: int = 1) -> list[str]:
    return [gate.take(step=first_step + index, loss=loss, grad_norm=None) for index, loss in enumerate(losses)]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=50))
def test_finite_losses_are_never_refused_without_the_spike_rule(losses: list[float]) -> None:
    gate = LossGate()
    assert set(taken(gate, losses)) <= {""}
    assert gate.why_refused() == ""


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_refuses_the_next_checkpoint_and_only_that(bad: float) -> None:
    gate = LossGate()
    assert taken(gate, [1.0, bad, 1.0]) == ["", f"the loss is {bad}", ""]
    assert gate.why_refused() == f"the loss is {bad} in step 2"
    assert gate.why_refused() == ""


def test_a_gradient_norm_that_is_no_number_counts_like_a_loss() -> None:
    gate = LossGate()
    assert gate.take(step=1, loss=1.0, grad_norm=math.inf) == "the gradient norm is inf"
    assert gate.why_refused() != ""


def test_a_bad_loss_is_told_once_and_refuses_as_long_as_it_lasts() -> None:
    gate = LossGate()
    assert [reason != "" for reason in taken(gate, [1.0, math.nan, math.nan])] == [False, True, False]
    assert gate.why_refused() != ""
    assert taken(gate, [math.nan], first_step=4) == [""]
    assert gate.why_refused() == "the loss is nan in step 4"
    assert [reason != "" for reason in taken(gate, [1.0, math.nan], first_step=5)] == [False, True]


def test_a_spike_is_refused_only_if_asked_for() -> None:
    assert set(taken(LossGate(), [*GOOD, 50.0])) == {""}
    gate = LossGate(spike_z=8.0)
    *before, spike = taken(gate, [*GOOD, 50.0])
    assert set(before) == {""}
    assert "spike" in spike
    assert "step 41" in gate.why_refused()


def test_a_spike_does_not_become_the_new_usual() -> None:
    gate = LossGate(spike_z=8.0)
    taken(gate, [*GOOD, *[50.0] * 30])
    assert "spike" in gate.why_refused()
    assert "spike" not in gate.take(step=99, loss=2.0, grad_norm=None)


def test_falling_losses_and_the_first_steps_are_no_spike() -> None:
    assert set(taken(LossGate(spike_z=4.0), [10.0 * 0.97**step for step in range(200)])) == {""}
    assert set(taken(LossGate(spike_z=4.0), [1.0, 900.0, 2.0])) == {""}


def test_after_a_roll_back_nothing_is_remembered() -> None:
    gate = LossGate()
    taken(gate, [math.nan])
    gate.forget()
    assert gate.why_refused() == ""
    assert taken(gate, [math.nan]) != [""]
