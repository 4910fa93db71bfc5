"""What the mechanisms are worth to a large job: published practices on `sim`, at the costs measured here.

    python bench/practices.py [--seeds 10] [--out bench/results/practices.json]

The costs (how soon a fault is found, how long a restart takes, what a save costs) come from the other benchmarks'
results where these are there, else from the figures that stand here with their source. Every row is the mean of several
seeds; the rows of one practice see the same faults at the same times.

What a machine of two cores cannot measure is the time in which thousands of ranks form their collectives anew. The rows
called "+ 60 s" add a minute to each recovery for that; the limits hold for them too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from _launch import print_table, write_result

from dougong.backend.sim.play import play
from dougong.cost.interval import daly_interval_s
from dougong.cost.reliability import job_mttf_s
from dougong.event.store import read
from dougong.score.scorecard import Scorecard, score
from dougong.spec.scenario import CheckpointPolicy, DetectTime, Recovery, Scenario, load_scenario
from dougong.units import HOUR_S, MINUTE_S

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
SCENARIOS = ROOT / "examples" / "scenarios"
COLLECTIVES_S = 60.0
HANG_STEPS = 4.5


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """What one launcher's mechanisms take. `save_s`: training time lost to one save, slower steps included."""

    name: str
    detect_s: float
    hang_s: float | None
    """A hang is found after so long; None = by the rule of this runtime, from the step time."""
    restart_s: float
    reload_s: float
    save_s: float
    sources: tuple[str, ...] = ()


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """The mean of several seeds. `lost_s`: wall time in which nothing new was trained."""

    ettr: float
    lost_s: float
    num_faults: float
    interval_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("bench/results/practices.json"))
    options = parser.parse_args()
    ours, torchrun = own_costs(RESULTS), torchrun_costs(RESULTS)
    rows = [*interval_practice(ours, torchrun, options.seeds), *months(ours, torchrun, options.seeds)]
    print_table(
        ("practice", "effective", "hours lost", "faults", "interval", "limit", "ok"),
        [
            (
                row["name"],
                f"{row['ours']:.2%}",
                f"{row['lost_h']:.1f}",
                f"{row['num_faults']:.0f}",
                f"{row['interval_s']:.0f} s",
                "–" if row["limit"] is None else f"{row['limit']:.0%}",
                "–" if row["ok"] is None else str(row["ok"]),
            )
            for row in rows
        ],
    )
    for costs in (ours, torchrun):
        print(f"{costs.name}: {'; '.join(costs.sources)}")
    result = {
        "benchmark": "practices",
        "num_seeds": options.seeds,
        "costs": {costs.name: costs for costs in (ours, torchrun)},
        "rows": rows,
        "is_reached": all(row["ok"] is not False for row in rows),
    }
    write_result(options.out, result)


# --- the costs ---


def own_costs(results: Path) -> Costs:
    """This runtime's, each the worse of what was measured for it."""
    detect_s, detect_from = _measured(
        results, ("scale_agents", "stopped worker"), ("run_detection", "stopped"), default=(1.41, "an earlier run")
    )
    restart_s, restart_from = _measured(
        results, ("scale_agents", "storm: loss → first step"), default=(3.0, "256 agents on two cores, an earlier run")
    )
    reload_s, reload_from = _measured(
        results, ("run", "node lost"), ("run", "kill"), default=(1.0, "the limit of a full state's recovery")
    )
    save_s, save_from = _measured(
        results, ("run", "lost per durable save"), default=(0.17, "the memcpy floor of 2.2 GB on two ranks")
    )
    return Costs(
        name="dougong",
        detect_s=detect_s,
        hang_s=None,
        restart_s=restart_s,
        reload_s=reload_s,
        save_s=save_s,
        sources=(
            f"a fault found after {detect_s:.2f} s ({detect_from})",
            f"all ranks restarted after {restart_s:.2f} s ({restart_from})",
            f"state back after {reload_s:.2f} s ({reload_from})",
            f"{save_s:.2f} s lost a save ({save_from})",
        ),
    )


