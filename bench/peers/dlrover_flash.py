"""The same training saved by DLRover's Flash Checkpoint under `dlrover-run`: `--method memory | disk`."""

from __future__ import annotations

import time

STARTED_NS = time.monotonic_ns()

import shutil  # noqa: E402
import threading  # noqa: E402
from pathlib import Path  # noqa: E402

import torch.distributed as dist  # noqa: E402
from _work import NothingToWaitFor, Work, parse, train  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint.checkpointer import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    StorageType,
)
from dlrover.trainer.torch.flash_checkpoint.ddp import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    DdpCheckpointer,
)

KEEP = 2
TRACKER = "dlrover_latest.txt"


class Flash(NothingToWaitFor):
    """Every rank its own shard."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._root: Path = work.options.checkpoints
        self._root.mkdir(parents=True, exist_ok=True)
        self._checkpointer = DdpCheckpointer(
            str(self._root), local_shard_num=work.world_size, global_shard_num=work.world_size
        )
        self._is_disk = work.options.method == "disk"
        self._asked_step = self._complete_step = 0
        if self._is_disk and work.rank == 0:
            threading.Thread(target=self._watch, daemon=True).start()

    def load(self) -> int:
        saved = self._checkpointer.load_checkpoint()
        if not saved:
            return 0
        self._work.put_back(saved["tensors"])  # views of its memory, so they are copied
        return saved["step"]

    def save(self, step: int) -> None:
        storage = StorageType.DISK if self._is_disk else StorageType.MEMORY
        state = {"step": step, "tensors": self._work.tensors()}
        self._checkpointer.save_checkpoint(step, state, storage_type=storage)
        self._asked_step = step

    def is_pending(self) -> bool:
        return self._is_disk and self._work.rank == 0 and self._complete_step < self._asked_step

    def restore(self, step: int) -> None:
        assert self.load() == step

    def _watch(self) -> None:
        """The step in the tracker file is complete on the disk, though not synced."""
        seen = ""
        while True:
            time.sleep(0.02)
            try:
                content = (self._root / TRACKER).read_text().strip()
            except FileNotFoundError:
                continue
            if content and content != seen:
                seen = content
                self._work.records.add("durable", step=int(content))
                self._complete_step = int(content)
                steps = sorted(int(path.name) for path in self._root.iterdir() if path.name.isdigit())
                for old in steps[:-KEEP]:
                    shutil.rmtree(self._root / str(old), ignore_errors=True)


def main() -> None:
    options, records = parse(__doc__)
    records.add("phase", name="started", ns=STARTED_NS)
    records.add("phase", name="imported")
    dist.init_process_group("gloo")
    records.add("phase", name="group")
    work = Work(options, records)
    records.add("phase", name="built")
    train(work, Flash(work))


if __name__ == "__main__":
    main()
