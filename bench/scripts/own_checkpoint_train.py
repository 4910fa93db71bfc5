"""A torchrun script as users write them: rank 0 saves with `torch.save` every few steps, every rank loads at its start.

torchrun --standalone --nproc-per-node 2 --max-restarts 3 own_checkpoint_train.py --checkpoint state.pt
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from _marks import Marks
from _training import Training, parser


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--checkpoint", type=Path, required=True)
    arguments.add_argument("--save-every", type=int, default=5)
    options = arguments.parse_args()
    dist.init_process_group("gloo")
    train = Training(options)
    marks = Marks(options.marks, rank=train.rank)
    step = load(train, options.checkpoint)
    while step < options.steps:
        for _, tokens, targets in train.loader:
            train(tokens, targets)
            step += 1
            marks.write(step)
            if step % options.save_every == 0 and train.rank == 0:
                save(train, options.checkpoint, step=step)
            if step == options.steps:
                break
    dist.destroy_process_group()


def load(train: Training, path: Path) -> int:
    """The step the file holds, put back; 0 without a file."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    train.model.load_state_dict(state["model"])
    train.optimizer.load_state_dict(state["optimizer"])
    train.schedule.load_state_dict(state["schedule"])
    train.loader.load_state_dict(state["loader"])
    return state["step"]


def save(train: Training, path: Path, *, step: int) -> None:
    parts = {"model": train.model, "optimizer": train.optimizer, "schedule": train.schedule, "loader": train.loader}
    staging = path.with_suffix(".part")
    torch.save({"step": step, **{name: part.state_dict() for name, part in parts.items()}}, staging)
    os.replace(staging, path)


if __name__ == "__main__":
    main()
