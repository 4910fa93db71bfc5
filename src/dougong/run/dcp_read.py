# pyright: standard
"""A durable checkpoint read box by box, whatever world size wrote it.

DCP's `.metadata` is a pickle by design: it is read only through an unpickler that knows DCP's own classes and nothing
else. A tensor is asked for by its name and a box; the box is put together from the stored boxes that it meets.

Source of the layout: torch/distributed/checkpoint/filesystem.py and metadata.py of torch 2.13.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from dougong.errors import CheckpointDamaged
from dougong.run.dcp_shard import METADATA_NAME
from dougong.run.extent import Box, Extent, intersection, uncovered, whole
from dougong.run.manifest import Place
from dougong.run.shard_plan import RankState
from dougong.run.state import TensorRecord, view_of
from dougong.run.tree import assemble

_UNREADABLE = (
    OSError,
    pickle.UnpicklingError,
    EOFError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    RuntimeError,
    MemoryError,
    OverflowError,
    msgspec.MsgspecError,
)
"""What decoders raise on bytes that are not what was written."""


class SavedTensor(msgspec.Struct, frozen=True):
    """A tensor that a checkpoint holds, in one or more boxes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


class SavedLeaf(msgspec.Struct, frozen=True):
    """Stands in a rank's saved tree where a tensor was that is stored under a name."""

    extent: Extent
    shape: tuple[int, ...]

    @property
    def box(self) -> Box:
        return Box(self.extent.offsets, self.shape)


class DurableState:
    """The state of all ranks in a durable checkpoint. Use it as a context manager; it keeps files open."""

    def __init__(self, place: Place, directory: str, *, world_size: int) -> None:
        self.world_size = world_size
        self.where = directory
        self._place = place
        self._metadata = read_metadata(place=place, directory=directory)
        self._files: dict[str, Any] = {}
        self._trees: dict[int, dict[str, Any]] = {}

    def __enter__(self) -> DurableState:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def rank_tree(self, rank: int) -> dict[str, Any]:
        """The tree that `rank` saved, with `SavedLeaf`s for the tensors. Raises CheckpointDamaged."""
        if rank not in self._trees:
            state = read_rank_state(place=self._place, directory=self.where, rank=rank)
            try:
                payload = memoryview(bytearray(state.payload))
                leaves = [
                    _saved_leaf(record, name) if name else view_of(payload, 0, record)
                    for record, name in zip(state.records, state.names, strict=True)
                ]
                self._trees[rank] = cast("dict[str, Any]", assemble(state.skeleton, leaves))
            except _UNREADABLE as error:
                reason = f"the state of rank {rank} cannot be put together: {error}"
                raise CheckpointDamaged(self.where, reason=reason) from error
        return self._trees[rank]

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which something is stored."""
        return tuple(self._metadata.state_dict_metadata)

    def tensor(self, name: str) -> SavedTensor | None:
        """What is stored under a name; None if nothing is, or no tensor. Raises CheckpointDamaged."""
        try:
            found = self._metadata.state_dict_metadata.get(name)
            if not isinstance(found, TensorStorageMetadata):
                return None
            boxes = tuple(Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in found.chunks)
            return SavedTensor(found.properties.dtype, tuple(found.size), boxes)
        except _UNREADABLE as error:
            raise CheckpointDamaged(self.where, reason=f"the index of {name} cannot be read: {error}") from error

    def read(self, name: str, box: Box) -> torch.Tensor:
        """A part of a tensor, in memory of its own. Raises CheckpointDamaged, also if no file holds a part of it."""
        saved = self.tensor(name)
        if saved is None:
            raise CheckpointDamaged(self.where, reason=f"{name} is not in its metadata")
        if box in saved.boxes:
            return self._stored(name, box, saved)
        missing = uncovered(box, saved.boxes)
        if missing is not None:
            reason = f"no file holds {name} at {list(missing.offsets)} + {list(missing.shape)} of {list(saved.shape)}"
            raise CheckpointDamaged(self.where, reason=reason)
        target = torch.empty(box.shape, dtype=saved.dtype)
        for stored in saved.boxes:
            shared = intersection(box, stored)
            if shared is not None:
                target[shared.within(box)] = self._stored(name, stored, saved)[shared.within(stored)]
        return target

    def _stored(self, name: str, box: Box, saved: SavedTensor) -> torch.Tensor:
        """A stored box, whole."""
        info = self._metadata.storage_data.get(MetadataIndex(name, torch.Size(box.offsets)))
        if info is None:
            raise CheckpointDamaged(self.where, reason=f"{name} at {list(box.offsets)} is not in its metadata")
        path = info.relative_path
        if "/" in path or path.startswith("."):
            raise CheckpointDamaged(self.where, reason=f"{path!r} lies outside of it")
        try:
            file = self._file(path)
            file.seek(info.offset)
            tensor = torch.load(io.BytesIO(file.read(info.length)), map_location="cpu", weights_only=True)
            if tuple(tensor.shape) != box.shape or tensor.dtype != saved.dtype:
                raise ValueError(f"{list(tensor.shape)} of {tensor.dtype} is stored, the index says {list(box.shape)}")
        except _UNREADABLE as error:
            raise CheckpointDamaged(f"{self.where}/{path}", reason=f"{name} cannot be read: {error}") from error
        return cast("torch.Tensor", tensor)

    def _file(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = self._place.open_read(f"{self.where}/{name}")
        return self._files[name]


def read_state(*, place: Place, directory: str, rank: int) -> dict[str, Any]:
    """A rank's state tree just as it was saved, DTensors as local parts. Raises CheckpointDamaged."""
    with DurableState(place, directory, world_size=rank + 1) as saved:
        return _filled(saved.rank_tree(rank), saved)


