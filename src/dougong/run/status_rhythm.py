"""How often an agent tells how its ranks do, and what it tells at once: pure rules by the size of the fleet.

A few agents speak five times a second. Thousands would drown the controller, and nearly all of it would say that
nothing has changed. So a larger fleet speaks more rarely, and an agent tells out of turn what a decision may rest on: a
rank that has stopped, is gone, has left its step, or has begun to be silent. So what a status says of these goes on
holding until the next one, and its durations go on counting.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dougong.run import wire
from dougong.run.page import Phase

_STATUS_S = 0.2
_STATUS_MAX_S = 5.0
_AGENTS_A_SECOND = 320
_SILENT_S = 5.0
_STALE_S = 2.0
_LOOK_S = 0.02
_LOOK_MAX_S = 0.5
_NODES_A_LOOK_S = 2560
_FEW_NODES = 64
SUSPICION_S = 1.0
"""A rank that shows neither progress nor activity for so long is news. Below the shortest patience of the hang rule."""

_AT_ONCE = (Phase.UNWOUND, Phase.STOPPED_CLEAN, Phase.DONE)


class FleetRhythm(msgspec.Struct, frozen=True, kw_only=True):
    """Times that follow from how many agents there are.

    `status_s`: an agent tells at least so often. `stale_s`: a status older than this is not judged by. `silent_s`: an
    agent that said nothing for so long counts as gone. `look_s`: the controller decides at least so often, and not more
    often than `look_gap_s`, however much it hears. `is_large`: a status is counted on between two.
    """

    status_s: float
    stale_s: float
    silent_s: float
    look_s: float
    look_gap_s: float
    is_large: bool


def fleet_rhythm(num_nodes: int) -> FleetRhythm:
    """The rhythm of a run of so many nodes, spares included."""
    status_s = min(_STATUS_MAX_S, max(_STATUS_S, num_nodes / _AGENTS_A_SECOND))
    look_s = min(_LOOK_MAX_S, max(_LOOK_S, num_nodes / _NODES_A_LOOK_S))
    return FleetRhythm(
        status_s=status_s,
        stale_s=max(_STALE_S, 2 * status_s),
        silent_s=max(_SILENT_S, 3 * status_s),
        look_s=look_s,
        look_gap_s=look_s / 2 if num_nodes > _FEW_NODES else 0.0,
        is_large=num_nodes > _FEW_NODES,
    )


def is_news(before: Sequence[wire.RankStatus], now: Sequence[wire.RankStatus]) -> bool:
    """May a decision change by what is to be told `now`, as against what was told `before`?

    Another set of processes; a rank that stopped, goes on, or is gone; one that left its step for good; one that has
    become silent. That a silent one stirs again is news too, else its silence would go on counting.
    """
    if len(before) != len(now):
        return True
    return any(_is_news(old, new) for old, new in zip(before, now, strict=True))


def grown(rank: wire.RankStatus, *, age_s: float) -> wire.RankStatus:
    """A status as it is `age_s` after it was told, given that its agent has had no news since.

    Only what would have been news counts on: a rank that was active may be so still.
    """
    is_silent, is_stopped = _is_silent(rank), rank.activity == "stopped"
    if not (is_silent or is_stopped or rank.phase == Phase.UNWOUND):
        return rank
    return msgspec.structs.replace(
        rank,
        idle_s=rank.idle_s + age_s if is_silent or rank.phase == Phase.UNWOUND else rank.idle_s,
        quiet_s=rank.quiet_s + age_s if is_silent or is_stopped else rank.quiet_s,
    )


def _is_news(old: wire.RankStatus, new: wire.RankStatus) -> bool:
    if (old.rank, old.generation, old.pid, old.is_attached) != (new.rank, new.generation, new.pid, new.is_attached):
        return True
    if old.activity != new.activity and ("stopped" in (old.activity, new.activity) or new.activity == "gone"):
        return True
    if old.phase != new.phase and (new.phase in _AT_ONCE or old.phase in _AT_ONCE):
        return True
    return _is_silent(old) != _is_silent(new)


def _is_silent(rank: wire.RankStatus) -> bool:
    return min(rank.idle_s, rank.quiet_s) > SUSPICION_S
