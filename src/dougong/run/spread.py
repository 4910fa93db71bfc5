"""The robust standard deviation, by which steps, nodes and losses are told apart from their like."""

from __future__ import annotations

import statistics
from collections.abc import Collection

_MAD_TO_SIGMA = 1.4826
"""Of a normal distribution, the standard deviation over the median absolute deviation: 1 / Phi^-1(3/4)."""


def robust_spread(values: Collection[float], *, least_ratio: float) -> float:
    """1.4826 times the median absolute deviation, never below `least_ratio` of the median; in the values' unit.

    `values` must not be empty. Source: Iglewicz and Hoaglin, How to Detect and Handle Outliers (1993).
    """
    usual = statistics.median(values)
    mad = statistics.median(abs(value - usual) for value in values)
    return max(_MAD_TO_SIGMA * mad, least_ratio * abs(usual))
