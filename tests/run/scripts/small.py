"""A tiny DDP training with attach, quick enough to be interrupted many times in a test.

Options: `--evaluate SECONDS` busy evaluation every 10 steps, `--save-sleep`, `--save-disk` the script's own slow
saves, `--slow-first`.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import dougong


class Numbers(Dataset):
    """Sample i: noisy inputs drawn from the global generators, so that a wrong random state shows in the loss."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int):
        noise = torch.rand(8) + float(numpy.random.rand()) + random.random()
        return index, torch.full((8,), index / 96) + 0.1 * noise


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--step-s", type=float, default=0.03)
    parser.add_argument("--evaluate", type=float, default=0.0)
    parser.add_argument("--save-sleep", type=float, default=0.0)
    parser.add_argument("--save-disk", type=float, default=0.0)
    parser.add_argument("--slow-first", type=float, default=0.0)
    parser.add_argument("--fail-at", type=int, default=0)
    parser.add_argument("--ballast-bytes", type=int, default=0)
    parser.add_argument("--replaceable", action="store_true", help="ranks can stay when a peer is replaced")
    options = parser.parse_args()

    dougong.init_process_group() if options.replaceable else dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3 + rank)
    numpy.random.seed(3 + rank)
    random.seed(3 + rank)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.BatchNorm1d(32), nn.Linear(32, 1))
    )
    if options.ballast_bytes:
        model.module.register_buffer("ballast", torch.zeros(options.ballast_bytes, dtype=torch.uint8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=1000)
    sampler = DistributedSampler(Numbers(), shuffle=True, seed=5)
    loader = DataLoader(Numbers(), batch_size=4, sampler=sampler)

    job = dougong.attach(model=model, optimizer=optimizer, lr_scheduler=schedule, data=loader)
    for step in job.steps(until=options.steps):
        with step as (ids, inputs):
            if step.number == 1 and options.slow_first:
                time.sleep(options.slow_first)
            if step.number == options.fail_at:
                raise ValueError(f"this script always fails at step {step.number}")
            loss = (model(inputs) - inputs.mean(dim=1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            time.sleep(options.step_s)
            step.record(loss=loss, tokens=inputs.numel(), samples=ids.tolist())
        if step.number % 10 == 0:
            torch.rand(3)  # an evaluation that draws random numbers
            if options.evaluate:
                spin(options.evaluate)
        if step.number == options.steps // 2:
            if rank == 0 and options.save_sleep:
                time.sleep(options.save_sleep)
            if rank == 0 and options.save_disk:
                write(options.save_disk)
    if rank == 0:
        print(f"done at {job.num_steps}, RESTARTS {os.environ['TORCHELASTIC_RESTART_COUNT']}")
    dist.destroy_process_group()
    sys.exit(0)


def spin(duration_s: float) -> None:
    end = time.monotonic() + duration_s
    while time.monotonic() < end:
        sum(range(1000))


def write(duration_s: float) -> None:
    end = time.monotonic() + duration_s
    with tempfile.TemporaryFile() as file:
        while time.monotonic() < end:
            file.write(os.urandom(1 << 18))
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            time.sleep(0.02)


if __name__ == "__main__":
    main()
