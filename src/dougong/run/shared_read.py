# pyright: standard
"""Boxes read by one rank for all that hold them: so a thousand data-parallel ranks do not storm one storage.

Each box is read by one of the ranks that want it, all sharing the bytes evenly, and broadcast to the others. Without a
process group for it, each rank reads for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec
import torch
import torch.distributed as dist

from dougong.errors import CheckpointDamaged
from dougong.run.extent import Box, Extent, deal

_BUCKET_BYTES = 64 * 2**20
_ALIGN_BYTES = 16

GroupOf = Callable[[tuple[int, ...]], "dist.ProcessGroup | None"]


class WantedBox(msgspec.Struct, frozen=True):
    """A box of a saved tensor that this rank wants, as do all of `ranks`."""

    name: str
    box: Box
    dtype: torch.dtype
    ranks: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.box.num_elements * self.dtype.itemsize


class BoxSource(Protocol):
    """Where boxes are read from. `read` raises CheckpointDamaged."""

    @property
    def where(self) -> str: ...
    def read(self, name: str, box: Box) -> torch.Tensor: ...


def read_boxes(
    wanted: Sequence[WantedBox], source: BoxSource, *, rank: int, world_size: int, group_of: GroupOf | None
) -> list[torch.Tensor]:
    """The boxes in their order. All ranks must call it together if `group_of` is given; None = each for itself.

    Raises CheckpointDamaged, and then on every rank.
    """
    world = None if group_of is None else group_of(tuple(range(world_size)))
    if group_of is None or world is None or world_size == 1:
        return [source.read(one.name, one.box) for one in wanted]
    groups = _groups(wanted, group_of)
    readers = _readers(wanted, groups, rank=rank)
    found: dict[int, torch.Tensor] = {}
    failure: CheckpointDamaged | None = None
    try:
        for index, one in enumerate(wanted):
            if readers[index] == rank:
                found[index] = source.read(one.name, one.box)
    except CheckpointDamaged as error:
        failure = error
    _agree(world, failure, source)
    for ranks in sorted(groups):  # the same order everywhere, so that no two ranks wait for each other
        for reader in ranks:
            shared = [i for i, one in enumerate(wanted) if one.ranks == ranks and readers[i] == reader]
            for bucket in _buckets(sorted(shared, key=lambda i: (wanted[i].name, wanted[i].box.offsets)), wanted):
                _broadcast(bucket, wanted, found, reader=reader, is_reader=reader == rank, group=groups[ranks])
    return [found[index] for index in range(len(wanted))]


def _groups(wanted: Sequence[WantedBox], group_of: GroupOf) -> dict[tuple[int, ...], dist.ProcessGroup]:
    sets = {one.ranks for one in wanted if len(one.ranks) > 1}
    return {ranks: group for ranks in sets if (group := group_of(ranks)) is not None}


def _readers(wanted: Sequence[WantedBox], groups: dict[tuple[int, ...], dist.ProcessGroup], *, rank: int) -> list[int]:
    holders = [one.ranks if one.ranks in groups else (rank,) for one in wanted]
    boxes = [Extent(one.name, (), (), one.box.offsets, who) for one, who in zip(wanted, holders, strict=True)]
    return list(deal(boxes, [one.num_bytes for one in wanted]))


def _agree(world: dist.ProcessGroup, failure: CheckpointDamaged | None, source: BoxSource) -> None:
    """Nobody may wait for a broadcast that its reader cannot make."""
    is_well = torch.tensor([failure is None], dtype=torch.int32)
    dist.all_reduce(is_well, dist.ReduceOp.MIN, group=world)
    if failure is not None:
        raise failure
    if not is_well.item():
        raise CheckpointDamaged(source.where, reason="another rank could not read its part")


def _buckets(indices: Sequence[int], wanted: Sequence[WantedBox]) -> Iterator[list[int]]:
    bucket: list[int] = []
    num_bytes = 0
    for index in indices:
        if bucket and num_bytes + wanted[index].num_bytes > _BUCKET_BYTES:
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(index)
        num_bytes += wanted[index].num_bytes
    if bucket:
        yield bucket


def _broadcast(
    bucket: Sequence[int],
    wanted: Sequence[WantedBox],
    found: dict[int, torch.Tensor],
    *,
    reader: int,
    is_reader: bool,
    group: dist.ProcessGroup,
) -> None:
    begins: list[int] = []
    end = 0
    for index in bucket:
        begins.append(end)
        end = -(-(end + wanted[index].num_bytes) // _ALIGN_BYTES) * _ALIGN_BYTES
    flat = torch.empty(end, dtype=torch.uint8)
    stretches = [flat[begin : begin + wanted[i].num_bytes] for i, begin in zip(bucket, begins, strict=True)]
    if is_reader:
        for index, stretch in zip(bucket, stretches, strict=True):
            stretch.copy_(found[index].contiguous().reshape(-1).view(torch.uint8))
    if end:
        dist.broadcast(flat, src=reader, group=group)
    if not is_reader:
        for index, stretch in zip(bucket, stretches, strict=True):
            # a copy, since an optimizer keeps what it is given, and would keep the whole bucket
            found[index] = stretch.view(wanted[index].dtype).reshape(wanted[index].box.shape).clone()
