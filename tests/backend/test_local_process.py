from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dougong.backend.local import process


@contextmanager
def running(code: str, *, name: str = "") -> Iterator[subprocess.Popen[str]]:
    """A Python process that has said it is ready; it is ended afterwards."""
    environment = {**os.environ, "DOUGONG_TEST": name}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, env=environment
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            yield child
        finally:
            for pid in (*process.descendants(child.pid), child.pid):
                process.kill(pid)


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def state_of(pid: int) -> str:
    found = process.read(pid)
    assert found is not None
    return found.state


READY = "print('ready', flush=True)\n"
WAITING = READY + "input()"


def test_a_running_process_is_alive_and_the_one_that_started_then() -> None:
    with running(WAITING) as child:
        started = process.start_ticks(child.pid)
        assert started is not None
        assert process.is_alive(child.pid)
        assert process.is_alive(child.pid, start_ticks_expected=started)


def test_a_pid_that_was_given_to_another_process_is_not_the_one_expected() -> None:
    with running(WAITING) as child:
        started = process.start_ticks(child.pid)
        assert started is not None
        assert not process.is_alive(child.pid, start_ticks_expected=started - 1)


def test_a_zombie_is_not_alive() -> None:
    with running(WAITING) as child:
        child.kill()
        wait_until(lambda: Path(f"/proc/{child.pid}/stat").read_text().rsplit(")")[1].split()[0] == "Z")
        assert not process.is_alive(child.pid)


def test_a_process_that_is_gone_has_no_reading() -> None:
    with running(WAITING) as child:
        pid = child.pid
    assert not process.is_alive(pid)
    assert process.read(pid) is None and process.start_ticks(pid) is None
    assert process.descendants(pid) == ()
    process.kill(pid)


def test_a_name_with_brackets_and_blanks_does_not_confuse_the_reading() -> None:
    rename = "open('/proc/self/comm', 'w').write(') S 1 (')\n"
    with running(rename + WAITING) as child:
        wait_until(lambda: state_of(child.pid) == "S")
        assert process.start_ticks(child.pid) == int(Path(f"/proc/{child.pid}/stat").read_text().split()[-31])


def test_a_stopped_process_is_in_state_t_until_it_is_continued() -> None:
    with running(WAITING) as child:
        process.kill(child.pid, signal.SIGSTOP)
        wait_until(lambda: state_of(child.pid) == "T")
        process.kill(child.pid, signal.SIGCONT)
        wait_until(lambda: state_of(child.pid) == "S")


def test_a_busy_process_uses_the_cpu_and_a_waiting_one_does_not() -> None:
    def grows(pid: int, by_ticks: int) -> bool:
        found = process.read(pid)
        assert found is not None
        return found.cpu_ticks >= by_ticks

    with running(READY + "while True: pass") as busy, running(WAITING) as waiting:
        before = process.read(waiting.pid)
        wait_until(lambda: grows(busy.pid, 20))
        after = process.read(waiting.pid)
    assert before is not None and after is not None
    assert after.cpu_ticks - before.cpu_ticks <= 2


def test_a_row_of_short_children_counts_as_work() -> None:
    """A save that calls a compressor for each file spends no time in a process that lives on."""
    code = READY + (
        "import subprocess, sys\n"
        "for _ in range(3): subprocess.run([sys.executable, '-c', 'sum(range(3_000_000))'])\n"
        "print('done', flush=True); input()"
    )
    with running(code) as child:
        assert child.stdout is not None
        before = process.read(child.pid)
        assert child.stdout.readline() == "done\n"
        after = process.read(child.pid)
    assert before is not None and after is not None
    assert after.cpu_ticks - before.cpu_ticks >= 10


def test_what_a_process_and_its_children_write_is_counted() -> None:
    with running(READY + "open('/dev/null', 'wb').write(bytes(2**20)); print('done', flush=True); input()") as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "done\n"
        found = process.read(child.pid)
    if not Path("/proc/self/io").exists():
        pytest.skip("this kernel does not count")
    assert found is not None and found.io_bytes >= 2**20


def test_a_sleep_on_a_timer_is_told_from_waiting_for_something() -> None:
    def is_on_timer(pid: int) -> bool:
        found = process.read(pid)
        assert found is not None
        return found.is_on_timer

    try:
        Path("/proc/self/syscall").read_text()
    except OSError:
        pytest.skip("this kernel does not tell the system call")
    with running(READY + "import time; time.sleep(60)") as sleeping, running(WAITING) as waiting:
        wait_until(lambda: is_on_timer(sleeping.pid))
        assert not is_on_timer(waiting.pid)


FAMILY = """
import subprocess, sys, threading
INNER = "import subprocess; c = subprocess.Popen(['sleep', '60']); print(c.pid, flush=True); c.wait()"
def start():
    global child
    child = subprocess.Popen([sys.executable, "-c", INNER], stdout=subprocess.PIPE, text=True)
thread = threading.Thread(target=start)
thread.start()
thread.join()
grandchild = child.stdout.readline().strip()
print("ready", flush=True)
print(child.pid, grandchild, flush=True)
input()
"""


def test_descendants_are_found_parents_first_also_those_of_other_threads() -> None:
    with running(FAMILY) as parent:
        assert parent.stdout is not None
        child, grandchild = map(int, parent.stdout.readline().split())
        assert process.descendants(parent.pid) == (child, grandchild)


def test_processes_are_found_by_a_mark_in_their_environment_with_what_they_start() -> None:
    start_one = "import subprocess; c = subprocess.Popen(['sleep', '60'])\n"
    with running(start_one + WAITING, name="a:n1") as marked, running(WAITING, name="a:n11"):
        found = process.pids_with_variable("DOUGONG_TEST", "a:n1")
        assert sorted(found) == sorted((marked.pid, *process.descendants(marked.pid)))
        assert len(found) == 2
    assert process.pids_with_variable("DOUGONG_TEST", "a:n1") == ()