def torchrun_costs(results: Path) -> Costs:
    """torchrun, a script that calls torch.save, and gloo's time-out of 30 min; 2.2 GB over two ranks."""
    recovery_s, recovery_from = 5.24, "kill → first step, 2.2 GB, median of 6 on two cores, an earlier run"
    save_s, save_from = 3.83, "torch.save of 2.2 GB over two ranks, an earlier run"
    measured = _peer(results, "run", "kill")
    if measured is not None:
        recovery_s, recovery_from = measured, "run.json"
    measured = _peer(results, "run", "block per durable save")
    if measured is not None:
        save_s, save_from = measured, "run.json"
    return Costs(
        name="torchrun + torch.save",
        detect_s=0.41,
        hang_s=1800.0,
        restart_s=recovery_s,
        reload_s=0.0,
        save_s=save_s,
        sources=(
            "a crash found after 0.41 s, a hang after 1,800 s (an earlier run)",
            f"first step after {recovery_s:.2f} s ({recovery_from})",
            f"{save_s:.2f} s lost a save ({save_from})",
        ),
    )


def _measured(results: Path, *places: tuple[str, str], default: tuple[float, str]) -> tuple[float, str]:
    """The first of these results (file, what its row or case is called) that is there, and where it is from."""
    for name, words in places:
        for row in _rows(results / f"{name}.json"):
            value = row.get("ours", row.get("found_s"))
            if words in str(row.get("name", "")) and isinstance(value, int | float):
                return float(value), f"{name}.json"
    return default


def _peer(results: Path, name: str, words: str) -> float | None:
    for row in _rows(results / f"{name}.json"):
        if words in str(row.get("name", "")) and isinstance(row.get("peer"), int | float):
            return float(row["peer"])
    return None


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a result, whatever its shape: a list, `rows`, or `cases` by name."""
    if not path.exists():
        return []
    result = json.loads(path.read_text())
    if isinstance(result, list):
        return result
    cases = result.get("cases", {})
    return [*result.get("rows", []), *({"name": name, **case} for name, case in cases.items())]


# --- the practices ---


def interval_practice(ours: Costs, torchrun: Costs, num_seeds: int) -> list[dict[str, Any]]:
    """4,000 accelerators for 20 days: a checkpoint every 15 min, and every minute."""
    scenario = load_scenario(SCENARIOS / "four-thousand-cards.yaml")
    blocking = msgspec.structs.replace(ours, save_s=torchrun.save_s)
    cases = {
        "every 15 min, saves that block": (blocking, 15 * MINUTE_S, 0.0),
        "every 1 min, saves that block": (blocking, MINUTE_S, 0.0),
        "every 15 min, saves beside training": (ours, 15 * MINUTE_S, 0.0),
        "every 1 min, saves beside training": (ours, MINUTE_S, 0.0),
        "every 1 min, beside training, + 60 s": (ours, MINUTE_S, COLLECTIVES_S),
    }
    played = {
        name: mean_of(with_costs(scenario, costs, interval_s=interval_s, more_s=more_s), num_seeds)
        for name, (costs, interval_s, more_s) in cases.items()
    }
    before = played["every 15 min, saves that block"]
    rows: list[dict[str, Any]] = []
    for name, one in played.items():
        limit = 0.99 if "1 min" in name and "beside" in name else None
        row = _row(f"4,000 cards, 20 days: {name}", one, limit=limit)
        saved_h = (before.lost_s - one.lost_s) / HOUR_S
        rows.append({**row, "saved_h": round(saved_h, 2), "saved_card_h": round(4000 * saved_h)})
    return rows


def months(ours: Costs, torchrun: Costs, num_seeds: int) -> list[dict[str, Any]]:
    """The month of 16,384 accelerators, a fault every 2.8 h; and 10,000 accelerators as Ant reports them."""
    month = load_scenario(SCENARIOS / "llama3-month.yaml")
    ten_thousand = sized(month, num_nodes=1250, name="ten-thousand-cards")
    rows: list[dict[str, Any]] = []
    for title, scenario in (("10,000 cards, 30 days", ten_thousand), ("16,384 cards, 30 days", month)):
        for more_s, added in ((0.0, ""), (COLLECTIVES_S, ", + 60 s")):
            best_s = best_interval_s(scenario, ours)
            one = mean_of(with_costs(scenario, ours, interval_s=best_s, more_s=more_s), num_seeds)
            rows.append(_row(f"{title}: dougong{added}", one, limit=None if more_s and "16" in title else 0.99))
        for interval_s, named in ((best_interval_s(scenario, torchrun), "its best interval"), (900.0, "every 15 min")):
            for more_s, added in ((0.0, ""), (COLLECTIVES_S, ", + 60 s")):
                one = mean_of(with_costs(scenario, torchrun, interval_s=interval_s, more_s=more_s), num_seeds)
                rows.append(_row(f"{title}: torchrun, torch.save {named}{added}", one, limit=None))
    return rows


def with_costs(scenario: Scenario, costs: Costs, *, interval_s: float, more_s: float) -> Scenario:
    """The same job and the same faults with another launcher's mechanisms."""
    (job,) = scenario.jobs
    hang_s = costs.hang_s if costs.hang_s is not None else HANG_STEPS * job.step_s + 1.0
    recovery = Recovery(
        detect_s=costs.detect_s,
        decide_s=0.0,
        restart_s=costs.restart_s + more_s,
        reload_s=costs.reload_s,
        detect_by_class=(
            DetectTime(cause_class="hang", detect_s=hang_s),
            DetectTime(cause_class="maintenance", detect_s=0.0),
        ),
    )
    checkpoint = CheckpointPolicy(interval_s=interval_s, stall_s=costs.save_s)
    return msgspec.structs.replace(
        scenario, recovery=recovery, jobs=(msgspec.structs.replace(job, checkpoint=checkpoint),)
    )