def read_rank_state(*, place: Place, directory: str, rank: int) -> RankState:
    """What `rank` alone wrote, and the skeleton of its tree. Raises CheckpointDamaged."""
    path = f"{directory}/rank-{rank}.state"
    try:
        with place.open_read(path) as file:
            return msgspec.msgpack.decode(file.read(), type=RankState)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointDamaged(path, reason=f"the rank's state cannot be read: {error}") from error


def read_metadata(*, place: Place, directory: str) -> Metadata:
    """DCP's index, through an unpickler that constructs DCP's own classes only. Raises CheckpointDamaged."""
    path = f"{directory}/{METADATA_NAME}"
    try:
        with place.open_read(path) as file:
            found = _MetadataUnpickler(io.BytesIO(file.read())).load()
    except _UNREADABLE as error:
        raise CheckpointDamaged(path, reason=f"DCP metadata cannot be read: {error}") from error
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise CheckpointDamaged(path, reason="this is not DCP metadata")
    return found


class _MetadataUnpickler(pickle.Unpickler):
    """Constructs nothing but what DCP's metadata is made of."""

    _ALLOWED = frozenset(
        {
            ("torch", "Size"),
            ("torch", "device"),
            ("torch.serialization", "_get_layout"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("pathlib", "PosixPath"),
            ("pathlib", "Path"),
            ("collections", "OrderedDict"),
        }
    )
    _METADATA_CLASSES = frozenset(
        {
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        }
    )

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name == "torch.distributed.checkpoint.metadata" and global_name in self._METADATA_CLASSES:
            return super().find_class(module_name, global_name)
        if (module_name, global_name) in self._ALLOWED:
            return super().find_class(module_name, global_name)
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return getattr(torch, global_name)
        raise pickle.UnpicklingError(f"{module_name}.{global_name} has no place in DCP metadata")


def _saved_leaf(record: TensorRecord, name: str) -> SavedLeaf:
    """Of a leaf that some rank stored under `name`."""
    if record.extent is not None:
        return SavedLeaf(record.extent, record.shape)
    return SavedLeaf(Extent(name, (name,), record.shape, whole(record.shape).offsets, ()), record.shape)


def _filled(value: Any, saved: DurableState) -> Any:
    match value:
        case SavedLeaf():
            return saved.read(value.extent.name, value.box)
        case dict():
            return type(value)((key, _filled(item, saved)) for key, item in value.items())
        case list() | tuple():
            return type(value)(_filled(item, saved) for item in cast("Sequence[Any]", value))
        case _:
            return value
