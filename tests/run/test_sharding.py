"""What is known of the ranks without any process group. The layouts with one are in test_reshard.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dougong.errors import CheckpointDamaged, UserError
from dougong.run.dcp_read import DurableState
from dougong.run.dcp_shard import write_metadata, write_shard
from dougong.run.extent import Extent
from dougong.run.manifest import LocalPlace
from dougong.run.reshard import fresh_rng, state_for
from dougong.run.sharding import Sharding
from dougong.run.state import Progress, gather, is_array, put_back, rng_state
from dougong.run.tree import dismantle
from tests.run import made_training as made


def extents(parts: dict[str, Any], **told: Any) -> dict[str, Extent]:
    """By the path in the state tree, with dots."""
    tree = gather(parts, data=None, progress=Progress(step=1, num_tokens=0))
    _, leaves = dismantle(tree, is_leaf=is_array)
    found = Sharding(parts, **told).extents(leaves)
    return {".".join(map(str, leaf.path)): e for leaf, e in zip(leaves, found, strict=True) if e is not None}


@pytest.fixture
def trained() -> dict[str, Any]:
    parts = made.parts()
    made.train(parts, num_steps=3)
    return parts


def test_one_rank_holds_everything_whole(trained: dict[str, Any]) -> None:
    found = extents(trained, rank=0, world_size=1)
    assert {extent.holders for extent in found.values()} == {(0,)}
    assert found["model.0.weight"] == Extent("model.0.weight", ("model", "0.weight"), (8, 4), (0, 0), (0,))
    assert found["optimizer.state.0.weight.exp_avg"].name == "optimizer.state.0.weight.exp_avg"


def test_of_what_nothing_is_known_each_rank_keeps_its_own(trained: dict[str, Any]) -> None:
    found = extents(trained, rank=2, world_size=4)
    assert found["model.0.weight"].name == "rank2.model.0.weight"
    assert found["model.0.weight"].key_path == ("rank2", "model", "0.weight")
    assert {extent.holders for extent in found.values()} == {(2,)}


def test_what_was_told_to_be_replicated_is_shared(trained: dict[str, Any]) -> None:
    found = extents(trained, rank=2, world_size=4, replicated_over=(0, 2))
    assert found["model.0.weight"].name == "model.0.weight"
    assert {extent.holders for extent in found.values()} == {(0, 2)}


def test_stages_with_the_same_names_are_kept_apart(trained: dict[str, Any]) -> None:
    found = extents(trained, rank=2, world_size=4, stage=1)
    assert found["model.0.weight"].name == "stage1.model.0.weight"


def test_naming_the_holders_of_a_large_world_stays_cheap(trained: dict[str, Any]) -> None:
    found = extents(trained, rank=7, world_size=10_000, replicated_over=range(10_000))
    (holders,) = {extent.holders for extent in found.values()}
    assert len(holders) <= 256 and len(set(holders)) == len(holders)


def test_random_numbers_and_positions_have_no_extent(trained: dict[str, Any]) -> None:
    assert not [name for name in extents(trained, rank=0, world_size=1) if name.startswith(("rng", "data"))]


def written(parts: dict[str, Any], root: Path, *, world_size: int) -> str:
    """A durable checkpoint of a replicated job; its directory."""
    directory = str(root / "step")
    items = []
    for rank in range(world_size):
        _, buffer = made.snapshot(parts, root / f"rank-{rank}", rank=rank, world_size=world_size)
        items += write_shard(buffer, place=LocalPlace(), directory=directory, rank=rank)[1]
    write_metadata(items, place=LocalPlace(), directory=directory)
    return directory


def loaded(parts: dict[str, Any], directory: str, *, saved_size: int, rank: int = 0, world_size: int = 1) -> Progress:
    sharding = Sharding(parts, rank=rank, world_size=world_size, replicated_over=range(world_size))
    with DurableState(LocalPlace(), directory, world_size=saved_size) as saved:
        return put_back(state_for(parts, sharding=sharding, saved=saved), parts)


@pytest.mark.parametrize(("saved_size", "world_size"), [(1, 3), (3, 1), (2, 2)])
def test_training_goes_on_bitwise_at_another_world_size(
    saved_size: int, world_size: int, trained: dict[str, Any], tmp_path: Path
) -> None:
    directory = written(trained, tmp_path, world_size=saved_size)
    expected = made.train(trained, num_steps=4)
    other = made.parts(seed=9)
    progress = loaded(other, directory, saved_size=saved_size, world_size=world_size)
    assert progress == Progress(step=3, num_tokens=120)
    assert made.train(other, num_steps=4) == expected


def test_a_tensor_that_no_file_holds_is_damage_that_names_it(trained: dict[str, Any], tmp_path: Path) -> None:
    directory = written(trained, tmp_path, world_size=1)
    with DurableState(LocalPlace(), directory, world_size=1) as saved:
        del saved._metadata.state_dict_metadata["model.0.weight"].chunks[:]  # pyright: ignore
        parts = made.parts()
        with pytest.raises(CheckpointDamaged) as caught:
            state_for(parts, sharding=Sharding(parts, rank=0, world_size=1), saved=saved)
    assert "no file holds model.0.weight at [0, 0] + [8, 4] of [8, 4]" in caught.value.reason


def test_a_model_of_another_shape_is_a_mistake_that_shows_both(trained: dict[str, Any], tmp_path: Path) -> None:
    directory = written(trained, tmp_path, world_size=2)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), *list(made.parts()["model"])[1:])
    other = {**made.parts(), "model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    with pytest.raises(UserError) as caught:
        loaded(other, directory, saved_size=2)
    assert caught.value.what == "model.0.weight is [8, 4] in the checkpoint and [8, 5] in the script"
    assert caught.value.where == "attach(model=…)"


@pytest.mark.parametrize("change", ["more", "less"])
def test_a_model_with_other_layers_is_a_mistake(change: str, trained: dict[str, Any], tmp_path: Path) -> None:
    directory = written(trained, tmp_path, world_size=2)
    layers = list(made.parts()["model"])
    model = torch.nn.Sequential(*(layers[:3] if change == "less" else [*layers, torch.nn.Linear(2, 2)]))
    other = {**made.parts(), "model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    with pytest.raises(UserError) as caught:
        loaded(other, directory, saved_size=2)
    assert "4.weight" in caught.value.what or "3.bias" in caught.value.what


def test_an_optimizer_over_other_parameters_is_a_mistake(trained: dict[str, Any], tmp_path: Path) -> None:
    directory = written(trained, tmp_path, world_size=2)
    other = made.parts()
    other["optimizer"] = torch.optim.AdamW(other["model"][0].parameters())
    with pytest.raises(UserError) as caught:
        loaded(other, directory, saved_size=2)
    assert caught.value.where == "attach(optimizer=…)" and "3.weight" in caught.value.what


def test_parameters_that_no_module_has_keep_their_number(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        parameter = torch.nn.Parameter(torch.ones(3))
        parts = made.parts()
        parts["extra"] = torch.optim.Adam([parameter], lr=0.1)
        return parts

    parts = make()
    parts["extra"].param_groups[0]["params"][0].grad = torch.ones(3)
    parts["extra"].step()
    directory = written(parts, tmp_path, world_size=2)
    other = make()
    loaded(other, directory, saved_size=2)
    (state,) = other["extra"].state.values()
    assert state["exp_avg"].equal(next(iter(parts["extra"].state.values()))["exp_avg"])


def test_random_numbers_of_a_new_rank_are_its_own_and_always_the_same() -> None:
    before = rng_state()
    states = [fresh_rng(before, rank=rank) for rank in (4, 5, 4)]
    assert states[0]["torch"].equal(states[2]["torch"]) and states[0]["python"] == states[2]["python"]
    assert not states[0]["torch"].equal(states[1]["torch"]) and states[0]["python"] != states[1]["python"]
    assert rng_state()["torch"].equal(before["torch"]) and rng_state()["python"] == before["python"]