def best_interval_s(scenario: Scenario, costs: Costs) -> float:
    """Daly's interval for the job's own faults, at least a step."""
    (job,) = scenario.jobs
    mtbf_s = job_mttf_s(num_nodes=job.num_nodes, rate_per_1000_node_days=scenario.faults.rate_per_1000_node_days)
    return max(job.step_s, daly_interval_s(cost_s=costs.save_s, mtbf_s=mtbf_s))


def sized(scenario: Scenario, *, num_nodes: int, name: str) -> Scenario:
    """The same job on fewer nodes."""
    (job,) = scenario.jobs
    return msgspec.structs.replace(scenario, name=name, jobs=(msgspec.structs.replace(job, num_nodes=num_nodes),))


def mean_of(scenario: Scenario, num_seeds: int) -> Played:
    """The scenario played with several seeds."""
    cards = [_scored(scenario, seed=scenario.seed + number) for number in range(num_seeds)]
    ettr = statistics.mean(card.ettr or 0.0 for card in cards)
    (job,) = scenario.jobs
    return Played(
        ettr=ettr,
        lost_s=(1 - ettr) * scenario.duration_s,
        num_faults=statistics.mean(card.interruptions for card in cards),
        interval_s=job.checkpoint.interval_s or 0.0,
    )


def _scored(scenario: Scenario, *, seed: int) -> Scorecard:
    with tempfile.TemporaryDirectory() as folder:
        (job,) = play(msgspec.structs.replace(scenario, seed=seed), run_dir=Path(folder) / "run")
        return score(read(job.run_dir / "events"))


def _row(name: str, one: Played, *, limit: float | None) -> dict[str, Any]:
    return {
        "name": name,
        "ours": round(one.ettr, 5),
        "peer": None,
        "floor": None,
        "limit": limit,
        "ok": None if limit is None else one.ettr >= limit,
        "lost_h": round(one.lost_s / HOUR_S, 2),
        "num_faults": round(one.num_faults, 1),
        "interval_s": round(one.interval_s, 1),
    }


if __name__ == "__main__":
    main()
