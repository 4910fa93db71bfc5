"""Training over a replaceable group. At step 8, once, rank 1 loses its connections."""

from __future__ import annotations

import json
import os
import socket
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dougong


def cut_connections() -> None:
    """Shut every TCP connection of this process down, as a broken link would."""
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.getpeername()
                    connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # not a socket, or not a connected one
            continue


if __name__ == "__main__":
    is_disturbed = sys.argv[1] == "disturbed"
    dougong.init_process_group()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.1), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    numbers = TensorDataset(torch.arange(40 * 8).float().reshape(40, 8) / 320)
    loader = DataLoader(numbers, batch_size=2, sampler=DistributedSampler(numbers, seed=1))
    losses: dict[int, float] = {}
    num_unwound = 0
    job = dougong.attach(model=model, optimizer=optimizer, data=loader)
    for step in job.steps(until=14):
        with step as (inputs,):
            if is_disturbed and step.number == 8 and dist.get_rank() == 1 and num_unwound == 0:
                num_unwound += 1
                cut_connections()
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[step.number] = loss.item()
            step.record(loss=loss, tokens=1)
    print(json.dumps(losses))
    dist.destroy_process_group()
