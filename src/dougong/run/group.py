# pyright: standard, reportIncompatibleMethodOverride=false, reportPrivateImportUsage=false
# The names of the parameters differ from torch's, which passes them by place; torch exports its stores unmarked.
"""A process group whose inside can be replaced while the model above keeps it.

DDP and others hold on to the group they were built with. When a peer dies, the gloo or NCCL group beneath is of no
use any more, but the object that they hold is this one: it gets a new inner group, and the model goes on without
being rebuilt. Every inner group has a store prefix of its own generation, so that no key of an earlier one is ever
read.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dougong.run.worker import BrokenCollective

BACKEND = "dougong"
_TIMEOUT = timedelta(minutes=30)


class ReplaceableGroup(dist.ProcessGroup):
    """Passes every collective on to an inner group, which `replace` exchanges. World size and rank stay."""

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, timeout: timedelta, *, inner_backend: str
    ) -> None:
        super().__init__(rank, world_size)  # pyright: ignore[reportCallIssue]
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._inner_backend = inner_backend
        self._inner: Any = None
        self.generation = 0
        self.first_entered_ns = 0
        """Monotonic time when a collective was first entered since this was set to 0."""
        self.replace(store, generation=0)

    def replace(self, store: dist.Store, *, generation: int) -> None:
        """Leave the inner group and form a new one with all ranks that call this with the same store and generation."""
        self.abandon()
        prefixed = dist.PrefixStore(f"generation-{generation}", store)
        if self._inner_backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            self._inner = dist.ProcessGroupNCCL(prefixed, self._rank, self._world_size, options)
        else:
            self._inner = dist.ProcessGroupGloo(prefixed, self._rank, self._world_size, self._timeout)
        self.generation = generation

    def abandon(self) -> None:
        """Close the inner group: peers that wait in a collective with this rank get an error instead of waiting."""
        inner, self._inner = self._inner, None
        if inner is not None and hasattr(inner, "abort"):
            inner.abort()

    # the collectives that torch calls on a group; each asks for the inner one anew

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return self._now().allreduce(tensors, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        return self._now().allreduce_coalesced(tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        # DDP sends its buffers at the very begin of a forward pass: that is no end of computing
        return self._now(is_reduction=False).broadcast(tensors, opts)

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        return self._now().reduce(tensors, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._now().allgather(outputs, inputs, opts)

    def _allgather_base(self, output: Any, input: Any, opts: Any = None) -> Any:
        return self._now()._allgather_base(output, input, opts)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._now().allgather_into_tensor_coalesced(outputs, inputs, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._now().gather(outputs, inputs, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._now().scatter(outputs, inputs, opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._now().reduce_scatter(outputs, inputs, opts)

    def _reduce_scatter_base(self, output: Any, input: Any, opts: Any = None) -> Any:
        return self._now()._reduce_scatter_base(output, input, opts)

    def alltoall_base(self, output: Any, input: Any, output_splits: Any, input_splits: Any, opts: Any = None) -> Any:
        return self._now().alltoall_base(output, input, output_splits, input_splits, opts)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._now().alltoall(outputs, inputs, opts)

    def barrier(self, opts: Any = None) -> Any:
        return self._now().barrier(opts)

    def send(self, tensors: Any, destination: int, tag: int = 0) -> Any:
        return self._now().send(tensors, destination, tag)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        return self._now().recv(tensors, source, tag)

    def size(self) -> int:
        return self._world_size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:
        return BACKEND

    def _now(self, *, is_reduction: bool = True) -> Any:
        if is_reduction and not self.first_entered_ns:
            self.first_entered_ns = time.monotonic_ns()
        if self._inner is None:
            raise BrokenCollective("the process group was abandoned and not replaced yet")
        return self._inner


def init_process_group(*, timeout: timedelta = _TIMEOUT) -> None:
    """Like `torch.distributed.init_process_group()`, with a default group that can be replaced under the model.

    gloo on CPU, NCCL on CUDA. Reads what torchrun and `dougong run` set: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
    """
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu", "cuda"])
    dist.init_process_group(BACKEND, timeout=timeout)


def default_group() -> ReplaceableGroup | None:
    """The default group if it is a replaceable one."""
    if not dist.is_initialized():
        return None
    group = dist.distributed_c10d._get_default_group()  # the public API names groups, but does not return the default
    return group if isinstance(group, ReplaceableGroup) else None


def join_store(host: str, port: int) -> dist.TCPStore:
    """The store of a new generation: rank 0 holds it, the others connect."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return dist.TCPStore(host, port, world_size, is_master=rank == 0, timeout=_TIMEOUT, wait_for_workers=False)


def _create(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> ReplaceableGroup:
    inner = "nccl" if torch.cuda.is_available() else "gloo"
    return ReplaceableGroup(store, rank, world_size, timeout, inner_backend=inner)
