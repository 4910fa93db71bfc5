"""What a rank writes of its snapshot, and in which layout: the plan that a writer without torch can carry out.

Every tensor is one `torch.save` record, a zip archive around its bytes. The rank has torch make the bytes before and
after; the tensor's own bytes stay where they lie in the snapshot buffer. Records are placed so that the bytes of a
large tensor begin on a block of the file, as they begin on a page of the buffer, and can go to the disk without a copy.

Source of the records: torch/serialization.py (`_save`, `skip_data`) and caffe2/serialize/inline_container.cc.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, cast

import msgspec
import torch
from torch.serialization import skip_data

from dougong.run.extent import Extent, deal
from dougong.run.manifest import ItemRecord
from dougong.run.new_file import BLOCK_BYTES
from dougong.run.state import RANK_LOCAL, SnapshotTable, TensorRecord, read_table
from dougong.run.tree import assemble
from dougong.run.write_order import FileOrder, Given, Segment, Stretch

_Path = tuple[str | int, ...]
_STRAIGHT_BYTES = 64 * 1024


class RankState(msgspec.Struct, frozen=True, array_like=True):
    """`rank-<r>.state`: the skeleton of a rank's whole state, its small leaves, and where the others lie."""

    skeleton: bytes
    records: tuple[TensorRecord, ...]
    names: tuple[str, ...]
    """Per leaf: the DCP name it is stored under, or "" if it stands in `payload`."""
    payload: bytes


class ShardPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The files of one rank, and where in them the values of DCP's index lie."""

    files: tuple[FileOrder, ...]
    items: tuple[ItemRecord, ...]


class ShardPlanner:
    """Plans the shards of one rank. What depends on the shapes alone is kept until they change."""

    def __init__(self, *, rank: int) -> None:
        self._rank = rank
        self._layout: _Layout | None = None

    def plan(self, buffer: memoryview) -> ShardPlan:
        """The plan for a snapshot. A leaf without an extent stays with the rank."""
        table, start = read_table(buffer)
        key = (start, table.records)
        if self._layout is None or self._layout.key != key:
            self._layout = _layout(key, rank=self._rank)
        layout = self._layout
        segments, items, num_bytes = list(layout.segments), list(layout.items), layout.num_bytes
        if self._rank == 0:
            taken = {record.extent.name for record in table.records if record.extent is not None}
            for name, key_path, value in _plain_values(table):
                if name not in taken:
                    content = _saved(value)
                    items.append(ItemRecord(name, key_path, layout.file_name, num_bytes, len(content), "", ()))
                    segments.append(Given(content))
                    num_bytes += len(content)
        return ShardPlan(
            files=(
                FileOrder(layout.file_name, _joined(segments)),
                FileOrder(f"rank-{self._rank}.state", (Given(_rank_state(buffer, start, table)),)),
            ),
            items=tuple(items),
        )


