# pyright: reportMissingImports=false
"""Train a small GPT-2 from scratch with the Trainer of Hugging Face, on any text file; two lines are Dougong's.

dougong run --nodes 2 --procs-per-node 1 -- examples/hf_trainer/train.py --steps 60
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from dougong.hf import DougongCallback


class Windows(Dataset):
    """Windows of `length` bytes of a text; each byte is a token."""

    def __init__(self, text: bytes, length: int) -> None:
        self._tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self._length = length

    def __len__(self) -> int:
        return len(self._tokens) // self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self._tokens[index * self._length : (index + 1) * self._length]
        return {"input_ids": window, "labels": window}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", default="output")
    options = parser.parse_args()

    set_seed(1)
    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir=options.output,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            warmup_steps=10,
            max_steps=options.steps,
            logging_steps=5,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=Windows(options.text.read_bytes(), 64),
    )
    trainer.add_callback(DougongCallback(trainer))
    trainer.train()


if __name__ == "__main__":
    main()
