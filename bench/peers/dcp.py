# pyright: reportPrivateImportUsage=false, reportMissingImports=false
# torch exports its checkpoint functions unmarked.
"""The same training saved by torch.distributed.checkpoint: `--method save | async | tuned`.

`async` is `async_save` as it comes. `tuned` keeps its staging memory between saves and fills it beside the next
forward and backward pass; the update waits until it is full.
"""

from __future__ import annotations

import time

STARTED_NS = time.monotonic_ns()

import shutil  # noqa: E402
from concurrent.futures import Future  # noqa: E402
from typing import Any  # noqa: E402

import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from _work import Work, parse, train  # noqa: E402
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions  # noqa: E402

KEEP = 2


class Checkpoints:
    """One directory a save; the newest two are kept."""

    def __init__(self, work: Work) -> None:
        self._work, self._method = work, work.options.method
        self._root = work.options.checkpoints
        self._root.mkdir(parents=True, exist_ok=True)
        self._group: Any = dist.new_group(backend="gloo")  # saving talks beside training
        self._staged: Future[Any] | None = None
        self._uploaded: Future[Any] | None = None
        self._stager = None
        if self._method == "tuned":
            options = StagingOptions(
                use_pinned_memory=False, use_shared_memory=True, use_async_staging=True, use_non_blocking_copy=False
            )
            self._stager = DefaultStager(options)

    def load(self) -> int:
        steps = sorted(int(path.parent.name) for path in self._root.glob("*/.metadata"))
        if not steps:
            return 0
        self._work.optimizer.prepare()
        self.restore(steps[-1])
        return steps[-1]

    def save(self, step: int) -> None:
        place = self._root / str(step)
        if self._method == "save":
            dcp.save(self._state(), checkpoint_id=place, process_group=self._group)
            self._done(step)
            return
        answer = dcp.async_save(
            self._state(), checkpoint_id=place, process_group=self._group, async_stager=self._stager
        )
        if isinstance(answer, Future):
            self._uploaded = answer
        else:
            self._staged, self._uploaded = answer.staging_completion, answer.upload_completion
        self._uploaded.add_done_callback(lambda _: self._done(step))

    def is_pending(self) -> bool:
        return self._uploaded is not None and not self._uploaded.done()

    def before_update(self) -> None:
        if self._staged is not None:
            self._staged.result()
            self._staged = None

    def restore(self, step: int) -> None:
        dcp.load(self._state(), checkpoint_id=self._root / str(step), process_group=self._group)

    def close(self) -> None:
        if self._uploaded is not None:
            self._uploaded.result()
        if self._stager is not None:
            self._stager.close()

    def _state(self) -> dict[str, Any]:
        """Names that say whose shard it is: without them DCP would take the ranks' tensors for copies of each other."""
        return {f"rank{self._work.rank}.{name}": tensor for name, tensor in self._work.tensors().items()}

    def _done(self, step: int) -> None:
        self._work.records.add("durable", step=step)
        if self._work.rank == 0:
            for path in sorted(self._root.iterdir(), key=lambda path: int(path.name))[:-KEEP]:
                shutil.rmtree(path)


def main() -> None:
    options, records = parse(__doc__)
    records.add("phase", name="started", ns=STARTED_NS)
    records.add("phase", name="imported")
    dist.init_process_group("gloo")
    records.add("phase", name="group")
    work = Work(options, records)
    records.add("phase", name="built")
    train(work, Checkpoints(work))


if __name__ == "__main__":
    main()
