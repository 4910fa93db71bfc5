"""The state of one rank: gathered from the live objects, written into a memory checkpoint, and put back.

State = model, optimizer, scheduler, data position, any further object with `state_dict()`, the random number
generators of Python, NumPy, torch and CUDA, the step and the token count.
"""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
import numpy
import torch
from torch.distributed.tensor import DTensor

from dougong.errors import UserError
from dougong.run.extent import Extent
from dougong.run.optimizer_state import (
    as_dtensor,
    load_optimizer,
    optimizer_tree,
    parameter_names,
    unwrapped,
)
from dougong.run.sharding import RANK_LOCAL
from dougong.run.tree import Leaf, assemble

_ALIGN_BYTES = 64
_PAGE_BYTES = 4096
_LARGE_BYTES = 64 * 1024
"""From this size on a leaf starts on a page, so that a writer can hand it to the disk as it lies (O_DIRECT)."""
_LENGTH = struct.Struct("<Q")


class TensorRecord(msgspec.Struct, frozen=True, array_like=True):
    """A leaf in a snapshot buffer. `kind` "torch" or "numpy"."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    num_bytes: int
    path: tuple[str | int, ...]
    extent: Extent | None = None
    """Its part in a tensor that all ranks share; None = it belongs to this rank alone."""


class SnapshotTable(msgspec.Struct, frozen=True, array_like=True):
    """The head of a snapshot buffer: the skeleton of the state tree and where its leaves lie."""

    skeleton: bytes
    records: tuple[TensorRecord, ...]


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far the job is."""

    step: int
    num_tokens: int
    orders: tuple[tuple[int, ...], ...] = ()
    """In which order gradients arrive, for each DDP model (see `dougong.run.reducers`)."""


def gather(parts: Mapping[str, Any], *, data: Mapping[str, Any] | None, progress: Progress) -> dict[str, Any]:
    """The state tree: one branch per part, with references to the live tensors, not copies.

    Optimizer state stands under the names of the parameters; DTensors are still whole.
    """
    tree = part_trees(parts)
    tree["rng"] = rng_state()
    tree["data"] = data
    tree["progress"] = msgspec.to_builtins(progress)
    return tree


def put_back(tree: Mapping[str, Any], parts: Mapping[str, Any]) -> Progress:
    """Load every part; random number generators last, since loading may draw. Returns the progress.

    Raises UserError if the saved state and the objects of the script do not belong together.
    """
    check_parts(tree, parts)
    for name, part in parts.items():
        try:
            _load(part, tree[name], parts)
        except (RuntimeError, ValueError, KeyError) as error:
            raise UserError(
                f"the checkpoint does not fit {name}: {error}",
                where=f"attach({name}=…)",
                mend="build the same model and optimizer as the run that wrote it, or start a new run",
            ) from error
    restore_rng(cast("dict[str, Any]", tree["rng"]))
    return msgspec.convert(tree["progress"], Progress)


def check_parts(tree: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    """Raises UserError if other objects were saved than are attached."""
    saved = set(tree) - set(RANK_LOCAL)
    if saved != set(parts):
        raise UserError(
            f"the checkpoint holds {', '.join(sorted(saved))}; the script attached {', '.join(sorted(parts))}",
            where="attach()",
            mend="attach the same objects as the run that wrote it",
        )


def part_trees(parts: Mapping[str, Any]) -> dict[str, Any]:
    """What is attached, as trees. Modules first: FSDP2 takes its parameters back to their shards for a state_dict()."""
    tree: dict[str, Any] = {
        name: unwrapped(part).state_dict() for name, part in parts.items() if isinstance(part, torch.nn.Module)
    }
    names = parameter_names(parts)
    for name, part in parts.items():
        if isinstance(part, torch.optim.Optimizer):
            tree[name] = optimizer_tree(part, names)
        elif name not in tree:
            tree[name] = part.state_dict()
    return tree


def payload_start(head_bytes: int) -> int:
    """Where the leaves begin behind a table of that size: on a page."""
    return aligned_to_page(_LENGTH.size + head_bytes)


def write_head(buffer: memoryview, head: bytes) -> None:
    """The table at the beginning of a buffer; the payload starts on the next page."""
    _LENGTH.pack_into(buffer, 0, len(head))
    buffer[_LENGTH.size : _LENGTH.size + len(head)] = head


def read_table(buffer: memoryview) -> tuple[SnapshotTable, int]:
    """The table of a snapshot, and where its payload starts."""
    (length,) = _LENGTH.unpack_from(buffer, 0)
    table = msgspec.msgpack.decode(buffer[_LENGTH.size : _LENGTH.size + length], type=SnapshotTable)
    return table, payload_start(length)


def read_tree(buffer: memoryview) -> dict[str, Any]:
    """The state tree of a snapshot, in memory of its own.

    An optimizer keeps the very tensors it loads and updates them in place: views would be training inside the snapshot.
    """
    table, start = read_table(buffer)
    leaves = [_own_copy(view_of(buffer, start, record)) for record in table.records]
    return cast("dict[str, Any]", assemble(table.skeleton, leaves))


def read_branch(buffer: memoryview, name: str) -> Any:
    """One part of the state tree of a snapshot, in memory of its own."""
    table, start = read_table(buffer)
    leaves = [_own_copy(view_of(buffer, start, record)) if record.path[0] == name else None for record in table.records]
    return cast("dict[str, Any]", assemble(table.skeleton, leaves))[name]


def _own_copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def view_of(buffer: memoryview, start: int, record: TensorRecord) -> Any:
    """A leaf as a view into the buffer, without a copy."""
    raw = buffer[start + record.offset_bytes : start + record.offset_bytes + record.num_bytes]
    if record.kind == "numpy":
        return numpy.frombuffer(raw, dtype=numpy.dtype(record.dtype)).reshape(record.shape).copy()
    dtype = getattr(torch, record.dtype)
    if record.num_bytes == 0:
        return torch.empty(record.shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=dtype).reshape(record.shape)


def num_parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in unwrapped(model).parameters())


