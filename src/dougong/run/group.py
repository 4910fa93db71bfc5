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
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dougong.run.alone import Alone
from dougong.run.place import rank_and_world_size, worker_place
from dougong.run.worker import BrokenCollective

BACKEND = "dougong"
_TIMEOUT = timedelta(minutes=30)
_CONNECT_S = 5.0
_LOOK_S = 0.005


class ReplaceableGroup(dist.ProcessGroup):
    """Passes every collective on to an inner group, which `replace` exchanges. World size and rank stay."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout: timedelta,
        *,
        inner_backend: str,
        is_newcomer: bool = False,
    ) -> None:
        super().__init__(rank, world_size)  # pyright: ignore[reportCallIssue]
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._inner_backend = inner_backend
        self._inner: Any = None
        self._sockets: frozenset[int] = frozenset()
        self._lock = threading.Lock()
        self.store = store
        self.generation = 0
        self.first_entered_ns = 0
        """Monotonic time when a collective was first entered since this was set to 0."""
        if is_newcomer:
            self._inner = Alone(world_size)
        else:
            self.replace(store, generation=0)

    @property
    def carries_cpu(self) -> bool:
        """Can tensors in the memory of the CPU be sent over it?"""
        return self._inner_backend != "nccl"

    @property
    def is_alone(self) -> bool:
        """Is this rank still building what its peers have built long ago?"""
        return isinstance(self._inner, Alone)

    def replace(self, store: dist.Store, *, generation: int) -> None:
        """Leave the inner group and form a new one with all ranks that call this with the same store and generation."""
        self.abandon()
        self.store = store
        before = _sockets()
        prefixed = dist.PrefixStore(f"generation-{generation}", store)
        if self._inner_backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            self._inner = dist.ProcessGroupNCCL(prefixed, self._rank, self._world_size, options)
        else:
            self._inner = dist.ProcessGroupGloo(prefixed, self._rank, self._world_size, self._timeout)
        self._sockets = _sockets() - before
        self.generation = generation

    def abandon(self) -> None:
        """Close the inner group: peers that wait in a collective with this rank get an error instead of waiting."""
        with self._lock:
            inner, self._inner = self._inner, None
            self._sockets = frozenset()  # the numbers will be given to other files
        if inner is not None and hasattr(inner, "abort"):
            inner.abort()

    def cut(self) -> bool:
        """From another thread: have a collective that waits for a lost peer end with an error. False = there is no
        inner group with peers to leave now.

        gloo has no way to end a collective from outside, so its connections are shut down; NCCL's is aborted.
        """
        with self._lock:
            inner = self._inner
            if inner is None or isinstance(inner, Alone):
                return False
            if self._inner_backend == "nccl" and hasattr(inner, "abort"):
                inner.abort()
            for fd in self._sockets:
                _shut_down(fd)
            return True

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
    rank, world_size = rank_and_world_size()
    store = join_store(os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "0")))
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world_size, timeout=timeout)
    group = default_group()
    assert group is not None
    group.store = store  # torch gave it one with a prefix of its own, which those that stay do not know


def default_group() -> ReplaceableGroup | None:
    """The default group if it is a replaceable one."""
    if not dist.is_initialized():
        return None
    group = dist.distributed_c10d._get_default_group()  # the public API names groups, but does not return the default
    return group if isinstance(group, ReplaceableGroup) else None


def join_store(host: str, port: int) -> dist.TCPStore:
    """The store of a new generation: rank 0 holds it, the others connect."""
    rank, world_size = rank_and_world_size()
    if rank != 0:
        _wait_until_listening(host, port)
    return dist.TCPStore(host, port, world_size, is_master=rank == 0, timeout=_TIMEOUT, wait_for_workers=False)


def _wait_until_listening(host: str, port: int) -> None:
    """Look every few milliseconds: a store's client that came too early waits half a second before it tries again."""
    deadline_s = time.monotonic() + _TIMEOUT.total_seconds()
    while time.monotonic() < deadline_s:
        try:
            socket.create_connection((host, port), timeout=_CONNECT_S).close()
            return
        except OSError:
            time.sleep(_LOOK_S)


def _create(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> ReplaceableGroup:
    inner = "nccl" if torch.cuda.is_available() else "gloo"
    place = worker_place()
    is_newcomer = place is not None and place.is_newcomer
    return ReplaceableGroup(store, rank, world_size, timeout, inner_backend=inner, is_newcomer=is_newcomer)


def can_stay() -> bool:
    """Is the default group the only one, and replaceable? Other groups would have to be formed anew by the script."""
    return default_group() is not None and len(dist.distributed_c10d._world.pg_map) == 1


_kept: list[Any] = []


def keep_until_exit() -> None:
    """Let no group that is there now be taken apart before this process ends.

    When the last user of a gloo group goes (the model, after `main()`), its destructor waits for gloo's thread while it
    holds the interpreter. If that thread is just dropping a tensor, it waits for the interpreter: the script hangs at
    its last line for ever.
    """
    if dist.is_initialized():
        _kept.extend(group for group in dist.distributed_c10d._world.pg_map if group not in _kept)


def _sockets() -> frozenset[int]:
    """The file descriptors of this process that are sockets."""
    found: set[int] = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.add(int(name))
        except OSError:  # the one of the listing itself
            continue
    return frozenset(found)


def _shut_down(fd: int) -> None:
    """End a connection so that both sides notice. A listening socket is left alone: gloo dies of that."""
    try:
        with socket.socket(fileno=os.dup(fd)) as connection:
            if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
