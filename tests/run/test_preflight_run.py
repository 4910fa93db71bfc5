"""Pre-flight with real processes: a bad node makes room for the spare before the first generation."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dougong.event.kinds import GenerationStarted, JobFailed, JobFinished, LinkSuspected, NodeQuarantined, PreflightDone
from tests.run import runs

pytest.importorskip("torch", reason="torch is not installed (extra: train)")
pytestmark = pytest.mark.processes

UNFIT = Path(__file__).parent / "scripts" / "unfit"


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "run"
    yield path
    runs.end_all(path)


def flown(run_dir: Path, monkeypatch: pytest.MonkeyPatch, unfit: str, *, spares: int = 1) -> runs.Finished:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(UNFIT), os.environ.get("PYTHONPATH", ""))))
    monkeypatch.setenv("UNFIT", unfit)
    return runs.run(run_dir, "--preflight", "--spares", str(spares), arguments=("--steps", "10"))


@pytest.mark.parametrize("fault", ["wrong", "slow", "deaf"])
def test_a_bad_node_is_swapped_for_the_spare_before_the_first_generation(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    done = flown(run_dir, monkeypatch, f"node-02:{fault}")
    assert done.code == 0, done.report
    (quarantined,) = done.events(NodeQuarantined)
    assert quarantined.component.endswith("node-02"), quarantined
    (report,) = done.events(PreflightDone)
    assert len(report.nodes) == 3
    assert report.bad == (quarantined.component,)
    (first,) = done.events(GenerationStarted)
    assert [placed.component[-2:] for placed in first.placement] == ["01", "03"]
    assert runs.left_behind(run_dir) == []
    assert runs.memory_left(run_dir) == []


def test_sound_nodes_train_as_they_would_without_the_test(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = flown(run_dir, monkeypatch, "", spares=0)
    assert done.code == 0, done.report
    (report,) = done.events(PreflightDone)
    assert report.reason == "all are fit"
    assert all(node.flop_per_s and node.bytes_per_s for node in report.nodes)
    assert done.events(JobFinished)


def test_a_node_that_computes_wrongly_is_not_used_even_without_a_spare(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = flown(run_dir, monkeypatch, "node-02:wrong", spares=0)
    assert done.code == 1, done.report
    (failed,) = done.events(JobFailed)
    assert "not enough nodes" in failed.reason
    assert "node-02" in failed.reason


def test_a_pair_without_a_third_node_points_at_the_link_and_trains_on(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = flown(run_dir, monkeypatch, "node-02:deaf", spares=0)
    assert done.events(LinkSuspected), done.report
    assert done.events(NodeQuarantined) == []
