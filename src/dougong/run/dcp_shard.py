"""A rank's part of a durable checkpoint, in the layout of torch.distributed.checkpoint (DCP).

Every tensor is one `torch.save` record in a `.distcp` file, and `.metadata` says where each lies, so plain `dcp.load`
reads the checkpoint. `.metadata` is a pickle by DCP's design: it is written here, and read back in
`dougong.run.dcp_read`.

Source of the layout: torch/distributed/checkpoint/filesystem.py and metadata.py of torch 2.13.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
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

from dougong.run.extent import deal
from dougong.run.manifest import FileRecord, ItemRecord, Place
from dougong.run.state import RANK_LOCAL, SnapshotTable, TensorRecord, read_table, view_of
from dougong.run.tree import assemble

METADATA_NAME = ".metadata"


class RankState(msgspec.Struct, frozen=True, array_like=True):
    """`rank-<r>.state`: the skeleton of a rank's whole state, its small leaves, and where the others lie."""

    skeleton: bytes
    records: tuple[TensorRecord, ...]
    names: tuple[str, ...]
    """Per leaf: the DCP name it is stored under, or "" if it stands in `payload`."""
    payload: bytes


def write_shard(
    buffer: memoryview, *, place: Place, directory: str, rank: int
) -> tuple[tuple[FileRecord, ...], tuple[ItemRecord, ...]]:
    """Write this rank's files from a snapshot buffer. Each box of a tensor is written by one of its holders only."""
    table, start = read_table(buffer)
    names = ["" if record.extent is None else record.extent.name for record in table.records]
    mine = _share(table.records, rank=rank)
    place.make_directory(directory)
    tensor_file, items = _write_tensors(buffer, start, table, names, mine, place=place, directory=directory, rank=rank)
    state_file = _write_rank_state(buffer, start, table, names, place=place, directory=directory, rank=rank)
    return (tensor_file, state_file), items


def write_metadata(items: Sequence[ItemRecord], *, place: Place, directory: str) -> FileRecord:
    """Write DCP's index over the tensors of all ranks."""
    described: dict[str, Any] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    mappings: dict[str, tuple[str | int, ...]] = {}
    for item in items:
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
    metadata = Metadata(
        state_dict_metadata=described, planner_data=mappings, storage_data=stored, version=CURRENT_DCP_VERSION
    )
    content = pickle.dumps(metadata)
    place.write(f"{directory}/{METADATA_NAME}", content)
    return FileRecord(METADATA_NAME, len(content), xxhash.xxh3_128_hexdigest(content))


def _share(records: Sequence[TensorRecord], *, rank: int) -> tuple[int, ...]:
    """The leaves that this rank writes. A part without any element of a tensor that has some is nobody's."""
    extents = [(index, record.extent) for index, record in enumerate(records) if record.extent is not None]
    writers = deal([extent for _, extent in extents], [records[index].num_bytes for index, _ in extents])
    return tuple(
        index
        for (index, extent), writer in zip(extents, writers, strict=True)
        if writer == rank and (math.prod(records[index].shape) > 0 or math.prod(extent.global_shape) == 0)
    )


def _write_tensors(
    buffer: memoryview,
    start: int,
    table: SnapshotTable,
    names: Sequence[str],
    mine: Sequence[int],
    *,
    place: Place,
    directory: str,
    rank: int,
) -> tuple[FileRecord, tuple[ItemRecord, ...]]:
    file_name = f"__{rank}_0.distcp"
    items: list[ItemRecord] = []
    plain = _plain_values(table)
    with _SyncedFile(place, f"{directory}/{file_name}") as file:
        for index in mine:
            record = table.records[index]
            blob = io.BytesIO()
            torch.save(view_of(buffer, start, record).clone(), blob)
            extent = record.extent
            assert extent is not None
            item = ItemRecord(
                fqn=extent.name,
                key_path=extent.key_path,
                file=file_name,
                offset_bytes=file.num_bytes,
                num_bytes=blob.tell(),
                dtype=record.dtype,
                shape=record.shape,
                offsets=extent.offsets,
                global_shape=extent.global_shape,
            )
            items.append(item)
            file.write(blob.getbuffer())
        if rank == 0:
            for name, key_path, value in plain:
                if name in names:
                    continue
                blob = io.BytesIO()
                torch.save(value, blob)
                items.append(ItemRecord(name, key_path, file_name, file.num_bytes, blob.tell(), "", ()))
                file.write(blob.getbuffer())
    return FileRecord(file_name, file.num_bytes, file.hexdigest), tuple(items)