class _Layout(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a plan that is the same for every snapshot of these shapes."""

    key: tuple[int, tuple[TensorRecord, ...]]
    file_name: str
    segments: tuple[Segment, ...]
    items: tuple[ItemRecord, ...]
    num_bytes: int


def _layout(key: tuple[int, tuple[TensorRecord, ...]], *, rank: int) -> _Layout:
    start, records = key
    file_name = f"__{rank}_0.distcp"
    segments: list[Segment] = []
    items: list[ItemRecord] = []
    at = 0
    for record, extent in _share(records, rank=rank):
        before, after = _framing(record.dtype, record.shape)
        is_straight = record.num_bytes >= _STRAIGHT_BYTES and (start + record.offset_bytes) % BLOCK_BYTES == 0
        gap = -(at + len(before)) % BLOCK_BYTES if is_straight else 0
        stretch = Stretch(start + record.offset_bytes, record.num_bytes)
        segments += [Given(bytes(gap) + before), stretch, Given(after)]
        num_bytes = len(before) + record.num_bytes + len(after)
        items.append(
            ItemRecord(
                fqn=extent.name,
                key_path=extent.key_path,
                file=file_name,
                offset_bytes=at + gap,
                num_bytes=num_bytes,
                dtype=record.dtype,
                shape=record.shape,
                global_shape=extent.global_shape,
                offsets=extent.offsets,
            )
        )
        at += gap + num_bytes
    return _Layout(key=key, file_name=file_name, segments=_joined(segments), items=tuple(items), num_bytes=at)


def _share(records: Sequence[TensorRecord], *, rank: int) -> list[tuple[TensorRecord, Extent]]:
    """The leaves that this rank writes. A part without any element of a tensor that has some is nobody's."""
    known = [(record, record.extent) for record in records if record.extent is not None]
    writers = deal([extent for _, extent in known], [record.num_bytes for record, _ in known])
    return [
        (record, extent)
        for (record, extent), writer in zip(known, writers, strict=True)
        if writer == rank and (math.prod(record.shape) > 0 or math.prod(extent.global_shape) == 0)
    ]


class _Recorder:
    """Stands in for the file that torch writes a record to, and keeps what comes before and after the payload."""

    def __init__(self) -> None:
        self.before = bytearray()
        self.after: bytearray | None = None

    def write(self, content: Any) -> int:
        target = self.before if self.after is None else self.after
        target += content
        return len(content)

    def seek(self, num_bytes: int, whence: int) -> None:
        """Where data is skipped, torch moves on by its length."""
        assert self.after is None and whence == io.SEEK_CUR and num_bytes > 0
        self.after = bytearray()


@cache
def _framing(dtype: str, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """What `torch.save` writes before and after the bytes of a tensor. No checksum, so the bytes are not needed.

    `torch.save` itself would take the switch for the checksum from the whole process, so it is not called.
    """
    recorder = _Recorder()
    archive: Any = torch._C.PyTorchFileWriter(recorder, False, 64)  # pyright: ignore
    with skip_data():
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        torch.serialization._save(tensor, archive, pickle, 2, False)  # pyright: ignore
    archive.write_end_of_file()
    return bytes(recorder.before), bytes(recorder.after or b"")


def _saved(value: Any) -> bytes:
    blob = io.BytesIO()
    torch.save(value, blob)
    return blob.getvalue()


def _joined(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Neighbouring given bytes as one; empty ones left out."""
    joined: list[Segment] = []
    pending = bytearray()
    for segment in segments:
        if isinstance(segment, Given):
            pending += segment.content
        elif segment.num_bytes:
            if pending:
                joined.append(Given(bytes(pending)))
                pending.clear()
            joined.append(segment)
    if pending:
        joined.append(Given(bytes(pending)))
    return tuple(joined)


def _rank_state(buffer: memoryview, start: int, table: SnapshotTable) -> bytes:
    payload = bytearray()
    records: list[TensorRecord] = []
    for record in table.records:
        if record.extent is not None:
            records.append(record)
            continue
        raw = buffer[start + record.offset_bytes : start + record.offset_bytes + record.num_bytes]
        records.append(msgspec.structs.replace(record, offset_bytes=len(payload)))
        payload += raw
    names = tuple("" if record.extent is None else record.extent.name for record in records)
    return msgspec.msgpack.encode(RankState(table.skeleton, tuple(records), names, bytes(payload)))


class _Hole(msgspec.Struct, frozen=True):
    """Stands where leaf `index` was."""

    index: int


def _plain_values(table: SnapshotTable) -> list[tuple[str, _Path, Any]]:
    """What is no tensor (learning rates …), with its DCP name and key path."""
    return [
        (".".join(map(str, path)), path, value)
        for path, value in _flattened(table)
        if not isinstance(value, _Hole) and path[0] not in RANK_LOCAL
    ]


def _flattened(table: SnapshotTable) -> list[tuple[_Path, Any]]:
    """The tree as DCP flattens it. Mappings are walked, with their keys as text; lists only if they hold tensors or
    mappings; all else is one value."""
    tree = cast("dict[str, Any]", assemble(table.skeleton, [_Hole(index) for index in range(len(table.records))]))
    found: list[tuple[_Path, Any]] = []

    def walk(value: Any, path: _Path) -> None:
        if isinstance(value, Mapping):
            for key, item in cast("Mapping[Any, Any]", value).items():
                walk(item, (*path, str(key)))
        elif _is_walked(value):
            for index, item in enumerate(cast("Sequence[Any]", value)):
                walk(item, (*path, index))
        else:
            found.append((path, value))

    walk(tree, ())
    return found


def _is_walked(value: Any) -> bool:
    if not isinstance(value, list | tuple):
        return False
    items = cast("Sequence[Any]", value)
    return any(isinstance(item, _Hole | Mapping) or _is_walked(item) for item in items)
