"""The state of a step, taken in two parts: what may change at any time at once, what only the optimizer changes later.

Parameters and optimizer state are not changed between one optimizer step and the next, so they can be copied while the
next forward and backward pass run, and only the next optimizer step has to wait. All else (buffers, schedulers, random
states, the data position) is small and is copied on the spot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec
import torch

from dougong.run.optimizer_state import is_zero, local_part
from dougong.run.sharding import Sharding
from dougong.run.snapshot import GivenUp, SnapshotFiles
from dougong.run.state import SnapshotTable, TensorRecord, copy_in, is_array, lay_out, payload_start, write_head
from dougong.run.tree import Leaf, dismantle

_UNKNOWN_VERSION = -1


class Capture:
    """A snapshot to be written. `fenced`: storages (addresses) that only the optimizer's step changes.

    Of a DTensor this rank's part is taken. Without `sharding` every leaf belongs to this rank alone.
    """

    def __init__(self, tree: Mapping[str, Any], *, fenced: frozenset[int], sharding: Sharding | None = None) -> None:
        skeleton, leaves = dismantle(tree, is_leaf=is_array)
        extents = (None,) * len(leaves) if sharding is None else sharding.extents(leaves)
        leaves = tuple(msgspec.structs.replace(leaf, value=local_part(leaf.value)) for leaf in leaves)
        records, num_payload = lay_out(leaves, extents)
        self.head = msgspec.msgpack.encode(SnapshotTable(skeleton, records))
        self._start = payload_start(len(self.head))
        self.num_bytes = self._start + num_payload
        self._now: list[tuple[Any, TensorRecord]] = []
        self._later: list[tuple[torch.Tensor, TensorRecord, int]] = []
        self._event: Any = None
        for leaf, record in zip(leaves, records, strict=True):
            if _is_fenced(leaf, fenced):
                self._later.append((leaf.value, record, _version(leaf.value)))
            else:
                self._now.append((_copied(leaf.value), record))
        if any(value.is_cuda for value, _, _ in self._later):
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def is_overlapped(self) -> bool:
        """Is there anything that is copied later?"""
        return bool(self._later)

    def write(self, buffer: memoryview, *, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Copy everything into a buffer of `num_bytes`. Raises GivenUp once it is not wanted any more."""
        write_head(buffer, self.head)
        for value, record in self._now:
            copy_in(buffer, self._start, value, record)
        if self._event is not None:
            self._write_from_device(buffer)
            return
        for value, record, _ in self._later:
            if not is_wanted():
                raise GivenUp
            copy_in(buffer, self._start, value, record)

    def changed_meanwhile(self) -> str:
        """The path of a tensor that was changed while it was copied, or "". Sees every change that autograd sees."""
        for value, record, version in self._later:
            if _version(value) != version:
                return ".".join(map(str, record.path))
        return ""

    def _write_from_device(self, buffer: memoryview) -> None:
        """On a stream of its own, so that only memory bandwidth is shared with training."""
        _pin(buffer)
        stream = _side_stream(self._later[0][0].device)
        stream.wait_event(self._event)
        with torch.cuda.stream(stream):
            for value, record, _ in self._later:
                copy_in(buffer, self._start, value, record, is_blocking=False)
        stream.synchronize()


def fenced_storages(parts: Mapping[str, Any]) -> frozenset[int]:
    """The storages that only a torch optimizer's step changes: its parameters and their state."""
    found: set[int] = set()
    for part in parts.values():
        if not isinstance(part, torch.optim.Optimizer):
            continue
        for group in part.param_groups:
            found.update(storage_address(parameter) for parameter in group["params"])
        owner: Any = part.optim if is_zero(part) else part
        for state in cast("dict[Any, dict[str, Any]]", owner.state).values():
            found.update(storage_address(value) for value in state.values() if isinstance(value, torch.Tensor))
    return frozenset(found - {0})


def write_snapshot(
    files: SnapshotFiles,
    tree: Mapping[str, Any],
    *,
    step: int,
    generation: int,
    world_size: int,
    sharding: Sharding | None = None,
) -> tuple[int, int]:
    """Copy a state and publish it in one go; (the buffer's index, its bytes). Raises OSError if there is no memory."""
    capture = Capture(tree, fenced=frozenset(), sharding=sharding)
    files.reserve(capture.num_bytes)
    index = files.next_index()
    files.reserve(capture.num_bytes, only=index)
    files.void(index)
    capture.write(files.buffer(index))
    files.publish(index, step=step, generation=generation, world_size=world_size, num_bytes=capture.num_bytes)
    return index, capture.num_bytes


def _is_fenced(leaf: Leaf, fenced: frozenset[int]) -> bool:
    return (
        isinstance(leaf.value, torch.Tensor)
        and leaf.path[0] in ("model", "optimizer")
        and storage_address(leaf.value) in fenced
    )


def storage_address(tensor: torch.Tensor) -> int:
    """Of its storage; a view of a parameter is as fenced as the parameter. 0 for one without (empty, meta)."""
    whole: Any = tensor
    local: Any = whole.to_local() if hasattr(whole, "to_local") else whole
    return 0 if local.is_meta else int(local.untyped_storage().data_ptr())


def _version(tensor: torch.Tensor) -> int:
    """How often it was changed in place. An inference tensor does not count."""
    return _UNKNOWN_VERSION if tensor.is_inference() else tensor._version


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return value.copy()


_streams: dict[int, Any] = {}
_pinned: dict[int, memoryview] = {}
"""Buffers that the device knows by address. They stay mapped as long as the process lives: it would write elsewhere."""


def _pin(buffer: memoryview) -> None:
    """Have the device write into shared memory directly."""
    address = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
    if address not in _pinned:
        cuda = cast("Any", torch.cuda).cudart()
        cuda.cudaHostRegister(address, len(buffer), 0)
        _pinned[address] = buffer


def _side_stream(device: torch.device) -> Any:
    index = device.index or 0
    if index not in _streams:
        _streams[index] = torch.cuda.Stream(device=device, priority=0)
    return _streams[index]
