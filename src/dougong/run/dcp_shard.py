"""A rank's part of a durable checkpoint, in the layout of torch.distributed.checkpoint (DCP).

Every tensor is one `torch.save` record in a `.distcp` file, and `.metadata` says where each lies, so plain `dcp.load`
reads the checkpoint. `.metadata` is a pickle by DCP's design: it is written here, and read back only through an
unpickler that knows DCP's own classes and nothing else.

Source of the layout: torch/distributed/checkpoint/filesystem.py and metadata.py of torch 2.13.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import torch
import xxhash
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    _StorageInfo,  # pyright: ignore[reportPrivateUsage]
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dougong.errors import CheckpointDamaged
from dougong.run.manifest import FileRecord, ItemRecord, Place
from dougong.run.shard_plan import RankState, ShardPlanner
from dougong.run.state import Replication, view_of
from dougong.run.tree import assemble
from dougong.run.write_files import write_files

METADATA_NAME = ".metadata"
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


def write_shard(
    buffer: memoryview, *, place: Place, directory: str, rank: int, world_size: int, replication: Replication
) -> tuple[tuple[FileRecord, ...], tuple[ItemRecord, ...]]:
    """Write this rank's files from a snapshot buffer, here and now. Of equal boxes of tensors one rank writes each.

    A run has its node's writer do the same beside training.
    """
    plan = ShardPlanner(rank=rank, world_size=world_size).plan(buffer, replication=replication)
    return write_files(plan.files, buffer, place=place, directory=directory), plan.items


def write_metadata(items: Sequence[ItemRecord], *, place: Place, directory: str) -> FileRecord:
    """Write DCP's index over the tensors of all ranks, here and now."""
    content = metadata_bytes(items)
    place.write(f"{directory}/{METADATA_NAME}", content)
    return FileRecord(METADATA_NAME, len(content), xxhash.xxh3_128_hexdigest(content))


def metadata_bytes(items: Sequence[ItemRecord]) -> bytes:
    """DCP's index over the tensors of all ranks. Boxes of one name are the chunks of one tensor."""
    described: dict[str, Any] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    mappings: dict[str, tuple[str | int, ...]] = {}
    for item in sorted(items, key=lambda item: (item.fqn, item.offsets)):
        mappings[item.fqn] = item.key_path
        if not item.dtype:
            described[item.fqn] = BytesStorageMetadata()
            index = MetadataIndex(item.fqn)
        else:
            is_whole = item.global_shape is None
            offsets = torch.Size([0] * len(item.shape) if is_whole else item.offsets)
            if item.fqn not in described:
                described[item.fqn] = TensorStorageMetadata(
                    properties=TensorProperties(dtype=getattr(torch, item.dtype)),
                    size=torch.Size(item.shape if item.global_shape is None else item.global_shape),
                    chunks=[],
                )
            described[item.fqn].chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(item.shape)))
            index = MetadataIndex(item.fqn, offsets)
        stored[index] = _StorageInfo(item.file, item.offset_bytes, item.num_bytes)
    return pickle.dumps(
        Metadata(state_dict_metadata=described, planner_data=mappings, storage_data=stored, version=CURRENT_DCP_VERSION)
    )


def read_state(*, place: Place, directory: str, rank: int) -> dict[str, Any]:
    """A rank's state tree from a committed checkpoint. Raises CheckpointDamaged."""
    path = f"{directory}/rank-{rank}.state"
    try:
        with place.open_read(path) as file:
            state = msgspec.msgpack.decode(file.read(), type=RankState)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointDamaged(path, reason=f"the rank's state cannot be read: {error}") from error
    metadata = read_metadata(place=place, directory=directory)
    payload = memoryview(bytearray(state.payload))
    try:
        with _TensorReader(metadata, place=place, directory=directory) as reader:
            leaves = [
                reader.tensor(name) if name else view_of(payload, 0, record)
                for record, name in zip(state.records, state.names, strict=True)
            ]
        return cast("dict[str, Any]", assemble(state.skeleton, leaves))
    except _UNREADABLE as error:
        raise CheckpointDamaged(path, reason=f"the rank's state cannot be put together: {error}") from error


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


class _TensorReader:
    """Reads single tensors of a checkpoint, one open file at a time."""

    def __init__(self, metadata: Metadata, *, place: Place, directory: str) -> None:
        self._stored = {index.fqn: info for index, info in metadata.storage_data.items()}
        self._place = place
        self._directory = directory
        self._open: dict[str, Any] = {}

    def __enter__(self) -> _TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()

    def tensor(self, name: str) -> torch.Tensor:
        info = self._stored.get(name)
        if info is None:
            raise CheckpointDamaged(self._directory, reason=f"{name} is not in its metadata")
        if "/" in info.relative_path or info.relative_path.startswith("."):
            raise CheckpointDamaged(self._directory, reason=f"{info.relative_path!r} lies outside of it")
        try:
            file = self._file(info.relative_path)
            file.seek(info.offset)
            record = io.BytesIO(file.read(info.length))
            return cast("torch.Tensor", torch.load(record, map_location="cpu", weights_only=True))
        except _UNREADABLE as error:
            path = f"{self._directory}/{info.relative_path}"
            raise CheckpointDamaged(path, reason=f"{name} cannot be read: {error}") from error

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = self._place.open_read(f"{self._directory}/{name}")
        return self._open[name]
