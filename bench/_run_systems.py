"""Start Dougong and its peers on the scripts of `bench/peers/`, bounded in time, and read what these wrote down.

Every launch has an id that all of its processes carry in their environment, so that nothing of it is left behind.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import msgspec
from _launch import DOUGONG, ROOT, TORCHRUN, running, sweep

PEERS = Path(os.environ.get("PEERS_DIR", ROOT / ".peers"))
SCRIPTS = ROOT / "bench" / "peers"
NUM_RANKS = int(os.environ.get("BENCH_RANKS", "2"))
DEVICE = os.environ.get("BENCH_DEVICE", "cpu")
VERSIONS = {"dlrover": "0.6.1", "nvrx": "0.4.1"}
_ID = "BENCH_ID"
_STAMP = re.compile(
    r"^(?:\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3})\] \[(?:WARNING|ERROR)|[WE](\d{4} \d\d:\d\d:\d\d\.\d{6}))",
    re.MULTILINE,
)


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `bench/peers/_records.py`."""

    kind: str
    name: str
    step: int
    begin_ns: int
    ns: int
    wall_ns: int
    pid: int
    rank: int = 0


class System(msgspec.Struct, frozen=True, kw_only=True):
    """A launcher with the script that is trained under it. `peer` = whose environment it needs; "" = ours."""

    name: str
    script: str
    method: str = ""
    peer: str = ""
    launcher: tuple[str, ...]

    @property
    def is_installed(self) -> bool:
        return not self.peer or (PEERS / self.peer / "ready").exists()

    @property
    def python(self) -> str:
        return str(PEERS / self.peer / "bin" / "python") if self.peer else sys.executable


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """One start of a system, where it keeps its files, and the launcher's process."""

    system: System
    directory: Path
    process: subprocess.Popen[bytes]

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    @property
    def log(self) -> str:
        path = self.directory / "launcher.log"
        return path.read_text(errors="replace") if path.exists() else ""


_SHAPE = ("--standalone", "--nproc-per-node", str(NUM_RANKS), "--max-restarts", "40")
_TORCHRUN = TORCHRUN[1:]
_DLROVER = ("-m", "dlrover.trainer.torch.main", "--standalone", "--nnodes=1", f"--nproc_per_node={NUM_RANKS}")
_NVRX = ("-m", "nvidia_resiliency_ext.fault_tolerance.launcher", "--ignore-missing-fault-tol-cfg", *_SHAPE)

# Where a fault comes every minute, more than the usual tenth of the time may go into copies on other nodes.
OFTEN_COPIED = ("--memory-every", "1", "--set", "save.peer_busy_ratio=0.5")

OURS = System(name="Dougong", script="dougong_attach.py", launcher=(*DOUGONG[1:], "--no-score", *_SHAPE))
TORCH_FILES = System(name="torch.save", script="torch_files.py", launcher=(*_TORCHRUN, *_SHAPE))
TORCHRUN_SAVING = msgspec.structs.replace(TORCH_FILES, name="torchrun")
DCP_SAVE = System(name="DCP save", script="dcp.py", method="save", launcher=(*_TORCHRUN, *_SHAPE))
DCP_ASYNC = System(name="DCP async_save", script="dcp.py", method="async", launcher=(*_TORCHRUN, *_SHAPE))
DCP_TUNED = System(name="DCP async_save, tuned", script="dcp.py", method="tuned", launcher=(*_TORCHRUN, *_SHAPE))
DLROVER_MEMORY = System(
    name="DLRover memory",
    script="dlrover_flash.py",
    method="memory",
    peer="dlrover",
    launcher=(*_DLROVER, "--max_restarts=40"),
)
DLROVER_DISK = msgspec.structs.replace(DLROVER_MEMORY, name="DLRover disk", method="disk")
DLROVER_RUN = msgspec.structs.replace(DLROVER_MEMORY, name="dlrover-run")
NVRX = System(name="NVRx ft_launcher", script="torch_files.py", peer="nvrx", launcher=_NVRX)


