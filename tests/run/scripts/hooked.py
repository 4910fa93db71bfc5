"""A loop in the style of Megatron: it counts its iterations and consumed samples itself. A few lines are Dougong's."""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dougong


def batches(consumed: int, *, rank: int, world_size: int):
    """Samples from number `consumed` on, as a sampler does that is built from the counter."""
    while True:
        ids = torch.arange(consumed, consumed + 4 * world_size)[rank::world_size]
        consumed += 4 * world_size
        yield ids, torch.sin(ids.float()[:, None] * torch.arange(1, 9))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--train-iters", type=int, default=40)
    parser.add_argument("--tensorboard", action="store_true")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    counters = {"consumed_samples": 0, "losses": []}

    loop = dougong.loop(model=model, optimizer=optimizer, counters=counters)
    iteration = loop.restore()
    writer = dougong.summary_writer(loop) if options.tensorboard and rank == 0 else None
    data = batches(counters["consumed_samples"], rank=rank, world_size=world_size)
    while iteration < options.train_iters:
        loop.begin_step()
        ids, inputs = next(data)
        optimizer.zero_grad()
        loss = (model(inputs) - inputs[:, :1]).square().mean()
        loss.backward()
        optimizer.step()
        iteration += 1
        counters["consumed_samples"] += 4 * world_size
        loop.end_step(loss=loss, tokens=inputs.numel(), samples=ids.tolist())
        if writer is not None:
            writer.add_scalar("loss", loss.item(), iteration)
        torch.rand(2)  # an evaluation that draws
        time.sleep(0.03)
    loop.finish()
    if rank == 0:
        print(f"done at {loop.num_steps}, consumed {counters['consumed_samples']}, resumed at {loop.job.resumed_step}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
