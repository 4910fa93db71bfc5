"""The worker's half of a durable save, with a real writer in a thread and the letters carried by hand."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dougong.run.capture import write_snapshot
from dougong.run.letters import (
    AgentLetter,
    CheckpointCommitted,
    DropCheckpoint,
    OrderPut,
    Reopened,
    SaveAgain,
    ShardFailed,
    ShardSkipped,
    ShardWritten,
    WorkerLetter,
    WriteMetadata,
    post,
    read_from_worker,
    unread,
)
from dougong.run.persist import Persister, PersistRequest
from dougong.run.sharding import Sharding
from dougong.run.snapshot import SnapshotFiles
from dougong.run.write_order import order_path
from dougong.run.writer import Writer, WriterSettings
from tests.run.made_place import place_in
from tests.run.runs import wait_for


class Bench:
    """One rank whose agent and writer are driven by the test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.place = place_in(root, memory_every_steps=1, durable_every_steps=1, commit_timeout_s=60.0)
        self.node = self.place.node
        self.files = SnapshotFiles(self.node.snapshot(0))
        self.persister = Persister(self.place, self.files)
        self.writer = Writer(WriterSettings(node_root=str(self.node.root), write_bytes_per_s=0.0, checkpoint_key=""))

    def submit(self, step: int, *, num_values: int = 50_000) -> None:
        assert self.persister.may_begin(step)
        tree = {"model": {"w": torch.full((num_values,), float(step))}}
        sharding = Sharding({}, rank=0, world_size=1, replicated_over=range(1))
        index, num_bytes = write_snapshot(self.files, tree, step=step, generation=1, world_size=1, sharding=sharding)
        self.persister.submit(PersistRequest(index=index, num_bytes=num_bytes, step=step, stall_s=0.0))

    def told(self, kind: type[WorkerLetter]) -> list[WorkerLetter]:
        letters = [read_from_worker(path) for path in unread(self.node.outbox(0))]
        return [letter for letter in letters if isinstance(letter, kind)]

    def serve(self, *, orders: int = 1) -> None:
        """As the agent and the writer do with the newest order."""
        wait_for(lambda: len(self.told(OrderPut)) >= orders)
        letter = self.told(OrderPut)[-1]
        assert isinstance(letter, OrderPut)
        self.writer.serve(Path(letter.path))

    def answer(self, letter: AgentLetter) -> None:
        post(self.node.inbox(0), letter)

    def files_of(self, step: int) -> set[str]:
        directory = self.root / "checkpoints" / f"step-{step:09d}-g001"
        return {path.name for path in directory.iterdir()} if directory.is_dir() else set()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.persister.move_to(made.place)


def committed(step: int) -> CheckpointCommitted:
    return CheckpointCommitted(generation=1, rank=0, step=step)


def test_a_save_goes_from_the_snapshot_to_a_settled_checkpoint(bench: Bench) -> None:
    bench.submit(5)
    bench.serve()
    (shard,) = bench.told(ShardWritten)
    assert isinstance(shard, ShardWritten)
    bench.answer(WriteMetadata(generation=1, rank=0, step=5, directory=shard.directory, items=shard.items))
    bench.serve(orders=2)
    assert bench.files_of(5) == {"__0_0.distcp", "rank-0.state", ".metadata"}
    bench.answer(committed(5))
    assert bench.persister.wait_committed(step=5)
    assert bench.persister.may_begin(10)


def test_a_reservation_without_a_snapshot_can_be_given_back(bench: Bench) -> None:
    assert bench.persister.may_begin(5)
    assert not bench.persister.may_begin(6)
    bench.persister.release()
    assert bench.persister.may_begin(7)


def test_the_last_step_is_saved_again_when_every_rank_would(bench: Bench) -> None:
    bench.submit(5)
    bench.serve()
    bench.answer(DropCheckpoint(generation=1, rank=0, step=5))
    assert not bench.persister.wait_committed(step=5)
    bench.answer(Reopened(generation=1, rank=0, step=5))
    assert bench.persister.begin_again(5, on_wait=lambda: None)
    assert len(bench.told(SaveAgain)) == 1
    assert not bench.persister.may_begin(6)
    bench.persister.release()


def test_submitting_returns_although_nobody_writes(bench: Bench) -> None:
    began_s = time.monotonic()
    bench.submit(5)
    assert not bench.persister.may_begin(10)
    assert time.monotonic() - began_s < 30  # nothing here waits for a writer that is not there
    assert bench.persister.num_skipped == 1


def test_what_is_due_before_the_one_before_is_settled_is_skipped_and_told(bench: Bench) -> None:
    bench.submit(5)
    bench.serve()
    wait_for(lambda: not unread(bench.node.inbox(0)))  # its own part is written, but others' may not be
    assert not bench.persister.may_begin(10)
    (skip,) = bench.told(ShardSkipped)
    assert isinstance(skip, ShardSkipped)
    assert (skip.step, skip.busy_step) == (10, 5)
    bench.answer(committed(5))
    wait_for(lambda: bench.persister.may_begin(15))


