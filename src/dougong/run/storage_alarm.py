"""What is wrong with the storage of checkpoints, said once when it begins and once when it is over.

Training goes on meanwhile from memory checkpoints, and every durable checkpoint that is due tries again.
"""

from __future__ import annotations

import errno

from dougong.event.kinds import AnyEvent, StorageFailing, StorageRecovered
from dougong.run.letters import StorageCause

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
_CALM = 3
"""So many checkpoints in a row without a skip, and slow storage counts as fast enough again."""


def cause_of(error: BaseException) -> StorageCause:
    """The cause that an error names."""
    number = error.errno if isinstance(error, OSError) else None
    return "other" if number is None else _CAUSES.get(number, "other")


class StorageAlarm:
    """Folds what becomes of each durable checkpoint into few events."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._cause: StorageCause | None = None
        self._num_failed = 0
        self._is_slow = False
        self._num_skipped = 0
        self._num_calm = 0

    def failed(self, step: int, *, cause: StorageCause, reason: str) -> tuple[AnyEvent, ...]:
        """The checkpoint of `step` could not be written. An event only if it is news."""
        self._num_failed += 1
        if self._cause == cause:
            return ()
        self._cause = cause
        return (StorageFailing(step=step, cause=cause, path=self._url, reason=reason, mend=_MEND[cause]),)

    def skipped(self, step: int, *, reason: str) -> tuple[AnyEvent, ...]:
        """The checkpoint of `step` was due before the one before was finished."""
        self._num_skipped += 1
        self._num_calm = 0
        if self._is_slow:
            return ()
        self._is_slow = True
        return (StorageFailing(step=step, cause="slow", path=self._url, reason=reason, mend=_MEND["slow"]),)

    def committed(self, step: int) -> tuple[AnyEvent, ...]:
        """The checkpoint of `step` exists."""
        events: list[AnyEvent] = []
        if self._cause is not None:
            events.append(self._recovered(step, cause=self._cause, num_missed=self._num_failed))
            self._cause, self._num_failed = None, 0
        self._num_calm += 1
        if self._is_slow and self._num_calm > _CALM:
            events.append(self._recovered(step, cause="slow", num_missed=self._num_skipped))
            self._is_slow, self._num_skipped = False, 0
        return tuple(events)

    def _recovered(self, step: int, *, cause: StorageCause, num_missed: int) -> StorageRecovered:
        return StorageRecovered(step=step, cause=cause, path=self._url, num_missed=num_missed)
