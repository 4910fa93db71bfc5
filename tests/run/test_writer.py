from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from dougong.run.layout import NodeDirectory
from dougong.run.letters import OrderDone, ShardFailed, ShardWritten
from dougong.run.manifest import FileRecord
from dougong.run.write_order import WriteOrder, orders_in, put_order, take_order
from dougong.run.writer import Writer, WriterSettings
from tests.run import made_orders as made
from tests.run.runs import wait_for

HEAVY = {"torch", "numpy", "fsspec", "cryptography", "click", "rich", "yaml"}


def writer_at(root: Path) -> Writer:
    return Writer(WriterSettings(node_root=str(root / "node"), write_bytes_per_s=0.0, checkpoint_key=""))


def test_a_writer_loads_no_torch_and_nothing_else_that_is_heavy() -> None:
    code = "import sys, dougong.run.writer; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert HEAVY & set(loaded) == set()


@pytest.mark.processes
def test_a_writer_at_work_has_no_torch_in_its_memory(tmp_path: Path) -> None:
    order = made.order_at(tmp_path)
    with made.writer(tmp_path) as process:
        made.put(tmp_path, order, process)
        wait_for(lambda: made.told_rank(tmp_path))
        maps = Path(f"/proc/{process.pid}/maps").read_text()
    assert "torch" not in maps and "numpy" not in maps


@pytest.mark.processes
def test_orders_become_files_and_letters(tmp_path: Path) -> None:
    orders = [made.order_at(tmp_path, rank=rank) for rank in range(3)]
    with made.writer(tmp_path) as process:
        for order in orders:
            made.put(tmp_path, order, process)
        wait_for(lambda: all(made.told_rank(tmp_path, rank) for rank in range(3)))
    written = made.files_in(tmp_path, orders[0])
    for rank, order in enumerate(orders):
        assert {name: written[name] for name in made.content_of(order)} == made.content_of(order)
        (told,) = made.told_controller(tmp_path, rank)
        assert isinstance(told, ShardWritten)
        assert (told.rank, told.step, told.directory, told.stall_s) == (rank, 10, order.directory, 0.5)
        sizes = {name: len(content) for name, content in made.content_of(order).items()}
        assert {file.name: file.num_bytes for file in told.files} == sizes
        (done,) = made.told_rank(tmp_path, rank)
        assert isinstance(done, OrderDone) and done.reason == ""
    assert orders_in(NodeDirectory(tmp_path / "node")) == ()


