"""Readings of Linux processes through /proc and pidfd.

Source: proc(5), pidfd_open(2), and the kernel's Documentation/filesystems/proc.rst.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec

_PF_EXITING = 0x4
_CLOCK_NANOSLEEP = {"x86_64": 230, "aarch64": 115}.get(platform.machine(), -1)
_NANOSLEEP = {"x86_64": 35, "aarch64": 101}.get(platform.machine(), -1)
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), -1)
# read, connect, sendto, recvfrom, sendmsg, recvmsg, wait4, waitid
_WAITS_FOR_OTHERS = {
    "x86_64": frozenset({0, 42, 44, 45, 46, 47, 61, 247}),
    "aarch64": frozenset({63, 203, 206, 207, 211, 212, 260, 95}),
}.get(platform.machine(), frozenset[int]())


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """A process and its descendants at one moment. `cpu_ticks` in clock ticks, `io_bytes` read and written in all."""

    state: str
    cpu_ticks: int
    io_bytes: int
    is_on_timer: bool
    is_in_disk_wait: bool
    is_on_lock: bool = False
    """The main thread waits for a lock without a time limit, and no other thread waits for a peer, file or child."""


class ThreadReading(msgspec.Struct, frozen=True, kw_only=True):
    """A thread at one moment. `waits_in`: the kernel's function (wchan), "" = it runs, or the kernel does not say."""

    thread: int
    name: str
    state: str
    cpu_s: float
    waits_in: str