@contextmanager
def launched(
    system: System, arguments: Sequence[str], *, directory: Path, options: Sequence[str] = ()
) -> Iterator[Launch]:
    """The system on its script with `arguments`, its launcher with `options`; at the end nothing of it is left."""
    launch_id = f"bench{uuid.uuid4().hex[:10]}"
    records, checkpoints, run_dir = directory / "records", directory / "checkpoints", directory / "run"
    own = (*options, "--run-dir", str(run_dir)) if system is OURS else tuple(options)
    script = (str(SCRIPTS / system.script), "--records", str(records), "--checkpoints", str(checkpoints))
    method = ("--method", system.method) if system.method else ()
    device = () if DEVICE == "cpu" else ("--device", DEVICE)
    command = (system.python, *system.launcher, *own, *script, *method, *device, *arguments)
    # DLRover names its shared memory after the job
    environment = {_ID: launch_id, "ELASTIC_JOB_NAME": launch_id, "PYTHONWARNINGS": "ignore"}
    try:
        with running(command, log_path=directory / "launcher.log", environment=environment) as process:
            yield Launch(system=system, directory=directory, process=process)
    finally:
        if system is OURS:
            sweep(run_dir)
        _sweep(launch_id)


def records_of(directory: Path) -> tuple[Record, ...]:
    """All records of all ranks in the order of time. A line being written is left out."""
    found: list[Record] = []
    for path in sorted((directory / "records").glob("rank-*.jsonl")):
        rank = int(path.stem.removeprefix("rank-"))
        whole, _, _ = path.read_bytes().rpartition(b"\n")
        found += [
            msgspec.structs.replace(msgspec.json.decode(line, type=Record), rank=rank) for line in whole.splitlines()
        ]
    return tuple(sorted(found, key=lambda record: record.ns))


def wait_for_records(launch: Launch, *, limit_s: float) -> tuple[Record, ...]:
    """The records once the launcher has ended. Raises RuntimeError with its last words if it ends ill or too late."""
    try:
        code = launch.process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{launch.system.name} did not end within {limit_s:.0f} s\n{_last_words(launch)}") from None
    if code != 0:
        raise RuntimeError(f"{launch.system.name} ended with {code}\n{_last_words(launch)}")
    return records_of(launch.directory)


def first_said_ns(log: str, *, after_ns: int) -> int | None:
    """Wall time of the launcher's first warning after `after_ns`: when it had noticed. Reads both usual stamps."""
    for match in _STAMP.finditer(log):
        at_ns = _stamp_ns(match)
        if at_ns > after_ns:
            return at_ns
    return None


def load_1_min() -> float:
    return round(os.getloadavg()[0], 2)


def memory_floor_s(records: Sequence[Record]) -> list[float]:
    """Each round's slowest rank."""
    return slowest_s([record for record in records if record.kind == "floor"])


def slowest_s(records: Sequence[Record]) -> list[float]:
    """Of records that all ranks have for the same `step`: how long the slowest took, by step."""
    by_step: dict[int, float] = {}
    for record in records:
        took_s = (record.ns - record.begin_ns) / 1e9
        by_step[record.step] = max(took_s, by_step.get(record.step, 0.0))
    return [by_step[step] for step in sorted(by_step)]


def environment_variable(pid: int, name: str) -> str | None:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    mark = f"{name}=".encode()
    return next((variable[len(mark) :].decode() for variable in variables if variable.startswith(mark)), None)


def _sweep(launch_id: str) -> None:
    """What carries the id is ended, a launcher's orphans too, and its shared memory freed."""
    deadline_s = time.monotonic() + 10.0
    while time.monotonic() < deadline_s:
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        own = [pid for pid in pids if pid != os.getpid() and environment_variable(pid, _ID) == launch_id]
        if not own:
            break
        for pid in own:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)
    for path in Path("/dev/shm").glob(f"*{launch_id}*"):
        path.unlink(missing_ok=True)


def _stamp_ns(match: re.Match[str]) -> int:
    if match[1]:
        return round(datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S,%f").timestamp() * 1e9)
    said = datetime.strptime(f"{datetime.now().year}{match[2]}", "%Y%m%d %H:%M:%S.%f")
    return round(said.timestamp() * 1e9)


def _last_words(launch: Launch) -> str:
    return "\n".join(launch.log.splitlines()[-15:])


def options_of(arguments: Mapping[str, object]) -> tuple[str, ...]:
    """`{"saves": 3, "busy": True}` as command line options; False is left out."""
    words: list[str] = []
    for name, value in arguments.items():
        if value is False:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(str(value))
    return tuple(words)
