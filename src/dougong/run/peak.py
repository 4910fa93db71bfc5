"""What a rank can compute at best, for accelerators that no datasheet is known of."""

from __future__ import annotations

import time

import torch


def measure_gemm_flop_per_s(*, size: int = 1024, duration_s: float = 0.5) -> tuple[float, str]:
    """The matmul rate of this rank, and how it was measured: the honest peak of a machine without a datasheet figure.

    Square products of `size`, 2·size³ FLOP each; the best of several, since a peak is a ceiling. On CUDA bfloat16.
    """
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rng = torch.get_rng_state()
    left, right = (torch.rand(size, size, device=device, dtype=dtype) for _ in range(2))
    torch.set_rng_state(rng)
    best_s = float("inf")
    end_ns = time.monotonic_ns() + round(duration_s * 1e9)
    while time.monotonic_ns() < end_ns:
        began_ns = time.monotonic_ns()
        torch.matmul(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best_s = min(best_s, (time.monotonic_ns() - began_ns) / 1e9)
    return 2.0 * size**3 / best_s, f"measured GEMM {size}x{size}, {str(dtype).removeprefix('torch.')}, {device.type}"
