"""The training that both recovery scripts do: the GPT of `examples/gpt` at the size asked for."""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gpt" / "train.py"


class Training:
    """A model under DDP with all that belongs to it. Call it with one batch: one optimizer step, and the loss."""

    def __init__(self, options: argparse.Namespace) -> None:
        gpt = _load(EXAMPLE)
        torch.manual_seed(1)
        self.rank = int(os.environ["RANK"])
        text = gpt.standard_library(400_000)
        self.loader: Any = gpt.Windows(text, length=options.length, batch_size=options.batch_size, seed=1)
        network = gpt.GPT(
            num_layers=options.layers, width=options.width, num_heads=options.heads, length=options.length
        )
        self.model = DDP(network)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 20))

    def __call__(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(tokens, targets)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.item()


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options that both scripts know."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--steps", type=int, default=25)
    result.add_argument("--layers", type=int, default=1)
    result.add_argument("--width", type=int, default=64)
    result.add_argument("--heads", type=int, default=4)
    result.add_argument("--length", type=int, default=64, help="tokens per sample")
    result.add_argument("--batch-size", type=int, default=2, help="samples per rank and step")
    result.add_argument("--marks", type=Path, help="where to note when each step was finished")
    return result


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpt_example", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
