"""What a rank writes of its snapshot, and in which layout: the plan that a writer without torch can carry out.

Every tensor is one `torch.save` record, a zip archive around its bytes. The rank has torch make the bytes before and
after; the tensor's own bytes stay where they lie in the snapshot buffer. Records are placed so that the bytes of a
large tensor begin on a block of the file, as they begin on a page of the buffer, and can go to the disk without a copy.

Source of the records: torch/serialization.py (`_save`, `skip_data`) and caffe2/serialize/inline_container.cc.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, cast

import msgspec
import torch
from torch.serialization import skip_data

from dougong.run.extent import Extent
from dougong.run.manifest import ItemRecord
from dougong.run.new_file import BLOCK_BYTES
from dougong.run.state import RANK_LOCAL, Replication, SnapshotTable, TensorRecord, read_table
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

    def __init__(self, *, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._layout: _Layout | None = None

    def plan(self, buffer: memoryview, *, replication: Replication) -> ShardPlan:
        """The plan for a snapshot. `replication` is asked about leaves without an extent."""
        table, start = read_table(buffer)
        key = (start, table.records, replication)
        if self._layout is None or self._layout.key != key:
            self._layout = _layout(key, table, rank=self._rank, world_size=self._world_size)
        layout = self._layout
        segments, items, num_bytes = list(layout.segments), list(layout.items), layout.num_bytes
        if self._rank == 0:
            taken = {place.name for place in layout.places}
            for name, key_path, value in _plain_values(table):
                if name not in taken:
                    content = _saved(value)
                    items.append(ItemRecord(name, key_path, layout.file_name, num_bytes, len(content), "", ()))
                    segments.append(Given(content))
                    num_bytes += len(content)
        return ShardPlan(
            files=(
                FileOrder(layout.file_name, _joined(segments)),
                FileOrder(f"rank-{self._rank}.state", (Given(_rank_state(buffer, start, table, layout.places)),)),
            ),
            items=tuple(items),
        )


class _Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a leaf is stored: as a box of tensor `name` (`holders` have the same bytes); `name` "" = with the rank."""

    name: str
    key_path: _Path = ()
    global_shape: tuple[int, ...] | None = None
    offsets: tuple[int, ...] = ()
    holders: tuple[int, ...] = ()


class _Layout(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a plan that is the same for every snapshot of these shapes."""

    key: tuple[int, tuple[TensorRecord, ...], Replication]
    places: tuple[_Place, ...]
    file_name: str
    segments: tuple[Segment, ...]
    items: tuple[ItemRecord, ...]
    num_bytes: int


def _layout(
    key: tuple[int, tuple[TensorRecord, ...], Replication], table: SnapshotTable, *, rank: int, world_size: int
) -> _Layout:
    start, records, replication = key
    key_paths = _key_paths(table)
    places = _unique(
        [
            _place(record, key_paths[index], rank=rank, world_size=world_size, replication=replication)
            for index, record in enumerate(records)
        ]
    )
    file_name = f"__{rank}_0.distcp"
    segments: list[Segment] = []
    items: list[ItemRecord] = []
    at = 0
    for index in _share(records, places, rank=rank):
        record, place = records[index], places[index]
        before, after = _framing(record.dtype, record.shape)
        is_straight = record.num_bytes >= _STRAIGHT_BYTES and (start + record.offset_bytes) % BLOCK_BYTES == 0
        gap = -(at + len(before)) % BLOCK_BYTES if is_straight else 0
        stretch = Stretch(start + record.offset_bytes, record.num_bytes)
        segments += [Given(bytes(gap) + before), stretch, Given(after)]
        num_bytes = len(before) + record.num_bytes + len(after)
        items.append(
            ItemRecord(
                place.name,
                place.key_path,
                file_name,
                at + gap,
                num_bytes,
                record.dtype,
                record.shape,
                place.global_shape,
                place.offsets,
            )
        )
        at += gap + num_bytes
    return _Layout(
        key=key,
        places=tuple(places),
        file_name=file_name,
        segments=_joined(segments),
        items=tuple(items),
        num_bytes=at,
    )


def _place(record: TensorRecord, key_path: _Path, *, rank: int, world_size: int, replication: Replication) -> _Place:
    """An extent says it; else the leaf's name is its path with dots, as DCP flattens it, and replication says whose."""
    if record.extent is not None:
        return _place_of_extent(record.extent)
    if record.kind != "torch" or record.path[0] in RANK_LOCAL:
        return _Place(name="")
    name = ".".join(map(str, record.path))
    if not replication.is_replicated or name in replication.of_each_rank:
        return _Place(name=f"rank{rank}.{name}", key_path=(f"rank{rank}", *key_path), holders=(rank,))
    holders = (0,) if name in replication.of_rank_0 else tuple(range(world_size))
    return _Place(name=name, key_path=key_path, holders=holders)


def _place_of_extent(extent: Extent) -> _Place:
    return _Place(
        name=extent.name,
        key_path=extent.key_path,
        global_shape=extent.global_shape,
        offsets=extent.offsets,
        holders=extent.holders,
    )


def _unique(places: Sequence[_Place]) -> list[_Place]:
    """Two leaves that flatten to one DCP name (keys `1` and `"1"`, or with a dot in them) stay with the rank."""
    counts = Counter((place.name, place.offsets) for place in places)
    return [place if counts[place.name, place.offsets] == 1 else _Place(name="") for place in places]


def _share(records: Sequence[TensorRecord], places: Sequence[_Place], *, rank: int) -> tuple[int, ...]:
    """The leaves that this rank writes: all that it alone holds, and its share of those that others hold too.

    Of the boxes with the same holders, the largest first to whoever has the fewest bytes so far. These ranks know
    exactly these boxes, so all of them compute the same deal and nobody has to be asked.
    """
    loads: dict[tuple[int, ...], dict[int, int]] = {}
    mine: list[int] = []
    stored = [index for index, place in enumerate(places) if place.name and place.holders]
    for index in sorted(stored, key=lambda i: (-records[i].num_bytes, places[i].name, places[i].offsets)):
        place = places[index]
        load = loads.setdefault(place.holders, dict.fromkeys(sorted(place.holders), 0))
        writer = min(load, key=lambda holder: (load[holder], holder))
        load[writer] += records[index].num_bytes
        if writer == rank:
            mine.append(index)
    return tuple(sorted(mine))


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


def _rank_state(buffer: memoryview, start: int, table: SnapshotTable, places: Sequence[_Place]) -> bytes:
    payload = bytearray()
    records: list[TensorRecord] = []
    for record, place in zip(table.records, places, strict=True):
        if place.name:
            records.append(record)
            continue
        raw = buffer[start + record.offset_bytes : start + record.offset_bytes + record.num_bytes]
        records.append(msgspec.structs.replace(record, offset_bytes=len(payload)))
        payload += raw
    names = tuple(place.name for place in places)
    return msgspec.msgpack.encode(RankState(table.skeleton, tuple(records), names, bytes(payload)))


class _Hole(msgspec.Struct, frozen=True):
    """Stands where leaf `index` was."""

    index: int


def _key_paths(table: SnapshotTable) -> dict[int, _Path]:
    """The key path of each leaf by its index, as DCP flattens the tree."""
    return {value.index: path for path, value in _flattened(table) if isinstance(value, _Hole)}


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
