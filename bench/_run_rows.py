"""What `make bench-run` must reach, and the rows that say whether it does.

A row is `{"name", "ours", "peer", "floor", "limit", "ok"}`. In the name stand the unit, which peer is meant, and if
its figure is cited. A limit is the most that `ours` may be, or the least where the name says "at least".
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import msgspec
from _run_ettr import EttrFigures
from _run_kills import KillFigures, Recovery
from _run_saves import SaveFigures

BLOCK_LIMIT_S = 0.02
LOST_TO_FLOOR, BUSY_LOST_TO_FLOOR = 0.9, 2.0
DURABLE_LIMIT_S = 2.0
RESTORE_LIMIT_S = 0.15
FULL_LIMIT_S, SMALL_LIMIT_S = 1.0, 0.3
FULL_RATIO, SMALL_RATIO = 0.15, 0.10
NODE_RATIO = 0.20
STOP_FOUND_LIMIT_S, STOP_BACK_LIMIT_S = 3.0, 4.0
ETTR_LIMIT, SIM_ETTR_LIMIT = 0.95, 0.99

# Each measured once on a machine of this size, for where a peer is not installed or takes half an hour.
CITED = {
    "block": ("DCP async_save, tuned", 0.081),
    "lost": ("DLRover disk", 0.69),
    "durable": ("DCP save", 5.4),
    "restore": ("DLRover memory", 0.143),
    "full": ("torchrun", 5.24),
    "small": ("torchrun", 2.17),
    "stop": ("torchrun", 1800.1),
}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table. None = not measured, and then `ok` is false."""

    name: str
    ours: float | None
    peer: float | None
    floor: float | None
    limit: float | None
    ok: bool


class Measured(msgspec.Struct, kw_only=True):
    """All that was measured so far."""

    disk_floor_s: list[float]
    saves: list[SaveFigures]
    kills: list[KillFigures]
    stops: list[KillFigures]
    slow_stops: list[KillFigures]
    node_losses: list[KillFigures]
    ettr: list[EttrFigures]
    sim_ettr: float | None = None


def rows_of(measured: Measured) -> tuple[Row, ...]:
    """In the order of the issue's table; what was not measured is left out."""
    return (
        *_save_rows(measured, is_busy=False),
        *_save_rows(measured, is_busy=True),
        *_restore_rows(measured),
        *_kill_rows(measured.kills, is_full=True),
        *_kill_rows(measured.kills, is_full=False),
        *_node_rows(measured),
        *_stop_rows(measured),
        *_ettr_rows(measured),
    )


def median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 4) if values else None


def recoveries_of(figures: Sequence[KillFigures], system: str, *, is_full: bool) -> list[Recovery]:
    """Of all starts of one system."""
    chosen = [figure for figure in figures if figure.system == system and figure.is_full == is_full]
    return [recovery for figure in chosen for recovery in figure.recoveries]


def without_step_s(figures: Sequence[KillFigures], system: str, *, is_full: bool) -> list[float]:
    """Each recovery less one undisturbed step of its own start: what the system itself took."""
    chosen = [figure for figure in figures if figure.system == system and figure.is_full == is_full]
    return [
        recovery.any_step_s - figure.step_s
        for figure in chosen
        for recovery in figure.recoveries
        if recovery.any_step_s is not None
    ]


def _row(
    name: str,
    ours: float | None,
    *,
    limit: float | None,
    peer: float | None = None,
    floor: float | None = None,
    is_least: bool = False,
) -> Row:
    is_ok = ours is not None and (limit is None or (ours >= limit if is_least else ours <= limit))
    return Row(name=name, ours=ours, peer=peer, floor=floor, limit=limit, ok=is_ok)


def _save_rows(measured: Measured, *, is_busy: bool) -> list[Row]:
    by_name = {figures.method: figures for figures in measured.saves if figures.is_busy == is_busy}
    if "Dougong" not in by_name:
        return []
    ours = by_name["Dougong"]
    floor_s = median(ours.floor_s)
    assert floor_s is not None
    disk_floor_s = median(measured.disk_floor_s)
    kind = ", CPU-bound step" if is_busy else ""
    factor = BUSY_LOST_TO_FLOOR if is_busy else LOST_TO_FLOOR
    durable = {name: figures for name, figures in by_name.items() if figures.durable_s and name != "Dougong"}
    block, block_peer = _best("block", {name: figures.block_s for name, figures in durable.items()})
    lost, lost_peer = _best("lost", {name: figures.lost_s for name, figures in durable.items()})
    synced = {name: figures.durable_s for name, figures in durable.items() if figures.is_synced}
    after, after_peer = _best("durable", synced)
    rows = [
        _row(
            f"training thread held up per durable save, s{kind} (best peer: {block})",
            median(ours.block_s),
            peer=block_peer,
            floor=floor_s,
            limit=None if is_busy else BLOCK_LIMIT_S,
        ),
        _row(
            f"training time lost per durable save, s{kind} (best peer: {lost}; limit {factor:g} x floor)",
            median(ours.lost_s),
            peer=lost_peer,
            floor=floor_s,
            limit=round(factor * floor_s, 4),
        ),
        _row(
            f"durable after, s{kind} (best peer that syncs: {after})",
            median(ours.durable_s),
            peer=after_peer,
            floor=disk_floor_s,
            limit=None if is_busy else DURABLE_LIMIT_S,
        ),
    ]
    if ours.verdict is not None:
        num_torn = len(ours.verdict.torn) + abs(len(ours.verdict.steps) - 1)
        rows.append(_row(f"torn tensors in a durable save{kind}", float(num_torn), limit=0.0))
    return rows


