"""A rank's part of a durable checkpoint, in the layout of torch.distributed.checkpoint (DCP).

Every tensor is one `torch.save` record in a `.distcp` file, and `.metadata` says where each lies, so plain `dcp.load`
reads the checkpoint. `.metadata` is a pickle by DCP's design: it is written here, and read back in
`dougong.run.dcp_read`.

Source of the layout: torch/distributed/checkpoint/filesystem.py and metadata.py of torch 2.13.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

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

from dougong.run.manifest import FileRecord, ItemRecord, Place
from dougong.run.shard_plan import ShardPlanner
from dougong.run.write_files import write_files

METADATA_NAME = ".metadata"


def write_shard(
    buffer: memoryview, *, place: Place, directory: str, rank: int
) -> tuple[tuple[FileRecord, ...], tuple[ItemRecord, ...]]:
    """Write this rank's files from a snapshot buffer, here and now.

    Each box of a tensor is written by one of its holders. A run has its node's writer do the same beside training.
    """
    plan = ShardPlanner(rank=rank).plan(buffer)
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
            offsets = torch.Size(item.offsets or [0] * len(item.shape))
            chunk = ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(item.shape))
            whole = described.setdefault(
                item.fqn,
                TensorStorageMetadata(
                    properties=TensorProperties(dtype=getattr(torch, item.dtype)),
                    size=torch.Size(item.shape if item.global_shape is None else item.global_shape),
                    chunks=[],
                ),
            )
            whole.chunks.append(chunk)
            index = MetadataIndex(item.fqn, offsets)
        stored[index] = _StorageInfo(item.file, item.offset_bytes, item.num_bytes)
    return pickle.dumps(
        Metadata(state_dict_metadata=described, planner_data=mappings, storage_data=stored, version=CURRENT_DCP_VERSION)
    )
