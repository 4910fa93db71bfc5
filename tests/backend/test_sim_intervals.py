"""How often to save, on `sim`: the scenario of 4,000 cards says what it is made to say."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
import pytest

from dougong.backend.sim.play import play
from dougong.cost.interval import daly_interval_s
from dougong.cost.reliability import job_mttf_s
from dougong.event.store import read
from dougong.score.scorecard import score
from dougong.spec.scenario import CheckpointPolicy, Scenario, load_scenario

PATH = Path(__file__).parents[2] / "examples" / "scenarios" / "four-thousand-cards.yaml"
BLOCKING_S = 3.83  # torch.save of 2.2 GB over two ranks on two cores


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    warned: list[object] = []
    loaded = load_scenario(PATH, warn=warned.append)
    assert warned == []
    return loaded


def effective_ratio(scenario: Scenario, *, interval_s: float, stall_s: float) -> float:
    (job,) = scenario.jobs
    policy = CheckpointPolicy(interval_s=interval_s, stall_s=stall_s)
    changed = msgspec.structs.replace(scenario, jobs=(msgspec.structs.replace(job, checkpoint=policy),))
    with tempfile.TemporaryDirectory() as folder:
        (played,) = play(changed, run_dir=Path(folder) / "run")
        ettr = score(read(played.run_dir / "events")).ettr
    assert ettr is not None
    return ettr


def test_a_minute_is_worth_it_only_where_saves_do_not_block(scenario: Scenario) -> None:
    assert effective_ratio(scenario, interval_s=60, stall_s=0.02) > 0.99
    assert effective_ratio(scenario, interval_s=60, stall_s=0.02) > effective_ratio(
        scenario, interval_s=900, stall_s=0.02
    )
    assert effective_ratio(scenario, interval_s=60, stall_s=BLOCKING_S) < effective_ratio(
        scenario, interval_s=900, stall_s=BLOCKING_S
    )


def test_no_other_interval_is_clearly_better_than_dalys(scenario: Scenario) -> None:
    (job,) = scenario.jobs
    mtbf_s = job_mttf_s(num_nodes=job.num_nodes, rate_per_1000_node_days=scenario.faults.rate_per_1000_node_days)
    best_s = daly_interval_s(cost_s=BLOCKING_S, mtbf_s=mtbf_s)
    best = effective_ratio(scenario, interval_s=best_s, stall_s=BLOCKING_S)
    for factor in (0.25, 4.0):
        assert best > effective_ratio(scenario, interval_s=best_s * factor, stall_s=BLOCKING_S)
