"""A script of someone else, written to DLRover's Checkpointer and NVRx's heartbeats; only the imports are changed."""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dougong.compat.dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType
from dougong.compat.nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--directory", required=True)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(2)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = RankMonitorClient()
    monitor.init_workload_monitoring()
    checkpointer = DdpCheckpointer(options.directory)
    saved = checkpointer.load_checkpoint()
    first = 0
    if saved:
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        monitor.load_state_dict(saved["monitor"])
        first = saved["step"]
    for step in range(first + 1, options.steps + 1):
        monitor.send_heartbeat()
        optimizer.zero_grad()
        model(torch.full((2, 4), float(step % 3 + rank))).sum().square().backward()
        optimizer.step()
        time.sleep(0.03)
        if step % 4 == 0:
            storage = StorageType.DISK if step % 12 == 0 else StorageType.MEMORY
            monitor.calculate_and_set_hb_timeouts(skip_if_not_ready=True)
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            checkpointer.save_checkpoint(step, state | {"monitor": monitor.state_dict()}, storage_type=storage)
    checkpointer.wait_latest_checkpoint(timeout=60)
    monitor.shutdown_workload_monitoring()
    if rank == 0:
        weight = next(model.parameters()).sum().item()
        print(f"weight {weight!r} from {first}, subsequent {monitor.hb_timeouts.were_calculated}")
    dist.destroy_process_group()
