"""A run through a schedule of faults, and the proof that nothing was lost."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dougong.event.kinds import CheckpointDeleted, CheckpointSaved, FaultInjected, JobFinished, WarningRaised
from dougong.run.manifest import verify
from tests.run import runs

SAVES = ("--memory-every", "4", "--durable-every", "20")


def disturbed(
    run_dir: Path, *faults: str, options: tuple[str, ...] = (), arguments: tuple[str, ...] = (), nodes: int = 2
) -> runs.Finished:
    """The run has ended, as it may."""
    chaos = runs.write_chaos(run_dir.parent / "chaos.yaml", *faults)
    done = runs.run(run_dir, *SAVES, "--chaos", str(chaos), *options, arguments=arguments, nodes=nodes)
    not_done = [event.text for event in done.events(WarningRaised) if "could not be done" in event.text]
    assert not_done == [], done.report
    return done


def assert_same(done: runs.Finished, undisturbed: runs.Finished, *, memory: Path | None = None) -> None:
    """Losses bitwise, samples exactly, every durable checkpoint that was told of is whole, nothing is left."""
    assert done.code == 0, done.report
    for rank in (0, 1):
        assert done.losses(rank) == undisturbed.losses(rank), done.report
    assert done.samples() == undisturbed.samples(), done.report
    assert len(done.events(JobFinished)) == 1
    assert_commits(done)
    assert runs.left_behind(done.run_dir) == []
    assert runs.memory_left(done.run_dir) == []
    assert memory is None or list(memory.iterdir()) == []


def assert_commits(done: runs.Finished, *, checkpoints: Path | None = None) -> None:
    deleted = {event.path for event in done.events(CheckpointDeleted)}
    for event in done.events(CheckpointSaved):
        if event.tier == "durable" and event.path not in deleted:
            verify(str(checkpoints or done.run_dir / "checkpoints"), event.path)


def injected(done: runs.Finished) -> list[str]:
    return [event.fault for event in done.events(FaultInjected)]


@contextmanager
def small_file_system(directory: Path, *, kind: str, num_bytes: int) -> Iterator[Path]:
    """A tmpfs, or an ext4 in a file, of its own; the test is skipped where this user may not mount."""
    directory.mkdir()
    image = directory.with_suffix(".img")
    commands = [("mount", "-t", "tmpfs", "-o", f"size={num_bytes},mode=1777", "tmpfs", str(directory))]
    if kind == "ext4":
        commands = [
            ("fallocate", "-l", str(num_bytes), str(image)),
            ("mkfs.ext4", "-q", "-F", "-m", "0", str(image)),
            ("mount", "-o", "loop", str(image), str(directory)),
        ]
    for command in commands:
        try:
            done = subprocess.run(command, check=False, capture_output=True, text=True)
        except OSError as error:
            pytest.skip(f"{command[0]}: {error.strerror}")
        if done.returncode != 0:
            pytest.skip(f"a file system can be mounted by root only: {done.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)
        image.unlink(missing_ok=True)
