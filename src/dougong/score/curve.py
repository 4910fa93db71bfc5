"""A curve thinned for drawing."""

from __future__ import annotations

import math
from collections.abc import Sequence


def thinned(points: Sequence[tuple[int, float]], *, max_points: int) -> tuple[tuple[int, float], ...]:
    """At most `max_points` of `points` (x ascending): the smallest and the largest of each stretch, so that a spike
    stays, and values that are not finite are left out."""
    finite = [point for point in points if math.isfinite(point[1])]
    if len(finite) <= max_points:
        return tuple(finite)
    size = math.ceil(len(finite) / (max_points // 2))
    kept: list[tuple[int, float]] = []
    for begin in range(0, len(finite), size):
        stretch = finite[begin : begin + size]
        kept.extend(sorted({min(stretch, key=_value), max(stretch, key=_value)}))
    return tuple(kept)


def _value(point: tuple[int, float]) -> float:
    return point[1]
