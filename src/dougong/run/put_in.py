"""Puts a snapshot back into the tensors that are there, or lets the tensors live in the snapshot's own memory.

A copy into memory that is mapped already runs at the speed of memory. A new process has no such memory yet, and fresh
pages cost several times the copy; so there the tensors are made views of the buffer, which is then this process's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from dougong.run.capture import fenced_storages, storage_address
from dougong.run.optimizer_state import is_zero, local_part
from dougong.run.state import is_array, part_trees, read_table, view_of
from dougong.run.tree import assemble, dismantle

_VALUE_DEPTH = 4
"""Of `optimizer.state.<parameter>.<value>` in the state tree."""
_PIECE_VALUES = 2**18
"""So many values are copied at a time: who reads them just before has them in the cache."""


def tree_in_place(
    buffer: memoryview,
    parts: Mapping[str, Any],
    *,
    is_adopted: bool,
    before_read: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """The state tree of a snapshot, in which what training changes in place is already where it belongs.

    `before_read` is told up to which byte of the buffer is read next, in rising order but for views.

    Leaves that have a live counterpart of the same kind are copied into it, or made its memory, and stand in the tree
    as the live tensor, so that loading the tree finds nothing left to copy. The others are copies.
    """
    table, start = read_table(buffer)
    live, sharded = _live_tensors(parts)
    fenced = fenced_storages(parts)
    leaves: list[Any] = []
    for record in table.records:
        saved = view_of(buffer, start, record)
        target = live.get(record.path)
        if isinstance(saved, torch.Tensor) and target is not None and _is_same_kind(saved, target):
            # the memory inside a DTensor cannot be exchanged from outside
            is_own = is_adopted and record.path not in sharded and storage_address(target) in fenced
            is_own = is_own and target.device.type == "cpu"
            if not is_own or not _live_in(target, saved):
                _copy_into(target, saved, begin=start + record.offset_bytes, before_read=before_read)
            leaves.append(target)
        elif is_adopted and record.kind == "torch" and _can_move_out(record.path, parts):
            leaves.append(saved)
        else:
            leaves.append(saved.clone() if isinstance(saved, torch.Tensor) else saved)
    return cast("dict[str, Any]", assemble(table.skeleton, leaves))


def move_out(parts: Mapping[str, Any], buffer: memoryview) -> None:
    """Give every tensor that lives in `buffer` memory of its own."""
    whole = torch.frombuffer(buffer, dtype=torch.uint8)
    first = whole.data_ptr()
    last = first + whole.numel()
    for tensor in _all_tensors(parts):
        if tensor.device.type == "cpu" and first <= tensor.data_ptr() < last:
            tensor.data = tensor.data.clone()


def _can_move_out(path: tuple[str | int, ...], parts: Mapping[str, Any]) -> bool:
    """Is it a value of the optimizer's state that `move_out` would find again? Not that of ZeRO-1, which lies in an
    inner optimizer, nor the inside of a DTensor or of a list."""
    optimizer = parts.get("optimizer")
    return (
        path[:2] == ("optimizer", "state")
        and len(path) == _VALUE_DEPTH
        and isinstance(optimizer, torch.optim.Optimizer)
        and not is_zero(optimizer)
        and not any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
    )


def _live_tensors(
    parts: Mapping[str, Any],
) -> tuple[dict[tuple[str | int, ...], torch.Tensor], frozenset[tuple[str | int, ...]]]:
    """What this rank holds of the model and the optimizer's state by path, and which of it lies in DTensors.

    Parameters are given as such, so that a copy onto themselves is seen to be none.
    """
    trees = part_trees({name: part for name, part in parts.items() if name in ("model", "optimizer")})
    leaves = dismantle(trees, is_leaf=is_array)[1]
    model: Any = parts.get("model")
    parameters: dict[tuple[int, torch.Size], torch.Tensor] = {}
    if isinstance(model, torch.nn.Module):
        parameters = {_key(parameter): parameter for parameter in model.parameters()}
    live: dict[tuple[str | int, ...], torch.Tensor] = {}
    sharded: set[tuple[str | int, ...]] = set()
    for leaf in leaves:
        if not isinstance(leaf.value, torch.Tensor) or leaf.path[:2] == ("optimizer", "param_groups"):
            continue
        local = local_part(leaf.value)
        if local is not leaf.value:
            sharded.add(leaf.path)
        key = _key(local)
        parameter = parameters.get(key)
        live[leaf.path] = local if parameter is None else parameter
    return live, frozenset(sharded)


def _live_in(target: torch.Tensor, saved: torch.Tensor) -> bool:
    """Make the saved tensor's memory the target's, if nothing else is in what it has now."""
    if not target.is_contiguous() or target.untyped_storage().nbytes() != saved.nbytes:
        return False
    target.data = saved
    return True


def _copy_into(target: torch.Tensor, saved: torch.Tensor, *, begin: int, before_read: Callable[[int], None]) -> None:
    """`begin`: where the saved tensor lies in the buffer."""
    with torch.no_grad():
        if target.device.type != "cpu" or not target.is_contiguous():
            target.copy_(saved)
            return
        into, values = target.view(-1), saved.view(-1)
        for offset in range(0, values.numel(), _PIECE_VALUES):
            piece = values[offset : offset + _PIECE_VALUES]
            before_read(begin + (offset + piece.numel()) * piece.element_size())
            into[offset : offset + _PIECE_VALUES].copy_(piece)


def _is_same_kind(saved: torch.Tensor, target: torch.Tensor) -> bool:
    return type(target) in (torch.Tensor, torch.nn.Parameter) and (
        saved.dtype == target.dtype and saved.shape == target.shape and not target.is_meta
    )


def _key(tensor: torch.Tensor) -> tuple[int, torch.Size]:
    return (
        (tensor.data_ptr(), tensor.shape) if type(tensor) in (torch.Tensor, torch.nn.Parameter) else (0, tensor.shape)
    )


def _all_tensors(parts: Mapping[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    model, optimizer = cast("Any", parts.get("model")), parts.get("optimizer")
    if isinstance(model, torch.nn.Module):
        found.extend(model.parameters())
    if isinstance(optimizer, torch.optim.Optimizer):
        states = cast("dict[Any, dict[str, Any]]", optimizer.state).values()
        found.extend(value for state in states for value in state.values() if isinstance(value, torch.Tensor))
    return found
