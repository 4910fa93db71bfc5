"""What is wrong with the storage of checkpoints, said once when it begins and once when it is over.

Training goes on meanwhile from memory checkpoints, and every durable checkpoint that is due tries again.
"""

from __future__ import annotations

import errno

import msgspec

from dougong.event.kinds import AnyEvent, StorageFailing, StorageRecovered
from dougong.run.letters import StorageCause
from dougong.units import format_si

_CAUSES: dict[int, StorageCause] = {
    errno.ENOSPC: "full",
    errno.EDQUOT: "full",
    errno.EFBIG: "full",
    errno.EROFS: "read-only",
    errno.EACCES: "read-only",
    errno.EPERM: "read-only",
    errno.ENOENT: "gone",
    errno.ESTALE: "gone",
    errno.ENODEV: "gone",
    errno.ENOTCONN: "gone",
    errno.EIO: "gone",
    errno.ETIMEDOUT: "slow",
}
_MEND: dict[StorageCause, str] = {
    "full": "make room (`df -h`, `quota`), lower --keep, or write less often (--durable-every)",
    "read-only": "mount it writable, or mend the permissions of the directory",
    "slow": "write less often (--durable-every), or use faster storage",
    "gone": "look after the disk, the mount or the network (`dmesg`, `mount`)",
    "other": "see the reason",
}
_RATE_WAIT_S = 30.0
_CALM = 3
"""So many checkpoints in a row without a skip, and slow storage counts as fast enough again."""


def cause_of(error: BaseException) -> StorageCause:
    """The cause that an error names."""
    number = error.errno if isinstance(error, OSError) else None
    return "other" if number is None else _CAUSES.get(number, "other")


class _Skip(msgspec.Struct, frozen=True, kw_only=True):
    """The first checkpoint that was skipped."""

    step: int
    busy_step: int
    rank: int
    at_s: float


class StorageAlarm:
    """Folds what becomes of each durable checkpoint into few events."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._cause: StorageCause | None = None
        self._num_failed = 0
        self._is_slow = False
        self._num_skipped = 0
        self._num_calm = 0
        self._first_skip: _Skip | None = None
        self._write_bytes_per_s = 0.0

    def failed(self, step: int, *, cause: StorageCause, reason: str) -> tuple[AnyEvent, ...]:
        """The checkpoint of `step` could not be written. An event only if it is news."""
        self._num_failed += 1
        if self._cause == cause:
            return ()
        self._cause = cause
        return (StorageFailing(step=step, cause=cause, path=self._url, reason=reason, mend=_MEND[cause]),)

    def skipped(self, step: int, *, busy_step: int, rank: int, now_s: float) -> tuple[AnyEvent, ...]:
        """The checkpoint of `step` was due before that of `busy_step` was finished. It is said when a rate is known, or
        after half a minute in any case."""
        self._num_skipped += 1
        self._num_calm = 0
        if self._is_slow:
            return ()
        if self._first_skip is None:
            self._first_skip = _Skip(step=step, busy_step=busy_step, rank=rank, at_s=now_s)
        if not self._write_bytes_per_s and now_s - self._first_skip.at_s < _RATE_WAIT_S:
            return ()
        return self._slow(self._first_skip)

    def written(self, num_bytes: int, *, write_s: float) -> tuple[AnyEvent, ...]:
        """A rank's part was written at this rate."""
        self._write_bytes_per_s = num_bytes / max(write_s, 1e-9)
        return () if self._first_skip is None or self._is_slow else self._slow(self._first_skip)

    def committed(self, step: int) -> tuple[AnyEvent, ...]:
        """The checkpoint of `step` exists."""
        events: list[AnyEvent] = []
        if self._cause is not None:
            events.append(self._recovered(step, cause=self._cause, num_missed=self._num_failed))
            self._cause, self._num_failed = None, 0
        self._num_calm += 1
        if self._is_slow and self._num_calm > _CALM:
            events.append(self._recovered(step, cause="slow", num_missed=self._num_skipped))
            self._is_slow, self._num_skipped, self._first_skip = False, 0, None
        return tuple(events)

    def _slow(self, skip: _Skip) -> tuple[AnyEvent, ...]:
        self._is_slow = True
        rate = f"; ranks write at {format_si(self._write_bytes_per_s, 'B/s')}" if self._write_bytes_per_s else ""
        reason = f"rank {skip.rank}: the one of step {skip.busy_step} was not finished when this one was due{rate}"
        return (StorageFailing(step=skip.step, cause="slow", path=self._url, reason=reason, mend=_MEND["slow"]),)

    def _recovered(self, step: int, *, cause: StorageCause, num_missed: int) -> StorageRecovered:
        return StorageRecovered(step=step, cause=cause, path=self._url, num_missed=num_missed)
