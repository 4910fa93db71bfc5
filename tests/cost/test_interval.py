"""The laws of the interval between two saves; the published numbers are in `validation/`."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dougong.cost import reliability
from dougong.cost.interval import daly_interval_s, exact_interval_s, lost_ratio, young_interval_s

SMALL_SHARES = st.floats(min_value=1e-9, max_value=1e-2)
SHARES = st.floats(min_value=1e-9, max_value=1e3)


@given(SMALL_SHARES)
def test_all_three_agree_while_a_save_is_small_beside_the_mtbf(share: float) -> None:
    exact_s = exact_interval_s(cost_s=share, mtbf_s=1.0)
    assert daly_interval_s(cost_s=share, mtbf_s=1.0) == pytest.approx(exact_s, rel=1e-4)
    assert young_interval_s(cost_s=share, mtbf_s=1.0) == pytest.approx(exact_s, rel=math.sqrt(share))


@given(SHARES)
def test_the_higher_order_is_close_to_the_exact_one_everywhere(share: float) -> None:
    exact_s = exact_interval_s(cost_s=share, mtbf_s=1.0)
    assert 0 < exact_s <= 1.0
    assert daly_interval_s(cost_s=share, mtbf_s=1.0) == pytest.approx(exact_s, rel=0.07)


@given(st.floats(min_value=1e-6, max_value=10.0), st.floats(min_value=0.5, max_value=2.0))
def test_no_other_interval_makes_a_run_shorter(share: float, factor: float) -> None:
    """The renewal form is the share of the wall time that trains; nothing beats the exact interval in it."""

    def ettr(interval_s: float) -> float:
        return reliability.renewal_ettr(mttf_s=1.0, interval_s=interval_s, stall_s=share, restart_s=0.1)

    best_s = exact_interval_s(cost_s=share, mtbf_s=1.0)
    assert ettr(best_s) >= ettr(best_s * factor) * (1 - 1e-12)


@given(SMALL_SHARES, st.floats(min_value=0.1, max_value=10.0))
def test_the_first_order_interval_loses_least_to_first_order(share: float, factor: float) -> None:
    best_s = young_interval_s(cost_s=share, mtbf_s=1.0)
    best = lost_ratio(interval_s=best_s, cost_s=share, mtbf_s=1.0)
    assert best <= lost_ratio(interval_s=best_s * factor, cost_s=share, mtbf_s=1.0) * (1 + 1e-9)


@given(SHARES, st.floats(min_value=1.0, max_value=10.0))
def test_dearer_saves_are_made_less_often_and_rarer_failures_too(share: float, factor: float) -> None:
    interval_s = exact_interval_s(cost_s=share, mtbf_s=1.0)
    assert exact_interval_s(cost_s=share * factor, mtbf_s=1.0) >= interval_s * (1 - 1e-12)
    assert exact_interval_s(cost_s=share, mtbf_s=factor) >= interval_s * (1 - 1e-12)


def test_a_save_that_costs_nothing_is_made_all_the_time() -> None:
    assert young_interval_s(cost_s=0.0, mtbf_s=3600.0) == 0.0
    assert exact_interval_s(cost_s=0.0, mtbf_s=3600.0) == 0.0
