"""What an attached job saves and when, with nobody behind it: no writer takes its orders, no controller answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra: train)")

from dougong.run.attach import Job, attach  # noqa: E402
from dougong.run.copier import CopyJob  # noqa: E402
from dougong.run.letters import SaveRefused, ShardSkipped, read_from_worker, unread  # noqa: E402
from dougong.run.page import Page  # noqa: E402
from dougong.run.place import WorkerPlace, worker_variables  # noqa: E402
from dougong.run.snapshot import SnapshotFiles  # noqa: E402
from tests.run.made_place import place_in  # noqa: E402


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerPlace:
    found = place_in(tmp_path, memory_every_steps=1)
    Page.create(found.node.page(0), generation=1)
    for name, value in worker_variables(found).items():
        monkeypatch.setenv(name, value)
    return found


def job_of(model: Any) -> Job:
    return attach(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def saved_steps(place: WorkerPlace) -> list[int]:
    return [slot.step for slot in SnapshotFiles(place.node.snapshot(0)).slots()]


def letters_of(place: WorkerPlace, kind: type) -> list[Any]:
    letters = [read_from_worker(path) for path in unread(place.node.outbox(0))]
    return [letter for letter in letters if isinstance(letter, kind)]


def test_a_bad_loss_in_the_very_last_step_is_not_what_the_run_ends_with(place: WorkerPlace) -> None:
    job = job_of(torch.nn.Linear(2, 1))
    for step in job.steps(until=3):
        with step:
            step.record(loss=float("nan") if step.number == 3 else 0.5, tokens=1)
    assert saved_steps(place) == [2, 1], "the loop is over, and the bad state was not saved after all"
    assert [letter.step for letter in letters_of(place, SaveRefused)] == [3]


def test_a_durable_save_asked_for_while_one_is_being_written_is_skipped_and_said(place: WorkerPlace) -> None:
    job = job_of(torch.nn.Linear(2, 1))
    for step in job.steps():
        with step:
            step.record(loss=0.5, tokens=1)
        job.save_now(is_durable=True)
        if step.number == 3:
            break
    assert [(letter.step, letter.busy_step) for letter in letters_of(place, ShardSkipped)] == [(2, 1), (3, 1)]
    assert 1 in saved_steps(place), "what is being written is not written over"


def test_the_wait_at_the_fence_is_no_time_between_steps(place: WorkerPlace) -> None:
    """It lies inside of the step, so only the step is shortened by it."""
    job = job_of(torch.nn.Linear(2, 1))
    page = Page.open(place.node.page(0))
    copier: Any = job._copier
    for step in job.steps(until=2):
        with step:
            copier._fence_ns = 10**9 if step.number == 2 else 0
    records, _ = page.drain(seen=0)
    (first, second) = records
    assert second.checkpoint_stall_ns >= 10**9 > first.checkpoint_stall_ns
    assert second.between_ns > 0


@pytest.mark.parametrize(
    ("memory_every", "kept"),
    [(1, {1: 2, 2: 2, 3: 2, 4: 2}), (2, {2: 2, 4: 1, 6: 1}), (3, {3: 1, 6: 1})],
)
def test_a_save_that_all_ranks_expected_one_step_before_keeps_one_snapshot_and_others_two(
    memory_every: int, kept: dict[int, int], place: WorkerPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `test_snapshot_skew` takes for granted. In the step before the first save of all, room is made instead."""
    place = msgspec.structs.replace(place, memory_every_steps=memory_every)
    for name, value in worker_variables(place).items():
        monkeypatch.setenv(name, value)
    job = job_of(torch.nn.Linear(2, 1))
    copier: Any = job._copier
    told: dict[int, int] = {}
    was_idle: dict[int, bool] = {}
    begin = copier.begin

    def begin_slowly(copy_job: CopyJob) -> None:
        told[copy_job.step] = copy_job.num_kept
        begin(copy_job)

    monkeypatch.setattr(copier, "begin", begin_slowly)
    for step in job.steps(until=max(kept)):
        was_idle[step.number] = copier.is_idle
        with step:
            step.record(loss=0.5, tokens=1)
    assert told == kept
    assert all(was_idle[step] for step, num_kept in kept.items() if num_kept == 1), "the copy before was whole"
