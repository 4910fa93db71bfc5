from __future__ import annotations

import json
from pathlib import Path

import pytest

from dougong.run.bad_loss import BadLossDesk, ids_of, samples_of, skips_before
from dougong.run.letters import LossFoundBad, SaveRefused, Skip
from dougong.run.settings import Policy

SKIP = Policy(bad_loss="roll-back-and-skip")


def bad(step: int, rank: int = 0) -> LossFoundBad:
    return LossFoundBad(generation=3, rank=rank, step=step, reason="the loss is nan")


def refused(step: int) -> SaveRefused:
    return SaveRefused(generation=3, rank=0, step=step, reason="the loss is nan")


def test_by_default_nothing_follows_a_bad_loss() -> None:
    desk = BadLossDesk(Policy())
    desk.hear_bad(bad(10), now_s=0.0)
    assert desk.due(last_step=99, now_s=99.0) is None


@pytest.mark.parametrize("policy", [SKIP, Policy(bad_loss="stop")])
def test_it_is_acted_on_once_when_every_rank_has_finished_the_step(policy: Policy) -> None:
    desk = BadLossDesk(policy)
    desk.hear_bad(bad(10), now_s=0.0)
    assert desk.due(last_step=9, now_s=0.1) is None
    due = desk.due(last_step=10, now_s=0.2)
    assert due is not None and due.step == 10
    assert desk.due(last_step=11, now_s=0.3) is None


def test_a_rank_that_never_finishes_the_step_is_not_waited_for() -> None:
    desk = BadLossDesk(SKIP)
    desk.hear_bad(bad(10), now_s=0.0)
    assert desk.due(last_step=9, now_s=5.0) is not None


def test_of_several_ranks_the_earliest_step_counts() -> None:
    desk = BadLossDesk(SKIP)
    for step, rank in ((11, 0), (10, 1), (12, 2)):
        desk.hear_bad(bad(step, rank), now_s=0.0)
    due = desk.due(last_step=12, now_s=0.0)
    assert due is not None and (due.step, due.rank) == (10, 1)


def test_refused_checkpoints_are_said_once_until_a_good_one_is_there() -> None:
    desk = BadLossDesk(Policy())
    assert len(desk.hear_refused(refused(10), saved_step=5)) == 1
    assert desk.hear_refused(refused(15), saved_step=5) == ()
    assert len(desk.hear_refused(refused(30), saved_step=20)) == 1


def test_the_batches_skipped_are_listed_and_stay_skipped(tmp_path: Path) -> None:
    write(tmp_path / "rank-0.jsonl", (10, 2, [1, 2]), (10, 3, [3, 4]), (11, 3, [5]))
    write(tmp_path / "rank-1.jsonl", (10, 3, [6, 7]))
    write(tmp_path / "expected.jsonl", (10, 3, [8]))
    desk = BadLossDesk(SKIP, skips=(Skip(4, 1),))
    desk.hear_bad(bad(10), now_s=0.0)
    assert desk.skip(tmp_path) == (), "not before it is acted on"
    desk.due(last_step=10, now_s=0.0)
    (event,) = desk.skip(tmp_path)
    assert event.samples == ((0, (3, 4)), (1, (6, 7)))
    assert desk.skips == (Skip(4, 1), Skip(10, 3))
    assert desk.skip(tmp_path) == (), "twice does no harm"


def test_a_stop_skips_nothing(tmp_path: Path) -> None:
    desk = BadLossDesk(Policy(bad_loss="stop"))
    desk.hear_bad(bad(10), now_s=0.0)
    desk.due(last_step=10, now_s=0.0)
    assert desk.skip(tmp_path) == ()


def test_two_bad_batches_in_a_row_are_both_passed_over_before_the_step() -> None:
    skips = (Skip(10, 3), Skip(12, 4), Skip(10, 5))
    assert skips_before(10, skips) == (Skip(10, 3), Skip(10, 5))
    assert skips_before(11, skips) == ()


def test_a_ledger_that_was_torn_or_is_missing_tells_what_it_can(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    write(path, (10, 3, [3, 4]))
    with path.open("a") as file:
        file.write('{"step": 11, "gener')
    assert ids_of(Skip(10, 3), path) == (3, 4)
    assert ids_of(Skip(11, 3), path) is None
    assert samples_of(Skip(10, 3), tmp_path / "nowhere") == ()


def write(path: Path, *lines: tuple[int, int, list[int]]) -> None:
    path.write_text(
        "".join(
            json.dumps({"step": step, "generation": generation, "ids": ids}) + "\n" for step, generation, ids in lines
        )
    )
