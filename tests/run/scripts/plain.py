"""A script of someone else: DDP, its own checkpoint with torch.save, no word of Dougong."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--fail-rank", type=int, default=-1)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    if rank == options.fail_rank:
        raise ValueError(f"rank {rank} cannot start")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = 0
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint, weights_only=True)
        model.module.load_state_dict(saved["model"])
        first = saved["step"]
    for step in range(first, options.steps):
        optimizer.zero_grad()
        model(torch.full((2, 4), float(step % 3 + rank))).sum().backward()
        optimizer.step()
        time.sleep(0.03)
        if rank == 0 and step % 5 == 4:
            staging = options.checkpoint.with_suffix(".tmp")
            torch.save({"model": model.module.state_dict(), "step": step + 1}, staging)
            staging.replace(options.checkpoint)
    if rank == 0:
        print(f"argv {sys.argv[1:]} local_rank {local_rank} weight {model.module.weight.sum().item()!r} from {first}")
    dist.destroy_process_group()
