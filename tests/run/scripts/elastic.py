"""DDP over global batches that its ranks may share unevenly. `elastic.py STEPS [SECONDS in each step]`."""

from __future__ import annotations

import sys
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import dougong

if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.1), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    numbers = TensorDataset(torch.arange(40), torch.arange(40 * 8).float().reshape(40, 8) / 320)
    batches = dougong.GlobalBatches(num_samples=40, global_batch_size=14, seed=1)
    job = dougong.attach(model=model, optimizer=optimizer, data=DataLoader(numbers, batch_sampler=batches))
    for step in job.steps(until=int(sys.argv[1])):
        with step as (ids, inputs):
            time.sleep(float(sys.argv[2]) if len(sys.argv) > 2 else 0.0)
            loss = model(inputs).square().mean() * batches.loss_weight
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.record(loss=loss, tokens=1, samples=ids.tolist())
    torch.distributed.destroy_process_group()
