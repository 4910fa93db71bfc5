"""One time for a whole run: the wall clock of its start, carried on by the monotonic clock.

Durations are differences of event times, and a wall clock may jump: by NTP, by hand, by a broken battery. So the
launcher reads it once and notes it for this boot of the host; every controller of this start goes on from there, and
tells its time to the agents.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from dougong.clock import CarriedClock, Clock
from dougong.run.layout import RunDirectory, write_atomically

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Anchor(msgspec.Struct, frozen=True, kw_only=True):
    """Wall time minus monotonic time, at the start, of one boot of one host."""

    boot_id: str
    offset_ns: int


def drop_anchor(run: RunDirectory, clock: Clock) -> None:
    """Note the time of this start; on a disk that does not take it, each process has its own."""
    anchor = Anchor(boot_id=_boot_id(), offset_ns=clock.wall_ns() - clock.monotonic_ns())
    with contextlib.suppress(OSError):
        write_atomically(_path(run), msgspec.json.encode(anchor))


def run_clock(run: RunDirectory, clock: Clock) -> CarriedClock:
    """The time of the run; without a note of this boot, from the wall clock now."""
    try:
        anchor = msgspec.json.decode(_path(run).read_bytes(), type=Anchor)
    except (OSError, msgspec.MsgspecError):
        anchor = None
    if anchor is None or anchor.boot_id != _boot_id():
        return CarriedClock(clock, offset_ns=clock.wall_ns() - clock.monotonic_ns())
    return CarriedClock(clock, offset_ns=anchor.offset_ns)


def _path(run: RunDirectory) -> Path:
    return run.root / "clock.json"


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
