"""A process that writes or commits a checkpoint is killed at each of its system calls on the checkpoint's files."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path

import msgspec
import pytest

from dougong.clock import SystemClock
from dougong.errors import CheckpointDamaged
from dougong.run import manifest, retention_lock
from dougong.run.checkpoints import CheckpointDesk, newest_good
from dougong.run.layout import NodeDirectory
from dougong.run.letters import MetadataWritten, ShardFailed, ShardWritten
from dougong.run.write_order import FileOrder, Given, WriteOrder, put_order
from dougong.run.writer import OrderLine, Writer, WriterSettings
from tests.run import made_orders as made
from tests.run.killing import Moment, kill_at, moments, need_strace
from tests.run.made_checkpoint import make, write_files
from tests.run.made_settings import settings_at

pytestmark = pytest.mark.processes
COMMIT = Path(__file__).parent / "scripts" / "commit_checkpoint.py"


@pytest.fixture(autouse=True)
def _strace() -> None:
    need_strace()


def orders_at(root: Path, *, step: int = 10) -> tuple[WriteOrder, WriteOrder]:
    """A whole checkpoint of one rank: its shard and the metadata."""
    shard = made.order_at(root, step=step, num_bytes=200_000)
    metadata = msgspec.structs.replace(
        shard, kind="metadata", buffer_path="", files=(FileOrder(".metadata", (Given(b"index"),)),)
    )
    return shard, metadata


def lines_of(root: Path, orders: tuple[WriteOrder, ...]) -> bytes:
    node = NodeDirectory(root / "node")
    paths = [put_order(node, order) for order in orders]
    return b"".join(msgspec.json.encode(OrderLine(path=str(path))) + b"\n" for path in paths)


def commit_what_was_told(root: Path) -> None:
    """The controller's part, with the letters that are there."""
    settings = msgspec.structs.replace(settings_at(root), nodes=("n",), procs_per_node=1)

    async def take_all() -> None:
        desk = CheckpointDesk(settings, clock=SystemClock())
        # both orders were given at once here; in a run the metadata is asked for when all shards are there
        for letter in sorted(made.told_controller(root), key=lambda letter: isinstance(letter, MetadataWritten)):
            assert isinstance(letter, ShardWritten | ShardFailed | MetadataWritten)
            await desk.take(letter)

    asyncio.run(take_all())


def assert_no_false_commit(root: Path) -> None:
    for stored in manifest.list_stored(str(root / "checkpoints")):
        if stored.is_committed:
            manifest.verify(str(root / "checkpoints"), stored.directory)


def assert_next_save_succeeds(root: Path) -> None:
    for box in (NodeDirectory(root / "node").outbox(0), NodeDirectory(root / "node").inbox(0)):
        shutil.rmtree(box, ignore_errors=True)
    orders = orders_at(root, step=20)
    lines_of(root, orders)
    writer = Writer(WriterSettings(node_root=str(root / "node"), write_bytes_per_s=0.0, checkpoint_key=""))
    for path in writer.take_over():
        writer.serve(path)
    commit_what_was_told(root)
    assert newest_good(str(root / "checkpoints"))[0] == (20, "step-000000020-g001")


def test_a_writer_killed_at_any_call_leaves_no_false_checkpoint_and_the_next_save_succeeds(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    command, lines = made.writer_command(whole), lines_of(whole, orders_at(whole))
    found = moments(command, paths=(), log=tmp_path / "log", stdin=lines)
    commit_what_was_told(whole)
    assert newest_good(str(whole / "checkpoints"))[0] == (10, "step-000000010-g001")
    names = {moment.name for moment in found}
    assert {"mkdir", "fallocate", "ftruncate", "fsync", "unlink", "rename"} <= names, found
    assert names & {"pwrite64", "pwritev", "pwritev2"}, found
    num_killed = sum(_is_killed_well(tmp_path / f"{m.name}-{m.count}", m) for m in found)
    # one thread may carry out both orders this time, or each its own: then it never comes to some call
    assert num_killed > 0.7 * len(found) > 10, found


def _is_killed_well(root: Path, moment: Moment) -> bool:
    root.mkdir()
    lines = lines_of(root, orders_at(root))
    was_killed = kill_at(moment, made.writer_command(root), paths=(), log=root / "log", stdin=lines)
    told = made.told_controller(root)
    assert not any(isinstance(letter, ShardFailed) for letter in told), (moment, told)
    # the next writer gives up what was begun, and the controller acts on all the letters there are
    next_writer = Writer(WriterSettings(node_root=str(root / "node"), write_bytes_per_s=0.0, checkpoint_key=""))
    next_writer.take_over()
    commit_what_was_told(root)
    assert_no_false_commit(root)
    assert_next_save_succeeds(root)
    shutil.rmtree(root)
    return was_killed


@pytest.mark.parametrize("lock", [(), ("100",)], ids=["plain", "locked"])
def test_a_controller_killed_at_any_call_of_its_commit_leaves_all_or_nothing(
    lock: tuple[str, ...], tmp_path: Path
) -> None:
    fates: set[bool] = set()
    root = tmp_path / "whole"
    found = moments(_commit_command(root, lock), paths=(), log=tmp_path / "log")
    _open(root)
    assert {"write", "fsync", "rename"} <= {moment.name for moment in found}, found
    for moment in found:
        root = tmp_path / f"{moment.name}-{moment.count}"
        command = _commit_command(root, lock)
        assert kill_at(moment, command, paths=(), log=tmp_path / "log")
        (stored,) = manifest.list_stored(str(root))
        fates.add(stored.is_committed)
        assert_no_false_commit(root)
        if not stored.is_committed:
            with pytest.raises(CheckpointDamaged, match="never committed"):
                manifest.verify(str(root), stored.directory)
        _open(root)
        make(root, step=20)
        assert newest_good(str(root))[0] == (20, "step-000000020-g001")
        shutil.rmtree(root)
    assert fates == {True, False}


def _commit_command(root: Path, lock: tuple[str, ...]) -> list[str]:
    record = write_files(root, step=10)
    (root / "record.json").write_bytes(msgspec.json.encode(record))
    return [sys.executable, str(COMMIT), str(root), str(root / "record.json"), *lock]


def _open(root: Path) -> None:
    retention_lock.unprotect(root / "step-000000010-g001")
