"""Where a run keeps its files: the run directory, and each node's directory in shared memory."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import msgspec


class RunDirectory(msgspec.Struct, frozen=True):
    """The durable side of a run. All of it can be copied or shared between nodes."""

    root: Path

    @property
    def settings(self) -> Path:
        """What the run was started with (`RunSettings`, JSON)."""
        return self.root / "run.json"

    @property
    def token(self) -> Path:
        """The per-run token, readable by its owner only."""
        return self.root / "token"

    @property
    def address(self) -> Path:
        """Where the controller listens now."""
        return self.root / "controller.json"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def events(self) -> Path:
        return self.root / "events"

    @property
    def telemetry(self) -> Path:
        return self.root / "telemetry"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger"

    @property
    def evidence(self) -> Path:
        return self.root / "evidence"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def tracking(self) -> Path:
        """Experiment logs of the script, TensorBoard's for example."""
        return self.root / "tracking"


class NodeDirectory(msgspec.Struct, frozen=True):
    """The volatile side of one node: heartbeat pages, memory checkpoints, letters. Lost with the node."""

    root: Path

    def page(self, rank: int) -> Path:
        return self.root / f"rank-{rank}.page"

    def snapshot(self, rank: int) -> Path:
        """Prefix of the files of a rank's memory checkpoints."""
        return self.root / f"rank-{rank}"

    def outbox(self, rank: int) -> Path:
        return self.root / f"rank-{rank}.out"

    def inbox(self, rank: int) -> Path:
        return self.root / f"rank-{rank}.in"

    def copy(self, rank: int, *, owner: str) -> Path:
        """Prefix of the files of the copies of a rank's memory checkpoints, kept for the node where it ran."""
        return self.copies / owner.replace("/", "~") / f"rank-{rank}"

    @property
    def copies(self) -> Path:
        """Copies of memory checkpoints, a folder for each node whose ranks they are of."""
        return self.root / "copies"

    def flight(self, rank: int) -> Path:
        """The rank's record of its last collectives, written when asked for."""
        return self.root / f"rank-{rank}.flight.json"

    @property
    def preflight_box(self) -> Path:
        """Where the tests of a pre-flight leave their answers."""
        return self.root / "preflight.out"

    @property
    def workers(self) -> Path:
        """The running workers, for an agent that comes back."""
        return self.root / "workers.json"


def node_directory(run_id: str, component: str, *, memory_root: Path) -> NodeDirectory:
    """The node's directory; short, since paths in shared memory meet length limits."""
    digest = hashlib.sha256(component.encode()).hexdigest()[:6]
    name = component.rsplit("/", 1)[-1]
    return NodeDirectory(memory_root / f"dougong-{os.getuid()}-{run_id}" / f"{name}-{digest}")


def forget_memory(run_id: str, *, memory_root: Path) -> None:
    """Give back what a finished run still holds in this host's shared memory, under whatever node's name."""
    shutil.rmtree(memory_root / f"dougong-{os.getuid()}-{run_id}", ignore_errors=True)


def write_atomically(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Replace `path` by `content` so that a reader sees the old or the new, and a crash leaves one of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        _write_synced(staging, content, mode=mode)
        os.replace(staging, path)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Have the names in a local directory on disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_synced(path: Path, content: bytes, *, mode: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)
