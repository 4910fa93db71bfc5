"""A tiny DDP training that can go wrong in itself: `--bad-sample ID` gives a loss that is no number for any batch with
that sample, `--slow-rank R --slow-from STEP` a rank that computes slowly from a step on."""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dougong

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--bad-sample", type=int, default=-1)
    parser.add_argument("--slow-rank", type=int, default=-1)
    parser.add_argument("--slow-from", type=int, default=0)
    options = parser.parse_args()

    dougong.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.1), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    numbers = TensorDataset(torch.arange(400), torch.arange(400 * 8).float().reshape(400, 8) / 3200)
    loader = DataLoader(numbers, batch_size=2, sampler=DistributedSampler(numbers, seed=1))
    job = dougong.attach(model=model, optimizer=optimizer, data=loader)
    for step in job.steps(until=options.steps):
        with step as (ids, inputs):
            is_slow = rank == options.slow_rank and step.number >= options.slow_from
            time.sleep(options.step_s * (4 if is_slow else 1))
            loss = model(inputs).square().mean()
            if options.bad_sample in ids:
                loss = loss * float("nan")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step.record(loss=loss, tokens=ids.numel(), samples=ids.tolist())
    dist.destroy_process_group()
