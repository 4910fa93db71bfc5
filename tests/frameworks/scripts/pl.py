# pyright: reportMissingImports=false
"""A Lightning module whose every number can show a wrong restart: dropout, random data, accumulation, means, metrics.

It writes every logged value and a sum over its last parameters as JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import warnings
from pathlib import Path

import torch
import torchmetrics
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import dougong
from dougong.lightning import DougongCallback


class Numbers(Dataset):
    """Sample i: a few numbers, with noise drawn anew each time."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((6,), index / 80) + 0.1 * torch.rand(6) + 0.1 * random.random()


class Stream(IterableDataset):
    def __init__(self, length: int) -> None:
        self._numbers = Numbers(length)

    def __iter__(self):
        for index in range(len(self._numbers)):
            yield self._numbers[index]


class Net(LightningModule):
    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.BatchNorm1d(16), nn.Linear(16, 1))
        self.mean = torchmetrics.MeanMetric()
        self.extra = 0

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        time.sleep(self.hparams.step_s)
        loss = (self.layers(batch) - batch.mean(dim=1, keepdim=True)).square().mean()
        self.mean.update(loss)
        self.extra += 1
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean", self.mean.compute(), sync_dist=True)
        self.log("extra", float(self.extra), sync_dist=True)
        self.mean.reset()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.layers(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint) -> None:
        checkpoint["extra"] = self.extra

    def on_load_checkpoint(self, checkpoint) -> None:
        self.extra = checkpoint["extra"]


class Kept(Logger):
    """Keeps what is logged in a file, a line each."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    name = "kept"
    version = 0

    def log_hyperparams(self, *args, **kwargs) -> None:
        """Not of interest."""

    @rank_zero_only
    def log_metrics(self, metrics, step=None) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"at": step, **metrics}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--steps", type=int, default=-1)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--step-s", type=float, default=0.02)
    options = parser.parse_args()

    warnings.filterwarnings("ignore")
    seed_everything(5)
    log = options.result.with_suffix(".jsonl")
    data = Stream(38) if options.stream else Numbers(76)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=options.nodes,
        strategy="ddp" if options.nodes > 1 else "auto",
        max_epochs=3,
        max_steps=options.steps,
        accumulate_grad_batches=options.accumulate,
        val_check_interval=5,
        log_every_n_steps=1,
        logger=[Kept(log), TensorBoardLogger(dougong.log_directory(), name="", version="")],
        callbacks=[EarlyStopping("val_loss", patience=30), DougongCallback()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Net(options.step_s)
    trainer.fit(
        model,
        DataLoader(data, batch_size=2, shuffle=None if options.stream else True, num_workers=options.workers),
        DataLoader(Numbers(8), batch_size=2),
    )
    if trainer.is_global_zero:
        total = sum(parameter.double().sum().item() for parameter in model.parameters())
        last = {}
        for entry in map(json.loads, log.read_text().splitlines()):
            last[f"{entry['at']} {sorted(entry)}"] = entry
        options.result.write_text(json.dumps({"log": sorted(last.items()), "total": total}, indent=1))


if __name__ == "__main__":
    main()
