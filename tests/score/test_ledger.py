from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dougong.errors import StoreDamaged, UserError
from dougong.score.ledger import LedgerCounts, LedgerLine, Seen, count, count_run, final_trajectory


def _write(path: Path, *lines: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _undisturbed(run_dir: Path) -> None:
    for rank in (0, 1):
        lines = [{"step": step, "generation": 1, "ids": [step * 10 + rank]} for step in (1, 2, 3)]
        _write(run_dir / "ledger" / f"rank-{rank}.jsonl", *lines)


def test_a_redone_step_counts_once_with_its_last_line(tmp_path: Path) -> None:
    _undisturbed(tmp_path / "reference")
    run = tmp_path / "run"
    for rank in (0, 1):
        _write(
            run / "ledger" / f"rank-{rank}.jsonl",
            {"step": 1, "generation": 1, "ids": [10 + rank]},
            {"step": 2, "generation": 1, "ids": [20 + rank]},
            {"step": 2, "generation": 2, "ids": [20 + rank]},
            {"step": 3, "generation": 2, "ids": [30 + rank]},
        )
    assert count_run(run, reference_dir=tmp_path / "reference") == LedgerCounts(lost=0, repeated=0, skipped=0)


def test_a_batch_seen_again_in_another_step_is_repeated_and_the_steps_own_is_lost(tmp_path: Path) -> None:
    _undisturbed(tmp_path / "reference")
    _undisturbed(tmp_path / "run")
    _write(
        tmp_path / "run" / "ledger" / "rank-1.jsonl",
        {"step": 1, "ids": [11]},
        {"step": 2, "ids": [11]},
        {"step": 3, "ids": [31]},
    )
    _write(tmp_path / "run" / "ledger" / "rank-0.jsonl", *({"step": s, "ids": [s * 10]} for s in (1, 2, 3)))
    assert count_run(tmp_path / "run", reference_dir=tmp_path / "reference") == LedgerCounts(
        lost=1, repeated=1, skipped=0
    )


def test_samples_are_compared_over_all_ranks_whatever_their_number(tmp_path: Path) -> None:
    _undisturbed(tmp_path / "reference")
    lines = [{"step": step, "generation": 1, "ids": [step * 10, step * 10 + 1]} for step in (1, 2, 3)]
    _write(tmp_path / "run" / "ledger" / "rank-0.jsonl", *lines)
    assert count_run(tmp_path / "run", reference_dir=tmp_path / "reference") == LedgerCounts(
        lost=0, repeated=0, skipped=0
    )


def test_a_rank_that_is_gone_leaves_no_samples_of_a_trajectory_that_was_rolled_back() -> None:
    seen = final_trajectory(
        [
            (LedgerLine(step=5, generation=1, ids=(1,)), 0),
            (LedgerLine(step=5, generation=1, ids=(2,)), 1),
            (LedgerLine(step=5, generation=2, ids=(1, 2)), 0),
        ]
    )
    assert seen.trained == {5: Counter({1: 1, 2: 1})}


def test_steps_beyond_the_last_finished_one_are_not_lost(tmp_path: Path) -> None:
    _undisturbed(tmp_path / "reference")
    for rank in (0, 1):
        _write(tmp_path / "run" / "ledger" / f"rank-{rank}.jsonl", {"step": 1, "generation": 1, "ids": [10 + rank]})
    assert count_run(tmp_path / "run", reference_dir=tmp_path / "reference") == LedgerCounts(
        lost=0, repeated=0, skipped=0
    )


def test_a_sample_skipped_on_purpose_is_not_lost(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    _write(ledger / "expected.jsonl", {"step": 1, "rank": 0, "ids": ["a", "b"]})
    _write(ledger / "rank-0.jsonl", {"step": 1, "ids": ["a"]}, {"step": 1, "skipped": True, "ids": ["b"]})
    assert count_run(tmp_path) == LedgerCounts(lost=0, repeated=0, skipped=1)


def test_a_torn_last_line_is_ignored(tmp_path: Path) -> None:
    _write(tmp_path / "ledger" / "expected.jsonl", {"step": 1, "rank": 0, "ids": [1]})
    _write(tmp_path / "ledger" / "rank-0.jsonl", {"step": 1, "ids": [1]})
    with (tmp_path / "ledger" / "rank-0.jsonl").open("a") as file:
        file.write('{"step": 2, "ids": [2')
    assert count_run(tmp_path) == LedgerCounts(lost=0, repeated=0, skipped=0)


def test_a_damaged_line_in_the_middle_is_told_with_its_place(tmp_path: Path) -> None:
    _write(tmp_path / "ledger" / "expected.jsonl", {"step": 1, "rank": 0, "ids": [1]})
    (tmp_path / "ledger" / "rank-0.jsonl").write_text('{"step": 1, "ids": [1]}\n{"step": \n{"step": 3, "ids": []}\n')
    with pytest.raises(StoreDamaged, match=r"rank-0\.jsonl:2"):
        count_run(tmp_path)


def test_without_a_ledger_or_an_expectation_nothing_is_measured(tmp_path: Path) -> None:
    assert count_run(tmp_path) is None
    _undisturbed(tmp_path)
    assert count_run(tmp_path) is None


def test_a_reference_without_a_ledger_is_the_users_mistake(tmp_path: Path) -> None:
    _undisturbed(tmp_path)
    with pytest.raises(UserError, match="no sample ledger"):
        count_run(tmp_path, reference_dir=tmp_path / "none")


_TRAJECTORIES = st.dictionaries(st.integers(1, 6), st.lists(st.integers(0, 5), max_size=6).map(Counter), max_size=6)


@given(_TRAJECTORIES)
def test_a_run_lost_and_repeated_nothing_against_itself(trained: dict[int, Counter[int | str]]) -> None:
    seen = Seen(trained, {})
    assert count(seen, seen) == LedgerCounts(lost=0, repeated=0, skipped=0)


@given(_TRAJECTORIES, _TRAJECTORIES)
def test_lost_less_repeated_is_the_difference_in_number(
    trained: dict[int, Counter[int | str]], due: dict[int, Counter[int | str]]
) -> None:
    counts = count(Seen(trained, {}), Seen(due, {}))
    last_step = max(trained, default=0)
    num_due = sum(ids.total() for step, ids in due.items() if step <= last_step)
    num_seen = sum(ids.total() for ids in trained.values())
    assert counts.lost - counts.repeated == num_due - num_seen
