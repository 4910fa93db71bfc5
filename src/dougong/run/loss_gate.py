"""Is a loss good enough for the state after it to replace the last good one? Kept by each rank over its own losses.

A loss or gradient norm that is not finite is bad. A spike, if it is asked for, is a loss that lies far above the last
ones: z = (loss - median) / (1.4826 MAD), the spread at least 1 % of the median.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

from dougong.run.spread import robust_spread

_WINDOW = 128
_FEW = 16
_LEAST_SPREAD_RATIO = 0.01


class LossGate:
    """Takes each step's loss; refuses a checkpoint while a loss since the last asking was bad."""

    def __init__(self, *, spike_z: float = 0.0) -> None:
        """`spike_z` 0 = spikes are let through."""
        self._spike_z = spike_z
        self._usual: deque[float] = deque(maxlen=_WINDOW)
        self._refusal = ""
        self._was_bad = False

    def take(self, *, step: int, loss: float | None, grad_norm: float | None) -> str:
        """A finished step. Returns why it is bad if the one before was good, else ""."""
        reason = self._judge(loss, grad_norm)
        is_first = bool(reason) and not self._was_bad
        self._was_bad = bool(reason)
        if reason:
            self._refusal = self._refusal or f"{reason} in step {step}"
            return reason if is_first else ""
        if loss is not None:
            self._usual.append(loss)
        return ""

    def why_refused(self) -> str:
        """Why no checkpoint may be taken now; "" = it may. The next asking is about the steps after this one."""
        refusal, self._refusal = self._refusal, ""
        return refusal

    def forget(self) -> None:
        """The job was rolled back: what came after the restored step has not happened."""
        self._usual.clear()
        self._refusal = ""
        self._was_bad = False

    def _judge(self, loss: float | None, grad_norm: float | None) -> str:
        if loss is not None and not math.isfinite(loss):
            return f"the loss is {loss}"
        if grad_norm is not None and not math.isfinite(grad_norm):
            return f"the gradient norm is {grad_norm}"
        if loss is None or self._spike_z <= 0 or len(self._usual) < _FEW:
            return ""
        z = spike_z(loss, tuple(self._usual))
        return f"the loss {loss:.6g} is a spike (robust z {z:.1f})" if z > self._spike_z else ""


def spike_z(loss: float, usual: tuple[float, ...]) -> float:
    """How far a loss lies above the usual ones, in robust standard deviations."""
    median = statistics.median(usual)
    return (loss - median) / max(robust_spread(usual, least_ratio=_LEAST_SPREAD_RATIO), 1e-12)
