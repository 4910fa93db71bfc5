"""What all tests share: no settings leak in, no process leaks out, and Hypothesis draws the same cases in CI."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("desk", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("desk"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "desk")

# Set by launchers and schedulers: a test that runs inside one of their jobs must not believe it is a rank of it.
LAUNCHER_PREFIXES = ("DOUGONG_", "SLURM_", "TORCHELASTIC_")
LAUNCHER_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


# A shell ignores Ctrl-C for what it starts in the background, and its children inherit that; here it must work.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _outside_any_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(LAUNCHER_PREFIXES) or name in LAUNCHER_NAMES:
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _no_process_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test marked `processes` fails when a process that names its `tmp_path` outlives it."""
    if request.node.get_closest_marker("processes") is None or "tmp_path" not in request.fixturenames:
        yield
        return
    tmp_path: Path = request.getfixturevalue("tmp_path")
    yield
    left = _commands_naming(str(tmp_path))
    assert not left, f"left running: {left}"


def _commands_naming(text: str) -> list[str]:
    """The command lines of all living processes, but this one, that contain `text`."""
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it ended while we looked
            continue
        if text in command:
            found.append(f"{entry.name}: {command.strip()}")
    return found
