from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

from dougong.run.capture import write_snapshot
from dougong.run.dcp_shard import write_metadata
from dougong.run.extent import Extent
from dougong.run.manifest import ItemRecord, LocalPlace
from dougong.run.shard_plan import ShardPlanner
from dougong.run.sharding import Sharding
from dougong.run.snapshot import SnapshotFiles
from dougong.run.state import read_table
from dougong.run.write_files import write_files
from dougong.run.write_order import Given, Stretch

ALONE = "ignore:torch.distributed is disabled:UserWarning"


def buffer_of(tree: dict[str, Any], prefix: Path) -> memoryview:
    files = SnapshotFiles(prefix)
    alone = Sharding({}, rank=0, world_size=1)
    index, num_bytes = write_snapshot(files, tree, step=1, generation=1, world_size=1, sharding=alone)
    return files.buffer(index)[:num_bytes]


def with_extents(buffer: memoryview, extents: dict[tuple[str | int, ...], Extent], prefix: Path) -> memoryview:
    """The same snapshot, in which some leaves know where they lie in a whole tensor."""
    table, start = read_table(buffer)
    records = tuple(
        msgspec.structs.replace(record, extent=extents.get(record.path, record.extent)) for record in table.records
    )
    head = msgspec.msgpack.encode(msgspec.structs.replace(table, records=records))
    new_start = -(-(8 + len(head)) // 4096) * 4096
    whole = bytearray(len(head).to_bytes(8, "little") + head)
    whole += bytes(new_start - len(whole)) + buffer[start:]
    prefix.with_name(f"{prefix.name}.buf0").write_bytes(whole)
    return memoryview(whole)


def checkpoint(directory: Path, buffers: list[memoryview]) -> list[ItemRecord]:
    """A durable checkpoint of as many ranks as there are buffers."""
    items: list[ItemRecord] = []
    for rank, buffer in enumerate(buffers):
        plan = ShardPlanner(rank=rank).plan(buffer)
        write_files(plan.files, buffer, place=LocalPlace(), directory=str(directory))
        items += plan.items
    write_metadata(items, place=LocalPlace(), directory=str(directory))
    return items


def boxes_of(shape: tuple[int, int], *, rows: list[int], columns: list[int]) -> list[tuple[tuple[int, int], ...]]:
    """Offsets and shapes of the boxes between these cuts."""
    row_cuts, column_cuts = [0, *rows, shape[0]], [0, *columns, shape[1]]
    return [
        ((top, left), (bottom - top, right - left))
        for top, bottom in itertools.pairwise(row_cuts)
        for left, right in itertools.pairwise(column_cuts)
    ]


@pytest.mark.filterwarnings(ALONE)
@pytest.mark.parametrize("seed", range(4))
def test_boxes_of_two_ranks_that_cover_a_tensor_are_read_as_one_by_plain_dcp(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    shape = (rng.randint(3, 300), rng.randint(3, 300))
    whole = torch.randn(shape).to([torch.float32, torch.bfloat16][seed % 2])
    boxes = boxes_of(shape, rows=[rng.randint(1, shape[0] - 1)], columns=[rng.randint(1, shape[1] - 1)])
    rng.shuffle(boxes)
    buffers: list[memoryview] = []
    for rank in range(2):
        mine = boxes[rank::2]
        tree = {
            "model": {
                f"part{i}": whole[top : top + height, left : left + width].clone()
                for i, ((top, left), (height, width)) in enumerate(mine)
            },
            "rng": {"seed": rank},
        }
        extents: dict[tuple[str | int, ...], Extent] = {
            ("model", f"part{i}"): Extent("model.w", ("model", "w"), shape, offsets, (rank,))
            for i, (offsets, _) in enumerate(mine)
        }
        buffers.append(with_extents(buffer_of(tree, tmp_path / f"r{rank}"), extents, tmp_path / f"x{rank}"))
    checkpoint(tmp_path / "step", buffers)
    got = {"model": {"w": torch.zeros(shape, dtype=whole.dtype)}}
    load(got, checkpoint_id=str(tmp_path / "step"), no_dist=True)
    assert got["model"]["w"].equal(whole)


@pytest.mark.filterwarnings(ALONE)
def test_of_equal_boxes_one_holder_writes_each_and_the_bytes_are_shared_out(tmp_path: Path) -> None:
    """Four ranks, two halves, each held by two: as hybrid sharding has it."""
    whole = {f"w{i}": torch.randn(64, 32 * (i + 1)) for i in range(6)}
    buffers: list[memoryview] = []
    for rank in range(4):
        half = rank % 2
        tree = {"model": {name: value.chunk(2)[half].clone() for name, value in whole.items()}}
        extents: dict[tuple[str | int, ...], Extent] = {
            ("model", name): Extent(
                f"model.{name}", ("model", name), tuple(value.shape), (32 * half, 0), (half, half + 2)
            )
            for name, value in whole.items()
        }
        buffers.append(with_extents(buffer_of(tree, tmp_path / f"r{rank}"), extents, tmp_path / f"x{rank}"))
    items = checkpoint(tmp_path / "step", buffers)
    stored = [(item.fqn, item.offsets) for item in items if item.dtype]
    assert len(stored) == len(set(stored)) == 12
    written = [sum(item.num_bytes for item in items if item.file == f"__{rank}_0.distcp") for rank in range(4)]
    assert max(written) < 1.5 * min(written)
    got = {"model": {name: torch.zeros_like(value) for name, value in whole.items()}}
    load(got, checkpoint_id=str(tmp_path / "step"), no_dist=True)
    for name, value in whole.items():
        assert got["model"][name].equal(value)


@pytest.mark.parametrize(
    "dtype",
    ["float32", "float64", "bfloat16", "float16", "int64", "uint8", "bool", "complex64", "float8_e4m3fn"],
)
@pytest.mark.parametrize("shape", [(), (0, 4), (1,), (300, 257)])
def test_a_record_made_without_its_payload_reads_as_the_tensor(
    dtype: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    import io

    raw = torch.randint(0, 2, (math.prod(shape) * 16,), dtype=torch.uint8)
    kind = getattr(torch, dtype)
    value = raw[: math.prod(shape) * kind.itemsize].view(kind).reshape(shape)
    (item,) = checkpoint(tmp_path / "step", [buffer_of({"model": {"w": value}}, tmp_path / "r")])
    content = (tmp_path / "step" / item.file).read_bytes()
    record = io.BytesIO(content[item.offset_bytes : item.offset_bytes + item.num_bytes])
    got = torch.load(record, weights_only=True)
    assert got.dtype == kind and got.shape == value.shape
    assert got.reshape(-1).view(torch.uint8).equal(value.reshape(-1).view(torch.uint8))


def test_the_bytes_of_large_tensors_are_not_copied_and_begin_on_a_block_of_the_file(tmp_path: Path) -> None:
    tree = {"model": {f"w{i}": torch.rand(40_000 + i) for i in range(5)}}
    buffer = buffer_of(tree, tmp_path / "r")
    plan = ShardPlanner(rank=0).plan(buffer)
    at = 0
    num_stretches = 0
    for segment in plan.files[0].segments:
        if isinstance(segment, Stretch):
            num_stretches += 1
            assert at % 4096 == segment.offset_bytes % 4096 == 0
        at += segment.num_bytes
    assert num_stretches == 5
    assert sum(len(part.content) for part in plan.files[0].segments if isinstance(part, Given)) < 5 * 8192


def test_a_plan_is_kept_until_the_shapes_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dougong.run import shard_plan

    made: list[int] = []
    real = shard_plan._layout

    def counting(*arguments: Any, **rest: Any) -> Any:
        made.append(1)
        return real(*arguments, **rest)

    monkeypatch.setattr(shard_plan, "_layout", counting)
    planner = ShardPlanner(rank=0)
    for step, width in enumerate((100, 100, 100, 101, 101)):
        tree = {"model": {"w": torch.rand(width)}, "optimizer": {"lr": 0.1 * step}, "progress": {"step": step}}
        plan = planner.plan(buffer_of(tree, tmp_path / f"r{step}"))
        assert len(plan.items) == 2
    assert len(made) == 2


def test_what_changes_from_step_to_step_is_in_every_plan_anew(tmp_path: Path) -> None:
    from dougong.run.dcp_read import read_state

    planner = ShardPlanner(rank=0)
    for step in (1, 2):
        tree = {"model": {"w": torch.full((9,), float(step))}, "optimizer": {"lr": 0.1 * step}, "rng": {"at": step}}
        buffer = buffer_of(tree, tmp_path / f"r{step}")
        plan = planner.plan(buffer)
        directory = tmp_path / f"step{step}"
        write_files(plan.files, buffer, place=LocalPlace(), directory=str(directory))
        write_metadata(plan.items, place=LocalPlace(), directory=str(directory))
        got = read_state(place=LocalPlace(), directory=str(directory), rank=0)
        assert (got["optimizer"]["lr"], got["rng"]["at"], got["model"]["w"][0].item()) == (0.1 * step, step, step)


def test_the_switch_of_torch_save_for_checksums_stays_as_the_script_set_it(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    ShardPlanner(rank=0).plan(buffer_of({"model": {"w": torch.rand(3, 7, 11)}}, tmp_path / "r"))
    assert torch.serialization.get_crc32_options() is before is True
