# pyright: reportMissingImports=false
"""A Trainer whose every number can show a wrong restart: dropout, a collator that draws, odd accumulation, evaluation.

It writes its whole log, and a sum over its last parameters, as JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

CLOCKS = ("runtime", "per_second")


class Numbers(Dataset):
    """Sample i: a row of small numbers, one of which is drawn anew each time."""

    def __init__(self, length: int, *, is_random: bool) -> None:
        self._length = length
        self._is_random = is_random

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = (torch.arange(8) * (index + 1)) % 29
        if self._is_random:
            row[3] = random.randrange(29)
        return {"input_ids": row, "labels": row}


class Stream(IterableDataset):
    """The same without a length."""

    def __init__(self, length: int) -> None:
        self._numbers = Numbers(length, is_random=True)

    def __iter__(self):
        for index in range(len(self._numbers)):
            yield self._numbers[index]


class Slow(TrainerCallback):
    """So that a fault finds the run before its end."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    def on_step_end(self, args, state, control, **kwargs) -> None:
        time.sleep(self._step_s)


def mask(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A collator that draws, like those for masked language models."""
    inputs = torch.stack([row["input_ids"] for row in rows])
    labels = inputs.clone()
    inputs[torch.rand(inputs.shape) < 0.1] = 0
    return {"input_ids": inputs, "labels": labels}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--plain", action="store_true", help="no word of Dougong: the Trainer's own checkpoints")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--not-random", action="store_true")
    parser.add_argument("--steps", type=int, default=-1)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--tensorboard", action="store_true")
    options = parser.parse_args()

    set_seed(3)
    sizes = {"n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    output = options.result.with_suffix(".out")
    trainer = Trainer(
        model=GPT2LMHeadModel(GPT2Config(vocab_size=29, **sizes)),
        args=TrainingArguments(
            output_dir=str(output),
            per_device_train_batch_size=2,
            per_device_eval_batch_size=8,
            gradient_accumulation_steps=2,
            num_train_epochs=3,
            max_steps=options.steps,
            learning_rate=1e-2,
            warmup_steps=5,
            logging_steps=7,
            eval_strategy="steps",
            eval_steps=11,
            eval_on_start=True,
            metric_for_best_model="eval_loss",
            greater_is_better=False,
            save_strategy="steps" if options.plain else "no",
            save_steps=11,
            dataloader_num_workers=options.workers,
            report_to="tensorboard" if options.tensorboard else "none",
            disable_tqdm=True,
            use_cpu=True,
            ddp_find_unused_parameters=False,
        ),
        train_dataset=Stream(74) if options.stream else Numbers(74, is_random=not options.not_random),
        eval_dataset=Numbers(16, is_random=False),
        data_collator=None if options.not_random else mask,
        callbacks=[Slow(options.step_s)] if options.plain else [Slow(options.step_s), EarlyStoppingCallback(3)],
    )
    if options.plain:
        trainer.train(resume_from_checkpoint=get_last_checkpoint(str(output)) if output.exists() else None)
    else:
        from dougong.hf import DougongCallback

        trainer.add_callback(DougongCallback(trainer, has_random_batches=not options.not_random))
        trainer.train()
    if trainer.is_world_process_zero():
        log = [
            {name: value for name, value in entry.items() if not any(clock in name for clock in CLOCKS)}
            for entry in trainer.state.log_history
        ]
        total = sum(parameter.double().sum().item() for parameter in trainer.model.parameters())
        options.result.write_text(json.dumps({"log": log, "total": total}, indent=1))


if __name__ == "__main__":
    main()
