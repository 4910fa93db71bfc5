"""Whether it is worth looking for a hang: asked of thousands of ranks many times a second, so answered from what each
node's last status came to, without looking at the ranks again.
"""

from __future__ import annotations

import msgspec

from dougong.run import wire
from dougong.run.page import Phase
from dougong.run.settings import HangRule

_FEW_RANKS = 512
_AT_LEAST_S = 10.0


class _NodeSign(msgspec.Struct, frozen=True):
    """The last signs of life of a node's ranks, on the controller's clock."""

    sign_s: float
    progress_s: float
    is_suspect: bool


class Silence:
    """Says when `find_hang` could find something. It may be asked too often for nothing, never too rarely."""

    def __init__(self, rule: HangRule) -> None:
        self._shortest_s = min(
            rule.attached_min_s, rule.unmodified_first_s, rule.unmodified_min_s, rule.startup_s, rule.outside_step_s
        )
        self._active_s = min(rule.active_s, rule.startup_s)
        self._signs: dict[str, _NodeSign] = {}
        self._num_ranks = 0
        self._looked_s = 0.0

    def begin_generation(self, *, num_ranks: int) -> None:
        """Other processes; nothing is known of them."""
        self._num_ranks = num_ranks
        self._signs.clear()

    def hear(self, component: str, status: wire.Status, *, generation: int, now_s: float) -> None:
        """A node has told how its ranks do."""
        if self._num_ranks <= _FEW_RANKS:
            return
        ranks = [rank for rank in status.ranks if rank.generation == generation and rank.activity != "gone"]
        living = [rank for rank in ranks if rank.phase != Phase.DONE]
        self._signs[component] = _NodeSign(
            sign_s=now_s - min((min(rank.idle_s, rank.quiet_s) for rank in living), default=now_s),
            progress_s=now_s - min((rank.idle_s for rank in living), default=now_s),
            is_suspect=any(rank.activity == "stopped" or rank.phase == Phase.UNWOUND for rank in living),
        )

    def is_worth_a_look(self, *, now_s: float) -> bool:
        """Few ranks are looked at always; many if one is suspect, if all are silent, and else now and then."""
        if self._num_ranks > _FEW_RANKS and now_s - self._looked_s < _AT_LEAST_S and not self._is_likely(now_s):
            return False
        self._looked_s = now_s
        return True

    def _is_likely(self, now_s: float) -> bool:
        signs = self._signs.values()
        return (
            any(sign.is_suspect for sign in signs)
            or now_s - max((sign.sign_s for sign in signs), default=now_s) > self._shortest_s
            or now_s - max((sign.progress_s for sign in signs), default=now_s) > self._active_s
        )
