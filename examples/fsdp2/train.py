"""Fully sharded training (FSDP2) of a small byte-level Transformer, on CPU (gloo) or GPU (NCCL).

    torchrun --nproc-per-node 2 examples/fsdp2/train.py --steps 60
    dougong run --nodes 2 -- examples/fsdp2/train.py --steps 60

Each rank holds a part of every parameter, gradient and optimizer state. The lines marked (dougong) let a run be saved
and restored to the exact sample, with as many ranks as before or with others.
"""

import argparse
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

import dougong  # (dougong)


@dataclass
class ModelArgs:
    dim: int = 96
    n_layers: int = 3
    n_heads: int = 4
    vocab_size: int = 256
    max_seq_len: int = 64


class TextDataset(Dataset):
    """Windows of the standard library's own source code. An item is (its number, inputs, labels)."""

    def __init__(self, seq_len: int, max_bytes: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)[:max_bytes]
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.seq_len = seq_len

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        window = self.tokens[index * self.seq_len : (index + 1) * self.seq_len + 1]
        return index, window[:-1], window[1:]


class TransformerBlock(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(args.dim)
        self.attention = nn.MultiheadAttention(args.dim, args.n_heads, batch_first=True)
        self.ffn_norm = nn.RMSNorm(args.dim)
        self.ffn = nn.Sequential(nn.Linear(args.dim, 4 * args.dim), nn.SiLU(), nn.Linear(4 * args.dim, args.dim))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = self.attention_norm(x)
        x = x + self.dropout(self.attention(h, h, h, attn_mask=mask, need_weights=False)[0])
        return x + self.dropout(self.ffn(self.ffn_norm(x)))


class Transformer(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.pos_embeddings = nn.Embedding(args.max_seq_len, args.dim)
        self.layers = nn.ModuleList(TransformerBlock(args) for _ in range(args.n_layers))
        self.norm = nn.RMSNorm(args.dim)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        x = self.tok_embeddings(tokens) + self.pos_embeddings(torch.arange(length, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        for layer in self.layers:
            x = layer(x, mask)
        return self.output(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--global-batch-size", type=int, default=16, help="samples per step, over all ranks")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-bytes", type=int, default=400_000, help="length of the text")
    config = parser.parse_args()

    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device_type, int(os.environ["LOCAL_RANK"])) if device_type == "cuda" else torch.device("cpu")
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    mesh = init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(config.seed)

    args = ModelArgs()
    model = Transformer(args).to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=20)

    dataset = TextDataset(args.max_seq_len, config.max_bytes)
    batches = dougong.GlobalBatches(  # (dougong) in place of DistributedSampler
        num_samples=len(dataset), global_batch_size=config.global_batch_size, seed=config.seed
    )
    loader = DataLoader(dataset, batch_sampler=batches)
    torch.manual_seed(config.seed + 1 + dist.get_rank())  # dropout differs between the ranks

    job = dougong.attach(model=model, optimizer=optimizer, lr_scheduler=scheduler, data=loader)  # (dougong)
    for step in job.steps(until=config.steps):  # (dougong)
        with step as (ids, inputs, labels):  # (dougong)
            logits = model(inputs.to(device))
            loss = F.cross_entropy(logits.flatten(0, 1), labels.to(device).flatten())
            (loss * batches.loss_weight).backward()  # (dougong) right also when the ranks' shares differ by a sample
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step.record(loss=loss, tokens=inputs.numel(), samples=ids.tolist())  # (dougong)
        if dist.get_rank() == 0 and step.number % 10 == 0:
            print(f"step {step.number:4d}  loss {loss.item():.4f}  lr {scheduler.get_last_lr()[0]:.2e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
