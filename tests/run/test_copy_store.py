from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dougong.errors import CheckpointDamaged
from dougong.run.copy_store import NO_ANCHOR, Anchor, CopyStore, copy_over, forget_newer
from dougong.run.layout import NodeDirectory
from dougong.run.snapshot import Slot, SnapshotFiles
from tests.run.made_copies import flip_a_bit, save

OWNER = "hall/rack-01/node-01"


@pytest.fixture
def node(tmp_path: Path) -> NodeDirectory:
    return NodeDirectory(tmp_path / "node")


def saved(node: NodeDirectory, *, step: int, generation: int = 1, content: bytes | None = None) -> Slot:
    return save(node.snapshot(0), content or bytes([step]) * 9000, step=step, generation=generation)


def keep(store: CopyStore, *, step: int, generation: int = 1, anchor: Anchor = NO_ANCHOR, owner: str = OWNER) -> None:
    found = store.find(0, generation=generation, step=step, owner="")
    assert found is not None
    with store.deposit(owner, 0, found.slot, anchor=anchor) as deposit:
        copy_over(found, deposit)


def states(store: CopyStore, owner: str = OWNER) -> list[tuple[int, int]]:
    return [(c.snapshot.generation, c.snapshot.step) for c in store.held() if c.owner == owner]


def test_a_copy_has_the_bytes_and_the_name_of_its_owner(node: NodeDirectory) -> None:
    store = CopyStore(node)
    slot = saved(node, step=5)
    keep(store, step=5)
    (held,) = store.held()
    assert (held.owner, held.snapshot.rank, held.snapshot.step) == (OWNER, 0, 5)
    assert bytes(SnapshotFiles(node.copy(0, owner=OWNER)).read(step=5)) == bytes([5]) * 9000
    assert store.has(OWNER, 0, slot) and not store.has("other/node", 0, slot)


def test_copies_are_not_taken_for_the_nodes_own_checkpoints(node: NodeDirectory) -> None:
    from dougong.run.agent import snapshots_in

    saved(node, step=5)
    keep(CopyStore(node), step=5)
    assert [status.step for status in snapshots_in(node)] == [5]


def test_a_transfer_that_breaks_off_leaves_the_copies_before_it(node: NodeDirectory) -> None:
    store = CopyStore(node)
    for step in (1, 2):
        saved(node, step=step)
        keep(store, step=step)
    slot = saved(node, step=3)
    with store.deposit(OWNER, 0, slot, anchor=Anchor(1, 2)) as deposit:
        deposit.write(memoryview(b"x" * 5000))
    assert states(store) == [(1, 2)]


def test_bytes_that_are_not_those_announced_never_become_a_copy(node: NodeDirectory) -> None:
    store = CopyStore(node)
    slot = saved(node, step=3)
    with store.deposit(OWNER, 0, slot, anchor=NO_ANCHOR) as deposit:
        deposit.write(memoryview(b"x" * 9000))
        with pytest.raises(CheckpointDamaged, match="checksum differs"):
            deposit.finish()
    assert store.held() == ()


def test_what_the_rank_wrote_over_meanwhile_never_becomes_a_copy(node: NodeDirectory) -> None:
    store = CopyStore(node)
    saved(node, step=3)
    found = store.find(0, generation=1, step=3, owner="")
    assert found is not None
    flip_a_bit(node.snapshot(0), found.slot)
    with store.deposit(OWNER, 0, found.slot, anchor=NO_ANCHOR) as deposit, pytest.raises(CheckpointDamaged):
        copy_over(found, deposit)
    assert store.held() == ()


@given(steps=st.lists(st.integers(1, 100), min_size=3, max_size=9, unique=True).map(sorted), anchored=st.data())
@settings(max_examples=30)
def test_the_anchor_is_never_written_over(
    steps: list[int], anchored: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    node = NodeDirectory(tmp_path_factory.mktemp("node"))
    store, anchor = CopyStore(node), NO_ANCHOR
    for step in steps:
        saved(node, step=step)
        keep(store, step=step, anchor=anchor)
        assert len(states(store)) <= 2
        if anchor != NO_ANCHOR:
            assert (anchor.generation, anchor.step) in states(store)
        if anchored.draw(st.booleans()):
            anchor = Anchor(1, step)


def test_the_first_checkpoint_from_a_step_on_is_found_for_each_rank(node: NodeDirectory) -> None:
    for rank in (0, 1):
        for step in (10, 15):
            save(node.snapshot(rank), b"x" * 50, step=step)
    found = CopyStore(node).newest_of_own(generation=1, from_step=9)
    assert [(state.rank, state.slot.step) for state in found] == [(0, 10), (1, 10)]
    assert [s.slot.step for s in CopyStore(node).newest_of_own(generation=1, from_step=11)] == [15, 15]
    assert CopyStore(node).newest_of_own(generation=2, from_step=1) == ()


def test_own_checkpoints_are_found_before_copies(node: NodeDirectory) -> None:
    store = CopyStore(node)
    saved(node, step=5)
    keep(store, step=5)
    found = store.find(0, generation=1, step=5)
    assert found is not None and found.owner == ""
    assert store.find(0, generation=2, step=5) is None and store.find(1, generation=1, step=5) is None


def test_copies_older_than_the_anchor_are_given_up_with_their_memory(node: NodeDirectory) -> None:
    store = CopyStore(node)
    saved(node, step=5)
    keep(store, step=5, owner="gone/node")
    keep(store, step=5)
    saved(node, step=8)
    keep(store, step=8)
    assert store.forget_before(Anchor(1, 8))
    assert {(held.owner, held.snapshot.step) for held in store.held()} == {(OWNER, 5), (OWNER, 8)}
    assert not (node.copies / "gone~node").exists()
    assert not store.forget_before(Anchor(1, 8)), "nothing is left to give up"


def test_a_copy_found_damaged_is_forgotten(node: NodeDirectory) -> None:
    store = CopyStore(node)
    saved(node, step=5)
    keep(store, step=5)
    found = store.find(0, generation=1, step=5, owner=OWNER)
    assert found is not None and found.is_whole()
    flip_a_bit(found.prefix, found.slot)
    assert not found.is_whole()
    store.drop(found)
    assert store.held() == ()


def test_copies_do_not_take_the_last_memory(node: NodeDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs

    def nearly_full(path: Any) -> Any:
        room = real(path)
        return os.statvfs_result((room[0], 4096, 1_000_000, 50_001, 50_001, *room[5:]))

    monkeypatch.setattr(os, "statvfs", nearly_full)
    slot = saved(node, step=5)
    with pytest.raises(OSError, match="no shared memory to spare"):
        CopyStore(node).deposit(OWNER, 0, slot, anchor=NO_ANCHOR)


def test_a_rank_that_goes_back_forgets_the_future_it_gives_up(tmp_path: Path) -> None:
    prefix = tmp_path / "rank-0"
    save(prefix, b"a" * 50, step=10)
    save(prefix, b"b" * 50, step=15)
    forget_newer(prefix, generation=0, step=0)
    assert len(SnapshotFiles(prefix).slots()) == 2, "not from memory: nothing is known to be given up"
    forget_newer(prefix, generation=1, step=10)
    assert [slot.step for slot in SnapshotFiles(prefix).slots()] == [10]
    save(prefix, b"c" * 50, step=12, generation=2)
    assert [slot.step for slot in SnapshotFiles(prefix).slots()] == [12, 10]
