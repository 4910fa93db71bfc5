"""A rank's part of a durable checkpoint, in the layout of torch.distributed.checkpoint (DCP).

Every tensor is one `torch.save` record in a `.distcp` file, and `.metadata` says where each lies, so plain `dcp.load` reads
the checkpoint. `.metadata` is a pickle by DCP's design: it is written here, and read back only through an unpickler that knows
DCP's own classes and nothing else.

Source of the layout: torch/distributed/checkpoint/filesystem.py and metadata.py of torch 2.13.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
import xxhash
from torch.distributed.checkpoint.filesystem import _StorageInfo  # pyright: ignore[reportPrivateUsage]
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
from dougong.run.state import RANK_LOCAL, SnapshotTable, TensorRecord, read_table, view_of
from dougong.run.tree import assemble

_METADATA_NAME = ".metadata"


class RankState(msgspec.Struct, frozen=True, array_like=True):
    """`rank-<r>.state`: the skeleton of a rank's whole state, its small leaves, and where the others lie."""

    skeleton: bytes
    records: tuple[TensorRecord, ...]
    names: tuple[str, ...]
    """Per leaf: the DCP name it is stored under, or "" if it stands in `payload`."""
    payload: bytes


def write_shard(
    buffer: memoryview, *, place: Place, directory: str, rank: int, world_size: int, is_replicated: bool
) -> tuple[tuple[FileRecord, ...], tuple[ItemRecord, ...]]:
    """Write this rank's files from a snapshot buffer. Each replicated tensor is written by one rank only."""
    table, start = read_table(buffer)
    names = [_stored_name(record, rank=rank, is_replicated=is_replicated) for record in table.records]
    mine = _share(table.records, names, rank=rank, world_size=world_size, is_replicated=is_replicated)
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
            size = torch.Size(item.shape)
            origin = torch.Size([0] * len(item.shape))
            described[item.fqn] = TensorStorageMetadata(
                properties=TensorProperties(dtype=getattr(torch, item.dtype)),
                size=size,
                chunks=[ChunkStorageMetadata(offsets=origin, sizes=size)],
            )
            index = MetadataIndex(item.fqn, origin)
        stored[index] = _StorageInfo(item.file, item.offset_bytes, item.num_bytes)
    metadata = Metadata(state_dict_metadata=described, planner_data=mappings, storage_data=stored)
    content = pickle.dumps(metadata)
    place.write(f"{directory}/{_METADATA_NAME}", content)
    return FileRecord(_METADATA_NAME, len(content), xxhash.xxh3_128_hexdigest(content))


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
    with _TensorReader(metadata, place=place, directory=directory) as reader:
        leaves = [
            reader.tensor(name) if name else view_of(payload, 0, record)
            for record, name in zip(state.records, state.names, strict=True)
        ]
    return cast("dict[str, Any]", assemble(state.skeleton, leaves))


def read_metadata(*, place: Place, directory: str) -> Metadata:
    """DCP's index, through an unpickler that constructs DCP's own classes only. Raises CheckpointDamaged."""
    path = f"{directory}/{_METADATA_NAME}"
    try:
        with place.open_read(path) as file:
            found = _MetadataUnpickler(io.BytesIO(file.read())).load()
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, IndexError, TypeError, ValueError) as error:
        raise CheckpointDamaged(path, reason=f"DCP metadata cannot be read: {error}") from error
    if not isinstance(found, Metadata):
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
        if info.relative_path not in self._open:
            self._open[info.relative_path] = self._place.open_read(f"{self._directory}/{info.relative_path}")
        file = self._open[info.relative_path]
        file.seek(info.offset)
        record = io.BytesIO(file.read(info.length))
        return cast("torch.Tensor", torch.load(record, map_location="cpu", weights_only=True))


def _stored_name(record: TensorRecord, *, rank: int, is_replicated: bool) -> str:
    """The DCP name of a leaf: its path with dots, as DCP flattens it; "" for what belongs to the rank alone."""
    if record.kind != "torch" or record.path[0] in RANK_LOCAL:
        return ""
    name = ".".join(map(str, record.path))
    return name if is_replicated else f"rank{rank}.{name}"


def _share(
    records: Sequence[TensorRecord], names: Sequence[str], *, rank: int, world_size: int, is_replicated: bool
) -> tuple[int, ...]:
    """The leaves that this rank writes: all of its own, or its share of the replicated ones, equal in bytes.

    Every rank computes the same split, so nobody has to be asked.
    """
    candidates = [index for index, name in enumerate(names) if name]
    if not is_replicated or world_size == 1:
        return tuple(candidates)
    loads = [0] * world_size
    mine: list[int] = []
    for index in sorted(candidates, key=lambda i: (-records[i].num_bytes, names[i])):
        lightest = loads.index(min(loads))
        loads[lightest] += records[index].num_bytes
        if lightest == rank:
            mine.append(index)
    return tuple(sorted(mine))


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
    with _SyncedFile(place, f"{directory}/{file_name}") as file:
        for index in mine:
            record = table.records[index]
            blob = io.BytesIO()
            torch.save(view_of(buffer, start, record).clone(), blob)
            items.append(
                ItemRecord(names[index], record.path, file_name, file.num_bytes, blob.tell(), record.dtype, record.shape)
            )
            file.write(blob.getbuffer())
        if rank == 0:
            for name, key_path, value in _plain_leaves(table):
                blob = io.BytesIO()
                torch.save(value, blob)
                items.append(ItemRecord(name, key_path, file_name, file.num_bytes, blob.tell(), "", ()))
                file.write(blob.getbuffer())
    return FileRecord(file_name, file.num_bytes, file.hexdigest), tuple(items)


def _plain_leaves(table: SnapshotTable) -> list[tuple[str, tuple[str | int, ...], Any]]:
    """What is no tensor (learning rates, counters …), named as DCP flattens it, for readers that use plain `dcp.load`."""
    leaves: list[Any] = [_Hole() for _ in table.records]
    tree = cast("dict[str, Any]", assemble(table.skeleton, leaves))
    found: list[tuple[str, tuple[str | int, ...], Any]] = []

    def holds_tensor(value: Any) -> bool:
        if isinstance(value, Mapping):
            return any(map(holds_tensor, cast("Mapping[Any, Any]", value).values()))
        if isinstance(value, list | tuple):
            return any(map(holds_tensor, cast("Sequence[Any]", value)))
        return isinstance(value, _Hole)

    def walk(value: Any, path: tuple[str | int, ...]) -> None:
        if isinstance(value, _Hole):
            return
        if isinstance(value, Mapping):
            for key, item in cast("Mapping[Any, Any]", value).items():
                walk(item, (*path, str(key)))
        elif isinstance(value, list | tuple) and holds_tensor(value):
            for index, item in enumerate(cast("Sequence[Any]", value)):
                walk(item, (*path, index))
        elif path:
            found.append((".".join(map(str, path)), path, value))

    for part, branch in tree.items():
        if part not in RANK_LOCAL:
            walk(branch, (part,))
    return found


class _Hole:
    """Stands where a tensor was."""


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
