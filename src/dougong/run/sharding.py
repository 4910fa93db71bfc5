# pyright: standard
"""How the state of a job lies over its ranks, found from the live objects.

| what is attached | which ranks hold equal bytes |
|---|---|
| one rank | it alone; every tensor is whole |
| DDP | all ranks of DDP's group; of the buffers it broadcasts only its first rank's count |
| DTensors (FSDP2, HSDP, tensor parallel) | as mesh and placements say; other dimensions of the root mesh replicate |
| plain parameters beside DTensors | all ranks of the mesh, as torch.distributed.checkpoint takes them |
| `ZeroRedundancyOptimizer` | its state: the rank that owns the parameter |
| `attach(replicated_over=…)` | the ranks given there, for all that is no DTensor |
| anything else | each rank its own |

Source of a DTensor's box: `torch.distributed.tensor._utils.compute_local_shape_and_global_offset` of torch 2.13.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard, _StridedShardOffsetMode
from torch.nn.parallel import DistributedDataParallel

from dougong.errors import UserError
from dougong.run.extent import Extent, whole
from dougong.run.group import ReplaceableGroup
from dougong.run.optimizer_state import Names, is_like_parameter, is_zero, parameter_names, parameters_by_key, unwrapped
from dougong.run.tree import Leaf

RANK_LOCAL = ("rng", "data", "progress")
"""Parts of the state that belong to one rank alone."""
_MAX_HOLDERS = 256
_PIPELINE_NAMES = ("pp", "pipe", "stage")

Path = tuple[str | int, ...]


class Lay(msgspec.Struct, frozen=True):
    """Where a leaf lies, and every rank that holds the same bytes; `extent.holders` is a sample of these if many."""

    extent: Extent
    ranks: tuple[int, ...]


class Sharding:
    """The extents of one rank's state. `stage` and `replicated_over` are what `attach` was told, if anything.

    `stage` is for a pipeline whose stages use the same parameter names: everything shared is then named
    `stage<n>.…`. `replicated_over` lists the ranks that hold equal state, apart from DTensors.
    """

    def __init__(
        self,
        parts: Mapping[str, Any],
        *,
        rank: int,
        world_size: int,
        stage: int | None = None,
        replicated_over: Sequence[int] | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.stage = stage
        self.is_pipeline = stage is not None or (replicated_over is not None and len(replicated_over) < world_size)
        """Do other ranks hold other parameters?"""
        self._parts = parts
        self._ddp = next((part for part in parts.values() if isinstance(part, DistributedDataParallel)), None)
        self._replicated = self._ranks_of_replicas(replicated_over)
        self._parameters: dict[str, dict[str | int, torch.Tensor]] = {}
        self._meshes: list[DeviceMesh] = []
        self._known: dict[Path, tuple[Any, Lay | None]] = {}
        self._boxes: dict[tuple[int, tuple[Placement, ...]], tuple[int, ...]] = {}
        self._look_around()

    def extents(self, leaves: Sequence[Leaf]) -> tuple[Extent | None, ...]:
        """The extent of each leaf of the state tree; None = it belongs to this rank alone."""
        return tuple(None if lay is None else lay.extent for lay in self.lays(leaves))

    def lays(self, leaves: Sequence[Leaf]) -> tuple[Lay | None, ...]:
        """The same with all the ranks that share each leaf."""
        found = [self._cached(leaf) for leaf in leaves]
        # two leaves that flatten to one name (keys `1` and `"1"`, or with a dot in them) stay with the rank
        counts = Counter(lay.extent.name for lay in found if lay is not None)
        return tuple(lay if lay is not None and counts[lay.extent.name] == 1 else None for lay in found)

    def of_state(self, part: str, key: str | int, path: Path, *, global_shape: tuple[int, ...]) -> Lay:
        """Where state of an optimizer lies that it does not have yet: the state `path` of the parameter `key`."""
        optimizer = self._parts[part]
        parameter = self._parameters[part][key]
        if isinstance(parameter, DTensor) and is_like_parameter(path[-1], global_shape, parameter):
            return self._of_dtensor(path, parameter)
        return self._whole(path, global_shape, self._ranks_of_state(optimizer, parameter, global_shape))

    def group_of(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """A process group of exactly these ranks that can carry CPU tensors, if there is one."""
        for group in self._groups():
            if tuple(sorted(dist.get_process_group_ranks(group))) == ranks and _carries_cpu(group):
                return group
        return None

    # --- one leaf ---

    def _cached(self, leaf: Leaf) -> Lay | None:
        value = leaf.value
        if leaf.path[0] in RANK_LOCAL or not isinstance(value, torch.Tensor):
            return None
        is_sharded = isinstance(value, DTensor)
        kind = (tuple(value.shape), (id(value.device_mesh), value.placements) if is_sharded else None)
        known = self._known.get(leaf.path)
        if known is None or known[0] != kind:
            known = (kind, self._found(leaf, value))
            self._known[leaf.path] = known
        return known[1]

    def _found(self, leaf: Leaf, value: torch.Tensor) -> Lay:
        path, key_path = leaf.path, leaf.key_path
        if isinstance(value, DTensor):
            return self._of_dtensor(key_path, value)
        shape = tuple(value.shape)
        part = self._parts.get(str(path[0]))
        parameter = self._parameter_of(path, part)
        if parameter is not None:
            return self._whole(key_path, shape, self._ranks_of_state(part, parameter, shape))
        return self._whole(key_path, shape, self._ranks_of_plain(path, part), counting=self._counting(path))

    def _parameter_of(self, path: Path, part: Any) -> torch.Tensor | None:
        """The parameter that a leaf is the optimizer's state of."""
        if not isinstance(part, torch.optim.Optimizer) or len(path) < 4 or path[1] != "state":
            return None
        if path[2] not in self._parameters[str(path[0])]:
            self._look_around()  # a group of parameters was added since
        return self._parameters[str(path[0])].get(path[2])

    def _whole(
        self, path: Path, shape: tuple[int, ...], ranks: tuple[int, ...], *, counting: tuple[int, ...] | None = None
    ) -> Lay:
        key_path = path
        if not ranks:
            key_path = (f"rank{self.rank}", *path)
        elif self.stage is not None:
            key_path = (f"stage{self.stage}", *path)
        ranks = ranks or (self.rank,)
        holders = _sample(counting or ranks)
        extent = Extent(".".join(map(str, key_path)), key_path, shape, whole(shape).offsets, holders)
        return Lay(extent, ranks)

    def _of_dtensor(self, path: Path, value: DTensor) -> Lay:
        mesh, placements = value.device_mesh, value.placements
        if not all(isinstance(p, Replicate | Shard | _StridedShard) for p in placements):
            raise UserError(
                f"{'.'.join(map(str, path))} has placements {placements}",
                where="attach()",
                mend="keep only sharded or replicated DTensors in the state",
            )
        shape = tuple(value.shape)
        local_shape, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
        _refuse_interleaved(path, shape, mesh, placements)
        # torch counts on behind the end for ranks that hold nothing
        inside = tuple(min(offset, size) for offset, size in zip(offsets, shape, strict=True))
        lay = self._whole(path, shape, self._ranks_of_box(mesh, placements))
        ranks = lay.ranks if all(local_shape) else (self.rank,)
        holders = lay.extent.holders if all(local_shape) else ranks
        return Lay(msgspec.structs.replace(lay.extent, offsets=inside, holders=holders), ranks)

    # --- which ranks hold the same ---

    def _ranks_of_replicas(self, told: Sequence[int] | None) -> tuple[int, ...]:
        if told is not None:
            return tuple(sorted(told))
        if self._ddp is not None:
            return tuple(sorted(dist.get_process_group_ranks(self._ddp.process_group)))
        return (self.rank,) if self.world_size == 1 or self.stage is not None else ()

    def _ranks_of_plain(self, path: Path, part: Any) -> tuple[int, ...]:
        """Of a tensor that is no DTensor and no optimizer state."""
        if self._ddp is not None and not self._ddp.broadcast_buffers and path[0] == "model" and self._is_buffer(path):
            return (self.rank,) if self.world_size == 1 else ()
        if self._replicated:
            return self._replicated
        is_parameter = isinstance(part, nn.Module) and len(path) == 2 and not self._is_buffer(path)
        return self._ranks_of_meshes() if is_parameter else ()

    def _counting(self, path: Path) -> tuple[int, ...] | None:
        """Between two forward passes the ranks' buffers differ, and the next one takes those of DDP's first rank."""
        if self._ddp is None or path[0] != "model" or not self._ddp.broadcast_buffers or not self._is_buffer(path):
            return None
        return (dist.get_process_group_ranks(self._ddp.process_group)[0],)

    def _ranks_of_state(self, optimizer: Any, parameter: torch.Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
        if is_zero(optimizer):
            return (self.rank,)
        if self._replicated and not isinstance(parameter, DTensor):
            return self._replicated
        is_scalar = not shape or shape == (1,)
        if isinstance(parameter, DTensor):
            return (
                self._ranks_of_box(parameter.device_mesh, [Replicate()] * parameter.device_mesh.ndim)
                if is_scalar
                else ()
            )
        return self._ranks_of_meshes()

    def _ranks_of_box(self, mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[int, ...]:
        """The ranks of this one's box: along replicating dimensions of the mesh, and of the root mesh around it."""
        key = (id(mesh), tuple(placements))
        if key not in self._boxes:
            self._boxes[key] = self._ranks_around(mesh, placements)
        return self._boxes[key]

    def _ranks_around(self, mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[int, ...]:
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        index = [
            slice(None) if isinstance(p, Replicate) else slice(c, c + 1)
            for c, p in zip(coordinate, placements, strict=True)
        ]
        inside = mesh.mesh[tuple(index)].flatten().tolist()
        root = mesh._get_root_mesh()
        around = [dim for dim in range(root.ndim) if not _spans(mesh, root, dim) and not _is_pipeline(root, dim)]
        ranks = {rank for one in inside for rank in _along(root, one, around)}
        if self._replicated and set(inside) == {self.rank}:
            ranks |= set(self._replicated)
        return tuple(sorted(ranks))

    def _ranks_of_meshes(self) -> tuple[int, ...]:
        """All ranks around the first mesh that is used, its pipeline dimensions left out; () without a mesh."""
        for mesh in self._meshes:
            return self._ranks_of_box(mesh, [Replicate()] * mesh.ndim)
        return ()

    def _is_buffer(self, path: Path) -> bool:
        return ".".join(map(str, path[1:])) in self._buffers.get(str(path[0]), frozenset())

    # --- the objects ---

    def _look_around(self) -> None:
        modules = {name: unwrapped(part) for name, part in self._parts.items() if isinstance(part, nn.Module)}
        self._buffers = {name: frozenset(b for b, _ in module.named_buffers()) for name, module in modules.items()}
        seen: dict[int, DeviceMesh] = {}
        for module in modules.values():
            for parameter in module.parameters():
                if isinstance(parameter, DTensor):
                    seen.setdefault(id(parameter.device_mesh), parameter.device_mesh)
        self._meshes = list(seen.values())
        self.names: Names = parameter_names(self._parts)
        for name, part in self._parts.items():
            if isinstance(part, torch.optim.Optimizer):
                self._parameters[name] = parameters_by_key(part, self.names)

    def _groups(self) -> Iterator[dist.ProcessGroup]:
        if not dist.is_available() or not dist.is_initialized():
            return
        yield cast("dist.ProcessGroup", dist.group.WORLD)
        if self._ddp is not None:
            yield cast("dist.ProcessGroup", self._ddp.process_group)
        for mesh in self._meshes:
            for one in {id(m): m for m in (mesh, mesh._get_root_mesh())}.values():
                yield from (one.get_group(dim) for dim in range(one.ndim))


def ranks_of(told: Sequence[int] | dist.ProcessGroup | None) -> tuple[int, ...] | None:
    """The ranks of a process group, or those listed."""
    if told is None:
        return None
    return tuple(sorted(dist.get_process_group_ranks(told) if isinstance(told, dist.ProcessGroup) else told))


def _sample(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """At most so many that naming them in every record stays cheap, spread evenly; the same for all of them."""
    step = -(-len(ranks) // _MAX_HOLDERS)
    return ranks[::step]


def _spans(mesh: DeviceMesh, root: DeviceMesh, dim: int) -> bool:
    """Does the mesh extend along this dimension of its root?"""
    places = {int((root.mesh == rank).nonzero()[0][dim]) for rank in mesh.mesh.flatten().tolist()}
    return len(places) > 1


def _is_pipeline(root: DeviceMesh, dim: int) -> bool:
    names = root.mesh_dim_names
    return names is not None and names[dim].startswith(_PIPELINE_NAMES)


def _along(root: DeviceMesh, rank: int, dims: Sequence[int]) -> list[int]:
    """The ranks that differ from `rank` only along these dimensions."""
    coordinate = (root.mesh == rank).nonzero()[0].tolist()
    index = [slice(None) if dim in dims else slice(c, c + 1) for dim, c in enumerate(coordinate)]
    return root.mesh[tuple(index)].flatten().tolist()


def _refuse_interleaved(path: Path, shape: tuple[int, ...], mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    """A rank's part must be one box. FSDP2 over tensor parallel gives boxes; other strided splits do not."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for dim in {p.dim for p in placements if isinstance(p, _StridedShard)}:
        index = torch.arange(shape[dim])
        for size, place, placement in zip(mesh.shape, coordinate, placements, strict=True):
            if isinstance(placement, _StridedShard) and placement.dim == dim:
                _, taken = placement._local_shard_size_and_offset(
                    len(index), size, place, offset_mode=_StridedShardOffsetMode.ALL
                )
                index = index[torch.tensor(taken, dtype=torch.long)]
            elif isinstance(placement, Shard) and placement.dim == dim:
                count, first = Shard.local_shard_size_and_offset(len(index), size, place)
                index = index[first : first + count]
        if len(index) and not index.equal(torch.arange(int(index[0]), int(index[0]) + len(index))):
            raise UserError(
                f"a rank's part of {'.'.join(map(str, path))} is not in one piece: {placements}",
                where="attach()",
                mend="shard each dimension by contiguous parts, for example fully_shard() after parallelize_module()",
            )


def _carries_cpu(group: dist.ProcessGroup) -> bool:
    if isinstance(group, ReplaceableGroup):
        return group.carries_cpu
    return torch.device("cpu") in group._device_types
