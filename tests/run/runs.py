"""Real runs for the tests of the runtime: started as a user would, bounded in time, judged by their files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from dougong.backend.local.process import is_alive, pids_with_variable
from dougong.event import store
from dougong.event.kinds import Recorded
from dougong.telemetry.embedded import read as read_samples

SMALL = Path(__file__).parent / "scripts" / "small.py"
PLAIN = Path(__file__).parent / "scripts" / "plain.py"
TIMEOUT_S = 180.0


class Finished:
    """A run that has ended."""

    def __init__(self, run_dir: Path, *, code: int, stdout: str, stderr: str) -> None:
        self.run_dir = run_dir
        self.code = code
        self.stdout = stdout
        self.stderr = stderr

    def events(self, *kinds: type) -> list:
        return [record.event for record in self.records() if not kinds or isinstance(record.event, kinds)]

    def records(self) -> list[Recorded]:
        return list(store.read(self.run_dir / "events"))

    def losses(self, rank: int = 0) -> dict[int, float]:
        """The loss of each step on the final trajectory: of a step done again, the last one."""
        samples = read_samples(self.run_dir / "telemetry", f"loss/rank-{rank}")
        return dict(zip(samples.indices, samples.values, strict=True))

    def samples(self) -> dict[tuple[int, int], list[int]]:
        """The sample ids of each (step, rank) on the final trajectory."""
        found: dict[tuple[int, int], list[int]] = {}
        for path in sorted((self.run_dir / "ledger").glob("rank-*.jsonl")):
            rank = int(path.stem.removeprefix("rank-"))
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                found[entry["step"], rank] = entry["ids"]
        return found

    def score(self) -> dict:
        done = dougong("score", str(self.run_dir), "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    @property
    def report(self) -> str:
        """What a failing assertion should show."""
        logs = "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-1500:]}"
            for path in (self.run_dir / "logs").glob("*.log")
        )
        return f"exit {self.code}\n{self.stderr[-6000:]}\n{logs}"


def dougong(*arguments: str, cwd: Path | None = None, timeout_s: float = 30.0, env: Mapping[str, str] | None = None):
    """One short `dougong` command."""
    return subprocess.run(
        [sys.executable, "-m", "dougong.cli.main", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, **(env or {})},
        check=False,
    )


def start(run_dir: Path, *options: str, script: Path = SMALL, arguments: tuple[str, ...] = (), nodes: int = 2):
    """Start a run in the background; give it to `finish`."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    command = ["run", "--nodes", str(nodes), "--oversubscribe", "--run-dir", str(run_dir), *options, "--", str(script)]
    return _spawn(run_dir, (*command, *arguments))


def resume(run_dir: Path, *options: str):
    return _spawn(run_dir, ("run", "--resume", str(run_dir), *options))


def finish(process: subprocess.Popen[str], run_dir: Path, *, timeout_s: float = TIMEOUT_S) -> Finished:
    """Wait for the end of a run; kill all of it if it takes too long."""
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        stdout, stderr = process.communicate()
        end_all(run_dir)
        ended = Finished(run_dir, code=-1, stdout=stdout, stderr=stderr)
        raise AssertionError(f"the run did not end within {timeout_s} s\n{ended.report}") from None
    return Finished(run_dir, code=process.returncode, stdout=stdout, stderr=stderr)


def run(
    run_dir: Path, *options: str, script: Path = SMALL, arguments: tuple[str, ...] = (), nodes: int = 2
) -> Finished:
    return finish(start(run_dir, *options, script=script, arguments=arguments, nodes=nodes), run_dir)


def left_behind(run_dir: Path) -> list[int]:
    """Processes of the run that are still there, after a moment's grace."""
    deadline = time.monotonic() + 5.0
    while (alive := living(run_dir)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive


def living(run_dir: Path) -> list[int]:
    """Agents, zygotes and workers of the run, and what they started."""
    settings = json.loads((run_dir / "run.json").read_text())
    marks = [f"{settings['run_id']}:{node}" for node in (*settings["nodes"], *settings["spares"])]
    return [pid for mark in marks for pid in pids_with_variable("DOUGONG_NODE", mark) if is_alive(pid)]


def memory_left(run_dir: Path) -> list[Path]:
    run_id = json.loads((run_dir / "run.json").read_text())["run_id"]
    return list(Path("/dev/shm").glob(f"dougong-*-{run_id}/*"))


def end_all(run_dir: Path) -> None:
    """End every process of a run by pid."""
    if (run_dir / "run.json").exists():
        for pid in left_behind(run_dir):
            os.kill(pid, signal.SIGKILL)


def wait_for_step(run_dir: Path, step: int, *, timeout_s: float = 60.0) -> None:
    """Until the event log says that `step` is finished."""
    wait_for(lambda: _last_step(run_dir) >= step, timeout_s=timeout_s)


def wait_for(condition, *, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def write_chaos(path: Path, *faults: str, seed: int = 1) -> Path:
    path.write_text(f"seed: {seed}\nfaults:\n" + "".join(f"  - {{{fault}}}\n" for fault in faults))
    return path


def _last_step(run_dir: Path) -> int:
    if not (run_dir / "events").exists():
        return 0
    return max((getattr(record.event, "last_step", 0) or 0 for record in store.read(run_dir / "events")), default=0)


def _spawn(run_dir: Path, arguments: tuple[str, ...]):
    return subprocess.Popen(
        [sys.executable, "-m", "dougong.cli.main", *arguments],
        cwd=run_dir.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