@pytest.mark.processes
def test_when_its_agent_is_gone_a_writer_finishes_what_it_has(tmp_path: Path) -> None:
    order = made.order_at(tmp_path)
    with made.writer(tmp_path) as process:
        made.put(tmp_path, order, process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0
    assert made.files_in(tmp_path, order) == made.content_of(order)


@pytest.mark.processes
def test_what_a_killed_writer_left_is_given_up_and_removed_by_the_next(tmp_path: Path) -> None:
    order = made.order_at(tmp_path, num_bytes=30 * 2**20)
    with made.writer(tmp_path, write_bytes_per_s=float(8 * 2**20)) as process:
        made.put(tmp_path, order, process)
        wait_for(lambda: "__0_0.distcp" in made.files_in(tmp_path, order))
        process.kill()
    assert made.told_controller(tmp_path) == []
    assert writer_at(tmp_path).take_over() == ()
    (told,) = made.told_controller(tmp_path)
    assert isinstance(told, ShardFailed) and "killed" in told.reason
    assert made.files_in(tmp_path, order) == {}
    assert orders_in(NodeDirectory(tmp_path / "node")) == ()


def test_an_order_that_nobody_has_begun_is_carried_out_by_the_next_writer(tmp_path: Path) -> None:
    path = put_order(NodeDirectory(tmp_path / "node"), made.order_at(tmp_path))
    assert writer_at(tmp_path).take_over() == (path,)


def test_an_order_that_another_writer_is_at_is_left_alone(tmp_path: Path) -> None:
    path = put_order(NodeDirectory(tmp_path / "node"), made.order_at(tmp_path))
    held = take_order(path)
    assert held is not None
    assert writer_at(tmp_path).take_over() == ()
    writer_at(tmp_path).serve(path)
    assert path.exists() and made.told_controller(tmp_path) == []


def test_an_order_that_was_taken_back_is_not_carried_out(tmp_path: Path) -> None:
    path = put_order(NodeDirectory(tmp_path / "node"), made.order_at(tmp_path))
    path.unlink()
    writer_at(tmp_path).serve(path)
    assert made.told_controller(tmp_path) == made.told_rank(tmp_path) == []


def test_an_order_taken_back_in_the_middle_ends_the_writing_and_leaves_no_file(tmp_path: Path) -> None:
    order = made.order_at(tmp_path, num_bytes=40 * 2**20)
    path = put_order(NodeDirectory(tmp_path / "node"), order)
    slow = Writer(WriterSettings(node_root=str(tmp_path / "node"), write_bytes_per_s=16e6, checkpoint_key=""))
    thread = threading.Thread(target=slow.serve, args=(path,))
    thread.start()
    wait_for(lambda: "__0_0.distcp" in made.files_in(tmp_path, order))
    path.unlink()
    thread.join(60)
    assert made.files_in(tmp_path, order) == {}
    assert made.told_controller(tmp_path) == []


@pytest.mark.parametrize("harm", ["the buffer is gone", "the buffer is short", "a file is there", "no directory"])
def test_a_write_that_fails_is_told_with_its_reason_and_leaves_nothing(harm: str, tmp_path: Path) -> None:
    order = made.order_at(tmp_path)
    match harm:
        case "the buffer is gone":
            Path(order.buffer_path).unlink()
        case "the buffer is short":
            Path(order.buffer_path).write_bytes(bytes(5000))
        case "a file is there":
            (tmp_path / "checkpoints" / order.directory).mkdir(parents=True)
            (tmp_path / "checkpoints" / order.directory / "rank-0.state").write_bytes(b"old")
        case _:
            (tmp_path / "checkpoints").write_bytes(b"")
    path = put_order(NodeDirectory(tmp_path / "node"), order)
    writer_at(tmp_path).serve(path)
    (told,) = made.told_controller(tmp_path)
    (done,) = made.told_rank(tmp_path)
    assert isinstance(told, ShardFailed) and isinstance(done, OrderDone)
    assert told.reason == done.reason != ""
    left = made.files_in(tmp_path, order)
    assert left == ({"rank-0.state": b"old"} if harm == "a file is there" else {})
    assert not path.exists()


def test_boxes_of_a_run_that_is_over_do_not_come_back(tmp_path: Path) -> None:
    import shutil

    order = made.order_at(tmp_path)
    path = put_order(NodeDirectory(tmp_path / "node"), order)
    writer = writer_at(tmp_path)
    real = writer._carry_out

    def carry_out(order: WriteOrder, path: Path, fd: int) -> tuple[FileRecord, ...]:
        files = real(order, path, fd)
        shutil.rmtree(tmp_path / "node")
        return files

    writer._carry_out = carry_out
    writer.serve(path)
    assert not (tmp_path / "node").exists()


def test_an_order_that_is_no_order_is_removed(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    path = tmp_path / "node" / "rank-0.shard.order"
    path.write_bytes(msgspec.msgpack.encode({"kind": "other"}))
    writer_at(tmp_path).serve(path)
    assert not path.exists()


def test_an_encrypting_writer_leaves_no_plain_byte(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    from dougong.run.manifest import LocalPlace
    from dougong.run.sealed import UnsealedPlace, load_sealer

    key = tmp_path / "key"
    key.write_bytes(bytes(32))
    order = made.order_at(tmp_path, num_bytes=2 * 2**20)
    path = put_order(NodeDirectory(tmp_path / "node"), order)
    Writer(WriterSettings(node_root=str(tmp_path / "node"), write_bytes_per_s=0.0, checkpoint_key=str(key))).serve(path)
    written = made.files_in(tmp_path, order)
    place = UnsealedPlace(LocalPlace(), load_sealer(key))
    for name, content in made.content_of(order).items():
        assert b"state" not in written["rank-0.state"]
        with place.open_read(f"{tmp_path}/checkpoints/{order.directory}/{name}") as file:
            assert file.read() == content
