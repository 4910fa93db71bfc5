"""What follows when a rank says that its loss is bad: the controller's part, by the policy `bad_loss`.

"ignore": training goes on, only checkpoints are held back. "stop": the job is given up with the last good checkpoint
kept. "roll-back-and-skip": all ranks go back to the last good state, and the batches of the bad step are passed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from dougong.event.kinds import BatchesSkipped, SnapshotRefused
from dougong.run.letters import LossFoundBad, SaveRefused, Skip
from dougong.run.settings import Policy

_TAIL_BYTES = 16 << 20
_OTHERS_S = 2.0


class BadStep(msgspec.Struct, frozen=True, kw_only=True):
    """The first bad step of a generation, and when it was told."""

    step: int
    generation: int
    rank: int
    reason: str
    told_s: float


class BadLossDesk:
    """Follows what ranks say about their losses within one run. `skips` hold for every later start."""

    def __init__(self, policy: Policy, *, skips: Iterable[Skip] = ()) -> None:
        self._policy = policy
        self.skips: tuple[Skip, ...] = tuple(skips)
        self._bad: BadStep | None = None
        self._is_acted_on = False
        self._refused_step: int | None = None

    @property
    def bad(self) -> BadStep | None:
        """The step that this generation is broken off for."""
        return self._bad if self._is_acted_on else None

    def begin_generation(self) -> None:
        self._bad = None
        self._is_acted_on = False
        self._refused_step = None

    def hear_bad(self, letter: LossFoundBad, *, now_s: float) -> None:
        """A rank's loss has turned bad. Of several ranks and steps the earliest step counts."""
        if self._policy.bad_loss == "ignore" or self._is_acted_on:
            return
        if self._bad is None or letter.step < self._bad.step:
            self._bad = BadStep(
                step=letter.step,
                generation=letter.generation,
                rank=letter.rank,
                reason=f"{letter.reason} in step {letter.step}",
                told_s=now_s,
            )

    def hear_refused(self, letter: SaveRefused, *, saved_step: int) -> tuple[SnapshotRefused, ...]:
        """A rank refused a checkpoint: an event, unless it is known since the last one that all ranks have."""
        if self._refused_step is not None and saved_step < self._refused_step:
            return ()
        self._refused_step = letter.step
        return (
            SnapshotRefused(step=letter.step, generation=letter.generation, rank=letter.rank, reason=letter.reason),
        )

    def due(self, *, last_step: int, now_s: float) -> BadStep | None:
        """The bad step to act on, once: when every rank has finished it, or has had two seconds to."""
        if self._bad is None or self._is_acted_on:
            return None
        if last_step < self._bad.step and now_s - self._bad.told_s < _OTHERS_S:
            return None
        self._is_acted_on = True
        return self._bad

    def skip(self, ledger: Path) -> tuple[BatchesSkipped, ...]:
        """Pass the batches of the bad step over from now on, if that is the policy."""
        bad = self.bad
        if bad is None or self._policy.bad_loss != "roll-back-and-skip":
            return ()
        wanted = Skip(step=bad.step, generation=bad.generation)
        if wanted in self.skips:
            return ()
        self.skips = (*self.skips, wanted)
        return (
            BatchesSkipped(
                step=bad.step,
                generation=bad.generation,
                samples=samples_of(wanted, ledger),
                reason=f"rank {bad.rank}: {bad.reason}",
            ),
        )


def skips_before(step: int, skips: Sequence[Skip]) -> tuple[Skip, ...]:
    """The batches to pass over just before this step takes its own: each skip is one batch."""
    return tuple(skip for skip in skips if skip.step == step)


def samples_of(skip: Skip, ledger: Path) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """(rank, ids) of a step's samples, as the ledger has them; a rank that did not finish the step is left out."""
    found: list[tuple[int, tuple[int, ...]]] = []
    for path in sorted(ledger.glob("rank-*.jsonl")):
        number = path.stem.removeprefix("rank-")
        ids = ids_of(skip, path) if number.isdecimal() else None
        if ids is not None:
            found.append((int(number), ids))
    return tuple(sorted(found))


def ids_of(skip: Skip, path: Path) -> tuple[int, ...] | None:
    """The ids that one rank's ledger has for a step of a generation; None = there is no such line near its end."""
    for line in _last_lines(path):
        try:
            entry = msgspec.json.decode(line, type=_Line)
        except msgspec.MsgspecError:
            continue
        if (entry.step, entry.generation) == (skip.step, skip.generation) and not entry.skipped:
            return entry.ids
    return None


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    generation: int
    ids: tuple[int, ...]
    skipped: bool = False


def _last_lines(path: Path) -> Iterator[bytes]:
    """The lines of the last 16 MiB, newest first."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            content = file.read()
    except OSError:
        return
    yield from reversed(content.splitlines())
