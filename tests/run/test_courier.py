"""Real courier processes of several nodes on this host."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from dougong.errors import CheckpointDamaged
from dougong.run import courier_wire, wire
from dougong.run.copy_store import NO_ANCHOR, kept_for
from dougong.run.courier_orders import Bring, Brought, Report
from dougong.run.settings import SaveRule
from dougong.run.snapshot import SnapshotFiles
from tests.run.made_copies import TOKEN, CourierProcess, flip_a_bit, save

pytestmark = pytest.mark.processes

OWNER, KEEPER, SPARE = (f"local/rack-01/node-0{number}" for number in (1, 2, 3))
CONTENT = bytes(range(256)) * 2000


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[CourierProcess]:
    with CourierProcess(tmp_path, OWNER) as courier:
        yield courier


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[CourierProcess]:
    with CourierProcess(tmp_path, KEEPER) as courier:
        yield courier


def round_order(
    *peers: CourierProcess, number: int = 1, from_step: int = 1, anchor_step: int = 0, generation: int = 1
) -> wire.CopyOrder:
    return wire.CopyOrder(
        generation=generation,
        round=number,
        from_step=from_step,
        anchor_generation=1 if anchor_step else 0,
        anchor_step=anchor_step,
        peers=tuple(peer.address for peer in peers),
    )


def has(courier: CourierProcess, *, owner: str = OWNER, step: int) -> Report:
    """Wait until the courier says that it keeps this copy."""
    return courier.hear_until(
        lambda said: (
            isinstance(said, Report) and any(copy.owner == owner and copy.snapshot.step == step for copy in said.copies)
        )
    )


def bring(courier: CourierProcess, origin: CourierProcess, *, step: int, generation: int = 1) -> str:
    courier.order(Bring(request=7, rank=0, generation=generation, step=step, origin=origin.address))
    return courier.hear_until(lambda said: isinstance(said, Brought)).reason


def test_a_checkpoint_is_kept_at_home_and_sent_to_the_keeper(owner: CourierProcess, keeper: CourierProcess) -> None:
    owner.order(round_order(keeper))
    save(owner.node.snapshot(0), CONTENT, step=5)
    has(owner, step=5)
    has(keeper, step=5)
    copied = SnapshotFiles(keeper.node.copy(0, owner=OWNER))
    assert bytes(copied.read(step=5)) == CONTENT
    assert SnapshotFiles(keeper.node.snapshot(0)).slots() == (), "the keeper's own ranks see nothing of it"


def test_nothing_is_copied_before_the_step_of_the_round_or_of_another_generation(
    owner: CourierProcess, keeper: CourierProcess
) -> None:
    save(owner.node.snapshot(0), CONTENT, step=5)
    save(owner.node.snapshot(0), CONTENT, step=30, generation=2)
    owner.order(round_order(keeper, from_step=6))
    save(owner.node.snapshot(0), CONTENT, step=20)
    assert [copy.snapshot.step for copy in has(keeper, step=20).copies] == [20]


def test_the_keeper_holds_the_anchor_while_later_rounds_come_and_go(
    owner: CourierProcess, keeper: CourierProcess
) -> None:
    for number, step in enumerate((5, 10, 15, 20), start=1):
        order = round_order(keeper, number=number, from_step=step, anchor_step=5 if step > 5 else 0)
        keeper.order(order)
        owner.order(order)
        save(owner.node.snapshot(0), CONTENT + bytes([step]), step=step)
        report = has(keeper, step=step)
        assert 5 in [copy.snapshot.step for copy in report.copies]


def test_a_lost_nodes_state_comes_to_the_spare_over_the_network(
    tmp_path: Path, owner: CourierProcess, keeper: CourierProcess
) -> None:
    owner.order(round_order(keeper))
    save(owner.node.snapshot(0), CONTENT, step=5)
    has(keeper, step=5)
    owner.process.kill()
    with CourierProcess(tmp_path, SPARE) as spare:
        assert bring(spare, keeper, step=5) == ""
        assert bytes(SnapshotFiles(spare.node.snapshot(0)).read(step=5)) == CONTENT
        assert bring(spare, keeper, step=5) == "", "twice does no harm"
        assert "is not here any more" in bring(spare, keeper, step=6)
        assert "is not here any more" in bring(spare, keeper, step=5, generation=2)


def test_a_keeper_that_takes_the_lost_ranks_over_has_the_state_already(
    owner: CourierProcess, keeper: CourierProcess
) -> None:
    owner.order(round_order(keeper))
    save(owner.node.snapshot(0), CONTENT, step=5)
    has(keeper, step=5)
    owner.process.kill()
    assert bring(keeper, keeper, step=5) == ""
    files, slot = kept_for(0, keeper.node, generation=1, step=5)
    assert bytes(files.read_slot(slot)) == CONTENT
    assert SnapshotFiles(keeper.node.snapshot(0)).slots() == (), "it is read where it lies"


def test_a_survivor_goes_back_to_what_it_kept_itself(owner: CourierProcess, keeper: CourierProcess) -> None:
    owner.order(round_order(keeper))
    save(owner.node.snapshot(0), CONTENT, step=5)
    has(owner, step=5)
    for step in (10, 15):
        save(owner.node.snapshot(0), b"later" * 100, step=step)
    assert bring(owner, owner, step=5) == ""
    files, slot = kept_for(0, owner.node, generation=1, step=5)
    assert bytes(files.read_slot(slot)) == CONTENT
    with pytest.raises(CheckpointDamaged, match="or copy of step 6"):
        kept_for(0, owner.node, generation=1, step=6)


@pytest.mark.parametrize("is_at_home", [False, True])
def test_a_copy_with_a_flipped_bit_is_refused_and_forgotten(
    tmp_path: Path, owner: CourierProcess, keeper: CourierProcess, is_at_home: bool
) -> None:
    owner.order(round_order(keeper))
    save(owner.node.snapshot(0), CONTENT, step=5)
    has(keeper, step=5)
    prefix = keeper.node.copy(0, owner=OWNER)
    flip_a_bit(prefix, SnapshotFiles(prefix).slots()[0])
    with CourierProcess(tmp_path, SPARE) as spare:
        asker = keeper if is_at_home else spare
        assert "checksum differs" in (reason := bring(asker, keeper, step=5)) or "damaged" in reason
        assert SnapshotFiles(asker.node.snapshot(0)).slots() == ()
        assert SnapshotFiles(prefix).slots() == ()


def test_own_memory_with_a_flipped_bit_is_replaced_by_the_keepers_copy(
    owner: CourierProcess, keeper: CourierProcess
) -> None:
    owner.order(round_order(keeper))
    slot = save(owner.node.snapshot(0), CONTENT, step=5)
    has(keeper, step=5)
    flip_a_bit(owner.node.snapshot(0), slot)
    for kept in SnapshotFiles(owner.node.copy(0, owner=OWNER)).slots():
        flip_a_bit(owner.node.copy(0, owner=OWNER), kept)
    assert bring(owner, keeper, step=5) == ""
    assert bytes(SnapshotFiles(owner.node.snapshot(0)).read(step=5)) == CONTENT


@pytest.mark.parametrize("victim", ["owner", "keeper"])
def test_a_courier_killed_in_the_middle_of_a_transfer_leaves_the_copy_before_it(tmp_path: Path, victim: str) -> None:
    slow = SaveRule(peer_max_bytes_per_s=2e6)
    with CourierProcess(tmp_path, OWNER, save=slow) as owner, CourierProcess(tmp_path, KEEPER, save=slow) as keeper:
        owner.order(round_order(keeper))
        save(owner.node.snapshot(0), CONTENT, step=5)
        has(keeper, step=5)
        # 20 MB at 2 MB a second: there is time to kill it in the middle
        owner.order(round_order(keeper, number=2, from_step=6, anchor_step=5))
        save(owner.node.snapshot(0), bytes(20_000_000), step=10)
        has(owner, step=10)
        buffers = keeper.node.copy(0, owner=OWNER).parent
        while not any(path.stat().st_size > 4_000_000 for path in buffers.glob("rank-0.buf*")):
            assert keeper.process.poll() is None
        (owner if victim == "owner" else keeper).process.kill()
        files = SnapshotFiles(keeper.node.copy(0, owner=OWNER))
        assert [slot.step for slot in files.slots()] == [5]
        assert bytes(files.read(step=5)) == CONTENT
        if victim == "keeper":
            report = owner.hear_until(lambda said: isinstance(said, Report) and said.problem)
            assert "rank 0, step 10" in report.problem


def test_a_round_again_after_a_failed_one_completes(tmp_path: Path, owner: CourierProcess) -> None:
    with CourierProcess(tmp_path, KEEPER) as gone:
        dead = gone.address
    owner.order(msgspec.structs.replace(round_order(), peers=(dead,)))
    save(owner.node.snapshot(0), CONTENT, step=5)
    assert KEEPER in owner.hear_until(lambda said: isinstance(said, Report) and said.problem).problem
    with CourierProcess(tmp_path, KEEPER) as keeper:
        owner.order(round_order(keeper, number=2, from_step=5))
        has(keeper, step=5)


def test_a_courier_ends_with_its_agent_and_says_where_it_listens(owner: CourierProcess) -> None:
    assert owner.port > 0
    assert owner.process.stdin is not None
    owner.process.stdin.close()
    assert owner.process.wait(timeout=30) == 0


def test_an_owner_that_would_lie_outside_of_the_copies_is_refused(
    owner: CourierProcess, keeper: CourierProcess
) -> None:
    slot = save(owner.node.snapshot(0), CONTENT, step=5)
    with courier_wire.call("127.0.0.1", keeper.port, token=TOKEN) as connection:
        connection.say(courier_wire.Put(owner="..", rank=0, slot=slot, anchor=NO_ANCHOR))
        assert "is no component" in getattr(connection.hear(), "reason", "")


def test_it_is_started_without_pytorch() -> None:
    code = "import json, sys, dougong.run.courier; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "fsspec"} & set(json.loads(done.stdout))