def threads(pid: int) -> tuple[ThreadReading, ...]:
    """The threads of a process, the main one first; () if it is gone."""
    try:
        numbers = sorted(int(name) for name in os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return ()
    readings = (_read_thread(pid, number) for number in numbers)
    return tuple(reading for reading in readings if reading is not None)


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if there is none. A pid alone may be reused."""
    fields = _stat_fields(pid)
    return None if fields is None else int(fields[19])


def is_alive(pid: int, *, start_ticks_expected: int | None = None) -> bool:
    """Is there such a process, not a zombie, and (if told) the one that started then?"""
    fields = _stat_fields(pid)
    if fields is None or fields[0] in ("Z", "X"):
        return False
    return start_ticks_expected is None or int(fields[19]) == start_ticks_expected


def is_running(pid: int) -> bool:
    """Is there such a process, and is it not on its way out? What is exiting runs nothing of its own any more."""
    fields = _stat_fields(pid)
    return fields is not None and fields[0] not in ("Z", "X") and not int(fields[6]) & _PF_EXITING


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How a process is ending: its exit code, or the signal that ends it."""

    exit_code: int | None
    signal: int | None


def bad_ending(pid: int, *, start_ticks_expected: int) -> Ending | None:
    """Is the process on its way out, and not well? None if it runs, is gone altogether, or may have ended well.

    The kernel may take long to free its memory, and only then says that it ended. An exit code of 0 is also what the
    kernel shows to those who may not know. Source: proc(5), `flags` (PF_EXITING is 0x4 in include/linux/sched.h) and
    `exit_code` of /proc/PID/stat.
    """
    fields = _stat_fields(pid)
    if fields is None or int(fields[19]) != start_ticks_expected or not int(fields[6]) & _PF_EXITING:
        return None
    status = int(fields[49])
    if status == 0:
        return None
    if os.WIFSIGNALED(status):
        return Ending(exit_code=None, signal=os.WTERMSIG(status))
    return Ending(exit_code=os.WEXITSTATUS(status), signal=None)


def read(pid: int) -> Reading | None:
    """The process with its descendants, or None if it is gone."""
    fields = _stat_fields(pid)
    if fields is None:
        return None
    cpu_ticks = _cpu_ticks(fields)
    io_bytes = _io_bytes(pid)
    is_in_disk_wait = _has_disk_wait(pid)
    for child in descendants(pid):
        child_fields = _stat_fields(child)
        if child_fields is not None:
            cpu_ticks += _cpu_ticks(child_fields)
            io_bytes += _io_bytes(child)
            is_in_disk_wait = is_in_disk_wait or child_fields[0] == "D"
    return Reading(
        state=fields[0],
        cpu_ticks=cpu_ticks,
        io_bytes=io_bytes,
        is_on_timer=_syscall_number(pid) in (_CLOCK_NANOSLEEP, _NANOSLEEP),
        is_in_disk_wait=is_in_disk_wait,
        is_on_lock=_is_on_lock(pid),
    )


def descendants(pid: int) -> tuple[int, ...]:
    """All processes below this one, parents before children."""
    found: list[int] = []
    queue = [pid]
    while queue:
        for child in _children(queue.pop()):
            found.append(child)
            queue.append(child)
    return tuple(found)


def pids_with_variable(name: str, value: str) -> tuple[int, ...]:
    """All processes of this user whose environment holds `name=value`."""
    wanted = f"{name}={value}".encode()
    found: list[int] = []
    for pid in _all_pids():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if wanted in environment.split(b"\0"):
            found.append(pid)
    return tuple(found)


def kill(pid: int, signal_number: int = signal.SIGKILL) -> None:
    """Send a signal; a process that is gone already is fine."""
    try:
        os.kill(pid, signal_number)
    except ProcessLookupError:
        return


def kill_group(leader: int, *, start_ticks_expected: int) -> None:
    """Kill what is left of a process group, also after its leader has ended, unless the pid is another's by now."""
    if start_ticks(leader) not in (None, start_ticks_expected):
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _all_pids() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            yield int(name)


def _stat_fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name, which may itself hold blanks and brackets; [0] is the state."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (OSError, ProcessLookupError):
        return None
    return text[text.rindex(")") + 2 :].split()


def _read_thread(pid: int, thread: int) -> ThreadReading | None:
    folder = Path(f"/proc/{pid}/task/{thread}")
    try:
        text = (folder / "stat").read_text(errors="replace")
        name = (folder / "comm").read_text(errors="replace").strip()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    try:
        waits_in = (folder / "wchan").read_text(errors="replace").strip()
    except OSError:  # only the owner and root may ask
        waits_in = ""
    return ThreadReading(
        thread=thread,
        name=name,
        state=fields[0],
        cpu_s=(int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
        waits_in="" if waits_in == "0" else waits_in,
    )


def _cpu_ticks(fields: list[str]) -> int:
    """Of the process, and of its children that have ended: else a row of short ones would look like doing nothing."""
    return sum(int(field) for field in fields[11:15])


def _io_bytes(pid: int) -> int:
    """rchar + wchar: also what goes through the page cache or a pipe. 0 where the kernel does not say."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines[:2])


def _has_disk_wait(pid: int) -> bool:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    for thread in threads:
        try:
            text = Path(f"/proc/{pid}/task/{thread}/stat").read_text(errors="replace")
        except OSError:
            continue
        if text[text.rindex(")") + 2] == "D":
            return True
    return False


def _children(pid: int) -> tuple[int, ...]:
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return ()
    for thread in threads:
        try:
            found.extend(int(child) for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
        except OSError:
            continue
    return tuple(found)


def _is_on_lock(pid: int) -> bool:
    number, arguments = _syscall(pid, pid)
    # futex(address, operation, value, timeout): a timeout of null waits for ever
    if number != _FUTEX or len(arguments) < 4 or arguments[3] != "0x0":
        return False
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    return not any(_syscall(pid, int(thread))[0] in _WAITS_FOR_OTHERS for thread in threads)


def _syscall_number(pid: int) -> int:
    """The system call in which the main thread waits; -1 = running or not told."""
    return _syscall(pid, pid)[0]


def _syscall(pid: int, thread: int) -> tuple[int, list[str]]:
    """The system call in which a thread waits, and its arguments; (-1, []) = running or not told."""
    try:
        first, *arguments = Path(f"/proc/{pid}/task/{thread}/syscall").read_text().split()
    except (OSError, ValueError):
        return -1, []
    return (int(first) if first.lstrip("-").isdigit() else -1), arguments
