"""The retention lock: a committed checkpoint that nothing of ours deletes before its time, but by the owner's key.

Time is believed only where two clocks agree. On the boot that wrote the lock, the machine's own count of the time since
boot must have gone on as long as the wall clock says, so setting the clock forward opens nothing, by whatever step.
After a reboot, or on another machine, the wall clock is all there is. A clock set back only makes a lock last longer.
Whoever may write to the directory can remove files by hand; no local file system holds that off.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import os
import struct
import time
from pathlib import Path

import msgspec

from dougong.clock import Clock

_TOUCH_S = 120.0
"""So long after its time of commit the files of a checkpoint may still change their status."""
_FS_IOC_GETFLAGS = 0x80086601  # linux/fs.h
_FS_IOC_SETFLAGS = 0x40086602
_FS_IMMUTABLE = 0x10
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """Now, by two clocks: the wall's, and the time since the boot named `boot_id`, which nobody can set."""

    wall_ns: int
    boot_id: str
    boot_ns: int


class RetentionLock(msgspec.Struct, frozen=True, kw_only=True):
    """How long a checkpoint stays. It stands in the manifest, so the COMMIT mark covers it."""

    lock_s: float
    since: Moment
    opening: str = ""
    """SHA-256 of the word by which the owner's key opens the lock; "" = no key opens it."""
    seal: str = ""
    """HMAC-SHA256 by the owner's key over the checkpoint's name, its files and this record; "" = there is no key."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What stands beside the lock record."""

    is_as_committed: bool
    """The COMMIT mark fits the manifest."""
    changed_ns: int | None
    """When the manifest's file last changed its status (ctime); None = the storage does not tell."""
    opened_by: str = ""
    """The word left by `unlock`, hexadecimal."""
    is_seal_right: bool | None = None
    """None = the owner's key is not at hand."""


def now(clock: Clock) -> Moment:
    try:
        boot_id = _BOOT_ID.read_text().strip()
    except OSError:
        boot_id = ""
    return Moment(wall_ns=clock.wall_ns(), boot_id=boot_id, boot_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME))


def make_lock(lock_s: float, *, name: str, content: bytes, key: bytes | None, since: Moment) -> RetentionLock:
    """A lock on checkpoint `name`, whose manifest without a lock is `content`."""
    lock = RetentionLock(lock_s=lock_s, since=since)
    if key is None:
        return lock
    lock = msgspec.structs.replace(lock, opening=hashlib.sha256(opening_word(name, key)).hexdigest())
    return msgspec.structs.replace(lock, seal=_seal(lock, name=name, content=content, key=key))


def is_seal_right(lock: RetentionLock, *, name: str, content: bytes, key: bytes) -> bool:
    unsealed = msgspec.structs.replace(lock, seal="")
    return hmac.compare_digest(lock.seal, _seal(unsealed, name=name, content=content, key=key))


def opening_word(name: str, key: bytes) -> bytes:
    """What `unlock` leaves behind. Everybody can see that it is right; only the owner's key can make it."""
    return hmac.digest(_derived(key), b"open " + name.encode(), "sha256")


def is_opening_word(lock: RetentionLock, word_hex: str) -> bool:
    try:
        word = bytes.fromhex(word_hex)
    except ValueError:
        return False
    return bool(lock.opening) and hmac.compare_digest(hashlib.sha256(word).hexdigest(), lock.opening)


def why_locked(lock: RetentionLock, evidence: Evidence, moment: Moment) -> str:
    """Why the checkpoint must stay; "" = it may go."""
    if evidence.opened_by and is_opening_word(lock, evidence.opened_by):
        return ""
    if not evidence.is_as_committed or evidence.is_seal_right is False:
        return "its lock record is not the one that was committed; only the owner's key opens it"
    changed_ns = evidence.changed_ns
    if evidence.is_seal_right is None and changed_ns is not None:
        late_s = (changed_ns - lock.since.wall_ns) / 1e9
        if late_s > _TOUCH_S:
            return "its manifest was changed or copied after the commit; only the owner's key opens the lock"
    left_s = lock.lock_s - _elapsed_s(lock.since, moment)
    return f"it is locked for another {_duration(left_s)}" if left_s > 0 else ""


def protect(directory: Path) -> None:
    """Make a local checkpoint read-only; also immutable where this process and the file system can."""
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            path.chmod(0o444)
            _set_immutable(path, is_on=True)
        set_open(directory, is_open=False)


def set_open(directory: Path, *, is_open: bool) -> None:
    """May files be added? Those that are there stay as they are. Raises OSError."""
    if is_open:
        _set_immutable(directory, is_on=False)
    directory.chmod(0o755 if is_open else 0o555)
    if not is_open:
        _set_immutable(directory, is_on=True)


def unprotect(directory: Path) -> None:
    """Let it be deleted again. Raises OSError."""
    set_open(directory, is_open=True)
    for path in directory.iterdir():
        _set_immutable(path, is_on=False)


def _elapsed_s(since: Moment, moment: Moment) -> float:
    wall_s = (moment.wall_ns - since.wall_ns) / 1e9
    if since.boot_id and since.boot_id == moment.boot_id:
        return min(wall_s, (moment.boot_ns - since.boot_ns) / 1e9)
    return wall_s


def _seal(lock: RetentionLock, *, name: str, content: bytes, key: bytes) -> str:
    text = msgspec.json.encode((name, lock)) + b"\n" + content
    return hmac.digest(_derived(key), text, "sha256").hex()


def _derived(key: bytes) -> bytes:
    """The same file may hold the key of the encryption; the two uses must not share one key."""
    return hmac.digest(key, b"dougong retention lock", "sha256")


def _duration(left_s: float) -> str:
    from dougong.units import format_duration

    return format_duration(round(left_s))


def _set_immutable(path: Path, *, is_on: bool) -> None:
    """The attribute that even root has to take off first (chattr +i). Most users may not, many file systems cannot."""
    if os.geteuid() != 0:
        return
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            (flags,) = struct.unpack("l", fcntl.ioctl(fd, _FS_IOC_GETFLAGS, struct.pack("l", 0)))
            wanted = flags | _FS_IMMUTABLE if is_on else flags & ~_FS_IMMUTABLE
            if wanted != flags:
                fcntl.ioctl(fd, _FS_IOC_SETFLAGS, struct.pack("l", wanted))
        finally:
            os.close(fd)
