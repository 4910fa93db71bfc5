"""One step of a training script, as `dougong.attach` hands it out."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from dougong.run.worker import is_broken_collective

if TYPE_CHECKING:
    from dougong.run.attach import Job


class Step:
    """One step. Use it once, as a context manager; its value is the batch."""

    def __init__(self, job: Job, *, number: int, batch: Any, data_wait_ns: int) -> None:
        self.number = number
        self.is_entered = False
        self.is_finished = False
        self.loss: float | None = None
        self.tokens: int | None = None
        self.samples: tuple[int, ...] | None = None
        self.grad_norm: float | None = None
        self.begin_ns = 0
        self.data_wait_ns = data_wait_ns
        self._job = job
        self._batch = batch

    def record(
        self,
        *,
        loss: float | torch.Tensor | None = None,
        tokens: int | None = None,
        samples: Sequence[int] | None = None,
        grad_norm: float | torch.Tensor | None = None,
    ) -> None:
        """Tell what this rank did in this step: its loss, the tokens it trained on, the ids of its samples.

        After a loss or a `grad_norm` that is not finite no checkpoint is taken until they are finite again.
        """
        self.loss = float(loss.detach()) if isinstance(loss, torch.Tensor) else loss
        self.tokens = tokens
        self.samples = None if samples is None else tuple(int(sample) for sample in samples)
        self.grad_norm = float(grad_norm.detach()) if isinstance(grad_norm, torch.Tensor) else grad_norm

    def begin(self) -> None:
        """What entering does, for a loop that cannot use `with`."""
        self.is_entered = True
        self.begin_ns = self._job.begin_step()

    def end(self) -> None:
        """What leaving without an error does."""
        self.is_finished = True
        self._job.finish_step(self)

    def __enter__(self) -> Any:
        self.begin()
        return self._batch

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> bool:
        if error is None:
            self.end()
            return False
        return self._job.unwind(error) if is_broken_collective(error) else False
