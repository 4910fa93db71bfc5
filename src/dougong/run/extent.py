"""Where a leaf of the state lies in the whole tensor that it is a part of, and which ranks hold the same bytes.

Boxes are half-open and in elements; a scalar is the box without dimensions. Nothing here needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec


class Extent(msgspec.Struct, frozen=True, array_like=True):
    """A box in a named tensor. Shapes and offsets are in elements.

    `name` is the fully qualified name in the layout of torch.distributed.checkpoint (DCP), the same on every rank that
    holds a part of it. `holders`: ranks that hold the bytes of this very box that count; each box is written durably
    by one of them (`deal`). They are this rank and its peers, except where another rank's bytes are the true ones, as
    with buffers that DDP broadcasts. For a tensor that is not sharded the box is the whole, from the origin.
    """

    name: str
    key_path: tuple[str | int, ...]
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    holders: tuple[int, ...]


class Box(msgspec.Struct, frozen=True, array_like=True):
    """A part of a tensor: where it begins and how large it is."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def within(self, other: Box) -> tuple[slice, ...]:
        """The indices of this box in a tensor that holds `other`, of which it is a part."""
        origins = zip(self.offsets, self.shape, other.offsets, strict=True)
        return tuple(slice(offset - origin, offset - origin + size) for offset, size, origin in origins)


def whole(shape: Sequence[int]) -> Box:
    """The box of a tensor that is not sharded."""
    return Box((0,) * len(shape), tuple(shape))


def intersection(left: Box, right: Box) -> Box | None:
    """What two boxes of one tensor share; None if that is nothing."""
    if len(left.shape) != len(right.shape):
        return None
    begins: list[int] = []
    sizes: list[int] = []
    for a, m, b, n in zip(left.offsets, left.shape, right.offsets, right.shape, strict=True):
        begins.append(max(a, b))
        sizes.append(min(a + m, b + n) - begins[-1])
    return Box(tuple(begins), tuple(sizes)) if all(size > 0 for size in sizes) else None


def uncovered(wanted: Box, stored: Sequence[Box]) -> Box | None:
    """A part of `wanted` that no stored box holds; None if they hold all of it. They may overlap."""
    missing = [wanted] if wanted.num_elements else []
    for box in stored:
        missing = [piece for part in missing for piece in _without(part, box)]
    return missing[0] if missing else None


def deal(extents: Sequence[Extent], sizes_bytes: Sequence[int]) -> tuple[int, ...]:
    """Which rank writes (or reads for the others) each box: one of its holders.

    Largest first, to whoever of the holders has the fewest bytes so far. The bytes are counted apart for each set of
    holders, since only of these does every member know all boxes; so all compute the same deal and nobody is asked.
    """
    loads: dict[tuple[int, ...], list[int]] = {}
    writers = [0] * len(extents)
    for index in sorted(range(len(extents)), key=lambda i: (-sizes_bytes[i], extents[i].name, extents[i].offsets)):
        holders = extents[index].holders
        load = loads.setdefault(holders, [0] * len(holders))
        chosen = load.index(min(load))
        load[chosen] += sizes_bytes[index]
        writers[index] = holders[chosen]
    return tuple(writers)


def _without(part: Box, taken: Box) -> list[Box]:
    """`part` less `taken`, as boxes: along each dimension what lies before it and what lies behind it."""
    shared = intersection(part, taken)
    if shared is None:
        return [part]
    pieces: list[Box] = []
    offsets, shape = list(part.offsets), list(part.shape)
    for dim, (begin, size) in enumerate(zip(shared.offsets, shared.shape, strict=True)):
        end, part_end = begin + size, offsets[dim] + shape[dim]
        for first, last in ((offsets[dim], begin), (end, part_end)):
            if first < last:
                piece = (*offsets[:dim], first, *offsets[dim + 1 :]), (*shape[:dim], last - first, *shape[dim + 1 :])
                pieces.append(Box(*piece))
        offsets[dim], shape[dim] = begin, size
    return pieces
