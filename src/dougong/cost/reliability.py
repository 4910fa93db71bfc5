"""Failure rates, their confidence, and what failures cost a long job."""

from __future__ import annotations

import math

from dougong.units import DAY_S

_EPSILON = 1e-15
_MAX_TERMS = 100_000


def failures_per_1000_node_days(num_failures: int, *, num_nodes: int, observed_s: float) -> float:
    """The rate in which published tables state failures."""
    return num_failures / (num_nodes * observed_s / DAY_S) * 1000


def job_mttf_s(*, num_nodes: int, rate_per_1000_node_days: float) -> float:
    """Mean seconds until the first of `num_nodes` nodes interrupts the job: 1 / (N r). `inf` at rate 0.

    Source: Kokolis et al., HPCA'25 (arXiv 2410.21680), for nodes that fail independently at a constant rate.
    """
    rate_per_s = num_nodes * rate_per_1000_node_days / (1000 * DAY_S)
    return 1 / rate_per_s if rate_per_s > 0 else math.inf


def mtbf_interval_s(operating_s: float, *, num_failures: int, confidence: float = 0.95) -> tuple[float, float]:
    """The two-sided confidence interval of the MTBF after `num_failures` in `operating_s`; the upper end may be `inf`.

    2T / chi2(1 - a/2; 2n + 2) .. 2T / chi2(a/2; 2n), for a time-terminated test of a constant failure rate.
    Source: IEC 60605-4; MIL-HDBK-338B, 8.3.2.5. No failure at all proves about MTBF >= T/3.7 (two-sided 95 %).
    """
    alpha = 1 - confidence
    lower_s = 2 * operating_s / chi_square_quantile(1 - alpha / 2, degrees=2 * num_failures + 2)
    if num_failures == 0:
        return lower_s, math.inf
    return lower_s, 2 * operating_s / chi_square_quantile(alpha / 2, degrees=2 * num_failures)


def expected_ettr(*, mttf_s: float, interval_s: float, stall_s: float, restart_s: float) -> float:
    """The expected share of wall time that trains: (1 - (u0 + dt/2) / M) / (1 + w/dt).

    `interval_s` dt and `stall_s` w of checkpoints; `restart_s` u0 from the fault to training again. Not below 0.
    Source: Kokolis et al., HPCA'25 (arXiv 2410.21680), whose own check is within about 5 % of Monte Carlo; it fails
    when dt is no longer small beside M (beyond about a tenth).
    """
    return max(0.0, 1 - (restart_s + interval_s / 2) / mttf_s) / (1 + stall_s / interval_s)


def renewal_ettr(*, mttf_s: float, interval_s: float, stall_s: float, restart_s: float) -> float:
    """The same share without the approximation for small dt, for faults that may also hit the recovery.

    A segment of dt + w succeeds without a fault; each failed try loses its time and then u0, itself open to faults:
    E[segment] = (M + E[u0]) (e^((dt + w)/M) - 1), E[u0] = M (e^(u0/M) - 1).
    Source: Daly, FGCS 22(3), 2006, equation 20 with R = u0.
    """
    segment_s = mttf_s * math.exp(restart_s / mttf_s) * math.expm1((interval_s + stall_s) / mttf_s)
    return interval_s / segment_s


def chi_square_quantile(probability: float, *, degrees: int) -> float:
    """x with P(chi2 of `degrees` degrees of freedom <= x) = `probability`, in 1e-6..1-1e-6; relative error below 1e-9.

    Bisection on the regularised gamma function.
    """
    assert 0 < probability < 1 and degrees >= 1
    shape = degrees / 2
    low, high = 0.0, max(1.0, 2.0 * shape)
    while regularised_gamma(shape, high) < probability:
        low, high = high, high * 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if regularised_gamma(shape, middle) < probability:
            low = middle
        else:
            high = middle
    return low + high


def regularised_gamma(shape: float, x: float) -> float:
    """P(shape, x), the lower incomplete gamma function over the whole one; in 0..1.

    Source: Abramowitz and Stegun 6.5.29 (series, for x < shape + 1) and 6.5.31 (continued fraction, beyond).
    """
    if x <= 0:
        return 0.0
    scale = math.exp(shape * math.log(x) - x - math.lgamma(shape))
    return scale * _gamma_series(shape, x) if x < shape + 1 else 1 - scale * _gamma_fraction(shape, x)


def _gamma_series(shape: float, x: float) -> float:
    term = total = 1 / shape
    for index in range(1, _MAX_TERMS):
        term *= x / (shape + index)
        total += term
        if term < total * _EPSILON:
            return total
    raise AssertionError("the series of the gamma function did not converge")


def _gamma_fraction(shape: float, x: float) -> float:
    # Lentz's method: numerators and denominators as ratios, so that nothing overflows.
    b = x + 1 - shape
    c, d = math.inf, 1 / b
    value = d
    for index in range(1, _MAX_TERMS):
        a = index * (shape - index)
        b += 2
        d = 1 / (a * d + b)
        c = b + a / c
        value *= c * d
        if abs(c * d - 1) < _EPSILON:
            return value
    raise AssertionError("the continued fraction of the gamma function did not converge")
