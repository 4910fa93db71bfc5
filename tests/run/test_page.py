from __future__ import annotations

import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dougong.run.page import ControlFault, Page, Phase, SaveOrder, SaveTimes, StepRecord

RING = 960
WRITER = """
import sys
import tempfile
from pathlib import Path
from dougong.run.page import Page, Phase, StepRecord
page = Page.open(Path(sys.argv[1]))
page.begin(pid=7, now_ns=1)
for step in range(1, int(sys.argv[2]) + 1):
    page.enter(Phase.STEP, now_ns=step)
    page.finish_step(StepRecord(step, step, step + 1, step, 1.0 / step, step, step, step))
    sys.stdin.readline() if step % 500 == 0 else None
page.enter(Phase.DONE, now_ns=9)
"""


def record(step: int, **changes: Any) -> StepRecord:
    base: dict[str, Any] = {
        "step": step,
        "begin_ns": step * 10,
        "end_ns": step * 10 + 5,
        "data_wait_ns": 1,
        "loss": 0.5,
        "tokens": 3,
        "checkpoint_stall_ns": 2,
        "between_ns": 4,
    }
    return StepRecord(**{**base, **changes})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank-0.page"


@pytest.fixture
def page(path: Path) -> Page:
    return Page.create(path, generation=3)


def test_a_new_page_has_nothing_to_tell(page: Page) -> None:
    assert (page.generation, page.pid, page.step, page.phase) == (3, 0, 0, Phase.STARTING)
    assert not page.is_attached and page.stop_at_step == 0 and page.take_fault() is ControlFault.NONE
    assert page.drain(seen=0) == ((), 0)


def test_both_sides_see_the_same(page: Page, path: Path) -> None:
    other = Page.open(path)
    page.begin(pid=42, now_ns=100)
    page.mark_attached()
    page.mark_restored(step=20)
    page.enter(Phase.STEP, now_ns=150)
    assert (other.pid, other.is_attached, other.step) == (42, True, 20)
    assert (other.phase, other.phase_since_ns, other.progress_ns) == (Phase.STEP, 150, 150)
    other.stop_at_step = 33
    other.ask_fault(ControlFault.HANG)
    assert page.stop_at_step == 33
    assert (page.take_fault(), page.take_fault()) == (ControlFault.HANG, ControlFault.NONE)


def test_a_page_made_anew_does_not_hear_a_worker_of_before(page: Page, path: Path) -> None:
    fresh = Page.create(path, generation=4)
    page.finish_step(record(9))
    assert fresh.step == 0 and fresh.drain(seen=0) == ((), 0)


WORDS = st.integers(0, 2**63 - 1)
RECORDS = st.builds(
    StepRecord,
    step=st.integers(1, 2**40),
    begin_ns=WORDS,
    end_ns=WORDS,
    data_wait_ns=WORDS,
    loss=st.none() | st.floats(allow_nan=False),
    tokens=st.none() | WORDS,
    checkpoint_stall_ns=WORDS,
    between_ns=WORDS,
)


@given(items=st.lists(RECORDS, max_size=10))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_record_comes_back_as_it_was(items: list[StepRecord], path: Path) -> None:
    page = Page.create(path, generation=1)
    for item in items:
        page.finish_step(item)
    assert page.drain(seen=0) == (tuple(items), len(items))


def test_a_loss_that_is_not_a_number_is_not_an_absent_one(page: Page) -> None:
    page.finish_step(record(1, loss=math.nan))
    page.finish_step(record(2, loss=None))
    (first, second), _ = page.drain(seen=0)
    assert first.loss is not None and math.isnan(first.loss)
    assert second.loss is None


@given(chunks=st.lists(st.integers(0, 40), max_size=12))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_draining_often_or_seldom_gives_each_step_once(chunks: list[int], path: Path) -> None:
    page = Page.create(path, generation=1)
    got: list[int] = []
    seen = step = 0
    for chunk in chunks:
        for _ in range(chunk):
            step += 1
            page.finish_step(record(step))
        items, seen = page.drain(seen=seen)
        got += [item.step for item in items]
    assert got == list(range(1, step + 1))


@pytest.mark.parametrize("count", [RING - 1, RING, RING + 1, 3 * RING])
def test_an_overflowing_ring_loses_the_oldest_only(count: int, page: Page) -> None:
    for step in range(1, count + 1):
        page.finish_step(record(step))
    items, seen = page.drain(seen=0)
    assert seen == count
    assert [item.step for item in items] == list(range(count - len(items) + 1, count + 1))
    assert len(items) >= min(count, RING - 1)


def test_a_reader_in_another_process_gets_every_step_of_a_writer(page: Page, path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(path), "2000"]
    got: list[StepRecord] = []
    seen = 0
    with subprocess.Popen(command, stdin=subprocess.PIPE) as writer:
        assert writer.stdin is not None
        while page.phase is not Phase.DONE:
            assert writer.poll() in (None, 0)
            items, seen = page.drain(seen=seen)
            got += items
            if items and items[-1].step % 500 == 0:
                writer.stdin.write(b"\n")
                writer.stdin.flush()
    got += page.drain(seen=seen)[0]
    assert [item.step for item in got] == list(range(1, 2001))
    assert all(item == StepRecord(s, s, s + 1, s, 1.0 / s, s, s, s) for s, item in enumerate(got, start=1))
    assert page.pid == 7


@pytest.mark.parametrize("content", [b"", b"x" * 100, bytes(4096 + 960 * 64)])
def test_a_file_that_is_no_page_is_refused(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not a heartbeat page"):
        Page.open(path)
    with pytest.raises(FileNotFoundError):
        Page.open(path.with_name("absent"))


def test_a_page_can_be_closed(page: Page) -> None:
    page.close()


@given(st.integers(0, 2**28 - 1), st.integers(1, 2**14 - 1), st.integers(1, 2**22 - 1))
def test_an_order_to_save_is_one_word(from_step: int, memory: int, durable: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = Page.create(Path(folder) / "page", generation=1)
        assert page.save_order is None
        page.save_order = SaveOrder(from_step, memory, durable)
        assert page.save_order == SaveOrder(from_step, memory, durable)
        page.close()


def test_a_rhythm_holds_until_the_step_at_which_the_next_begins() -> None:
    times = SaveTimes(memory_every_steps=5, durable_every_steps=10)
    saved: list[int] = []
    orders = {1: None, 12: SaveOrder(16, 2, 8), 25: SaveOrder(30, 7, 14)}
    order = None
    for step in range(1, 36):
        order = orders.get(step, order)
        times.take(order, step=step)
        saved += [step] if times.is_due(step) else []
    assert saved == [5, 10, 15, *range(16, 30, 2), 35]
    assert [step for step in saved if times.is_durable(step)] == [28]  # of the last rhythm


def test_after_a_roll_back_the_announced_rhythm_holds_at_once() -> None:
    times = SaveTimes(memory_every_steps=5, durable_every_steps=10)
    times.take(SaveOrder(1000, 2, 4), step=None)
    assert times.is_due(2) and times.is_durable(4) and not times.is_due(5)


def test_a_rank_that_stays_does_not_leave_at_a_step_that_was_meant_for_the_generation_before(tmp_path: Path) -> None:
    page = Page.create(tmp_path / "page", generation=1)
    page.stop_at_step = 40
    page.join_generation(2)
    assert page.stop_at_step == 0 and page.generation == 2
