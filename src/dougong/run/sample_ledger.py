"""Which samples a rank trained on in each step, kept to prove that none was lost or repeated."""

from __future__ import annotations

import json
import os

from dougong.run.bad_loss import ids_of
from dougong.run.letters import Skip
from dougong.run.place import WorkerPlace


class SampleLedger:
    """The ids of the samples of every finished step, one JSON line each; a step done again stands there again."""

    def __init__(self, place: WorkerPlace) -> None:
        self._path = place.run.ledger / f"rank-{place.rank}.jsonl"
        self._generation = place.generation
        self._fd: int | None = None

    def move_to(self, generation: int) -> None:
        self._generation = generation

    def samples_of(self, skip: Skip) -> tuple[int, ...] | None:
        """The ids that an earlier generation trained on in a step; None = they were not told."""
        return ids_of(skip, self._path)

    def write(self, step: int, samples: tuple[int, ...], *, is_skipped: bool = False) -> None:
        """Add a line. Raises OSError if the disk does not take it."""
        if self._fd is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        mark = {"skipped": True} if is_skipped else {}
        entry = {"step": step, "generation": self._generation, "ids": samples, **mark}
        line = json.dumps(entry, separators=(",", ":"))
        os.write(self._fd, f"{line}\n".encode())
