from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from dougong.errors import UserError
from dougong.run.capture import write_snapshot
from dougong.run.snapshot import SnapshotFiles
from dougong.run.state import (
    Progress,
    put_back,
    read_table,
    read_tree,
    restore_rng,
    rng_state,
)
from tests.run import made_training as made


def written_and_read(tree: dict[str, Any], prefix: Path) -> dict[str, Any]:
    files = SnapshotFiles(prefix)
    write_snapshot(files, tree, step=1, generation=1, world_size=1)
    return read_tree(SnapshotFiles(prefix).read(step=1))


def test_training_goes_on_bitwise_from_a_snapshot(tmp_path: Path) -> None:
    parts = made.parts()
    made.train(parts, num_steps=3)
    made.snapshot(parts, tmp_path / "rank-0")
    expected = made.train(parts, num_steps=4)

    other = made.parts(seed=9)
    progress = put_back(read_tree(SnapshotFiles(tmp_path / "rank-0").read(step=3)), other)
    assert progress == Progress(step=3, num_tokens=120)
    assert made.train(other, num_steps=4) == expected


def test_training_on_restored_objects_leaves_the_snapshot_as_it_is(tmp_path: Path) -> None:
    """An optimizer keeps the tensors it is given and updates them in place."""
    parts = made.parts()
    made.train(parts, num_steps=3)
    made.snapshot(parts, tmp_path / "rank-0")
    files = SnapshotFiles(tmp_path / "rank-0")
    put_back(read_tree(files.read(step=3)), parts)
    made.train(parts, num_steps=2)
    assert files.is_whole(files.slots()[0])


def test_a_state_that_has_changed_since_does_not_reach_the_snapshot(tmp_path: Path) -> None:
    parts = made.parts()
    files, _ = made.snapshot(parts, tmp_path / "rank-0")
    made.train(parts, num_steps=1)
    assert files.is_whole(files.slots()[0])


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4)], ids=str)
def test_every_dtype_and_shape_comes_back(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    tensor = (torch.rand(shape) * 100).to(dtype)
    got = written_and_read({"a": tensor}, tmp_path / "r")["a"]
    assert got.dtype == dtype and got.shape == tensor.shape
    assert got.reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))


def test_a_view_with_strides_comes_back_as_the_values_it_shows(tmp_path: Path) -> None:
    tensor = torch.arange(24.0).reshape(4, 6)
    got = written_and_read({"a": tensor.T, "b": tensor[::2, 1::3], "c": tensor[0].expand(3, 6)}, tmp_path / "r")
    assert got["a"].equal(tensor.T) and got["b"].equal(tensor[::2, 1::3]) and got["c"].equal(tensor[0].expand(3, 6))


ARRAYS = npst.arrays(
    dtype=npst.scalar_dtypes() | npst.unicode_string_dtypes(max_len=4), shape=npst.array_shapes(min_dims=0, min_side=0)
)


@given(array=ARRAYS)
@settings(max_examples=50)
def test_every_numpy_array_of_numbers_or_text_comes_back(array: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    got = written_and_read({"a": array}, tmp_path_factory.mktemp("s") / "r")["a"]
    assert got.dtype == array.dtype and got.shape == array.shape
    assert got.tobytes() == array.tobytes()
    assert got.flags.writeable


FOREIGN = [
    numpy.array([object()]),
    numpy.zeros(2, dtype=[("a", "f4")]),
    torch.eye(2).to_sparse(),
]


@pytest.mark.parametrize("foreign", FOREIGN, ids=["objects", "records", "sparse"])
def test_what_is_no_block_of_numbers_is_a_mistake_that_names_its_place(foreign: object, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        written_and_read({"ema": {"shadow": foreign}}, tmp_path / "r")
    assert caught.value.where == "state['ema']['shadow']"


def test_a_refused_state_leaves_the_last_snapshot_valid(tmp_path: Path) -> None:
    files = SnapshotFiles(tmp_path / "r")
    write_snapshot(files, {"a": torch.ones(2)}, step=1, generation=1, world_size=1)
    with pytest.raises(UserError):
        write_snapshot(files, {"a": object()}, step=2, generation=1, world_size=1)
    assert [slot.step for slot in files.slots()] == [1]


@given(steps=st.lists(st.integers(1, 40), min_size=1, max_size=6))
@settings(max_examples=20)
def test_snapshots_of_changing_size_are_each_read_back(
    steps: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    files = SnapshotFiles(tmp_path_factory.mktemp("s") / "r")
    for number, size in enumerate(steps, start=1):
        tree = {"a": torch.full((size * 1000,), float(number)), "count": number}
        write_snapshot(files, tree, step=number, generation=1, world_size=1)
        assert read_tree(files.read(step=number))["a"].equal(tree["a"])


def test_the_generators_of_python_numpy_and_torch_go_on_where_they_were() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), numpy.random.rand(), torch.rand(()).item()

    state = rng_state()
    expected = [draw() for _ in range(3)]
    restore_rng(state)
    assert [draw() for _ in range(3)] == expected


def test_another_set_of_objects_is_a_mistake_that_lists_both(tmp_path: Path) -> None:
    parts = made.parts()
    made.snapshot(parts, tmp_path / "r")
    tree = read_tree(SnapshotFiles(tmp_path / "r").read(step=3))
    with pytest.raises(UserError) as caught:
        put_back(tree, {"model": parts["model"]})
    assert "lr_scheduler, model, optimizer" in caught.value.what and "attached model" in caught.value.what


def test_a_model_of_another_shape_is_a_mistake(tmp_path: Path) -> None:
    parts = made.parts()
    made.snapshot(parts, tmp_path / "r")
    other = {**parts, "model": torch.nn.Sequential(torch.nn.Linear(5, 8))}
    with pytest.raises(UserError) as caught:
        put_back(read_tree(SnapshotFiles(tmp_path / "r").read(step=3)), other)
    assert caught.value.where == "attach(model=…)"


def test_tensors_in_a_snapshot_are_aligned(tmp_path: Path) -> None:
    _, buffer = made.snapshot(made.parts(), tmp_path / "r")
    table, start = read_table(buffer)
    assert {(start + record.offset_bytes) % 64 for record in table.records} == {0}
