"""What a rank asks its node's writer to put on storage: whole files, made of stretches of a snapshot buffer and of
bytes that stand in the order itself.

An order is a file in the node's shared memory. The writer holds a lock on it while it writes and removes it when it is
done; the rank takes it back by removing it. So no death of a writer or of an agent leaves a rank waiting for ever.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Literal

import msgspec

from dougong.run.layout import NodeDirectory, write_atomically
from dougong.run.manifest import ItemRecord
from dougong.run.reserve import with_reserve

Kind = Literal["shard", "metadata"]


class Given(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Bytes that stand here."""

    content: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.content)


class Stretch(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Bytes of the snapshot buffer."""

    offset_bytes: int
    num_bytes: int


Segment = Given | Stretch


class FileOrder(msgspec.Struct, frozen=True, array_like=True):
    """A file and what it consists of, from its first byte to its last."""

    name: str
    segments: tuple[Segment, ...]

    @property
    def num_bytes(self) -> int:
        return sum(segment.num_bytes for segment in self.segments)


class WriteOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The files that one rank adds to the checkpoint of a step."""

    kind: Kind
    generation: int
    rank: int
    step: int
    checkpoint_url: str
    directory: str
    buffer_path: str
    """The snapshot buffer; "" = the order has no stretch."""
    files: tuple[FileOrder, ...]
    items: tuple[ItemRecord, ...] = ()
    stall_s: float = 0.0
    asked_ns: int = 0
    """When the rank asked, on the monotonic clock of the node."""


def order_path(node: NodeDirectory, rank: int, kind: Kind) -> Path:
    return node.root / f"rank-{rank}.{kind}.order"


def orders_in(node: NodeDirectory) -> tuple[Path, ...]:
    return tuple(sorted(node.root.glob("rank-*.order")))


def put_order(node: NodeDirectory, order: WriteOrder) -> Path:
    """Leave an order for the writer. Raises OSError if there is no shared memory for it."""
    path = order_path(node, order.rank, order.kind)
    content = msgspec.msgpack.encode(order)
    with_reserve(node.root, lambda: write_atomically(path, content, mode=0o600))
    return path


def read_order(fd: int) -> WriteOrder:
    """The order in an open file. Raises msgspec.MsgspecError."""
    return msgspec.msgpack.decode(os.pread(fd, os.fstat(fd).st_size, 0), type=WriteOrder)


def take_order(path: Path) -> int | None:
    """An open file that holds the lock on the order; None if it is gone or somebody else has it."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_nlink > 0:
            return fd
    except BlockingIOError:
        pass
    os.close(fd)
    return None


def mark_begun(fd: int) -> None:
    """Files of the order may exist from now on. The mark outlives who set it."""
    os.fchmod(fd, 0o400)


def is_begun(fd: int) -> bool:
    return not os.fstat(fd).st_mode & 0o200


def is_taken(path: Path) -> bool:
    """Is a writer at work on this order?"""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(fd)
