"""A tiny model under DDP whose loss depends on everything that must be restored: weights, optimizer, schedule, position
in the data, and the random numbers of Python, NumPy and PyTorch. One lost or repeated draw shows in every later loss.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from _marks import Marks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import dougong

WIDTH = 16


class Small(nn.Module):
    """Two layers with dropout. `ballast` only gives a checkpoint some size, so that writing it takes a moment."""

    ballast: torch.Tensor

    def __init__(self, *, ballast_bytes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 1))
        self.register_buffer("ballast", torch.arange(ballast_bytes // 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).squeeze(-1)


class Samples:
    """An endless stream of numbered samples, each rank its own; speaks the StatefulDataLoader protocol."""

    def __init__(self, *, rank: int, world_size: int, batch_size: int) -> None:
        self.rank, self.world_size, self.batch_size = rank, world_size, batch_size
        self.batch = 0

    def __iter__(self) -> Iterator[tuple[list[int], torch.Tensor]]:
        while True:
            first = (self.batch * self.world_size + self.rank) * self.batch_size
            ids = list(range(first, first + self.batch_size))
            self.batch += 1
            yield ids, torch.stack([torch.rand(WIDTH, generator=torch.Generator().manual_seed(id_)) for id_ in ids])

    def state_dict(self) -> dict[str, Any]:
        return {"batch": self.batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batch = state["batch"]


def main() -> None:
    options = parse()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(options.seed)
    model = DDP(Small(ballast_bytes=options.ballast_bytes), broadcast_buffers=False)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(options.seed * 1000 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
    samples = Samples(rank=rank, world_size=dist.get_world_size(), batch_size=4)
    marks = Marks(options.marks, rank=rank)

    job = dougong.attach(model=model, optimizer=optimizer, lr_scheduler=schedule, data=samples)
    for step in job.steps(until=options.steps):
        with step as (ids, x):
            noise = random.random() + float(np.random.random())
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.mse_loss(model(x), x.sum(-1) + 0.1 * noise)
            loss.backward()
            optimizer.step()
            schedule.step()
            time.sleep(options.step_s)
            step.record(loss=loss, tokens=len(ids), samples=ids)
        marks.write(step.number)
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-s", type=float, default=0.01, help="pause in each step, in seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ballast-bytes", type=int, default=4 << 20)
    parser.add_argument("--marks", type=Path, help="where to note when each step was finished")
    return parser.parse_args()


if __name__ == "__main__":
    main()
