# pyright: standard
"""Scripts written to DLRover's Flash Checkpoint: the same calls, kept by Dougong.

Signatures: dlrover 0.6, `dlrover.trainer.torch.flash_checkpoint.ddp` and `.checkpointer`. A script changes the head of
its import, `dlrover` to `dougong.compat.dlrover`.
"""

from __future__ import annotations

import enum
import os
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from dougong.errors import UserError
from dougong.run.attach import Job, Step

_TRACKER = "dougong_latest.txt"


class StorageType(enum.Enum):
    """Where a state goes: memory outlives the process, disk the node."""

    MEMORY = 1
    DISK = 2


class Checkpointer(ABC):
    """What a script calls."""

    @abstractmethod
    def save_checkpoint(
        self, step: int, state_dict: dict[str, Any], path: str = "", storage_type: StorageType = StorageType.DISK
    ) -> None: ...

    @abstractmethod
    def load_checkpoint(self, resume_path: str = "") -> dict[str, Any]: ...


class DdpCheckpointer(Checkpointer):
    """Saves what the script hands over, on every rank, and gives back the newest of it after a restart.

    Steps are counted by the first optimizer, so a restart is scored like any other. Random states are saved and put
    back too, in `load_checkpoint`. In a run no file is written at `path`: MEMORY is a snapshot in shared memory, DISK a
    durable checkpoint of the run, and `checkpoint_dir` and the other options are without effect. A run that is asked to
    stop leaves at the next save. Without `dougong run`, DISK writes a file by rank 0 and MEMORY nothing.
    """

    def __init__(
        self,
        checkpoint_dir: str,
        local_shard_num: int = 1,
        global_shard_num: int = 1,
        comm_backend: str = "",
        deletion_strategy: Any = None,
        save_timeout: int = 600,
        replica_count: int = 0,
    ) -> None:
        self.checkpoint_dir = checkpoint_dir
        self._job = Job({"script": self}, data=None)
        self._job.do_not_go_back()
        self._given: dict[str, Any] = {}
        self._is_restored = False
        self._optimizer: int | None = None
        self._since_ns = time.monotonic_ns()
        if self._job.is_in_run:
            register_optimizer_step_post_hook(self._after_step)

    def save_checkpoint(
        self, step: int, state_dict: dict[str, Any], path: str = "", storage_type: StorageType = StorageType.DISK
    ) -> None:
        """Every rank calls it after the same optimizer step. `state_dict` holds tensors, numbers, texts and containers.

        Raises UserError for anything else in it.
        """
        if self._job.is_in_run:
            self._restore_once()
            self._given = state_dict
            self._job.save_now(is_durable=storage_type is StorageType.DISK)
            self._job.leave_if_asked()
            self._given = {}  # it refers to the live tensors
            self._since_ns = time.monotonic_ns()
        elif storage_type is StorageType.DISK and self._job.rank == 0:
            self._write(Path(path or f"{self.checkpoint_dir}/{step}/rank_0.pt"), state_dict)

    def load_checkpoint(self, resume_path: str = "") -> dict[str, Any]:
        """The newest state saved, of this rank; an empty dict if there is none. `resume_path`: a file to begin from."""
        self._restore_once()
        found, self._given = self._given, {}
        if found:
            return found
        path = Path(resume_path) if resume_path else self._tracked()
        return torch.load(path, map_location="cpu", weights_only=True) if path is not None and path.is_file() else {}

    def wait_latest_checkpoint(self, timeout: int = 1800) -> None:
        """Until the last state saved to DISK is durable."""
        self._job.wait_durable()

    # --- a part of the state ---

    def state_dict(self) -> dict[str, Any]:
        return self._given

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self._given = state_dict

    def _restore_once(self) -> None:
        if not self._is_restored:
            self._is_restored = True
            self._job.restore()

    def _after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._optimizer is None:
            self._optimizer = id(optimizer)
        if id(optimizer) != self._optimizer:
            return
        if not self._is_restored and self._job.is_resuming:
            raise UserError(
                "the script trains without having loaded the state of before",
                where="DdpCheckpointer",
                mend="call load_checkpoint() before the first step, at a first start too",
            )
        self._restore_once()
        step = Step(self._job, number=self._job.num_steps + 1, batch=None, data_wait_ns=0)
        step.begin()
        step.begin_ns, self._since_ns = self._since_ns, time.monotonic_ns()
        step.end()

    # --- without a run ---

    def _write(self, path: Path, state_dict: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        staging = path.with_name(f".{path.name}.tmp")
        torch.save(state_dict, staging)
        os.replace(staging, path)
        Path(self.checkpoint_dir).mkdir(parents=True, exist_ok=True)
        (Path(self.checkpoint_dir) / _TRACKER).write_text(str(path.absolute()))

    def _tracked(self) -> Path | None:
        tracker = Path(self.checkpoint_dir) / _TRACKER
        return Path(tracker.read_text()) if tracker.is_file() else None
