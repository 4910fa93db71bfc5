"""Scripts that end, or do not, in ways that a launcher easily gets wrong."""

from __future__ import annotations

import gzip
import signal
from pathlib import Path

from dougong.backend.local.process import is_alive
from dougong.event import kinds
from tests.run.runs import finish, left_behind, memory_left, resume, run, start, wait_for, wait_for_step


def script(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "script.py"
    path.write_text(text)
    return path


def test_threads_and_exit_functions_of_a_script_run_to_their_end(tmp_path: Path):
    text = (
        "import atexit, threading, time\n"
        "atexit.register(lambda: print('at exit'))\n"
        "threading.Thread(target=lambda: (time.sleep(0.5), print('thread'))).start()\n"
    )
    ended = run(tmp_path / "r", "--no-score", script=script(tmp_path, text), nodes=1)
    log = (tmp_path / "r" / "logs" / "rank-0.log").read_text()
    assert ended.code == 0 and "thread" in log and "at exit" in log
    assert left_behind(tmp_path / "r") == [] and memory_left(tmp_path / "r") == []


def test_a_thread_inside_torch_at_the_end_of_a_script_is_not_a_crash(tmp_path: Path):
    """Taking the interpreter apart ends such a thread in the middle of C++, which aborts the process."""
    text = (
        "import builtins, gzip, sys, threading, time, torch\n"
        "ones = torch.ones(2000, 2000)\n"
        "def work():\n"
        "    while True: torch.mm(ones, ones)\n"
        "for _ in range(2): threading.Thread(target=work, daemon=True).start()\n"
        "builtins.left_open = open(sys.argv[1], 'w')\n"
        "builtins.left_open.write('flushed')\n"
        "builtins.archive = gzip.open(sys.argv[1] + '.gz', 'wt')\n"
        "builtins.archive.write('ended')\n"
        "time.sleep(0.5)\n"
    )
    arguments = (str(tmp_path / "open.txt"),)
    ended = run(tmp_path / "r", "--no-score", script=script(tmp_path, text), arguments=arguments, nodes=1)
    assert ended.code == 0 and ended.events(kinds.WorkerLost) == [], ended.report
    assert (tmp_path / "open.txt").read_text() == "flushed"
    assert gzip.decompress((tmp_path / "open.txt.gz").read_bytes()) == b"ended"


def test_a_group_is_not_taken_apart_at_the_end_of_a_script(tmp_path: Path):
    """gloo's destructor may wait for a thread that waits for the interpreter, which the destructor holds."""
    text = (
        "import torch, torch.distributed as dist, dougong\n"
        "from dougong.run import group\n"
        "def main():\n"
        "    dist.init_process_group('gloo')\n"
        "    own = dist.distributed_c10d._get_default_group()\n"
        "    model = torch.nn.Linear(1, 1)\n"
        "    for step in dougong.attach(model=model).steps(until=0): pass\n"
        "    dist.destroy_process_group()\n"
        "    assert group._kept == [own]\n"
        "main()\n"
    )
    ended = run(tmp_path / "r", "--no-score", script=script(tmp_path, text), nodes=2)
    assert ended.code == 0 and ended.events(kinds.WorkerLost) == [], ended.report


def test_what_a_killed_worker_had_started_is_ended_with_it(tmp_path: Path):
    text = (
        "import os, subprocess\n"
        "child = subprocess.Popen(['sleep', '300'])\n"
        "print('child', child.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    ended = run(tmp_path / "r", "--no-score", "--max-restarts", "0", script=script(tmp_path, text), nodes=1)
    log = (tmp_path / "r" / "logs" / "rank-0.log").read_text()
    children = [int(line.split()[1]) for line in log.splitlines() if line.startswith("child")]
    assert ended.code == 1 and len(children) == 1
    assert not any(is_alive(pid) for pid in children)


def test_an_interrupt_before_the_agents_are_there_leaves_no_process(tmp_path: Path):
    process = start(tmp_path / "r", "--no-score")
    wait_for(lambda: (tmp_path / "r" / "controller.json").exists())
    process.send_signal(signal.SIGINT)
    ended = finish(process, tmp_path / "r")
    assert ended.code == 130, ended.report
    assert left_behind(tmp_path / "r") == [] and memory_left(tmp_path / "r") == []


def test_a_resume_right_after_its_launcher_was_killed_waits_for_the_controller(tmp_path: Path):
    process = start(tmp_path / "r", "--no-score", arguments=("--steps", "60"))
    wait_for_step(tmp_path / "r", 5)
    process.kill()
    process.communicate()
    ended = finish(resume(tmp_path / "r", "--no-score"), tmp_path / "r")
    assert ended.code == 0, ended.report
    assert ended.events(kinds.WorkerLost) == []
    assert sorted(ended.losses()) == list(range(1, 61))


def test_garbage_among_the_letters_and_checkpoints_of_a_node_is_passed_over(tmp_path: Path):
    process = start(tmp_path / "r", "--no-score", arguments=("--steps", "40"))
    wait_for_step(tmp_path / "r", 3)
    for node in memory_left(tmp_path / "r"):
        (node / "rank-x.commit").write_text("?")
        for box in (*node.glob("rank-*.out"), *node.glob("rank-*.in")):
            (box / "0-garbage").write_bytes(b"\xff" * 99)
            (box / "0-directory").mkdir()
    ended = finish(process, tmp_path / "r")
    assert ended.code == 0, ended.report
    assert ended.events(kinds.WorkerLost, kinds.AgentLost) == []


def test_a_run_whose_report_cannot_be_written_ends_as_its_job_did(tmp_path: Path):
    process = start(tmp_path / "r", "--no-score", script=script(tmp_path, "import time; time.sleep(1)"), nodes=1)
    wait_for(lambda: (tmp_path / "r" / "controller.json").exists())
    (tmp_path / "r" / "report.html").mkdir()
    ended = finish(process, tmp_path / "r")
    assert ended.code == 0 and "warning:" in ended.stderr, ended.report


def test_steps_that_are_not_entered_and_a_second_attach_are_told(tmp_path: Path):
    text = (
        "import sys, torch, dougong\n"
        "model = torch.nn.Linear(1, 1)\n"
        "job = dougong.attach(model=model)\n"
        "if 'twice' in sys.argv: dougong.attach(model=model)\n"
        "for step in job.steps(until=2): pass\n"
    )
    path = script(tmp_path, text)
    for name, words in (("once", "was not entered"), ("twice", "called twice")):
        options = ("--no-score", "--max-restarts", "0")
        ended = run(tmp_path / name, *options, script=path, arguments=(name,), nodes=1)
        lost = ended.events(kinds.WorkerLost)
        assert ended.code == 1 and words in lost[0].detail, ended.report
