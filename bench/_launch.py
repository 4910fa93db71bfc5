"""Start `dougong run` and torchrun for a benchmark, bounded in time, and read what they and their scripts left."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from dougong.backend.local.nodes import NODE_VARIABLE
from dougong.event import store
from dougong.event.kinds import Event, Recorded
from dougong.run.settings import load_settings, run_directory

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "bench" / "scripts"
DOUGONG = (sys.executable, "-m", "dougong.cli.main", "run")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
INTERRUPT_S = 20.0

KindT = TypeVar("KindT", bound=Event)


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A step that a rank finished, as its script wrote it down. `time_ns` is monotonic, `wall_ns` since the epoch."""

    rank: int
    step: int
    pid: int
    time_ns: int
    wall_ns: int


@contextmanager
def running(
    command: Sequence[str], *, log_path: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """The command in a session of its own; at the end it is interrupted if it still runs, then killed."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("wb") as log:
        launcher = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**_environment(), **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield launcher
    finally:
        _end(launcher)


def wait(launcher: subprocess.Popen[bytes], *, limit_s: float) -> int | None:
    """The exit code, or None once `limit_s` is over."""
    try:
        return launcher.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return None


def read_marks(directory: Path) -> tuple[Mark, ...]:
    """All marks of all ranks, each rank's in the order they were written. A line being written is left out."""
    found: list[Mark] = []
    for path in sorted(directory.glob("rank-*.marks")):
        rank = int(path.stem.removeprefix("rank-"))
        whole, _, _ = path.read_text().rpartition("\n")
        for line in whole.splitlines():
            step, pid, time_ns, wall_ns = (int(word) for word in line.split())
            found.append(Mark(rank=rank, step=step, pid=pid, time_ns=time_ns, wall_ns=wall_ns))
    return tuple(found)


def events_of(run_dir: Path) -> tuple[Recorded, ...]:
    """All events of a run in the one order over all streams; none if the run never began to write."""
    directory = run_dir / "events"
    return tuple(store.read(directory)) if directory.is_dir() else ()


def of_kind(records: Sequence[Recorded], kind: type[KindT]) -> tuple[tuple[int, KindT], ...]:
    """(wall time in ns, event) of one kind."""
    return tuple((record.time_ns, record.event) for record in records if isinstance(record.event, kind))


def processes_of(run_dir: Path) -> tuple[tuple[int, str], ...]:
    """(pid, command line) of all that lives and belongs to this run: on one of its nodes, or its controller."""
    run_id = run_id_of(run_dir)
    if run_id is None:
        return ()
    mark, name = f"{NODE_VARIABLE}={run_id}:".encode(), str(run_dir.absolute()).encode()
    found: list[tuple[int, str]] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            variables = (entry / "environ").read_bytes().split(b"\0")
            is_dead = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "ZX"
        except OSError:
            continue
        is_controller = b"dougong.cli.controller" in words and name in words
        if not is_dead and (is_controller or any(variable.startswith(mark) for variable in variables)):
            found.append((int(entry.name), b" ".join(words).decode(errors="replace").strip()))
    return tuple(found)


def shared_memory_of(run_dir: Path) -> tuple[Path, ...]:
    """What a run has in the machine's shared memory."""
    run_id = run_id_of(run_dir)
    return () if run_id is None else tuple(sorted(Path("/dev/shm").glob(f"*{run_id}*")))


def sweep(run_dir: Path) -> None:
    """End what a failed run left running, and free its memory."""
    for pid, _ in processes_of(run_dir):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    for path in shared_memory_of(run_dir):
        shutil.rmtree(path, ignore_errors=True)


def run_id_of(run_dir: Path) -> str | None:
    directory = run_directory(run_dir)
    return load_settings(directory).run_id if directory.settings.exists() else None


def machine() -> dict[str, object]:
    """Where a figure comes from: it means little without."""
    import torch

    return {
        "num_cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "load_average_at_start": round(os.getloadavg()[0], 2),
    }


def write_result(path: Path, result: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns for people; the first is flush left."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    for row in (header, ["-" * width for width in widths], *rows):
        others = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        print("  ".join((row[0].ljust(widths[0]), *others)))


def spread(values: Sequence[float]) -> list[float]:
    """[smallest, largest], rounded to a tenth of a millisecond; empty without values."""
    return [round(min(values), 4), round(max(values), 4)] if values else []


def _environment() -> dict[str, str]:
    """One thread a rank and the loopback for both. Without the last, half of torchrun's restarts on one node never come
    back: the new attempt reads peer addresses that the old one left in the store it shares with its agent."""
    fixed = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return {**os.environ, **fixed}


def _end(launcher: subprocess.Popen[bytes]) -> None:
    if launcher.poll() is not None:
        return
    launcher.send_signal(signal.SIGINT)
    deadline_s = time.monotonic() + INTERRUPT_S
    while launcher.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.05)
    if launcher.poll() is None:
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