def _restore_rows(measured: Measured) -> list[Row]:
    peers = {figures.method: figures.restore_s for figures in measured.saves if figures.restore_s}
    ours = peers.pop("Dougong memory", ())
    if not ours:
        return []
    floors_s = [floor_s for figures in measured.saves if not figures.is_busy for floor_s in figures.floor_s]
    best, peer = _best("restore", peers)
    name = f"restore from memory, warm, s (best peer: {best})"
    return [_row(name, median(ours), peer=peer, floor=median(floors_s), limit=RESTORE_LIMIT_S)]


def _kill_rows(kills: Sequence[KillFigures], *, is_full: bool) -> list[Row]:
    ours = _back_s(kills, "Dougong", is_full=is_full)
    if not ours and not recoveries_of(kills, "Dougong", is_full=is_full):
        return []
    state = "full state" if is_full else "small state"
    peers = {
        name: tuple(_back_s(kills, name, is_full=is_full)) for name in ("torchrun", "dlrover-run", "NVRx ft_launcher")
    }
    best, peer = _best("full" if is_full else "small", {name: times_s for name, times_s in peers.items() if times_s})
    limit_s, limit_ratio = (FULL_LIMIT_S, FULL_RATIO) if is_full else (SMALL_LIMIT_S, SMALL_RATIO)
    own_s, their_s = (median(without_step_s(kills, name, is_full=is_full)) for name in ("Dougong", "torchrun"))
    word = ""
    if their_s is None:
        their_s, word = CITED["full" if is_full else "small"][1], ", cited"
    ratio = None if own_s is None else round(own_s / their_s, 4)
    return [
        _row(f"kill -9 to first step, {state}, s (best peer: {best})", median(ours), peer=peer, limit=limit_s),
        _row(
            f"the same without the step itself, {state}, share of torchrun's{word}", ratio, peer=1.0, limit=limit_ratio
        ),
        _row(
            f"kill -9 to first step never finished before, {state}, s (peer: torchrun)",
            median(_back_s(kills, "Dougong", is_full=is_full, is_new=True)),
            peer=median(_back_s(kills, "torchrun", is_full=is_full, is_new=True)),
            limit=None,
        ),
    ]


def _node_rows(measured: Measured) -> list[Row]:
    if not measured.node_losses:
        return []
    recoveries = recoveries_of(measured.node_losses, "Dougong", is_full=True)
    # the steps since the peer's copy was made are done again, as they would be since torchrun's last save
    from_peer = [item.any_step_s for item in recoveries if item.any_step_s is not None and item.source == "peer"]
    torchrun = median(_back_s(measured.kills, "torchrun", is_full=True))
    word = "torchrun's restart from disk" if torchrun is not None else "torchrun's restart from disk, cited"
    their_s = torchrun if torchrun is not None else CITED["full"][1]
    ours = median(from_peer)
    name = f"node lost to first step from a peer's copy, share of {word}"
    if ours is None:
        name += " (not there: no restore came from a peer)"
    return [_row(name, None if ours is None else round(ours / their_s, 4), peer=1.0, limit=NODE_RATIO)]


def _stop_rows(measured: Measured) -> list[Row]:
    recoveries = recoveries_of(measured.stops, "Dougong", is_full=False)
    if not recoveries:
        return []
    slow = recoveries_of(measured.slow_stops, "torchrun", is_full=False)
    found = [item.detected_s for item in recoveries if item.detected_s is not None]
    back = [item.new_step_s for item in recoveries if item.new_step_s is not None]
    peer, word = CITED["stop"][1], "torchrun, cited"
    if slow and slow[0].detected_s is not None:
        peer, word = slow[0].detected_s, "torchrun"
    return [
        _row(f"SIGSTOP to detected, s, defaults (peer: {word})", median(found), peer=peer, limit=STOP_FOUND_LIMIT_S),
        _row(
            f"SIGSTOP to first new step, s, defaults (peer: {word}; it never came back)",
            median(back),
            limit=STOP_BACK_LIMIT_S,
        ),
    ]


def _ettr_rows(measured: Measured) -> list[Row]:
    rows = [
        _row(
            "ETTR, at least, one kill, hang or node loss a minute",
            round(min(figures.ettr, figures.by_script), 4),
            limit=ETTR_LIMIT,
            is_least=True,
        )
        for figures in measured.ettr
    ]
    if measured.sim_ettr is not None:
        name = "ETTR, at least, simulated, one fault per 2.8 h"
        rows.append(_row(name, round(measured.sim_ettr, 4), limit=SIM_ETTR_LIMIT, is_least=True))
    return rows


def _back_s(kills: Sequence[KillFigures], system: str, *, is_full: bool, is_new: bool = False) -> list[float]:
    """To the first step on every rank after each kill; `is_new`: the first that was never finished before."""
    recoveries = recoveries_of(kills, system, is_full=is_full)
    times_s = [recovery.new_step_s if is_new else recovery.any_step_s for recovery in recoveries]
    return [time_s for time_s in times_s if time_s is not None]


def _best(what: str, by_name: dict[str, Any]) -> tuple[str, float]:
    """The peer with the smallest median; the cited one if none was measured."""
    medians = {name: value for name, values in by_name.items() if (value := median(values)) is not None}
    if not medians:
        name, value = CITED[what]
        return f"{name}, cited", value
    name = min(medians, key=lambda name: medians[name])
    return name, medians[name]
