"""A rank's part of a durable checkpoint, in the layout of torch.distributed.checkpoint (DCP).

Every tensor is one `torch.save` record in a `.distcp` file, and `.metadata` says where each lies, so plain `dcp.load`
reads the checkpoint. `.metadata` is a pickle by DCP's design: it is written here, and read back only through an
unpickler that knows DCP's own classes and nothing else.

Source of the layout: torch/distributed/checkpoint/filesystem.py and metadata.py of torch 2.13.
"""

from __future__ import annotations

import io
import os
import pickle
from collections import Counter
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

from dougong.errors import CheckpointDamaged
from dougong.run.manifest import FileRecord, ItemRecord, Place
from dougong.run.state import RANK_LOCAL, Replication, SnapshotTable, TensorRecord, read_table, view_of
from dougong.run.tree import assemble

_METADATA_NAME = ".metadata"
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


class RankState(msgspec.Struct, frozen=True, array_like=True):
    """`rank-<r>.state`: the skeleton of a rank's whole state, its small leaves, and where the others lie."""

    skeleton: bytes
    records: tuple[TensorRecord, ...]
    names: tuple[str, ...]
    """Per leaf: the DCP name it is stored under, or "" if it stands in `payload`."""
    payload: bytes


def write_shard(
    buffer: memoryview, *, place: Place, directory: str, rank: int, world_size: int, replication: Replication
) -> tuple[tuple[FileRecord, ...], tuple[ItemRecord, ...]]:
    """Write this rank's files from a snapshot buffer. Each replicated tensor is written by one rank only."""
    table, start = read_table(buffer)
    names = _unique([_stored_name(record, rank=rank, replication=replication) for record in table.records])
    mine = _share(table.records, names, rank=rank, world_size=world_size, replication=replication)
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
    metadata = Metadata(
        state_dict_metadata=described, planner_data=mappings, storage_data=stored, version=CURRENT_DCP_VERSION
    )
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
    path = f"{directory}/{_METADATA_NAME}"
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


def _stored_name(record: TensorRecord, *, rank: int, replication: Replication) -> str:
    """The DCP name of a leaf: its path with dots, as DCP flattens it; "" for what belongs to the rank alone."""
    if record.kind != "torch" or record.path[0] in RANK_LOCAL:
        return ""
    name = ".".join(map(str, record.path))
    is_shared = replication.is_replicated and name not in replication.of_each_rank
    return name if is_shared else f"rank{rank}.{name}"


def _unique(names: Sequence[str]) -> list[str]:
    """Two leaves that flatten to one DCP name (keys `1` and `"1"`, or with a dot in them) stay with the rank."""
    counts = Counter(names)
    return [name if counts[name] == 1 else "" for name in names]


def _share(
    records: Sequence[TensorRecord], names: Sequence[str], *, rank: int, world_size: int, replication: Replication
) -> tuple[int, ...]:
    """The leaves that this rank writes: all of its own, or its share of the replicated ones, equal in bytes.

    Every rank computes the same split, so nobody has to be asked.
    """
    candidates = [index for index, name in enumerate(names) if name]
    if not replication.is_replicated or world_size == 1:
        return tuple(candidates)
    loads = [0] * world_size
    mine: list[int] = []
    for index in sorted(candidates, key=lambda i: (-records[i].num_bytes, names[i].removeprefix(f"rank{rank}."))):
        if names[index].startswith(f"rank{rank}.") and names[index] not in replication.of_rank_0:
            mine.append(index)
            continue
        writer = 0 if names[index] in replication.of_rank_0 else loads.index(min(loads))
        loads[writer] += records[index].num_bytes
        if writer == rank:
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
    key_paths, plain = _flattened(table)
    with _SyncedFile(place, f"{directory}/{file_name}") as file:
        for index in mine:
            record = table.records[index]
            blob = io.BytesIO()
            torch.save(view_of(buffer, start, record).clone(), blob)
            name, key_path = names[index], key_paths[index]
            if name != ".".join(map(str, key_path)):
                key_path = (f"rank{rank}", *key_path)
            items.append(ItemRecord(name, key_path, file_name, file.num_bytes, blob.tell(), record.dtype, record.shape))
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


def _flattened(table: SnapshotTable) -> tuple[dict[int, _Path], list[tuple[str, _Path, Any]]]:
    """The tree as DCP flattens it: the key path of each leaf by its index, and what is no tensor (learning rates …).

    Mappings are walked, with their keys as text; lists only if they hold tensors or mappings; all else is one value.
    """
    tree = cast("dict[str, Any]", assemble(table.skeleton, [_Hole(index) for index in range(len(table.records))]))
    key_paths: dict[int, _Path] = {}
    plain: list[tuple[str, _Path, Any]] = []

    def walk(value: Any, path: _Path) -> None:
        if isinstance(value, _Hole):
            key_paths[value.index] = path
        elif isinstance(value, Mapping):
            for key, item in cast("Mapping[Any, Any]", value).items():
                walk(item, (*path, str(key)))
        elif _is_walked(value):
            for index, item in enumerate(cast("Sequence[Any]", value)):
                walk(item, (*path, index))
        elif path[0] not in RANK_LOCAL:
            plain.append((".".join(map(str, path)), path, value))

    walk(tree, ())
    return key_paths, plain


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
