"""Simulated months against the closed forms: `python validation/simulated_month.py` plays the example with ten seeds.

The wall time per interruption is compared with 1 / (N r), and the ETTR with the closed form and with the renewal form.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec

from dougong.backend.sim.play import play
from dougong.backend.sim.progress import NS, pace_of
from dougong.cost.reliability import expected_ettr, job_mttf_s, mtbf_interval_s, renewal_ettr
from dougong.event.store import read
from dougong.score.scorecard import Scorecard, score
from dougong.spec.scenario import Scenario, load_scenario
from dougong.units import HOUR_S

MONTH = Path(__file__).parents[1] / "examples" / "scenarios" / "llama3-month.yaml"


class Expected(NamedTuple):
    """What the closed forms say of a scenario with one job."""

    mtbf_s: float
    closed_ettr: float
    renewal_ettr: float


def expected_of(scenario: Scenario) -> Expected:
    """The closed forms, with the detection time of the classes weighted by how often they strike."""
    (job,) = scenario.jobs
    pace = pace_of(job)
    mttf_s = job_mttf_s(num_nodes=job.num_nodes, rate_per_1000_node_days=scenario.faults.rate_per_1000_node_days)
    recovery, causes = scenario.recovery, scenario.faults.causes
    weight = sum(cause.weight for cause in causes)
    detect_s = sum(recovery.detect_s_of(cause.cause_class) * cause.weight for cause in causes) / weight
    case = {
        "mttf_s": mttf_s,
        "interval_s": pace.interval_steps * pace.step_ns / NS,
        "stall_s": pace.stall_ns / NS,
        "restart_s": detect_s + recovery.decide_s + recovery.restart_s + recovery.reload_s,
    }
    return Expected(mttf_s, expected_ettr(**case), renewal_ettr(**case))


def scored(scenario: Scenario, *, seed: int) -> Scorecard:
    """The scorecard of the scenario's one job with another seed."""
    with tempfile.TemporaryDirectory() as folder:
        (job,) = play(msgspec.structs.replace(scenario, seed=seed), run_dir=Path(folder) / "run")
        return score(read(job.run_dir / "events"))


def main() -> None:
    scenario = load_scenario(MONTH)
    expected = expected_of(scenario)
    cards = [scored(scenario, seed=seed) for seed in range(10)]
    for seed, card in enumerate(cards):
        lower_s, upper_s = card.mtbf_ci95_s
        assert card.mtbf_s is not None and card.ettr is not None and lower_s is not None and upper_s is not None
        print(
            f"seed {seed}: MTBF {card.mtbf_s / HOUR_S:.2f} h (95 %: {lower_s / HOUR_S:.2f} to {upper_s / HOUR_S:.2f}), "
            f"ETTR {card.ettr:.4f}"
        )
    wall_s = sum(card.wall_s for card in cards)
    num_failures = sum(card.interruptions for card in cards)
    lower_s, upper_s = mtbf_interval_s(wall_s, num_failures=num_failures)
    mean_ettr = sum(card.ettr or 0.0 for card in cards) / len(cards)
    print(
        f"all: wall time per interruption {wall_s / num_failures / HOUR_S:.3f} h (95 %: {lower_s / HOUR_S:.3f} to "
        f"{upper_s / HOUR_S:.3f}), closed form {expected.mtbf_s / HOUR_S:.3f} h"
    )
    print(
        f"all: ETTR {mean_ettr:.4f}, closed form {expected.closed_ettr:.4f} "
        f"({mean_ettr / expected.closed_ettr - 1:+.2%}), renewal form {expected.renewal_ettr:.4f} "
        f"({mean_ettr / expected.renewal_ettr - 1:+.2%})"
    )


if __name__ == "__main__":
    main()
