"""Scenario files of the simulator."""

from __future__ import annotations

import contextlib
import re
import tempfile
import typing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dougong.errors import Problems, UserError
from dougong.event import kinds
from dougong.spec import scenario
from dougong.spec.scenario import load_scenario

EXAMPLES = Path(__file__).parents[2] / "examples"

SMALL = """\
name: small
seed: 1
duration: 1d
cluster: {accelerator: h100, num_nodes: 4}
jobs:
  a: {num_nodes: 3, num_spares: 1, step: 1s, tokens_per_step: 1000, checkpoint: {stall: 1s, interval_steps: 10}}
faults:
  rate_per_1000_node_days: 5
  causes: {bug: {weight: 1, cause_class: software}}
recovery: {detect: 1s, decide: 1s, restart: 1s, reload: 1s}
repair: 1h
"""


def problems(folder: Path, text: str) -> list[tuple[str, str]]:
    path = folder / "s.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(Problems) as caught:
        load_scenario(path, warn=lambda _: None)
    return [(problem.where.rpartition("/")[2], problem.what) for problem in caught.value.problems]


def test_the_cause_classes_are_those_of_the_event_log() -> None:
    assert typing.get_args(scenario.CauseClass) == typing.get_args(kinds.CauseClass)


def test_the_month_is_what_was_published() -> None:
    warned: list[UserError] = []
    month = load_scenario(EXAMPLES / "scenarios" / "llama3-month.yaml", warn=warned.append)
    assert warned == []
    (job,) = month.jobs
    assert month.duration_s == 30 * 86400
    assert job.num_nodes * 8 == 16384
    assert month.cluster.num_nodes == job.num_nodes + job.num_spares
    unexpected = sum(cause.weight for cause in month.faults.causes if not cause.is_planned)
    planned = sum(cause.weight for cause in month.faults.causes if cause.is_planned)
    assert (unexpected, planned) == (419, 47)
    rate = month.faults.rate_per_node_s * 2048 * 54 * 86400
    assert rate == pytest.approx(466, abs=0.5)
    assert job.model_flop_per_token is not None
    achieved = job.model_flop_per_token * job.tokens_per_step / job.step_s / 16384
    assert achieved == pytest.approx(400e12, rel=0.01)


def test_a_cluster_may_be_a_file_beside_the_scenario(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("name: c\nnodes: {'r/n-[1-4]': t}\nnode_types: {t: {accelerator: h100}}\n")
    path = tmp_path / "s.yaml"
    path.write_text(SMALL.replace("{accelerator: h100, num_nodes: 4}", "c.yaml"))
    assert load_scenario(path).cluster.name == "c"


def test_mistakes_of_the_scenario_and_its_cluster_are_told_together(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("name: c\nnodes: {'r/n-[1-4]': x}\nnode_types: {t: {}}\n")
    found = problems(
        tmp_path, SMALL.replace("{accelerator: h100, num_nodes: 4}", "c.yaml").replace("seed: 1", "seed: -1")
    )
    assert [where for where, _ in found] == ["s.yaml:2 seed", "s.yaml:4 cluster", "n-[1-4].type"]


def test_a_cluster_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    found = problems(tmp_path, SMALL.replace("{accelerator: h100, num_nodes: 4}", "none.yaml"))
    assert [where for where, _ in found] == ["s.yaml:4 cluster"]


def test_an_unknown_accelerator_is_told_where_it_stands(tmp_path: Path) -> None:
    ((where, what),) = problems(tmp_path, SMALL.replace("h100", "h1000"))
    assert where == "s.yaml:4 cluster.accelerator"
    assert "'h1000'" in what


def test_a_job_larger_than_the_cluster_is_told(tmp_path: Path) -> None:
    ((where, _),) = problems(tmp_path, SMALL.replace("num_spares: 1", "num_spares: 2"))
    assert where == "s.yaml:6 jobs.a.num_nodes"


@pytest.mark.parametrize("interval", ["", ", interval_steps: 10, interval: 5s"])
def test_a_checkpoint_has_exactly_one_interval(tmp_path: Path, interval: str) -> None:
    ((where, _),) = problems(tmp_path, SMALL.replace(", interval_steps: 10", interval))
    assert where.startswith("s.yaml:6 jobs.a.checkpoint")


def test_a_class_has_its_own_detection_time(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(SMALL.replace("{detect: 1s,", "{detect: 1s, detect_by_class: {hang: 10min},"))
    recovery = load_scenario(path).recovery
    assert recovery.detect_s_of("hang") == 600
    assert recovery.detect_s_of("crash") == 1


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_no_change_to_a_file_crashes_the_loader(data: st.DataObject) -> None:
    month = (EXAMPLES / "scenarios" / "llama3-month.yaml").read_text(encoding="utf-8")
    text = data.draw(st.sampled_from([SMALL, month]))
    for _ in range(data.draw(st.integers(1, 4))):
        words = [match.span() for match in re.finditer(r"[^\s{},:\[\]]+|[{}\[\],:\n]", text)]
        start, end = data.draw(st.sampled_from(words))
        junk = data.draw(st.sampled_from(["", "-1", "[]", "{}", "~", "x", "1e400", "0", ":", "- ", '"', "5min", "c"]))
        text = text[:start] + junk + text[end:]
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(Problems, UserError):
        path = Path(folder) / "s.yaml"
        path.write_text(text, encoding="utf-8")
        load_scenario(path, warn=lambda _: None)