def test_the_buffer_is_kept_until_it_is_written_and_free_after(bench: Bench) -> None:
    bench.submit(5)
    wait_for(lambda: bench.told(OrderPut))
    (pinned,) = [slot.index for slot in bench.files.slots()]
    for step in (6, 7, 8):
        tree = {"model": {"w": torch.full((50_000,), float(step))}}
        index, _ = write_snapshot(bench.files, tree, step=step, generation=1, world_size=1, sharding=None)
        assert index != pinned
    bench.serve()
    wait_for(lambda: bench.files.next_index() == pinned)
    (shard,) = bench.told(ShardWritten)
    assert isinstance(shard, ShardWritten)
    content = (bench.root / "checkpoints" / shard.directory / "__0_0.distcp").read_bytes()
    assert torch.full((50_000,), 5.0).numpy().tobytes() in content


def test_a_dropped_one_is_taken_back_also_from_a_writer_in_the_middle_of_it(bench: Bench) -> None:
    bench.writer = Writer(WriterSettings(node_root=str(bench.node.root), write_bytes_per_s=16e6, checkpoint_key=""))
    bench.submit(5, num_values=16 * 2**20)
    thread = threading.Thread(target=bench.serve)
    thread.start()
    wait_for(lambda: "__0_0.distcp" in bench.files_of(5))
    bench.answer(DropCheckpoint(generation=1, rank=0, step=5))
    assert not bench.persister.wait_committed(step=5)
    thread.join(60)
    assert bench.files_of(5) == set()
    assert not order_path(bench.node, 0, "shard").exists()
    assert bench.persister.may_begin(10)


def test_a_failed_order_frees_the_rank_at_once(bench: Bench) -> None:
    (bench.root / "checkpoints").write_bytes(b"")
    bench.submit(5)
    bench.serve()
    assert not bench.persister.wait_committed(step=5)
    assert [letter.cause for letter in bench.told(ShardFailed) if isinstance(letter, ShardFailed)] == ["other"]
    assert bench.persister.may_begin(10)


def test_an_order_that_is_gone_without_a_word_is_a_failure_and_not_a_wait(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dougong.run.persist._SILENCE_S", 0.2)
    bench.submit(5)
    wait_for(lambda: order_path(bench.node, 0, "shard").exists())
    order_path(bench.node, 0, "shard").unlink()
    assert not bench.persister.wait_committed(step=5)
    (letter,) = bench.told(ShardFailed)
    assert isinstance(letter, ShardFailed) and "writer" in letter.reason


def test_an_order_that_no_writer_begins_is_given_up(bench: Bench) -> None:
    import msgspec

    bench.persister.move_to(msgspec.structs.replace(bench.place, commit_timeout_s=0.2))
    bench.submit(5)
    assert not bench.persister.wait_committed(step=5)
    assert not order_path(bench.node, 0, "shard").exists()


def test_a_commit_whose_letter_was_lost_is_seen_on_the_storage(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dougong.run.persist._LOOK_S", 0.05)
    bench.submit(5)
    bench.serve()
    (shard,) = bench.told(ShardWritten)
    assert isinstance(shard, ShardWritten)
    (bench.root / "checkpoints" / shard.directory / "COMMIT").write_text("mark")
    assert bench.persister.wait_committed(step=5)


def test_a_new_generation_gives_up_what_is_in_hand(bench: Bench) -> None:
    import msgspec

    bench.submit(5)
    wait_for(lambda: bench.told(OrderPut))
    bench.persister.move_to(msgspec.structs.replace(bench.place, generation=2))
    wait_for(lambda: bench.persister.may_begin(6))
    assert not order_path(bench.node, 0, "shard").exists()


def test_a_snapshot_from_before_a_roll_back_is_never_written_as_one_of_after_it(bench: Bench) -> None:
    import msgspec

    bench.submit(5)
    bench.persister.move_to(msgspec.structs.replace(bench.place, generation=2))
    wait_for(lambda: bench.persister.may_begin(6))
    bench.persister.release()
    orders = list(bench.node.root.glob("*.order"))
    assert orders == [] and not any("g002" in path.name for path in (bench.root).rglob("step-*"))


def test_letters_of_other_steps_and_generations_settle_nothing(bench: Bench) -> None:
    bench.submit(5)
    bench.serve()
    bench.answer(committed(4))
    bench.answer(CheckpointCommitted(generation=2, rank=0, step=5))
    wait_for(lambda: not unread(bench.node.inbox(0)))
    assert not bench.persister.may_begin(10)
