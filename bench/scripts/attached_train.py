"""The training of `own_checkpoint_train.py`, saved and restored by `dougong.attach` instead of by the script."""

from __future__ import annotations

import torch.distributed as dist
from _marks import Marks
from _training import Training, parser

import dougong


def main() -> None:
    options = parser(__doc__).parse_args()
    dist.init_process_group("gloo")
    train = Training(options)
    marks = Marks(options.marks, rank=train.rank)
    job = dougong.attach(model=train.model, optimizer=train.optimizer, lr_scheduler=train.schedule, data=train.loader)
    for step in job.steps(until=options.steps):
        with step as (ids, tokens, targets):
            step.record(loss=train(tokens, targets), tokens=tokens.numel(), samples=ids)
        marks.write(step.number)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
