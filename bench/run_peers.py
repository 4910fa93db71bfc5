"""`make bench-run`: what saving and recovery cost, beside the real peers and the physical floors, in one run.

    python bench/run_peers.py [--only saves kills …] [--rounds 5] [--state-mb 2207]

A state of 2.2 GB on two ranks of one machine. Prints each part as it goes with the time left, then the table, and
writes bench/results/run.json (the rows) and bench/results/details/run.json (every figure behind them). A limit that is
missed is printed as MISSED and is no error: the exit code is 1 only if a measurement could not be made. A peer that is
not installed (scripts/peers.sh) is left out, and its row judged against a cited figure. The figures mean something on
a quiet machine only; the load before each part is printed and kept.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _run_disk
import _run_ettr
import _run_kills
import _run_saves
import msgspec
from _launch import machine, print_table, write_result
from _run_rows import Measured, Row, median, recoveries_of, rows_of, without_step_s
from _run_systems import OURS, TORCHRUN_SAVING, VERSIONS, System, load_1_min

PARTS = ("floors", "saves", "busy", "kills", "small", "nodes", "stops", "ettr")
FULL_MB = 2207.0
PASSES = 2
SLOW_LIMIT_S = 2700.0
NOISY_LOAD = 1.0


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """One start of one system, and how long it takes at full size."""

    name: str
    part: str
    estimate_s: float
    measure: Callable[[Path], None]


def main() -> int:
    options = _parse()
    if options.list:
        for part in PARTS:
            print(part)
        return 0
    measured = Measured(disk_floor_s=[], saves=[], kills=[], stops=[], slow_stops=[], node_losses=[], ettr=[])
    found = machine()
    wanted = [unit for unit in _units(options, measured) if unit.part in options.only]
    absent = _say_what_is_absent()
    measured.sim_ettr = _sim_ettr(options.out.parent)
    details = {"machine": found, "state_mb": options.state_mb, "rounds": options.rounds, "not_installed": absent}
    failures: list[str] = []

    def keep() -> None:
        write_result(options.out, rows_of(measured))
        facts = {**details, "versions": VERSIONS, "failures": failures, "measured": measured}
        write_result(options.out.parent / "details" / options.out.name, facts)

    _measure_all(wanted, failures, work=options.work, keep=keep)
    _print(measured, rows_of(measured))
    for failure in failures:
        print(f"NOT MEASURED: {failure}")
    return 1 if failures else 0


def _units(options: argparse.Namespace, measured: Measured) -> list[Unit]:
    """All there is to do, the systems of one comparison after each other, twice where several starts are needed."""

    def disk(directory: Path) -> None:
        measured.disk_floor_s += _run_disk.measure(
            rounds=options.rounds, state_mb=options.state_mb, directory=directory
        )

    units = [Unit(name="floor of the disk", part="floors", estimate_s=15, measure=disk)]
    units += [_save_unit(method, options, measured, is_busy=False) for method in _run_saves.METHODS]
    units += [
        _save_unit(method, options, measured, is_busy=True)
        for method in _run_saves.METHODS
        if method.name in _run_saves.BUSY_METHODS
    ]
    per_pass = -(-options.rounds // PASSES)
    for is_full in (True, False):
        for number in range(PASSES):
            units += [
                _kill_unit(system, options, measured, is_full=is_full, number=number, kills=per_pass)
                for system in _run_kills.SYSTEMS
                if system.is_installed
            ]

    def nodes(directory: Path) -> None:
        figures = _run_kills.measure_node_loss(losses=per_pass, state_mb=options.state_mb, directory=directory)
        measured.node_losses.append(figures)

    def stops(directory: Path) -> None:
        measured.stops.append(_stop(OURS, kills=options.rounds, directory=directory))

    def slow(directory: Path) -> None:
        measured.slow_stops.append(_stop(TORCHRUN_SAVING, kills=1, directory=directory, limit_s=SLOW_LIMIT_S))

    def ettr(directory: Path) -> None:
        figures = _run_ettr.measure(
            duration_s=options.ettr_s,
            every_s=min(60.0, options.ettr_s / 4),
            state_mb=options.state_mb,
            compute_s=0.5,
            directory=directory,
        )
        measured.ettr.append(figures)

    units += [
        Unit(name=f"node lost, start {number + 1}", part="nodes", estimate_s=55, measure=nodes)
        for number in range(PASSES)
    ]
    units.append(Unit(name="SIGSTOP", part="stops", estimate_s=25, measure=stops))
    units.append(Unit(name="ETTR", part="ettr", estimate_s=options.ettr_s + 10, measure=ettr))
    units.append(Unit(name="SIGSTOP under torchrun, once", part="slow", estimate_s=1900, measure=slow))
    return units


def _save_unit(method: _run_saves.Method, options: argparse.Namespace, measured: Measured, *, is_busy: bool) -> Unit:
    is_ours = method.system is OURS
    rounds = options.rounds if is_ours or not is_busy else max(1, options.rounds - 2)

    def measure(directory: Path) -> None:
        if not method.system.is_installed:
            return
        figures = _run_saves.measure(
            method, is_busy=is_busy, rounds=rounds, state_mb=options.state_mb, directory=directory
        )
        measured.saves.append(figures)

    name = f"save: {method.name}{', CPU-bound' if is_busy else ''}"
    estimate_s = method.estimate_s if method.system.is_installed else 0.0
    return Unit(name=name, part="busy" if is_busy else "saves", estimate_s=estimate_s, measure=measure)


def _kill_unit(
    system: System, options: argparse.Namespace, measured: Measured, *, is_full: bool, number: int, kills: int
) -> Unit:
    def measure(directory: Path) -> None:
        figures = _run_kills.measure(
            system, kills=kills, is_full=is_full, state_mb=options.state_mb, directory=directory
        )
        measured.kills.append(figures)

    name = f"kill -9, {'full' if is_full else 'small'} state, {system.name}, start {number + 1}"
    is_ours = system is OURS
    estimate_s = (25.0 if is_ours else 45.0) if is_full else (10.0 if is_ours else 22.0)
    return Unit(name=name, part="kills" if is_full else "small", estimate_s=estimate_s, measure=measure)


def _stop(system: System, *, kills: int, directory: Path, limit_s: float = 60.0) -> _run_kills.KillFigures:
    return _run_kills.measure(
        system, kills=kills, is_full=False, state_mb=0.0, directory=directory, by=signal.SIGSTOP, limit_s=limit_s
    )


def _say_what_is_absent() -> list[str]:
    systems = [method.system for method in _run_saves.METHODS] + list(_run_kills.SYSTEMS)
    absent = sorted({system.peer for system in systems if not system.is_installed})
    for peer in absent:
        print(f"{peer} {VERSIONS[peer]}: peer not installed (scripts/peers.sh); judged against cited figures")
    return absent


def _measure_all(units: Sequence[Unit], failures: list[str], *, work: Path | None, keep: Callable[[], None]) -> None:
    """Each in turn, in a directory that is removed after it, with all that is known kept after each.

    What could not be measured goes into `failures` in words. Ctrl-C ends it there.
    """
    began_s = time.monotonic()
    done_s = 0.0
    for number, unit in enumerate(units):
        elapsed_s = time.monotonic() - began_s
        pace = elapsed_s / done_s if done_s else 1.0
        left_s = pace * sum(later.estimate_s for later in units[number:])
        load = load_1_min()
        noisy = " - NOT QUIET, figures mean little" if load > NOISY_LOAD and number == 0 else ""
        print(
            f"[{number + 1}/{len(units)}] {elapsed_s / 60:.1f} min, {pace:.0%} of the planned time, about"
            f" {left_s / 60:.0f} min left, load {load}{noisy}: {unit.name}",
            flush=True,
        )
        directory = Path(tempfile.mkdtemp(prefix="dougong-bench-", dir=work))
        try:
            unit.measure(directory)
        except (RuntimeError, OSError, AssertionError, LookupError, ValueError) as error:
            traceback.print_exc()
            failures.append(f"{unit.name}: {error}")
        except KeyboardInterrupt:
            failures.append(f"{unit.name} and what comes after it: interrupted")
            return
        finally:
            shutil.rmtree(directory, ignore_errors=True)
            keep()
        done_s += unit.estimate_s


def _sim_ettr(results: Path) -> float | None:
    """From the simulated practices (bench/practices.py), if they were run: the worst row with a fault every 2.8 h."""
    path = results / "practices.json"
    if not path.exists():
        return None
    rows = msgspec.json.decode(path.read_bytes())["rows"]
    found = [row["ours"] for row in rows if row["limit"] is not None and row["name"].startswith("16,384 cards")]
    return min(found) if found else None


def _print(measured: Measured, rows: Sequence[Row]) -> None:
    for is_busy in (False, True):
        _print_saves([figures for figures in measured.saves if figures.is_busy == is_busy], is_busy=is_busy)
    for is_full in (True, False):
        _print_kills(measured.kills, is_full=is_full)
    _print_node_losses(measured.node_losses)
    print()
    table = [
        (row.name, _number(row.ours), _number(row.peer), _number(row.floor), _number(row.limit), _judged(row))
        for row in rows
    ]
    if table:
        print_table(("what", "ours", "peer", "floor", "limit", ""), table)
    missed = [row.name for row in rows if not row.ok]
    print(f"\n{len(rows) - len(missed)} of {len(rows)} reached" + "".join(f"\nMISSED: {name}" for name in missed))


def _print_saves(saves: Sequence[_run_saves.SaveFigures], *, is_busy: bool) -> None:
    if not saves:
        return
    print(f"\nOne save, step of 0.5 s {'CPU-bound' if is_busy else 'host-idle'}: median (range), seconds")
    header = (
        "method",
        "first",
        "held up",
        "lost",
        "durable after",
        "fsync",
        "restore",
        "base step",
        "floor",
        "whole",
        "load",
    )
    print_table(
        header,
        [
            (
                figures.method,
                f"{figures.first_block_s:.3f}",
                _spread(figures.block_s),
                _spread(figures.lost_s),
                _spread(figures.durable_s),
                "yes" if figures.is_synced else "no",
                _spread(figures.restore_s),
                f"{figures.base_step_s:.3f}",
                _spread(figures.floor_s),
                "-" if figures.verdict is None else "yes" if figures.verdict.is_whole else "TORN",
                f"{figures.load_average:.1f}",
            )
            for figures in saves
        ],
    )


def _print_kills(kills: Sequence[_run_kills.KillFigures], *, is_full: bool) -> None:
    names = list(dict.fromkeys(figures.system for figures in kills if figures.is_full == is_full))
    if not names:
        return
    print(f"\nkill -9 of one rank, {'full' if is_full else 'small'} state: medians, seconds after the kill")
    stages = ("detected_s", "started_s", "imported_s", "group_s", "built_s", "loaded_s", "any_step_s")
    header = ("system", *(stage.removesuffix("_s").replace("_", " ") for stage in stages))
    table: list[tuple[str, ...]] = []
    for name in names:
        recoveries = recoveries_of(kills, name, is_full=is_full)
        new_s = [item.new_step_s for item in recoveries if item.new_step_s is not None]
        at_s = [_number(median(_known(recoveries, stage))) for stage in stages]
        num_never = sum(item.new_step_s is None for item in recoveries)
        without = _number(median(without_step_s(kills, name, is_full=is_full)))
        table.append((name, *at_s, _spread(new_s), without, str(num_never)))
    print_table((*header, "new step", "without step", "never back"), table)


def _print_node_losses(losses: Sequence[_run_kills.KillFigures]) -> None:
    recoveries = recoveries_of(losses, OURS.name, is_full=True)
    if not recoveries:
        return
    print("\nA node lost, one after the other: seconds after the loss")
    print_table(
        ("restored from", "detected", "started", "loaded", "any step", "new step", "redone"),
        [
            (
                item.source or "never",
                *(_number(getattr(item, name)) for name in ("detected_s", "started_s", "loaded_s")),
                _number(item.any_step_s),
                _number(item.new_step_s),
                "-" if item.num_redone is None else str(item.num_redone),
            )
            for item in recoveries
        ],
    )


def _known(recoveries: Sequence[Any], stage: str) -> list[float]:
    return [value for item in recoveries if (value := getattr(item, stage)) is not None]


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.3f} ({min(values):.3f}-{max(values):.3f})" if values else "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if value < 100 else f"{value:,.0f}"


def _judged(row: Row) -> str:
    if row.limit is None and row.ours is not None:
        return ""
    return "ok" if row.ok else "MISSED"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=(*PARTS, "slow"), default=PARTS, help="parts; slow = 32 minutes")
    parser.add_argument("--list", action="store_true", help="say which parts there are")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--state-mb", type=float, default=FULL_MB, help="state of both ranks together, in 10^6 B")
    parser.add_argument("--ettr-s", type=float, default=370.0, help="how long the run with a fault a minute lasts")
    parser.add_argument(
        "--work", type=Path, help="where checkpoints are put meanwhile (default: the temporary directory)"
    )
    parser.add_argument("--out", type=Path, default=Path("bench/results/run.json"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
