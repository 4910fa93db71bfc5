"""Small file systems on which a sequence of faults may fill the disk and the memory, and harm nobody else."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from dougong.backend.local.networks import check_networks
from dougong.errors import UserError
from dougong.spec.chaos import FaultKind

DISK_BYTES = 64 * 2**20
MEMORY_BYTES = 64 * 2**20


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """Where one sequence at a time keeps its checkpoints; None = beside the run, on the machine's own disk."""

    disk: Path | None = None
    memory: Path | None = None

    @property
    def options(self) -> tuple[str, ...]:
        """What `dougong run` is told of it."""
        if self.disk is None or self.memory is None:
            return ()
        return ("--checkpoint-dir", str(self.disk / "checkpoints"), "--set", f"save.memory_root={self.memory}")

    def clean(self) -> None:
        """Leave both empty, whatever the sequence did to them."""
        if self.disk is None or self.memory is None:
            return
        checkpoints = self.disk / "checkpoints"
        while os.path.ismount(checkpoints):
            _do("umount", "--lazy", str(checkpoints))
        shutil.rmtree(checkpoints, ignore_errors=True)
        for path in self.memory.iterdir():
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


@contextmanager
def slot(directory: Path) -> Iterator[Slot]:
    """An ext4 of 64 MiB in a file and a tmpfs of 64 MiB, if this user may mount them."""
    if impossible():
        yield Slot()
        return
    disk, memory, image = directory / "disk", directory / "memory", directory / "disk.img"
    for path in (disk, memory):
        path.mkdir(parents=True, exist_ok=True)
        while os.path.ismount(path):
            _do("umount", "--lazy", str(path))
    image.unlink(missing_ok=True)
    _do("fallocate", "-l", str(DISK_BYTES), str(image))
    _do("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
    _do("mount", "-o", "loop", str(image), str(disk))
    _do("mount", "-t", "tmpfs", "-o", f"size={MEMORY_BYTES},mode=1777", "tmpfs", str(memory))
    made = Slot(disk=disk, memory=memory)
    try:
        yield made
    finally:
        made.clean()
        for path in (disk, memory):
            _do("umount", "--lazy", str(path))
        image.unlink(missing_ok=True)


def impossible() -> dict[FaultKind, str]:
    """The kinds that this machine does not allow, and why."""
    found: dict[FaultKind, str] = {}
    tools = ("mount", "umount", "fallocate", "mkfs.ext4")
    lacking = [name for name in tools if shutil.which(name) is None]
    if os.geteuid() != 0 or lacking:
        reason = f"{', '.join(lacking)} not found" if lacking else "not root"
        found |= {"fill-disk": reason, "read-only-disk": reason, "fill-shm": reason}
    try:
        check_networks()
    except UserError as error:
        found["cut-network"] = error.what
    return found


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30.0, stdin=subprocess.DEVNULL)
