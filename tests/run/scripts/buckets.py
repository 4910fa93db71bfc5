"""DDP over three ranks with several buckets: in which order gradients are added up shows in the last bits of the loss.

`buckets.py STEPS [--replaceable]`
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dougong


class Endless:
    """Batches of random numbers, from a generator whose state is saved."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.randn(8, 32, generator=self.generator)


if __name__ == "__main__":
    dougong.init_process_group() if "--replaceable" in sys.argv else dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = (nn.Linear(32, 700), nn.Tanh(), nn.Linear(700, 700), nn.Tanh(), nn.Linear(700, 1))
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job = dougong.attach(model=model, optimizer=optimizer, data=Endless(dist.get_rank()))
    for step in job.steps(until=int(sys.argv[1])):
        with step as batch:
            optimizer.zero_grad()
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            step.record(loss=loss, tokens=8)
    dist.destroy_process_group()
