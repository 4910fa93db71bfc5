"""A small GPT on the source code of Python's own standard library, byte by byte: PyTorch, DDP, gloo or NCCL.

It runs under torchrun unchanged. The lines marked (dougong) let a run be saved and restored to the exact sample:

    torchrun --nproc-per-node 2 examples/gpt/train.py --steps 50
    dougong run --nodes 2 -- examples/gpt/train.py --steps 50
"""

from __future__ import annotations

import argparse
import math
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import dougong

VOCABULARY = 256  # bytes


class Block(nn.Module):
    """Attention, then a feed-forward network, each on a normalised copy of the stream."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Token and position embedding, blocks, and the output matrix shared with the token embedding."""

    def __init__(self, *, num_layers: int, width: int, num_heads: int, length: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.apply(self._initialise)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.token.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def flop_per_token(self, length: int) -> float:
        """Model FLOP per token, forward and backward: 6 per weight of a matrix product, and causal attention.

        Attention: 12 · layers · width · length, halved because a causal mask leaves half of the scores (PaLM,
        appendix B).
        """
        weights = sum(p.numel() for name, p in self.named_parameters() if p.dim() == 2 and "position" not in name)
        return 6.0 * weights + 6.0 * len(self.blocks) * self.token.embedding_dim * length


class Windows:
    """Windows of the text in a random order, drawn anew each epoch; each rank reads its own.

    Speaks the StatefulDataLoader protocol. A batch is (sample ids, tokens, targets).
    """

    def __init__(self, text: torch.Tensor, *, length: int, batch_size: int, seed: int) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.text, self.length, self.batch_size, self.seed = text, length, batch_size, seed
        self.num_windows = (len(text) - 1) // length
        self.epoch = 0
        self.batch = 0

    @property
    def num_batches(self) -> int:
        return self.num_windows // (self.batch_size * self.world_size)

    def ids(self, epoch: int, batch: int, rank: int) -> list[int]:
        """The sample ids of a rank's batch: a function of the seed and the position alone."""
        order = torch.randperm(self.num_windows, generator=torch.Generator().manual_seed(self.seed + epoch))
        first = (batch * self.world_size + rank) * self.batch_size
        return order[first : first + self.batch_size].tolist()

    def __iter__(self) -> Iterator[tuple[list[int], torch.Tensor, torch.Tensor]]:
        while self.batch < self.num_batches:
            ids = self.ids(self.epoch, self.batch, self.rank)
            self.batch += 1
            windows = torch.stack([self.text[i * self.length : (i + 1) * self.length + 1] for i in ids]).long()
            yield ids, windows[:, :-1], windows[:, 1:]
        self.epoch, self.batch = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.batch = state["epoch"], state["batch"]


class RecentLoss:
    """Mean loss of the last steps; saved and restored with the job, like any object with these two methods."""

    def __init__(self, num_steps: int = 10) -> None:
        self.num_steps = num_steps
        self.losses: list[float] = []

    def add(self, loss: float) -> float:
        self.losses = [*self.losses, loss][-self.num_steps :]
        return sum(self.losses) / len(self.losses)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])


def standard_library(num_bytes: int) -> torch.Tensor:
    """The first bytes of the standard library's own source: real text that every machine with Python has."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    content = b"".join(path.read_bytes() for path in files)[:num_bytes]
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def unigram_entropy_nats(text: torch.Tensor) -> float:
    """What a model that knows only how often each byte occurs would reach."""
    share = torch.bincount(text.int(), minlength=VOCABULARY).double() / len(text)
    return float(-(share[share > 0] * share[share > 0].log()).sum())


def main() -> None:
    options = parse()
    dougong.init_process_group()  # (dougong) instead of dist.init_process_group("nccl" or "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(options.seed)

    text = standard_library(options.num_bytes)
    loader = Windows(text, length=options.length, batch_size=options.batch_size, seed=options.seed)
    gpt = GPT(num_layers=options.layers, width=options.width, num_heads=options.heads, length=options.length).to(device)
    model = DDP(gpt)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_up_and_decay(step, options.steps))

    recent = RecentLoss()

    job = dougong.attach(  # (dougong)
        model=model,
        optimizer=optimizer,
        lr_scheduler=schedule,
        data=loader,
        recent=recent,
        model_flop_per_token=gpt.flop_per_token(options.length),
        hardware_flop_per_token=gpt.flop_per_token(options.length),  # nothing is recomputed
    )
    mean = math.nan
    for step in job.steps(until=options.steps):  # (dougong)
        with step as (ids, tokens, targets):  # (dougong)
            optimizer.zero_grad(set_to_none=True)
            batch_loss = model(tokens.to(device), targets.to(device))
            batch_loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            mean = recent.add(batch_loss.item())
            step.record(loss=batch_loss, tokens=tokens.numel(), samples=ids)  # (dougong)
        if loader.rank == 0 and (step.number % 10 == 0 or step.number == 1):
            print(f"step {step.number:5d}  loss {mean:.4f}", flush=True)
    if loader.rank == 0:
        entropy = unigram_entropy_nats(text)
        print(f"final loss {mean:.3f} nats per byte (mean of 10 steps); unigram entropy of the text {entropy:.3f}")
    dist.destroy_process_group()


def warm_up_and_decay(step: int, num_steps: int) -> float:
    warm_up = max(1, min(20, num_steps // 5))
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - warm_up) / max(1, num_steps - warm_up))))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--batch-size", type=int, default=4, help="samples per rank and step")
    parser.add_argument("--length", type=int, default=128, help="tokens per sample")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num-bytes", type=int, default=4_000_000, help="length of the text")
    return parser.parse_args()


if __name__ == "__main__":
    main()
