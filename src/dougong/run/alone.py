# pyright: standard, reportAttributeAccessIssue=false
# torch does not declare the maker of finished work.
"""The inside of a group whose peers are not there yet: every collective ends at once, as if all ranks held the same.

A rank that replaces a lost one builds its model while its peers wait at a later line. What a constructor does (DDP
compares shapes and sends rank 0's state) is done alone; the state comes from a checkpoint afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import _create_work_from_future


class Alone:
    """Answers as a group of `world_size` ranks with equal contributions would."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return _done(tensors)

    allreduce_coalesced = allreduce
    reduce = allreduce
    broadcast = allreduce

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            for item in output:
                item.copy_(tensor)
        return _done(inputs)

    def _allgather_base(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        output.view(self._world_size, -1).copy_(tensor.reshape(1, -1).expand(self._world_size, -1))
        return _done([output])

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._allgather_base(output, tensor)
        return _done(outputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self.allgather(outputs, inputs) if outputs else _done(inputs)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, tensors in zip(outputs, inputs, strict=False):
            output.copy_(tensors[0])
        return _done(outputs)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self.scatter(outputs, inputs)

    def _reduce_scatter_base(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        output.copy_(tensor.view(self._world_size, -1)[0].view_as(output))
        return _done([output])

    def alltoall_base(self, output: Any, tensor: Any, output_splits: Any, input_splits: Any, opts: Any = None) -> Any:
        if output.numel() == tensor.numel():
            output.copy_(tensor.view_as(output))
        return _done([output])

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            if output.numel() == tensor.numel():
                output.copy_(tensor.view_as(output))
        return _done(outputs)

    def barrier(self, opts: Any = None) -> Any:
        return _done([torch.zeros(1)])

    def send(self, tensors: Any, destination: int, tag: int = 0) -> Any:
        return _done(tensors)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        return _done(tensors)


def _done(tensors: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(list(tensors))
    return _create_work_from_future(future)
