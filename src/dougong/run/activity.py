"""Is a worker doing anything? Judged from two readings of its processes, half a second apart."""

from __future__ import annotations

import os

import msgspec

from dougong.backend.local.process import Reading
from dougong.run.wire import Activity

_WINDOW_S = 0.5
_BUSY_CPU_RATIO = 0.06
_BUSY_IO_BYTES = 64 * 1024
_TIMER_PATIENCE_S = 15.0


class ActivityState(msgspec.Struct, frozen=True, kw_only=True):
    """The last reading that counted, and since when the worker has been quiet."""

    reading: Reading
    read_s: float
    quiet_since_s: float
    timer_since_s: float | None = None
    activity: Activity = "running"


def advance(state: ActivityState | None, reading: Reading | None, *, now_s: float) -> ActivityState | None:
    """The state after another reading. None = the process is gone.

    A sleep on a timer counts as doing something, since it will end, but only for a while: a loop of sleeps may be a
    hang.
    """
    if reading is None:
        return None
    if state is None:
        return ActivityState(reading=reading, read_s=now_s, quiet_since_s=now_s)
    if reading.state == "T":
        # one that has used the CPU meanwhile was only stopped for moments: it is slow, not stopped
        is_still_stopped = state.activity == "stopped" and reading.cpu_ticks == state.reading.cpu_ticks
        since_s = state.quiet_since_s if is_still_stopped else now_s
        return ActivityState(reading=reading, read_s=now_s, quiet_since_s=since_s, activity="stopped")
    if now_s - state.read_s < _WINDOW_S:
        return state
    activity = _judge(state.reading, reading, elapsed_s=now_s - state.read_s)
    timer_since_s = None
    if activity == "timer":
        timer_since_s = state.timer_since_s if state.timer_since_s is not None else now_s
        if now_s - timer_since_s > _TIMER_PATIENCE_S:
            activity = "idle"
    is_quiet = activity in ("idle", "lock")
    return ActivityState(
        reading=reading,
        read_s=now_s,
        quiet_since_s=state.quiet_since_s if is_quiet else now_s,
        timer_since_s=timer_since_s,
        activity=activity,
    )


def _judge(before: Reading, after: Reading, *, elapsed_s: float) -> Activity:
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    if (after.cpu_ticks - before.cpu_ticks) / ticks_per_s > _BUSY_CPU_RATIO * elapsed_s:
        return "running"
    if after.is_in_disk_wait or after.io_bytes - before.io_bytes > _BUSY_IO_BYTES:
        return "disk"
    if after.is_on_timer:
        return "timer"
    return "lock" if after.is_on_lock and before.is_on_lock else "idle"
