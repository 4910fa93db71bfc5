"""A torchrun script as users write them: each rank saves its shard with `torch.save`, and loads it at its start.

Also what runs under NVRx's launcher, which restarts scripts and leaves saving to them.
"""

from __future__ import annotations

import time

STARTED_NS = time.monotonic_ns()

import os  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from _work import NothingToWaitFor, Work, parse, train  # noqa: E402


class Files(NothingToWaitFor):
    """`rank-R.pt`, replaced by each save. Without fsync, as `torch.save` leaves it."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._path = work.options.checkpoints / f"rank-{work.rank}.pt"
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def load(self) -> int:
        step = self._saved_step()
        if step:
            saved = torch.load(self._path, weights_only=True)
            self._work.model.load_state_dict(saved["model"])
            self._work.optimizer.load_state_dict(saved["optimizer"])
        return step

    def save(self, step: int) -> None:
        model, optimizer = self._work.model.state_dict(), self._work.optimizer.state_dict()
        staging = self._path.with_suffix(".part")
        torch.save({"step": step, "model": model, "optimizer": optimizer}, staging)
        os.replace(staging, self._path)
        self._work.records.add("durable", step=step)

    def restore(self, step: int) -> None:
        saved = torch.load(self._path, weights_only=True)
        tensors = dict(saved["model"])
        for name, state in zip(saved["model"], saved["optimizer"]["state"].values(), strict=True):
            tensors |= {f"{name}.{key}": value for key, value in state.items()}
        self._work.put_back(tensors)

    def _saved_step(self) -> int:
        """The step that all ranks have; a rank may have died before it saved."""
        step = 0
        if self._path.exists():
            step = torch.load(self._path, weights_only=True, mmap=True)["step"]
        agreed = torch.tensor([step, -step])
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
        assert int(agreed[0]) == -int(agreed[1]), "the ranks saved different steps"
        return step


def main() -> None:
    options, records = parse(__doc__)
    records.add("phase", name="started", ns=STARTED_NS)
    records.add("phase", name="imported")
    dist.init_process_group("gloo")
    records.add("phase", name="group")
    work = Work(options, records)
    records.add("phase", name="built")
    train(work, Files(work))


if __name__ == "__main__":
    main()
