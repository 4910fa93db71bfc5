"""A Lightning training goes through faults as if there had been none: bitwise the same values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dougong.event.kinds import JobFinished, JobStopped, RecoveryDecided, StateRestored
from tests.frameworks import tensorboard_events
from tests.run import runs

pytest.importorskip("torch", reason="torch is not installed (extra: train)")
pytest.importorskip("lightning", reason="lightning is not installed (extra: lightning)")
pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).parent / "scripts" / "pl.py"
SAVES = ("--memory-every", "3", "--durable-every", "10", "--no-score")
KILLS = ("kind: kill-worker, at_step: 14, rank: 1", "kind: kill-worker, at_step: 24, rank: 0")


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "run"
    yield path
    runs.end_all(path)


def train(run_dir: Path, *faults: str, arguments: tuple[str, ...] = (), options: tuple[str, ...] = SAVES):
    """The finished run, and what the script wrote."""
    result = run_dir.with_suffix(".json")
    chaos = ("--chaos", str(runs.write_chaos(run_dir.with_suffix(".yaml"), *faults))) if faults else ()
    done = runs.run(run_dir, *options, *chaos, script=SCRIPT, arguments=("--result", str(result), *arguments))
    assert done.code == 0, done.report
    return done, json.loads(result.read_text())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory):
    done, result = train(tmp_path_factory.mktemp("undisturbed") / "run")
    assert sorted(done.losses()) == list(range(1, 31)), "three epochs of 19 batches, two to a step"
    return done, result


def assert_same(done, result, undisturbed) -> None:
    for rank in (0, 1):
        assert done.losses(rank) == undisturbed[0].losses(rank), done.report
    assert result == undisturbed[1], done.report
    assert done.events(JobFinished)


def test_killed_workers_leave_no_trace(run_dir: Path, undisturbed) -> None:
    done, result = train(run_dir, *KILLS)
    assert [event.restore_source for event in done.events(RecoveryDecided)] == ["memory", "memory"]
    assert_same(done, result, undisturbed)
    curves = [tensorboard_events.scalars(event.run_dir / "tracking", "loss_step") for event in (done, undisturbed[0])]
    assert curves[0] == curves[1], "each step once"


def test_every_step_is_a_place_to_resume_from(run_dir: Path, undisturbed) -> None:
    """In the middle of an epoch, at its end, beside a validation; from a lost node too."""
    kills = [f"kind: kill-worker, at_step: {step}, rank: 0" for step in (7, 10, 11, 20)]
    loss = "kind: kill-node, at_step: 29, node: local/rack-01/node-02"
    options = ("--memory-every", "1", "--durable-every", "5", "--spares", "1", "--no-score")
    done, result = train(run_dir, *kills, loss, options=options)
    assert len(done.events(StateRestored)) == 6
    assert_same(done, result, undisturbed)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("--workers", "2", "--accumulate", "1"), id="loader with workers"),
        pytest.param(("--stream", "--steps", "26"), id="stream without a length"),
    ],
)
def test_other_ways_to_read_data(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    quiet = train(tmp_path / "quiet", arguments=arguments)
    done, result = train(tmp_path / "run", *KILLS, arguments=arguments)
    assert_same(done, result, quiet)


def test_a_stopped_training_goes_on_tomorrow(run_dir: Path, undisturbed) -> None:
    result = run_dir.with_suffix(".json")
    process = runs.start(run_dir, *SAVES, script=SCRIPT, arguments=("--result", str(result), "--step-s", "0.1"))
    runs.wait_for_step(run_dir, 5)
    process.send_signal(2)
    stopped = runs.finish(process, run_dir)
    assert stopped.code == 130, stopped.report
    assert stopped.events(JobStopped)
    done = runs.finish(runs.resume(run_dir), run_dir)
    assert done.code == 0, done.report
    assert_same(done, json.loads(result.read_text()), undisturbed)
