# pyright: standard
"""A fingerprint of the tensors that are the same on all data-parallel ranks: parameters and optimizer state.

Every tensor is summed as 64-bit integers, with overflow: a flipped bit changes the sum by a power of two and cannot be
lost. The sums make one digest. Summing runs at the speed of memory, on the CPU and on an accelerator alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import xxhash
from torch.nn.parallel import DistributedDataParallel

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensors: Iterable[torch.Tensor]) -> str:
    """16 hex digits. Law: one flipped bit in one tensor changes them."""
    sums = [bit_sum(tensor) for tensor in tensors]
    if not sums:
        return xxhash.xxh3_64_hexdigest(b"")
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for total in sums:
        by_device.setdefault(total.device, []).append(total)
    digest = xxhash.xxh3_64()
    for parts in by_device.values():
        digest.update(torch.stack(parts).cpu().numpy().tobytes())  # one copy from each device
    return digest.hexdigest()


def bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the bits as integers, eight bytes at a time where they lie so; on the tensor's own device."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    if flat.numel() * flat.element_size() % 8 == 0:
        # the sum must not depend on where a rank's copy happens to lie
        is_aligned = flat.storage_offset() * flat.element_size() % 8 == 0 and flat.data_ptr() % 8 == 0
        return (flat if is_aligned else flat.clone()).view(torch.int64).sum()
    return flat.view(_INTEGER[flat.element_size()]).sum(dtype=torch.int64)


def replicated(parts: Mapping[str, Any], *, world_size: int) -> Iterator[torch.Tensor]:
    """The tensors of a job that must be equal on all ranks just after an optimizer step.

    Known for DDP: parameters, and the state of an optimizer that every rank keeps whole. Buffers are left out: some,
    such as the running means of a batch norm, rightly differ between ranks.
    """
    model = parts.get("model")
    if world_size < 2 or not isinstance(model, DistributedDataParallel):
        return
    yield from model.module.parameters()
    optimizer = parts.get("optimizer")
    # ZeroRedundancyOptimizer has each rank keep a part of its own
    if isinstance(optimizer, torch.optim.Optimizer) and not hasattr(optimizer, "consolidate_state_dict"):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                yield from (state[name] for name in sorted(state) if isinstance(state[name], torch.Tensor))


def flip_bit(parts: Mapping[str, Any]) -> None:
    """Flip a bit of the largest parameter, as a faulty memory would. A low one: the loss shows nothing at once."""
    model = parts["model"]
    parameter = max(model.parameters(), key=lambda parameter: parameter.numel())
    raw = parameter.data.view(-1)[:1].view(torch.uint8)  # torch's count of changes sees nothing of it
    raw[0] ^= 1 << 4
