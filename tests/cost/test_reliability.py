from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dougong.cost import reliability

# Critical values as printed in the NIST/SEMATECH e-Handbook of Statistical Methods, table 1.3.6.7.4.
TABULATED = [
    (0.95, 1, 3.841),
    (0.975, 1, 5.024),
    (0.95, 2, 5.991),
    (0.975, 2, 7.378),
    (0.99, 5, 15.086),
    (0.999, 10, 29.588),
    (0.975, 20, 34.170),
    (0.975, 60, 83.298),
    (0.95, 100, 124.342),
    (0.05, 1, 0.004),
    (0.025, 2, 0.051),
    (0.025, 10, 3.247),
    (0.05, 20, 10.851),
    (0.025, 60, 40.482),
    (0.025, 100, 74.222),
]


@pytest.mark.parametrize(("probability", "degrees", "tabulated"), TABULATED)
def test_the_chi_square_quantile_is_the_tabulated_one(probability: float, degrees: int, tabulated: float) -> None:
    assert reliability.chi_square_quantile(probability, degrees=degrees) == pytest.approx(tabulated, abs=6e-4)


def test_two_degrees_of_freedom_have_the_closed_form_of_an_exponential() -> None:
    for probability in (1e-6, 0.025, 0.5, 0.975, 1 - 1e-6):
        exact = -2 * math.log1p(-probability)
        assert reliability.chi_square_quantile(probability, degrees=2) == pytest.approx(exact, rel=1e-9)


@given(st.floats(min_value=0.001, max_value=0.999), st.integers(min_value=1, max_value=2000))
def test_the_quantile_inverts_the_distribution(probability: float, degrees: int) -> None:
    x = reliability.chi_square_quantile(probability, degrees=degrees)
    assert reliability.regularised_gamma(degrees / 2, x / 2) == pytest.approx(probability, abs=1e-9)


@given(st.floats(min_value=1, max_value=1e9), st.integers(min_value=1, max_value=3000))
def test_the_interval_holds_the_estimate_and_narrows_with_failures(operating_s: float, num_failures: int) -> None:
    lower_s, upper_s = reliability.mtbf_interval_s(operating_s, num_failures=num_failures)
    assert lower_s < operating_s / num_failures < upper_s
    more_lower_s, more_upper_s = reliability.mtbf_interval_s(operating_s * 2, num_failures=num_failures * 2)
    assert more_upper_s / more_lower_s < upper_s / lower_s


def test_no_failure_bounds_the_mtbf_from_below_only() -> None:
    lower_s, upper_s = reliability.mtbf_interval_s(3600.0, num_failures=0)
    assert lower_s == pytest.approx(3600 / 3.689, rel=1e-3)
    assert upper_s == math.inf
    one_sided_s, _ = reliability.mtbf_interval_s(3600.0, num_failures=0, confidence=0.90)
    assert one_sided_s == pytest.approx(3600 / 2.996, rel=1e-3)


@given(
    st.floats(min_value=1e4, max_value=1e7),
    st.floats(min_value=0.001, max_value=0.02),
    st.floats(min_value=0.0, max_value=0.01),
)
def test_both_forms_agree_where_the_interval_is_small_beside_the_mttf(mttf_s: float, dt: float, u0: float) -> None:
    case = {"mttf_s": mttf_s, "interval_s": dt * mttf_s, "stall_s": dt * mttf_s / 50, "restart_s": u0 * mttf_s}
    assert reliability.renewal_ettr(**case) == pytest.approx(reliability.expected_ettr(**case), rel=1e-3)


def test_a_job_without_faults_runs_for_ever() -> None:
    assert reliability.job_mttf_s(num_nodes=8, rate_per_1000_node_days=0) == math.inf
