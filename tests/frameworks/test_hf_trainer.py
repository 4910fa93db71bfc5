"""A Trainer of Hugging Face goes through faults as if there had been none: bitwise the same log, loss for loss."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from dougong.event.kinds import JobFinished, JobStopped, RecoveryDecided, StateRestored
from tests.frameworks import tensorboard_events
from tests.run import runs

pytest.importorskip("torch", reason="torch is not installed (extra: train)")
pytest.importorskip("transformers", reason="transformers is not installed (extra: hf)")
pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).parent / "scripts" / "hf.py"
EXAMPLE = ROOT / "examples" / "hf_trainer" / "train.py"
SAVES = ("--memory-every", "3", "--durable-every", "10", "--no-score")
KILLS = ("kind: kill-worker, at_step: 14, rank: 1", "kind: kill-worker, at_step: 24, rank: 0")
NODE_LOSS = ("kind: kill-node, at_step: 17, node: local/rack-01/node-02",)


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
    assert sorted(done.losses()) == list(range(1, 31)), "three epochs of ten steps"
    assert sum("eval_loss" in entry for entry in result["log"]) == 4, "at the start, at 11, 22 and the end"
    return done, result


def assert_same(done, result, undisturbed) -> None:
    for rank in (0, 1):
        assert done.losses(rank) == undisturbed[0].losses(rank), done.report
    assert result == undisturbed[1], done.report
    assert done.events(JobFinished)


def test_killed_workers_leave_no_trace(run_dir: Path, undisturbed) -> None:
    done, result = train(run_dir, *KILLS, arguments=("--tensorboard",))
    assert [event.restore_source for event in done.events(RecoveryDecided)] == ["memory", "memory"]
    assert_same(done, result, undisturbed)
    logged = [(entry["step"], entry["loss"]) for entry in result["log"] if "loss" in entry]
    shown = tensorboard_events.scalars(run_dir / "tracking", "train/loss")
    assert [step for step, _ in shown] == [7, 14, 21, 28], "each once"
    assert shown == [(step, pytest.approx(loss)) for step, loss in logged]


def test_a_lost_node_leaves_no_trace(run_dir: Path, undisturbed) -> None:
    done, result = train(run_dir, *NODE_LOSS, options=(*SAVES, "--set", "save.peer_copies=0", "--spares", "1"))
    assert [event.restore_source for event in done.events(RecoveryDecided)] == ["durable"]
    assert_same(done, result, undisturbed)


def test_every_step_is_a_place_to_resume_from(run_dir: Path, undisturbed) -> None:
    """Beside logs and evaluations, in the middle of an epoch, at its end."""
    kills = [f"kind: kill-worker, at_step: {step}, rank: 0" for step in (7, 10, 11, 20, 29)]
    done, result = train(run_dir, *kills, options=("--memory-every", "1", "--durable-every", "100", "--no-score"))
    assert len(done.events(StateRestored)) == 6
    assert_same(done, result, undisturbed)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("--workers", "2"), id="loader with workers"),
        pytest.param(("--stream", "--steps", "26"), id="stream without a length"),
        pytest.param(("--not-random",), id="batches passed over by their numbers"),
        pytest.param(("--steps", "26"), id="ends within an epoch"),
    ],
)
def test_other_ways_to_read_data(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    quiet = train(tmp_path / "quiet", arguments=arguments)
    done, result = train(tmp_path / "run", *KILLS, arguments=arguments)
    assert_same(done, result, quiet)


def test_a_stopped_training_goes_on_tomorrow(run_dir: Path, undisturbed) -> None:
    result = run_dir.with_suffix(".json")
    process = runs.start(run_dir, *SAVES, script=SCRIPT, arguments=("--result", str(result), "--step-s", "0.2"))
    runs.wait_for_step(run_dir, 5)
    process.send_signal(2)
    stopped = runs.finish(process, run_dir)
    assert stopped.code == 130, stopped.report
    assert stopped.events(JobStopped)
    done = runs.finish(runs.resume(run_dir), run_dir)
    assert done.code == 0, done.report
    assert_same(done, json.loads(result.read_text()), undisturbed)


def test_an_unmodified_trainer_resumes_from_its_own_checkpoint(run_dir: Path) -> None:
    """It is not restored behind its back, and what it does again is counted."""
    chaos = runs.write_chaos(run_dir.with_suffix(".yaml"), "kind: kill-worker, at_step: 17, rank: 1")
    result = run_dir.with_suffix(".json")
    arguments = ("--plain", "--result", str(result))
    done = runs.run(run_dir, "--chaos", str(chaos), script=SCRIPT, arguments=arguments)
    assert done.code == 0, done.report
    assert [event.restore_source for event in done.events(RecoveryDecided)] == ["script"]
    assert done.events(StateRestored) == [], "nothing was restored behind its back"
    steps = [entry["step"] for entry in json.loads(result.read_text())["log"] if "loss" in entry]
    assert steps == [7, 14, 21, 28]
    card = done.score()
    assert card["steps"] == 30
    assert 6 <= card["steps_redone"] <= 10, "from its checkpoint at step 11 to where it was killed"


def test_the_example_resumes_exactly(tmp_path: Path) -> None:
    chaos = runs.write_chaos(tmp_path / "chaos.yaml", KILLS[0], *NODE_LOSS)
    arguments = ("--steps", "30", "--output", str(tmp_path / "output"))
    quiet = runs.run(tmp_path / "quiet", *SAVES, script=EXAMPLE, arguments=arguments)
    shutil.rmtree(tmp_path / "output", ignore_errors=True)
    options = (*SAVES, "--spares", "1", "--chaos", str(chaos))
    done = runs.run(tmp_path / "run", *options, script=EXAMPLE, arguments=arguments)
    assert (quiet.code, done.code) == (0, 0), done.report
    assert done.losses() == quiet.losses()
    logged = [line for line in quiet.stdout.splitlines() if "'loss'" in line]
    assert len(logged) == 6
    assert set(logged) == {line for line in done.stdout.splitlines() if "'loss'" in line}
