"""Silent corruption: tensors that must be the same on all ranks are compared by their fingerprints.

A bit that flips in one rank's copy raises no error; it makes that rank's gradients wrong, and through the next
all-reduce everybody's. So it is not enough to mend the one rank: all go back to what was saved before the last
comparison that found them equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from dougong.event.kinds import CorruptionSuspected, ReplicasCompared
from dougong.run.letters import Fingerprinted


class Distrust(msgspec.Struct, frozen=True, kw_only=True):
    """After this suspicion nothing is trusted that was saved since the last agreement, up to the generation of the
    suspicion."""

    generation: int
    agreed_generation: int
    agreed_step: int


class Suspicion(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks differ. `is_certain`: the majority names them; else all ranks are suspects alike."""

    step: int
    ranks: tuple[int, ...]
    is_certain: bool
    detail: str


def compare(digests: Mapping[int, str]) -> tuple[tuple[int, ...], bool]:
    """The suspects among the ranks, and whether a majority names them. () = all agree."""
    counts = Counter(digests.values())
    digest, count = counts.most_common(1)[0]
    if count == len(digests):
        return (), True
    if 2 * count > len(digests):
        return tuple(sorted(rank for rank, own in digests.items() if own != digest)), True
    return tuple(sorted(digests)), False


def is_trusted(generation: int, step: int, distrusts: Iterable[Distrust]) -> bool:
    """May a checkpoint of this generation and step be restored, after these suspicions?"""
    return not any(
        generation <= one.generation and not (generation <= one.agreed_generation and step <= one.agreed_step)
        for one in distrusts
    )


class FingerprintDesk:
    """Gathers the fingerprints of one generation after the other, and compares those of each step."""

    def __init__(self, *, agreed: tuple[int, int] = (0, 0), distrusts: Sequence[Distrust] = ()) -> None:
        """`agreed`: generation and step of the last comparison that found all ranks equal."""
        self._agreed = agreed
        self.distrusts = tuple(distrusts)
        self._world_size = 0
        self._by_step: dict[int, dict[int, str]] = {}
        self.suspicion: Suspicion | None = None
        """Of this generation."""

    def begin_generation(self, *, world_size: int) -> None:
        self._world_size = world_size
        self._by_step.clear()
        self.suspicion = None

    def hear(self, letter: Fingerprinted) -> tuple[ReplicasCompared | CorruptionSuspected, ...]:
        """A rank's fingerprint; an event once those of all ranks are there. Only the first suspicion counts."""
        digests = self._by_step.setdefault(letter.step, {})
        digests[letter.rank] = letter.digest
        if len(digests) < self._world_size or self.suspicion is not None:
            return ()
        del self._by_step[letter.step]
        suspects, is_certain = compare(digests)
        if not suspects:
            self._agreed = (letter.generation, letter.step)
            return (ReplicasCompared(generation=letter.generation, step=letter.step),)
        return (self._suspect(letter, suspects, is_certain=is_certain),)

    def _suspect(self, letter: Fingerprinted, suspects: tuple[int, ...], *, is_certain: bool) -> CorruptionSuspected:
        generation, step = self._agreed
        since = f"they agreed last at step {step}" if step else "they were never compared before"
        others = self._world_size - len(suspects)
        who = (
            f"rank(s) {', '.join(map(str, suspects))} against {others} that agree"
            if is_certain
            else f"one or more of ranks {', '.join(map(str, suspects))}, there is no majority"
        )
        detail = f"parameters or optimizer state differ: {who}; {since}"
        self.suspicion = Suspicion(step=letter.step, ranks=suspects, is_certain=is_certain, detail=detail)
        self.distrusts = (
            *self.distrusts,
            Distrust(generation=letter.generation, agreed_generation=generation, agreed_step=step),
        )
        return CorruptionSuspected(
            generation=letter.generation,
            step=letter.step,
            ranks=suspects,
            agreed_generation=generation,
            agreed_step=step,
            detail=detail,
        )
