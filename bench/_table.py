"""Writes the tables of docs/benchmarks.md from bench/results/: the last step of `make bench` and `make bench-run`.

python bench/_table.py
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
TABLE = re.compile(r"(<!-- table -->\n).*?(<!-- end of table -->)", re.DOTALL)
RUN_TABLES = re.compile(r"(<!-- run tables -->\n).*?(<!-- end of run tables -->)", re.DOTALL)
HEADER = ("what", "measured against", "target", "here", "command")

STAGES = ("detected", "started", "imported", "group", "built", "loaded")
Result = dict[str, Any]


class Row(NamedTuple):
    """A row, and how its two figures are read from a result; the file's name is the script's."""

    what: str
    script: str
    peer: Callable[[Result], str]
    target: str
    here: Callable[[Result], str]


def main() -> None:
    lines = ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER), *(_line(row) for row in ROWS)]
    text = PAGE.read_text(encoding="utf-8")
    table = "\n".join(lines)
    text = TABLE.sub(lambda match: f"{match[1]}{table}\n{match[2]}", text)
    run_tables = "\n".join(_run_tables())
    text = RUN_TABLES.sub(lambda match: f"{match[1]}{run_tables}\n{match[2]}", text)
    PAGE.write_text(text, encoding="utf-8")


def _line(row: Row) -> str:
    path = RESULTS / f"{row.script}.json"
    command = f"`python bench/{row.script}.py`"
    if not path.exists():
        return f"| {row.what} | – | {row.target} | not measured | {command} |"
    result = json.loads(path.read_text())
    return f"| {row.what} | {row.peer(result)} | {row.target} | {row.here(result)} | {command} |"


def _run_tables() -> Iterator[str]:
    """What `make bench-run` left: the rows with their limits, where we lose, and what stands behind them."""
    rows_path, details_path = RESULTS / "run.json", RESULTS / "details" / "run.json"
    if not rows_path.exists() or not details_path.exists():
        yield "Not measured yet: `make bench-run`."
        return
    rows, details = json.loads(rows_path.read_text()), json.loads(details_path.read_text())
    yield from _lines(
        ("what", "here", "peer", "floor", "limit", ""),
        [
            (
                row["name"],
                _figure(row["ours"]),
                _figure(row["peer"]),
                _figure(row["floor"]),
                _figure(row["limit"]),
                "reached" if row["ok"] else "**missed**",
            )
            for row in rows
        ],
    )
    machine = details["machine"]
    yield from (
        "",
        f"On {machine['num_cpus']} cores, torch {machine['torch']}, load {machine['load_average_at_start']}"
        f" at the start; {details['state_mb']:,.0f} MB of state; not installed: "
        f"{', '.join(details['not_installed']) or 'none'}.",
    )
    for is_busy in (False, True):
        saves = [figures for figures in details["measured"]["saves"] if figures["is_busy"] == is_busy]
        if saves:
            step = "CPU-bound" if is_busy else "host-idle"
            yield from ("", f"Each way to save, {step} step of {saves[0]['base_step_s']:.2f} s; seconds, medians:", "")
            yield from _lines(
                ("way", "held up", "lost", "durable after", "fsync", "restore", "floor", "whole"),
                [
                    (
                        figures["method"],
                        *(_spread(figures[name]) for name in ("block_s", "lost_s", "durable_s")),
                        "yes" if figures["is_synced"] else "no",
                        *(_spread(figures[name]) for name in ("restore_s", "floor_s")),
                        _whole(figures["verdict"]),
                    )
                    for figures in saves
                ],
            )
    for is_full in (True, False):
        kills = [figures for figures in details["measured"]["kills"] if figures["is_full"] == is_full]
        if kills:
            state = "full" if is_full else "small"
            yield from ("", f"kill -9 of one rank, {state} state; seconds after the kill, medians:", "")
            yield from _lines(("system", *STAGES, "new step", "never back"), list(_kill_lines(kills)))


def _kill_lines(kills: Sequence[Result]) -> Iterator[tuple[str, ...]]:
    for system in dict.fromkeys(figures["system"] for figures in kills):
        recoveries = [item for figures in kills if figures["system"] == system for item in figures["recoveries"]]
        back = [item for item in recoveries if item["new_step_s"] is not None]
        at = (_spread([item[f"{stage}_s"] for item in back if item[f"{stage}_s"] is not None]) for stage in STAGES)
        new_step = _spread([item["new_step_s"] for item in back])
        yield system, *(cell.split(" ")[0] for cell in at), new_step, str(len(recoveries) - len(back))


def _lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(header) + " |"
    yield "|" + "---|" * len(header)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g}–{max(values):.3g})" if values else "–"


def _whole(verdict: Result | None) -> str:
    if verdict is None:
        return "–"
    return "yes" if len(verdict["steps"]) == 1 and not verdict["torn"] else "**torn**"


def _recovery(model: str, name: str) -> Callable[[Result], str]:
    def read(result: Result) -> str:
        row = result["models"][model]
        value_s, (low_s, high_s) = row[f"{name}_first_step_s"], row[f"{name}_first_step_s_range"]
        share = "" if name == "torchrun" else f"{row[f'{name}_to_torchrun_ratio']:.0%}: "
        return f"{share}{'torchrun: ' if name == 'torchrun' else ''}{value_s:.2f} s ({low_s:.2f}–{high_s:.2f})"

    return read


def _lost_node(model: str, name: str) -> Callable[[Result], str]:
    def read(result: Result) -> str:
        row = result["models"][model]
        low_s, high_s = row[f"{name}_first_step_s_range"]
        share = f"{row['ratio']:.0%}: " if name == "ours" else "torchrun, one process lost: "
        return f"{share}{row[f'{name}_first_step_s']:.2f} s ({low_s:.2f}–{high_s:.2f})"

    return read


def _beside(model: str, field: str, name: str, *, factor: float, unit: str) -> Callable[[Result], str]:
    def read(result: Result) -> str:
        value = result["models"][model][f"{name}_{field}"] * factor
        return f"{'torchrun: ' if name == 'torchrun' else ''}{value:.{0 if value >= 10 else 1}f} {unit}"

    return read


def _detection(case: str) -> Callable[[Result], str]:
    def read(result: Result) -> str:
        row = result["cases"][case]
        low_s, high_s = row["found_s_range"]
        return f"{row['found_s']:.2f} s ({low_s:.2f}–{high_s:.2f})"

    return read


def _hang_limit(case: str) -> Callable[[Result], str]:
    return lambda result: f"its own p99 step: {result['cases'][case]['limit_s']:.2f} s"


def _spec_load(result: Result) -> str:
    files = result["files"]
    return (
        f"{files['ranges']['load_s'] * 1e3:.0f} ms as ranges, {files['one_by_one']['load_s'] * 1e3:.0f} ms node by node"
    )


def _spec_floor(result: Result) -> str:
    files = result["files"]
    return f"parsing alone: {files['ranges']['parse_s'] * 1e3:.1f} and {files['one_by_one']['parse_s'] * 1e3:.0f} ms"


def _hundred(result: Result) -> Result:
    return next(row for row in result["rows"] if row["batch_size"] == 100)


def _overhead(result: Result) -> str:
    low_s, high_s = result["overhead_s_95_percent"]
    return (
        f"{result['overhead_ratio']:.2%} ({low_s * 1e6:.0f} to {high_s * 1e6:.0f} µs); "
        f"{result['empty_overhead_s'] * 1e6:.1f} µs alone, {result['empty_overhead_to_step_ratio']:.2%}"
    )


def _month(result: Result) -> str:
    return f"simulated in {result['simulate_s']:.2f} s, scored in {result['score_s']:.2f} s"


def _of_row(start: str) -> Callable[[Result], str]:
    """The row whose name begins so, with its range where there were several."""

    def read(result: Result) -> str:
        row = next(row for row in result["rows"] if row["name"].startswith(start))
        value = f"{row['ours']:.1%}" if not row["unit"] else f"{row['ours']:.3g} {row['unit']}"
        return f"{value} ({row['range'][0]:.2f}–{row['range'][1]:.2f})" if row["num"] > 1 else value

    return read


def _effective(name: str) -> Callable[[Result], str]:
    def read(result: Result) -> str:
        row = next(row for row in result["rows"] if row["name"] == name)
        return f"{row['ours']:.2%}, {row['lost_h']:.1f} h lost"

    return read


def _campaign(result: Result) -> str:
    passed = result["num_sequences"] - result["num_failed"]
    return f"{passed} of {result['num_sequences']} sequences, {result['num_faults']} faults"


def _seconds(value_s: float, range_s: list[float]) -> str:
    return f"{value_s:.2f} s ({range_s[0]:.2f}–{range_s[1]:.2f})"


ROWS = (
    Row(
        "crash → first step, GPT of 129 MB state, attached",
        "run_recovery",
        _recovery("gpt", "torchrun"),
        "at most 50 %",
        _recovery("gpt", "attached"),
    ),
    Row(
        "the same, a state of 0.8 MB",
        "run_recovery",
        _recovery("small", "torchrun"),
        "at most 50 %",
        _recovery("small", "attached"),
    ),
    Row(
        "the same, torchrun's own script unmodified",
        "run_recovery",
        _recovery("small", "torchrun"),
        "at most 50 %",
        _recovery("small", "unmodified"),
    ),
    Row(
        "node lost → first step on a spare from the copy on another node, GPT of 129 MB state",
        "peer_restore",
        _lost_node("gpt", "torchrun"),
        "at most 20 %",
        _lost_node("gpt", "ours"),
    ),
    Row(
        "the same, a state of 0.8 MB",
        "peer_restore",
        _lost_node("small", "torchrun"),
        "at most 20 %",
        _lost_node("small", "ours"),
    ),
    Row(
        "command → first step, small",
        "run_recovery",
        _beside("small", "cold_start_s", "torchrun", factor=1.0, unit="s"),
        "–",
        _beside("small", "cold_start_s", "attached", factor=1.0, unit="s"),
    ),
    Row(
        "a step of the GPT, saved every 5 steps",
        "run_recovery",
        _beside("gpt", "step_s", "torchrun", factor=1e3, unit="ms"),
        "–",
        _beside("gpt", "step_s", "attached", factor=1e3, unit="ms"),
    ),
    Row(
        "a stopped process is found, attached script",
        "run_detection",
        lambda result: f"torchrun: {result['torchrun_cited_s']:,.0f} s (cited, one earlier run)",
        "within 3 s",
        _detection("stopped, attached"),
    ),
    Row(
        "a stopped process is found, unmodified script",
        "run_detection",
        lambda result: f"torchrun: {result['torchrun_cited_s']:,.0f} s (cited, one earlier run)",
        "within 3 s",
        _detection("stopped, unmodified"),
    ),
    Row(
        "a live hang is found, steps of 20 ms",
        "run_detection",
        _hang_limit("hang, 20 ms steps"),
        "max(3 s, 6 × p99)",
        _detection("hang, 20 ms steps"),
    ),
    Row(
        "a live hang is found, steps of 0.7 s",
        "run_detection",
        _hang_limit("hang, 0.7 s steps"),
        "max(3 s, 6 × p99)",
        _detection("hang, 0.7 s steps"),
    ),
    Row(
        "overhead of `attach`, without checkpoints",
        "attach_overhead",
        lambda result: f"the same step without it: {result['step_s'] * 1e3:.1f} ms",
        "less than 1 %",
        _overhead,
    ),
    Row(
        "random faults survived, every loss bitwise as undisturbed",
        "campaign",
        lambda result: "an undisturbed run",
        "all",
        _campaign,
    ),
    Row(
        "256 agents on this machine: the controller at rest",
        "scale_agents",
        lambda result: "a core",
        "less than 20 %",
        _of_row("controller at rest"),
    ),
    Row(
        "the same: a killed worker is found",
        "scale_agents",
        lambda result: "–",
        "within 1 s",
        _of_row("killed worker"),
    ),
    Row(
        "the same: a stopped worker is found",
        "scale_agents",
        lambda result: "the rule: stopped for 1 s",
        "within 3 s",
        _of_row("stopped worker"),
    ),
    Row(
        "the same: loss → every rank started and restored",
        "scale_agents",
        lambda result: "–",
        "within 5 s",
        _of_row("storm: loss → every rank"),
    ),
    Row(
        "10,000 agents in virtual time: the controller at rest",
        "scale_sim",
        lambda result: "a core",
        "less than a core",
        _of_row("controller at rest"),
    ),
    Row(
        "the same: a killed worker is found",
        "scale_sim",
        lambda result: "–",
        "within 1 s",
        _of_row("killed worker → found"),
    ),
    Row(
        "the same: CPU time of a restart of all ranks",
        "scale_sim",
        lambda result: "–",
        "within 30 s",
        _of_row("killed worker: CPU time"),
    ),
    Row(
        "4,000 cards for 20 days on `sim`, saved every minute",
        "practices",
        _effective("4,000 cards, 20 days: every 15 min, saves that block"),
        "99 % effective",
        _effective("4,000 cards, 20 days: every 1 min, saves beside training"),
    ),
    Row(
        "10,000 cards for 30 days on `sim`",
        "practices",
        _effective("10,000 cards, 30 days: torchrun, torch.save its best interval"),
        "99 % effective",
        _effective("10,000 cards, 30 days: dougong"),
    ),
    Row(
        "16,384 cards for 30 days on `sim`, a fault every 2.8 h",
        "practices",
        _effective("16,384 cards, 30 days: torchrun, torch.save its best interval"),
        "99 % effective",
        _effective("16,384 cards, 30 days: dougong"),
    ),
    Row(
        "2 ranks of 1.1 GB on disk, synced and checksummed",
        "durable_write",
        lambda result: f"raw O_DIRECT writes: {_seconds(result['floor_s'], result['floor_s_range'])}",
        "at most 2 s",
        lambda result: _seconds(result["writer_s"], result["writer_s_range"]),
    ),
    Row(
        "CPU time of `dougong --help`",
        "cli_start",
        lambda result: f"`python -c pass`: {result['floor_cpu_s'] * 1e3:.0f} ms",
        "at most 100 ms",
        lambda result: f"{result['help_cpu_s'] * 1e3:.0f} ms",
    ),
    Row(
        "events appended, in batches of 100",
        "event_append",
        lambda result: f"the same bytes written and synced raw: {_hundred(result)['floor_events_per_s']:,.0f} a second",
        "at least 20,000 a second",
        lambda result: f"{_hundred(result)['log_events_per_s']:,.0f} a second",
    ),
    Row("16,384 accelerators loaded and checked", "spec_load", _spec_floor, "less than 1 s", _spec_load),
    Row(
        "a simulated month of 16,384 accelerators",
        "score_month",
        lambda result: f"reading its events: {result['read_s']:.2f} s",
        "seconds",
        _month,
    ),
)

if __name__ == "__main__":
    main()
