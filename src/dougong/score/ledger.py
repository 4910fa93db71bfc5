"""The sample ledger: which samples a run really trained on, against those it should have.

`RUN_DIR/ledger/rank-<r>.jsonl` holds a line `{"step": 12, "generation": 3, "ids": [..]}` for each step a rank finished.
A redone step appears again; of one step and rank the last line counts. Since ranks may change in number, samples are
compared per step over all ranks; a step counts with the lines of the newest generation that finished it.
`expected.jsonl` holds what should have been seen, with `rank` in each line; the ledger of an undisturbed run of the
same seed will do as well. A line with `"skipped": true` names samples passed over on purpose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from dougong.errors import StoreDamaged, UserError

Sample = int | str
Trajectory = Mapping[int, Counter[Sample]]

_NONE: Counter[Sample] = Counter()


class LedgerLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line. `rank` is needed in `expected.jsonl` only; elsewhere the file's name tells it."""

    step: int
    ids: tuple[Sample, ...]
    generation: int = 0
    rank: int | None = None
    skipped: bool = False


class LedgerCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Samples on the final trajectory that were missed, seen too often, and passed over on purpose."""

    lost: int
    repeated: int
    skipped: int


class Seen(msgspec.Struct, frozen=True):
    """The samples of each step on the final trajectory, and those passed over on purpose."""

    trained: Trajectory
    skipped: Trajectory


def count(final: Seen, expected: Seen) -> LedgerCounts:
    """Compare step by step, up to the last finished step of `final`: what lies beyond has not been due yet.

    A sample trained in another step than its own counts as lost in the one and as repeated in the other. One that was
    skipped on purpose is not lost.
    """
    steps = final.trained.keys() | final.skipped.keys() | expected.trained.keys()
    last_step = max((*final.trained, *final.skipped), default=0)
    lost = repeated = skipped = 0
    for step in steps:
        if step <= last_step:
            due, seen, passed = (part.get(step, _NONE) for part in (expected.trained, final.trained, final.skipped))
            lost += (due - seen - passed).total()
            repeated += (seen - due).total()
            skipped += passed.total()
    return LedgerCounts(lost=lost, repeated=repeated, skipped=skipped)


def count_run(run_dir: Path, *, reference_dir: Path | None = None) -> LedgerCounts | None:
    """The counts of a run directory; `None` if it has no ledger or nothing tells what was expected.

    Raises StoreDamaged: a line that no crash explains. UserError: `reference_dir` holds no ledger.
    """
    directory = run_dir / "ledger"
    expected = _expected(directory, reference_dir=reference_dir)
    files = _rank_files(directory)
    if expected is None or not files:
        return None
    return count(read_ranks(files), expected)


def read_ranks(files: Sequence[Path]) -> Seen:
    """The final trajectory that the files `rank-<r>.jsonl` tell."""
    return final_trajectory(
        (line, line.rank if line.rank is not None else path.stem) for path in files for line in _lines(path)
    )


def final_trajectory(lines: Iterable[tuple[LedgerLine, Hashable]]) -> Seen:
    """Fold (line, rank) pairs, each rank's in the order they were written."""
    trained: dict[int, dict[Hashable, LedgerLine]] = {}
    skipped: dict[int, dict[Hashable, LedgerLine]] = {}
    for line, rank in lines:
        (skipped if line.skipped else trained).setdefault(line.step, {})[rank] = line
    return Seen(*({step: _newest(by_rank) for step, by_rank in part.items()} for part in (trained, skipped)))


def _newest(by_rank: Mapping[Hashable, LedgerLine]) -> Counter[Sample]:
    # A rank that is no longer there after a restart has left a line of a trajectory that was rolled back.
    newest = max(line.generation for line in by_rank.values())
    seen: Counter[Sample] = Counter()
    for line in by_rank.values():
        if line.generation == newest:
            seen.update(line.ids)
    return seen


def _expected(directory: Path, *, reference_dir: Path | None) -> Seen | None:
    if reference_dir is not None:
        files = _rank_files(reference_dir / "ledger")
        if not files:
            raise UserError(
                f"{reference_dir} has no sample ledger",
                where="--reference",
                mend="give the directory of an undisturbed run whose script writes ledger/rank-<r>.jsonl",
            )
        return read_ranks(files)
    path = directory / "expected.jsonl"
    return final_trajectory((line, line.rank) for line in _lines(path)) if path.is_file() else None


def _rank_files(directory: Path) -> tuple[Path, ...]:
    return tuple(sorted(directory.glob("rank-*.jsonl")))


def _lines(path: Path) -> Iterator[LedgerLine]:
    decoder = msgspec.json.Decoder(LedgerLine)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return  # torn by a crash: its step was not finished
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                raise StoreDamaged(str(path), line=number, reason=f"not a line of a ledger: {error}") from error
