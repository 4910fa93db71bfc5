"""Each fault with real processes. After each: the losses of the undisturbed run, step for step and bit for bit, and
every sample once."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from dougong.event.kinds import (
    AgentReturned,
    CheckpointRejected,
    CheckpointSaved,
    ControllerStarted,
    FaultInjected,
    GenerationStarted,
    JobFailed,
    JobFinished,
    JobResumed,
    JobStopped,
    NodeLost,
    RecoveryDecided,
    StateRestored,
    WebhookSent,
    WorkerLost,
)
from tests.run import runs

pytest.importorskip("torch", reason="torch is not installed (extra: train)")
pytestmark = pytest.mark.processes

SAVES = ("--memory-every", "4", "--durable-every", "20")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> runs.Finished:
    done = runs.run(tmp_path_factory.mktemp("undisturbed") / "run", *SAVES)
    assert done.code == 0, done.report
    assert sorted(done.losses()) == list(range(1, 61))
    return done


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "run"
    yield path
    runs.end_all(path)


def disturbed(run_dir: Path, *faults: str, spares: int = 0, num_copies: int = 1) -> runs.Finished:
    chaos = runs.write_chaos(run_dir.parent / "chaos.yaml", *faults)
    copies = ("--set", f"save.peer_copies={num_copies}")
    done = runs.run(run_dir, *SAVES, *copies, "--spares", str(spares), "--chaos", str(chaos))
    assert done.code == 0, done.report
    return done


def assert_same(done: runs.Finished, undisturbed: runs.Finished) -> None:
    """The proof that nothing was lost: losses bitwise, samples exactly, nothing left behind."""
    for rank in (0, 1):
        assert done.losses(rank) == undisturbed.losses(rank), done.report
    assert done.samples() == undisturbed.samples(), done.report
    assert runs.left_behind(done.run_dir) == []
    assert runs.memory_left(done.run_dir) == []
    assert done.events(JobFinished)


def test_a_killed_worker_is_replaced_from_memory(run_dir: Path, undisturbed: runs.Finished) -> None:
    done = disturbed(run_dir, "kind: kill-worker, at_step: 15, rank: 1")
    assert_same(done, undisturbed)
    (lost,) = done.events(WorkerLost)
    assert (lost.rank, lost.cause_class) == (1, "crash")
    assert "SIGKILL" in lost.detail
    (decided,) = done.events(RecoveryDecided)
    assert decided.restore_source == "memory"
    assert len(done.events(JobResumed)) == 1
    assert done.score()["interruptions"] == 1


def test_a_stopped_worker_is_found_and_replaced(run_dir: Path, undisturbed: runs.Finished) -> None:
    done = disturbed(run_dir, "kind: stop-worker, at_step: 15, rank: 0")
    assert_same(done, undisturbed)
    (lost,) = done.events(WorkerLost)
    assert (lost.rank, lost.cause_class) == (0, "stopped")
    assert (run_dir / lost.evidence / "stacks.txt").read_text().count("=== rank") == 2


def test_a_live_hang_is_found_named_and_ended(run_dir: Path, undisturbed: runs.Finished) -> None:
    done = disturbed(run_dir, "kind: hang-worker, at_step: 15, rank: 1")
    assert_same(done, undisturbed)
    (lost,) = done.events(WorkerLost)
    assert (lost.rank, lost.cause_class) == (1, "hang"), "the rank that holds the lock, not the one that waits for it"
    assert "do_control_fault" in (run_dir / lost.evidence / "stacks.txt").read_text()


def test_an_exception_in_one_rank_is_the_cause_not_the_broken_collective(
    run_dir: Path, undisturbed: runs.Finished
) -> None:
    done = disturbed(run_dir, "kind: raise-worker, at_step: 15, rank: 1")
    assert_same(done, undisturbed)
    (lost,) = done.events(WorkerLost)
    assert (lost.rank, lost.cause_class) == (1, "exception")
    assert "chaos: an exception was asked for" in lost.traceback


def test_a_lost_node_is_replaced_by_a_spare_from_the_durable_checkpoint(
    run_dir: Path, undisturbed: runs.Finished
) -> None:
    done = disturbed(run_dir, "kind: kill-node, at_step: 30, node: local/rack-01/node-02", spares=1, num_copies=0)
    assert_same(done, undisturbed)
    assert [event.component for event in done.events(NodeLost)] == ["local/rack-01/node-02"]
    (decided,) = done.events(RecoveryDecided)
    assert (decided.rung, decided.restore_source, decided.restore_step) == ("replaced-node", "durable", 20)
    last = done.events(GenerationStarted)[-1]
    assert [placed.component for placed in last.placement] == ["local/rack-01/node-01", "local/rack-01/node-03"]


def test_a_lost_node_without_a_spare_ends_the_job_resumably(run_dir: Path, undisturbed: runs.Finished) -> None:
    chaos = runs.write_chaos(run_dir.parent / "chaos.yaml", "kind: kill-node, at_step: 30, node: local/rack-01/node-02")
    done = runs.run(run_dir, *SAVES, "--chaos", str(chaos))
    assert done.code == 1, done.report
    assert "no spare left" in done.events(JobFailed)[0].reason
    again = runs.finish(runs.resume(run_dir), run_dir)
    assert again.code == 0, again.report
    assert_same(again, undisturbed)


def test_a_killed_controller_is_replaced_while_the_workers_run_on(run_dir: Path, undisturbed: runs.Finished) -> None:
    done = disturbed(run_dir, "kind: kill-controller, at_step: 15")
    assert_same(done, undisturbed)
    assert [event.is_restart for event in done.events(ControllerStarted)] == [False, True]
    assert len(done.events(GenerationStarted)) == 1, "no rank was started again"


def test_a_killed_agent_is_replaced_while_the_workers_run_on(run_dir: Path, undisturbed: runs.Finished) -> None:
    done = disturbed(run_dir, "kind: kill-agent, at_step: 15, node: local/rack-01/node-01")
    assert_same(done, undisturbed)
    assert [event.num_workers for event in done.events(AgentReturned)] == [1]
    assert len(done.events(GenerationStarted)) == 1, "no rank was started again"


def test_a_worker_lost_after_its_agent_was_replaced_is_still_found(run_dir: Path, undisturbed: runs.Finished) -> None:
    done = disturbed(
        run_dir,
        "kind: kill-agent, at_step: 10, node: local/rack-01/node-01",
        "kind: kill-controller, at_step: 20",
        "kind: kill-worker, at_step: 35, rank: 0",
    )
    assert_same(done, undisturbed)
    assert [event.rank for event in done.events(WorkerLost)] == [0]


def test_a_flipped_byte_in_a_durable_checkpoint_is_found_and_an_older_one_used(
    run_dir: Path, undisturbed: runs.Finished
) -> None:
    done = disturbed(
        run_dir,
        "kind: corrupt-checkpoint, at_step: 44",
        "kind: kill-node, at_step: 46, node: local/rack-01/node-01",
        spares=1,
        num_copies=0,
    )
    assert_same(done, undisturbed)
    rejected = {event.step: event.reason for event in done.events(CheckpointRejected)}
    assert 40 in rejected
    assert any(word in rejected[40] for word in ("checksum", "manifest.json"))
    assert done.events(StateRestored)[-1].step == 20


def test_a_half_written_checkpoint_is_never_used(run_dir: Path, undisturbed: runs.Finished) -> None:
    done = disturbed(
        run_dir,
        "kind: tear-checkpoint, at_step: 40, rank: 1",
        "kind: kill-node, at_step: 48, node: local/rack-01/node-01",
        spares=1,
        num_copies=0,
    )
    assert_same(done, undisturbed)
    injected = {event.fault for event in done.events(FaultInjected)}
    assert "tear-checkpoint" in injected, done.report
    saved = {(event.step, event.generation) for event in done.events(CheckpointSaved) if event.tier == "durable"}
    restored = [event for event in done.events(StateRestored) if event.source == "durable"]
    assert all(any(step == event.step for step, _ in saved) for event in restored)


def test_a_script_that_always_fails_is_given_up_with_its_first_traceback(run_dir: Path) -> None:
    done = runs.run(run_dir, *SAVES, arguments=("--fail-at", "1"))
    assert done.code == 1
    (failed,) = done.events(JobFailed)
    assert "3 failures in a row without one new step" in failed.reason
    assert "ValueError: this script always fails at step 1" in failed.traceback
    assert "runpy" not in failed.traceback, "only the user's frames"
    assert "this script always fails at step 1" in done.stderr
    assert [event.backoff_s for event in done.events(RecoveryDecided)] == [0.0, 1.0]
    assert runs.left_behind(run_dir) == []


def test_the_first_failing_rank_is_named_although_others_fail_after_it(run_dir: Path) -> None:
    done = runs.run(
        run_dir,
        "--max-restarts",
        "0",
        script=runs.PLAIN,
        arguments=("--checkpoint", str(run_dir.parent / "own.pt"), "--fail-rank", "1"),
    )
    assert done.code == 1
    assert "rank 1 cannot start" in done.events(JobFailed)[0].traceback
    assert [event.rank for event in done.events(WorkerLost)] == [1]


def test_ctrl_c_saves_and_leaves_a_run_that_goes_on_exactly(run_dir: Path, undisturbed: runs.Finished) -> None:
    process = runs.start(run_dir, *SAVES)
    runs.wait_for_step(run_dir, 12)
    process.send_signal(signal.SIGINT)
    stopped = runs.finish(process, run_dir)
    assert stopped.code == 130, stopped.report
    (event,) = stopped.events(JobStopped)
    assert "go on with: dougong run --resume" in stopped.stderr
    assert runs.left_behind(run_dir) == []
    assert [s.step for s in stopped.events(CheckpointSaved) if s.tier == "durable"][-1] == event.step
    again = runs.finish(runs.resume(run_dir), run_dir)
    assert again.code == 0, again.report
    assert again.events(StateRestored)[-1].step == event.step, "nothing is done twice"
    assert_same(again, undisturbed)
    assert again.score()["interruptions"] == 0


def test_a_killed_launcher_leaves_no_process_and_a_resumable_run(run_dir: Path, undisturbed: runs.Finished) -> None:
    process = runs.start(run_dir, *SAVES)
    runs.wait_for_step(run_dir, 12)
    process.kill()
    process.communicate()
    runs.wait_for(lambda: not runs.left_behind(run_dir), timeout_s=60)
    again = runs.finish(runs.resume(run_dir), run_dir)
    assert again.code == 0, again.report
    assert_same(again, undisturbed)


def test_launcher_and_controller_killed_at_once_leave_a_resumable_run(
    run_dir: Path, undisturbed: runs.Finished
) -> None:
    process = runs.start(run_dir, *SAVES)
    runs.wait_for_step(run_dir, 12)
    controller = runs_controller_pid(run_dir)
    process.kill()
    os.kill(controller, signal.SIGKILL)
    process.communicate()
    again = runs.finish(runs.resume(run_dir), run_dir)
    assert again.code == 0, again.report
    assert_same(again, undisturbed)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("--slow-first", "5"), id="a long first step"),
        pytest.param(("--evaluate", "4"), id="an evaluation"),
        pytest.param(("--save-sleep", "4"), id="a save that sleeps"),
        pytest.param(("--save-disk", "4"), id="a save that writes"),
    ],
)
def test_no_false_alarm(run_dir: Path, arguments: tuple[str, ...]) -> None:
    done = runs.run(run_dir, *SAVES, arguments=("--steps", "30", *arguments))
    assert done.code == 0, done.report
    assert done.events(WorkerLost) == [], done.report


def test_an_unmodified_torchrun_script_resumes_from_its_own_checkpoint(run_dir: Path) -> None:
    own = run_dir.parent / "own.pt"
    chaos = runs.write_chaos(run_dir.parent / "chaos.yaml", "kind: kill-worker, at_step: 40, rank: 1")
    done = runs.run(
        run_dir, "--chaos", str(chaos), script=runs.PLAIN, arguments=("--steps", "150", "--checkpoint", str(own))
    )
    assert done.code == 0, done.report
    quiet = runs.run(
        run_dir.with_name("quiet"),
        script=runs.PLAIN,
        arguments=("--steps", "150", "--checkpoint", str(own.with_name("b.pt"))),
    )
    weight = quiet.stdout.split("weight ")[1].split()[0]
    assert f"weight {weight}" in done.stdout, "the same result as without the fault"
    assert "from 0" not in done.stdout, "it loaded its own checkpoint"
    assert done.events(RecoveryDecided)[0].restore_source == "script"
    assert done.events(StateRestored) == [], "nothing was restored behind its back"


def runs_controller_pid(run_dir: Path) -> int:
    return [event.pid for event in runs.Finished(run_dir, code=0, stdout="", stderr="").events(ControllerStarted)][-1]


def test_an_interruption_is_told_to_the_webhook(run_dir: Path) -> None:
    heard: list[dict[str, object]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Keep the test's output clean."""

    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        chaos = runs.write_chaos(run_dir.parent / "chaos.yaml", "kind: kill-worker, at_step: 10, rank: 0")
        url = f"http://127.0.0.1:{server.server_port}/hook"
        done = runs.run(run_dir, *SAVES, "--chaos", str(chaos), "--webhook", url, arguments=("--steps", "20"))
        server.shutdown()
    assert done.code == 0, done.report
    assert [(told["kind"], told["rank"]) for told in heard] == [("WorkerLost", 0)]
    assert [event.status for event in done.events(WebhookSent)] == [204]


def test_a_second_launcher_on_the_same_run_is_refused(run_dir: Path) -> None:
    process = runs.start(run_dir, *SAVES)
    runs.wait_for_step(run_dir, 5)
    second = runs.dougong("run", "--resume", str(run_dir))
    assert second.returncode == 2
    assert "is going on already" in second.stderr
    done = runs.finish(process, run_dir)
    assert done.code == 0, done.report
