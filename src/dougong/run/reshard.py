# pyright: standard
"""The state of all ranks of an earlier world, brought to this rank of the present one.

The structure comes from the live objects, since a new rank of a grown world has saved nothing: each tensor of theirs is
a box in a named tensor, and is read from whatever boxes were saved. What is no tensor (learning rates, a scheduler's
counters) comes from the tree of rank r, or, where the earlier world had no rank r, from that of rank r modulo its size;
in a pipeline, from that of a rank of the same stage.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import numpy
import torch
from torch import nn

from dougong.errors import CheckpointDamaged, UserError
from dougong.run.dcp_read import SavedLeaf, SavedTensor
from dougong.run.extent import Box
from dougong.run.optimizer_state import is_like_parameter, is_zero, local_part, owned_keys, parameters_by_key
from dougong.run.sharding import Lay, Path, Sharding
from dougong.run.shared_read import WantedBox, read_boxes
from dougong.run.state import check_parts, is_array, part_trees, restore_rng, rng_state
from dougong.run.tree import dismantle


class SavedState(Protocol):
    """The saved state of all ranks of a world: a durable checkpoint, or what a node has in memory."""

    @property
    def where(self) -> str: ...
    @property
    def world_size(self) -> int: ...
    def rank_tree(self, rank: int) -> dict[str, Any]: ...
    def tensor(self, name: str) -> SavedTensor | None: ...
    def read(self, name: str, box: Box) -> torch.Tensor: ...


def state_for(
    parts: Mapping[str, Any], *, sharding: Sharding, saved: SavedState, is_read_once: bool = False
) -> dict[str, Any]:
    """The state tree for this rank, DTensors as local parts; `put_back` takes it.

    `is_read_once`: each box is read by one of the ranks that want it and broadcast; all ranks must then call this
    together. Raises UserError if the saved state and the objects of the script do not belong together, and
    CheckpointDamaged if a part of a tensor was not saved or cannot be read.
    """
    tree = _Plan(parts, sharding, saved).tree()
    wanted: list[WantedBox] = []
    _mapped(tree, WantedBox, wanted.append)
    tensors = read_boxes(
        wanted,
        saved,
        rank=sharding.rank,
        world_size=sharding.world_size,
        group_of=sharding.group_of if is_read_once else None,
    )
    following = iter(tensors)
    return _mapped(tree, WantedBox, lambda _: next(following))


class _Plan:
    """The tree of this rank with `WantedBox`es in place of tensors."""

    def __init__(self, parts: Mapping[str, Any], sharding: Sharding, saved: SavedState) -> None:
        self._parts = parts
        self._sharding = sharding
        self._saved = saved
        self._rank = sharding.rank
        self._is_new = self._rank >= saved.world_size
        self._is_pipeline = sharding.is_pipeline
        check_parts(saved.rank_tree(self._rank % saved.world_size), parts)
        self._live = part_trees(parts)
        _, leaves = dismantle(self._live, is_leaf=is_array)
        shapes = [tuple(local_part(leaf.value).shape) for leaf in leaves]
        lays = sharding.lays(leaves)
        self._lays = {leaf.path: (lay, shape) for leaf, lay, shape in zip(leaves, lays, shapes, strict=True)}
        self._template_rank = self._rank_alike()
        self._template = saved.rank_tree(self._template_rank)

    def tree(self) -> dict[str, Any]:
        tree = {name: self._part(name, part) for name, part in self._parts.items()}
        own = self._saved.rank_tree(self._rank % self._saved.world_size)
        tree["rng"] = fresh_rng(self._saved.rank_tree(0)["rng"], rank=self._rank) if self._is_new else own["rng"]
        tree["data"] = own["data"]
        progress = cast("dict[str, Any]", own["progress"])
        tree["progress"] = {**progress, "num_tokens": 0} if self._is_new else progress
        return tree

    def _rank_alike(self) -> int:
        """The rank whose tree is the pattern for this one's. In a pipeline it must have had the same parameters."""
        first, size = self._rank % self._saved.world_size, self._saved.world_size
        if not self._is_pipeline:
            return first
        wanted = {lay.extent.name for (part, *_), (lay, _) in self._lays.items() if part == "model" and lay is not None}
        for rank in (first, *(other for other in range(size) if other != first)):
            model = self._saved.rank_tree(rank).get("model", {})
            if wanted & {leaf.extent.name for leaf in model.values() if isinstance(leaf, SavedLeaf)}:
                return rank
        return first

    def _part(self, name: str, part: Any) -> Any:
        if isinstance(part, torch.optim.Optimizer):
            return self._optimizer(name, part)
        if isinstance(part, nn.Module):
            return self._module(name)
        return self._as_saved(self._template[name], (name,))

    def _module(self, name: str) -> dict[str, Any]:
        live, saved = self._live[name], self._template[name]
        unexpected = set(saved) - set(live)
        if unexpected and not (self._is_pipeline and self._saved.world_size != self._sharding.world_size):
            raise _foreign(f"the checkpoint holds {name}.{min(unexpected)}, the script's {name} does not", name)
        return {key: self._module_value(name, key) for key in live}

    def _module_value(self, name: str, key: str) -> Any:
        path = (name, key)
        if path in self._lays:
            lay, shape = self._lays[path]
            return self._wanted(path, lay, shape)
        return self._template_value(path)

    def _optimizer(self, name: str, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        names = self._sharding.names
        template = self._template[name]
        parameters = parameters_by_key(optimizer, names)
        owned = owned_keys(optimizer, names)
        state: dict[str | int, Any] = {}
        for key, parameter in parameters.items():
            saved = self._saved_state_of(name, key) if key in owned else None
            if saved is not None:
                path = (name, "state", key)
                state[key] = {kind: self._state_value((*path, kind), value, parameter) for kind, value in saved.items()}
        groups = template["param_groups"]
        if self._is_pipeline and len(groups) == len(optimizer.param_groups):
            live = self._live[name]["param_groups"]
            groups = [{**group, "params": own["params"]} for group, own in zip(groups, live, strict=True)]
        return {**template, "state": state, "param_groups": groups}

    def _saved_state_of(self, name: str, key: str | int) -> Mapping[str, Any] | None:
        """From the tree of whichever rank had this parameter's state; None if it has none yet."""
        ranks = [self._template_rank, *(r for r in range(self._saved.world_size) if r != self._template_rank)]
        for rank in ranks if self._is_scattered(name) else ranks[:1]:
            state = self._saved.rank_tree(rank)[name]["state"]
            if key in state:
                return state[key]
        return None

    def _is_scattered(self, name: str) -> bool:
        """May another rank have state that this one's predecessor has not? Under ZeRO-1, and between stages."""
        return self._is_pipeline or is_zero(self._parts[name])

    def _state_value(self, path: Path, value: Any, parameter: torch.Tensor) -> Any:
        if not isinstance(value, SavedLeaf):
            return self._as_saved(value, path)
        if path in self._lays:
            lay, shape = self._lays[path]
            return self._wanted(path, lay, shape)
        global_shape = value.extent.global_shape
        key_path = (path[0], path[1], str(path[2]), *path[3:])
        lay = self._sharding.of_state(str(path[0]), path[2], key_path, global_shape=global_shape)
        is_sharded = is_like_parameter(path[-1], global_shape, parameter)
        return self._wanted(path, lay, tuple(local_part(parameter).shape) if is_sharded else global_shape)

    def _as_saved(self, value: Any, path: Path) -> Any:
        """A part of the template, each tensor as the live object has it, or else as it was saved."""
        if isinstance(value, SavedLeaf):
            if path in self._lays:
                lay, shape = self._lays[path]
                return self._wanted(path, lay, shape)
            return self._box(value.extent.name, value.box, value.extent.global_shape, (self._rank,))
        if isinstance(value, Mapping):
            pairs = ((key, self._as_saved(item, (*path, key))) for key, item in value.items())
            return type(value)(pairs)  # pyright: ignore[reportCallIssue]
        if isinstance(value, list | tuple):
            return type(value)(self._as_saved(item, (*path, index)) for index, item in enumerate(value))
        return value

    def _wanted(self, path: Path, lay: Lay | None, shape: tuple[int, ...]) -> Any:
        if lay is None:  # it stayed with its rank
            return self._template_value(path)
        base = ".".join(map(str, path))
        extent = lay.extent
        of_rank = f"rank{self._template_rank}.{base}"
        names = (of_rank, base) if extent.key_path[0] == f"rank{self._rank}" else (extent.name, base, of_rank)
        name = next((name for name in names if self._saved.tensor(name) is not None), None)
        if name is None:
            return self._template_value(path)
        ranks = lay.ranks if name == extent.name else (self._rank,)
        return self._box(name, Box(extent.offsets, shape), extent.global_shape, ranks)

    def _box(self, name: str, box: Box, global_shape: tuple[int, ...], ranks: tuple[int, ...]) -> Any:
        saved = self._saved.tensor(name)
        if saved is None:
            raise CheckpointDamaged(self._saved.where, reason=f"{name} is not in its metadata")
        if saved.shape != global_shape:
            raise _foreign(
                f"{name} is {list(saved.shape)} in the checkpoint and {list(global_shape)} in the script", name
            )
        if box.num_elements == 0:
            return torch.empty(box.shape, dtype=saved.dtype)
        return WantedBox(name, box, saved.dtype, ranks)

    def _template_value(self, path: Path) -> Any:
        value: Any = self._template
        for key in path:
            if not isinstance(value, Mapping) or key not in value:
                raise _foreign(f"the checkpoint does not hold {'.'.join(map(str, path))}", str(path[0]))
            value = value[key]
        return (
            self._as_saved(value, path)
            if not isinstance(value, SavedLeaf)
            else self._box(value.extent.name, value.box, value.extent.global_shape, (self._rank,))
        )


def fresh_rng(of_rank_0: Mapping[str, Any], *, rank: int) -> dict[str, Any]:
    """The random generators of a rank that the earlier world did not have.

    Seeded by the rank and the state of rank 0's torch generator, so the same each time, and different for each rank.
    The generators of this process are left as they are.
    """
    digest = hashlib.sha256(bytes(of_rank_0["torch"].tolist()) + rank.to_bytes(8, "little")).digest()
    before = rng_state()
    try:
        random.seed(digest)
        numpy.random.seed(numpy.frombuffer(digest, dtype=numpy.uint32))
        torch.manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        return rng_state()
    finally:
        restore_rng(before)


def _foreign(what: str, name: str) -> UserError:
    return UserError(
        what,
        where=f"attach({name.split('.', 1)[0]}=…)",
        mend="build the same model and optimizer as the run that wrote it, or start a new run",
    )


def _mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """The tree with `change` done to every leaf of a kind, in the order of the walk."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return type(value)((key, _mapped(item, kind, change)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, kind, change) for item in cast("Sequence[Any]", value))
    return value
