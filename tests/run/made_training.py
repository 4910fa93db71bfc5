"""A small network with all that training keeps in it, and snapshots of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dougong.run.capture import write_snapshot
from dougong.run.sharding import Sharding
from dougong.run.snapshot import SnapshotFiles
from dougong.run.state import Progress, gather


def parts(*, seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(), torch.nn.Linear(8, 2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    return {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler}


def train(parts: dict[str, Any], *, num_steps: int) -> list[float]:
    """The losses of so many steps; data and dropout come from the global generator."""
    losses: list[float] = []
    for _ in range(num_steps):
        parts["optimizer"].zero_grad()
        loss = parts["model"](torch.randn(5, 4)).square().mean()
        loss.backward()
        parts["optimizer"].step()
        parts["lr_scheduler"].step()
        losses.append(loss.item())
    return losses


def snapshot(
    parts: dict[str, Any], prefix: Path, *, step: int = 3, data: Any = None, rank: int = 0, world_size: int = 2
) -> tuple[SnapshotFiles, memoryview]:
    """A memory checkpoint of `parts` as a rank of a replicated job makes it: its files, and the bytes written."""
    files = SnapshotFiles(prefix)
    tree = gather(parts, data=data, progress=Progress(step=step, num_tokens=40 * step))
    sharding = Sharding(parts, rank=rank, world_size=world_size, replicated_over=range(world_size))
    index, num_bytes = write_snapshot(files, tree, step=step, generation=1, world_size=world_size, sharding=sharding)
    return files, files.buffer(index)[:num_bytes]