def rng_state() -> dict[str, Any]:
    """The random number generators of Python, NumPy, torch and, once it is in use, CUDA."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(legacy=True),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = list(torch.cuda.get_rng_state_all())
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """Set them to what `rng_state` returned."""
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"].clone())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([item.clone() for item in state["cuda"]])


def _load(part: Any, tree: Any, parts: Mapping[str, Any]) -> None:
    """Put a part's tree back, this rank's parts of DTensors in place."""
    if isinstance(part, torch.optim.Optimizer):
        load_optimizer(part, tree, parameter_names(parts))
        return
    inner = unwrapped(part)
    if isinstance(inner, torch.nn.Module):
        live = inner.state_dict()
        tree = {
            key: as_dtensor(value, live[key]) if isinstance(live.get(key), DTensor) else value
            for key, value in tree.items()
        }
    inner.load_state_dict(tree)


def is_array(value: object) -> bool:
    """Is it a block of plain numbers? Sparse and quantized tensors and arrays of objects are not."""
    if isinstance(value, torch.Tensor):
        return value.layout == torch.strided and not value.is_quantized
    return isinstance(value, numpy.ndarray) and cast("Any", value).dtype.kind in "biufcmMSU"


def lay_out(leaves: tuple[Leaf, ...], extents: Sequence[Extent | None]) -> tuple[tuple[TensorRecord, ...], int]:
    records: list[TensorRecord] = []
    offset = 0
    for leaf, extent in zip(leaves, extents, strict=True):
        value = leaf.value
        is_torch = isinstance(value, torch.Tensor)
        num_bytes = value.numel() * value.element_size() if is_torch else value.nbytes
        dtype = str(value.dtype).removeprefix("torch.") if is_torch else value.dtype.str
        kind = "torch" if is_torch else "numpy"
        if num_bytes >= _LARGE_BYTES:
            offset = _aligned(offset, to_bytes=_PAGE_BYTES)
        records.append(TensorRecord(kind, dtype, tuple(value.shape), offset, num_bytes, leaf.path, extent))
        offset = _aligned(offset + num_bytes)
    return tuple(records), offset


def copy_in(buffer: memoryview, start: int, value: Any, record: TensorRecord, *, is_blocking: bool = True) -> None:
    """Copy a leaf to its place behind `start`. Not blocking: only started, on the current stream of its device."""
    if record.num_bytes == 0:
        return
    raw = buffer[start + record.offset_bytes : start + record.offset_bytes + record.num_bytes]
    if record.kind == "numpy":
        raw[:] = numpy.ascontiguousarray(value).tobytes()
        return
    target = torch.frombuffer(raw, dtype=value.dtype).reshape(value.shape)
    target.copy_(value.detach(), non_blocking=not is_blocking)


def aligned_to_page(num_bytes: int) -> int:
    return _aligned(num_bytes, to_bytes=_PAGE_BYTES)


def _aligned(num_bytes: int, *, to_bytes: int = _ALIGN_BYTES) -> int:
    return -(-num_bytes // to_bytes) * to_bytes


assert sys.byteorder == "little", "snapshots are little-endian"
