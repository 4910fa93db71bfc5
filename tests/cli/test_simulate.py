from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dougong.cli.simulate import simulate
from dougong.errors import Problems

SMALL = """\
name: small
seed: 7
duration: 2h
cluster: {accelerator: H100-80G-SXM5, num_nodes: 5}
jobs:
  gpt:
    num_nodes: 4
    num_spares: 1
    tokens_per_step: 1000
    model_flop_per_token: 1.0e+12
    step: 2s
    checkpoint: {interval: 60s, stall: 1s}
faults:
  rate_per_1000_node_days: 6000
  causes:
    gpu: {weight: 1, cause_class: accelerator, takes_node: true}
recovery: {detect: 3s, decide: 1s, restart: 6s, reload: 2s}
repair: 10min
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


def test_a_scenario_is_played_and_scored(scenario: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    result = CliRunner().invoke(simulate, [str(scenario), "--run-dir", str(run_dir), "--json"], catch_exceptions=False)
    document = json.loads(result.stdout)
    (job,) = document["jobs"]
    assert (document["scenario"], document["seed"], job["run_dir"]) == ("small", 7, str(run_dir))
    assert job["scorecard"]["interruptions"] > 0
    assert 0 < job["scorecard"]["ettr"] < 1
    assert (run_dir / "report.html").is_file()
    assert str(run_dir) in result.stderr


def test_without_a_directory_the_run_lies_under_runs(
    scenario: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(simulate, [str(scenario)], catch_exceptions=False)
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert run_dir.name.startswith("small-")
    assert "ETTR" in result.stdout


def test_the_speed_paces_but_changes_no_event(scenario: Path, tmp_path: Path) -> None:
    for name, speed in (("fast", ()), ("paced", ("--speed", "1e7"))):
        arguments = [str(scenario), "--run-dir", str(tmp_path / name), *speed]
        assert CliRunner().invoke(simulate, arguments, catch_exceptions=False).exit_code == 0
    fast, paced = (
        b"".join(path.read_bytes() for path in sorted((tmp_path / name / "events").rglob("*.jsonl")))
        for name in ("fast", "paced")
    )
    assert fast == paced


def test_all_mistakes_of_a_scenario_are_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(SMALL.replace("num_nodes: 4", "num_nodes: 40").replace("decide: 1s", "decide: -1s"))
    with pytest.raises(Problems):
        CliRunner().invoke(simulate, [str(path), "--run-dir", str(tmp_path / "run")], catch_exceptions=False)
