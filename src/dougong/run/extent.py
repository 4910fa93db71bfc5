"""Where a leaf of the state lies in the whole tensor that it is a part of, and which ranks hold the same bytes."""

from __future__ import annotations

import msgspec


class Extent(msgspec.Struct, frozen=True, array_like=True):
    """A box in a named tensor. Shapes and offsets are in elements.

    `name` is the fully qualified name in the layout of torch.distributed.checkpoint (DCP), the same on every rank that
    holds a part of it. `holders`: the ranks, this one among them, that hold equal bytes of this very box; each box is
    written durably by one of them. For a tensor that is not sharded the box is the whole, from the origin.
    """

    name: str
    key_path: tuple[str | int, ...]
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    holders: tuple[int, ...]