_Path = tuple[str | int, ...]


class _Hole(msgspec.Struct, frozen=True):
    """Stands where leaf `index` was."""

    index: int


def _plain_values(table: SnapshotTable) -> list[tuple[str, _Path, Any]]:
    """What is no tensor (learning rates …) as DCP flattens it: name, key path, value.

    Mappings are walked, with their keys as text; lists only if they hold tensors or mappings; all else is one value.
    """
    tree = cast("dict[str, Any]", assemble(table.skeleton, [_Hole(index) for index in range(len(table.records))]))
    plain: list[tuple[str, _Path, Any]] = []

    def walk(value: Any, path: _Path) -> None:
        if isinstance(value, _Hole):
            return
        if isinstance(value, Mapping):
            for key, item in cast("Mapping[Any, Any]", value).items():
                walk(item, (*path, str(key)))
        elif _is_walked(value):
            for index, item in enumerate(cast("Sequence[Any]", value)):
                walk(item, (*path, index))
        elif path[0] not in RANK_LOCAL:
            plain.append((".".join(map(str, path)), path, value))

    walk(tree, ())
    return plain


def _is_walked(value: Any) -> bool:
    if not isinstance(value, list | tuple):
        return False
    items = cast("Sequence[Any]", value)
    return any(isinstance(item, _Hole | Mapping) or _is_walked(item) for item in items)


def _write_rank_state(
    buffer: memoryview,
    start: int,
    table: SnapshotTable,
    names: Sequence[str],
    *,
    place: Place,
    directory: str,
    rank: int,
) -> FileRecord:
    payload = bytearray()
    records: list[TensorRecord] = []
    for record, name in zip(table.records, names, strict=True):
        if name:
            records.append(record)
            continue
        raw = buffer[start + record.offset_bytes : start + record.offset_bytes + record.num_bytes]
        records.append(msgspec.structs.replace(record, offset_bytes=len(payload)))
        payload += raw
    content = msgspec.msgpack.encode(RankState(table.skeleton, tuple(records), tuple(names), bytes(payload)))
    file_name = f"rank-{rank}.state"
    with _SyncedFile(place, f"{directory}/{file_name}") as file:
        file.write(memoryview(content))
    return FileRecord(file_name, file.num_bytes, file.hexdigest)


class _SyncedFile:
    """A new file that is on disk when it is closed, with its size and checksum."""

    def __init__(self, place: Place, path: str) -> None:
        from dougong.run.manifest import LocalPlace

        self.num_bytes = 0
        self.hexdigest = ""
        self._digest = xxhash.xxh3_128()
        self._place = place
        self._path = path
        self._file: Any = open(path, "xb") if isinstance(place, LocalPlace) else io.BytesIO()  # noqa: SIM115

    def write(self, content: memoryview) -> None:
        self._file.write(content)
        self._digest.update(content)
        self.num_bytes += len(content)

    def __enter__(self) -> _SyncedFile:
        return self

    def __exit__(self, error_type: object, *_: object) -> None:
        from dougong.run.manifest import LocalPlace

        self.hexdigest = self._digest.hexdigest()
        if not isinstance(self._place, LocalPlace):
            if error_type is None:
                self._place.write(self._path, self._file.getvalue())
            return
        try:
            if error_type is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()
        directory = os.open(Path(self._path).parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
