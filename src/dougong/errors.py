"""The errors of Dougong, one tree.

```
DougongError
├── UserError          the user's mistake: what, where, the mend; the command exits 2
├── Problems           several user's mistakes of one file, shown at once; exits 2
├── WorldError         the world failed (disk, network, node): typed fields; the command exits 1
│   ├── StoreDamaged   a stored event or segment is not what was written
│   ├── StoreWriteFailed   events could not be made durable (disk full, read-only); none of them is acknowledged
│   ├── NodeUnreachable
│   ├── CheckpointDamaged
│   └── CheckpointLocked    its retention lock still holds; it is not deleted
└── MissingExtra       a heavy optional package is absent; the message names the extra; exits 2
```

Our own bugs are `assert`s and ordinary Python exceptions; they are not in this tree.
"""

from __future__ import annotations

from collections.abc import Sequence


class DougongError(Exception):
    """Anything Dougong raises on purpose."""

    exit_code = 1


class UserError(DougongError):
    """A user's mistake in three parts: `what` is wrong (the value shown), `where` it stands, how to `mend` it."""

    exit_code = 2

    def __init__(self, what: str, *, where: str, mend: str) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.mend = mend

    def __str__(self) -> str:
        return f"{self.what}\n  where: {self.where}\n  mend:  {self.mend}"


class Problems(DougongError):
    """All the mistakes found in one file, so that they can be mended in one go."""

    exit_code = 2

    def __init__(self, problems: Sequence[UserError]) -> None:
        assert problems
        super().__init__(f"{len(problems)} problems")
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


class MissingExtra(UserError):
    """An optional package is not installed; `extra` is the name to install it by."""

    def __init__(self, package: str, *, extra: str, needed_for: str) -> None:
        super().__init__(
            f"the Python package {package!r} is not installed",
            where=needed_for,
            mend=f"pip install 'dougong[{extra}]'",
        )
        self.package = package
        self.extra = extra


class WorldError(DougongError):
    """The world failed: neither the user's mistake nor our bug."""


class StoreDamaged(WorldError):
    """A stored record is not what was written, at a place where no crash can explain it."""

    def __init__(self, path: str, *, line: int, reason: str) -> None:
        super().__init__(f"{path}:{line}: {reason}")
        self.path = path
        self.line = line
        self.reason = reason


class StoreWriteFailed(WorldError):
    """Events could not be made durable. None of them is acknowledged; they stay buffered for the next commit."""

    def __init__(self, path: str, *, num_events: int, reason: str) -> None:
        super().__init__(f"{path}: {num_events} events not written: {reason}")
        self.path = path
        self.num_events = num_events
        self.reason = reason


class NodeUnreachable(WorldError):
    """A node cannot be reached or started through its backend."""

    def __init__(self, component: str, *, reason: str) -> None:
        super().__init__(f"{component}: {reason}")
        self.component = component
        self.reason = reason


class CheckpointDamaged(WorldError):
    """A checkpoint fails its verification; it must not be loaded."""

    def __init__(self, path: str, *, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class CheckpointLocked(WorldError):
    """A checkpoint's retention lock still holds; it was not deleted."""

    def __init__(self, path: str, *, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason
