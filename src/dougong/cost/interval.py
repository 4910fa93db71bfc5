"""How often to save: the interval between two checkpoints for which a job loses the least time.

A save costs `cost_s` of training time (its stall, and what it slows the steps beside it), a failure costs the work
since the last save, and failures come at a constant rate, `mtbf_s` apart on average.
"""

from __future__ import annotations

import math

_NEWTON_ROUNDS = 60
_FAR = 30.0  # 1 - t/M is then below the precision of a float


def young_interval_s(*, cost_s: float, mtbf_s: float) -> float:
    """Seconds of work between two saves, to first order: sqrt(2 d M). Good while `cost_s` is small beside `mtbf_s`.

    Source: Young, CACM 17(9), 1974.
    """
    return math.sqrt(2 * cost_s * mtbf_s)


def daly_interval_s(*, cost_s: float, mtbf_s: float) -> float:
    """The same to higher order: sqrt(2 d M) (1 + sqrt(x)/3 + x/9) - d with x = d / 2M; M once d is at least 2M.

    Source: Daly, FGCS 22(3), 2006, equation 37.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    share = cost_s / (2 * mtbf_s)
    return young_interval_s(cost_s=cost_s, mtbf_s=mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - cost_s


def exact_interval_s(*, cost_s: float, mtbf_s: float) -> float:
    """Where the expected run time is least without any approximation: (1 - t/M) e^((t + d)/M) = 1.

    The derivative of the cost function behind both, which does not depend on the time of a restart. Source: Daly, FGCS
    22(3), 2006, equation 20 set to its minimum; here by Newton's method.
    """
    if cost_s <= 0:
        return 0.0
    if cost_s > _FAR * mtbf_s:
        return mtbf_s
    # in y = t/M: log(1 - y) + y + d/M = 0, concave and falling, so Newton from the right of the root never crosses it
    share = cost_s / mtbf_s
    y = -math.expm1(-1 - share)
    for _ in range(_NEWTON_ROUNDS):
        step = (math.log1p(-y) + y + share) * (1 - y) / y
        y += step
        if abs(step) <= 1e-15 * y:
            break
    return y * mtbf_s


def lost_ratio(*, interval_s: float, cost_s: float, mtbf_s: float) -> float:
    """The share of the time lost to saves and to work done again, restarts not counted: d/t + (t + d)/2M, at most 1.

    Source: the first-order cost function of Young, 1974, and Daly, 2006, section 2.
    """
    return min(1.0, cost_s / interval_s + (interval_s + cost_s) / (2 * mtbf_s))
