# pyright: standard, reportPrivateImportUsage=false
# torch exports its stores unmarked.
"""The pre-flight test of one rank, in a short-lived process forked from the zygote: a product of matrices alone, or an
all-reduce together with the ranks of another node. Its answer is a letter.

The entries are small whole numbers, so every sum is exact whatever order it is added up in: the product is the same,
bit for bit, on every sound machine, and known beforehand.
"""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import xxhash

from dougong.run.letters import Probed, post
from dougong.run.place import PreflightPlace, preflight_place
from dougong.run.preflight import EXPECTED_DIGEST

_SIZE = 512
_CUDA_SIZE = 4096
_GEMM_S = 1.5
_BUFFER_BYTES = 8 * 2**20
_CUDA_BUFFER_BYTES = 256 * 2**20
_NUM_REDUCES = 8


def main() -> int:
    """Do what this process was forked for; the exit code."""
    place = preflight_place()
    assert place is not None
    device = _device(place.local_rank)
    if place.stage == 0:
        rate, is_exact = gemm(device)
        letter = Probed(generation=place.serial, rank=place.rank, flop_per_s=rate, is_exact=is_exact)
    else:
        rate, is_exact = pair(place, device)
        letter = Probed(generation=place.serial, rank=place.rank, bytes_per_s=rate, is_exact=is_exact)
    post(Path(place.box), letter)
    return 0


def gemm(device: torch.device) -> tuple[float, bool]:
    """The rate of this rank in FLOP/s (2·size³ per product), and whether every product was right.

    The best of many short products: a process that shares the machine has bad moments, but a slow one has no good ones.
    """
    left, right = factors(_SIZE, device=device)
    first = multiply(left, right)
    is_exact = digest(first) == EXPECTED_DIGEST
    large = factors(_CUDA_SIZE, device=device, dtype=torch.bfloat16) if device.type == "cuda" else (left, right)
    best_s = float("inf")
    ends_ns = time.monotonic_ns() + round(_GEMM_S * 1e9)
    while time.monotonic_ns() < ends_ns:
        began_ns = time.monotonic_ns()
        product = multiply(*large)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best_s = min(best_s, (time.monotonic_ns() - began_ns) / 1e9)
        again = product if device.type == "cpu" else multiply(left, right)
        is_exact = is_exact and torch.equal(again, first)  # a fault may come and go
    return 2.0 * large[0].shape[0] ** 3 / best_s, is_exact


def factors(
    size: int, *, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two square matrices of whole numbers from -4 to 4. A sum of 512 products stays below 2^24: exact in float32."""
    row = torch.arange(size, dtype=torch.int64).unsqueeze(1)
    column = torch.arange(size, dtype=torch.int64).unsqueeze(0)
    left = (row * 7919 + column * 104729 + row * column) % 9 - 4
    right = (row * 15485863 + column * 31 + row * column * 3) % 9 - 4
    return left.to(device=device, dtype=dtype), right.to(device=device, dtype=dtype)


def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.matmul(left, right)


def digest(product: torch.Tensor) -> str:
    product = product + 0.0  # the sign of a zero may differ
    return xxhash.xxh3_128_hexdigest(cast("Any", product.cpu().contiguous().numpy()).data)


def pair(place: PreflightPlace, device: torch.device) -> tuple[float, bool]:
    """The bytes of the buffer over the time of the best all-reduce of the two nodes, and whether the sums were right.

    Raises RuntimeError if the partner does not come or breaks off.
    """
    timeout = timedelta(seconds=place.timeout_s)
    store = dist.TCPStore(
        place.master_address,
        place.master_port,
        place.world_size,
        is_master=place.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
    )
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout)
    num = (_CUDA_BUFFER_BYTES if device.type == "cuda" else _BUFFER_BYTES) // 4
    mine = (torch.arange(num, device=device) % 1024).to(torch.float32) + float(place.rank)
    ranks_sum = place.world_size * (place.world_size - 1) / 2
    wanted = (torch.arange(num, device=device) % 1024).to(torch.float32) * place.world_size + ranks_sum
    best_s, is_exact = float("inf"), True
    for _ in range(_NUM_REDUCES):
        buffer = mine.clone()
        began_ns = time.monotonic_ns()
        reduce(buffer)
        best_s = min(best_s, (time.monotonic_ns() - began_ns) / 1e9)
        is_exact = is_exact and torch.equal(buffer, wanted)
    dist.barrier()
    dist.destroy_process_group()
    return num * 4 / best_s, is_exact


def reduce(buffer: torch.Tensor) -> None:
    dist.all_reduce(buffer)
    if buffer.device.type == "cuda":
        torch.cuda.synchronize(buffer.device)


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
