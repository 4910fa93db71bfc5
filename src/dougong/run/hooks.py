"""Step and state hooks for a loop that stays as it is: Megatron's `while iteration < train_iters` and its relatives.

```python
loop = dougong.loop(model=model, optimizer=optimizer, lr_scheduler=sched, counters=counters)
iteration = loop.restore()                 # 0, or the steps finished before the fault
while iteration < train_iters:
    loop.begin_step()
    loss = train_step(...)
    iteration += 1
    loop.end_step(loss=loss, tokens=n)
loop.finish()
```
"""

from __future__ import annotations

import time
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dougong.errors import UserError
from dougong.run.attach import Job, Stateful, Step, attach
from dougong.run.page import Phase


def loop(
    *,
    model: torch.nn.Module,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    data: Any = None,
    model_flop_per_token: float | None = None,
    hardware_flop_per_token: float | None = None,
    stage: int | None = None,
    replicated_over: Sequence[int] | dist.ProcessGroup | None = None,
    **others: Stateful | MutableMapping[str, Any],
) -> Loop:
    """Hooks for a training loop of one's own, with the service of `dougong.attach`.

    `others` are further state: objects with `state_dict()` and `load_state_dict()`, or plain dicts of numbers, texts
    and tensors, which are filled in place at a restore. A framework that counts consumed samples keeps its data
    position so: the counter is in such a dict, and the loader is built from it after `restore()`. `data` and
    `Loop.batches` are for a loop whose loader cannot begin in the middle. Raises UserError for an object without state.
    """
    stateful = {name: _DictState(part) if isinstance(part, MutableMapping) else part for name, part in others.items()}
    job = attach(
        model=model,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        data=data,
        model_flop_per_token=model_flop_per_token,
        hardware_flop_per_token=hardware_flop_per_token,
        stage=stage,
        replicated_over=replicated_over,
        **stateful,
    )
    return Loop(job, has_data=data is not None)


class Loop:
    """The hooks. In order: `restore`, then `begin_step` and `end_step` around each step, then `finish`."""

    def __init__(self, job: Job, *, has_data: bool = False) -> None:
        self.job = job
        job.do_not_go_back()
        self._has_data = has_data
        self._is_restored = False
        self._step: Step | None = None
        self._is_save_pending = False
        self._data_wait_ns = 0

    @property
    def num_steps(self) -> int:
        """Steps finished, over all restarts."""
        return self.job.num_steps

    @property
    def is_in_step(self) -> bool:
        """Between `begin_step` and `end_step`."""
        return self._step is not None

    @property
    def batches(self) -> Iterator[Any]:
        """The batches of `data`, epoch after epoch, from the very next one."""
        if not self._has_data:
            raise UserError("there is no data to read", where="Loop.batches", mend="give dougong.loop(data=…) a loader")
        while True:
            began_ns = time.monotonic_ns()
            batch = self.job.next_batch()
            if self._step is None:  # within a step the wait is part of the step
                self._data_wait_ns += time.monotonic_ns() - began_ns
            yield batch

    def restore(self) -> int:
        """Put back the newest saved state, in place; the number of steps that are finished, 0 at first.

        Raises UserError if batches are to be left out, which only `job.steps()` can do.
        """
        if self.job.num_skips:
            raise UserError(
                "the run wants batches left out that made the loss bad; a loop of its own cannot do that",
                where="--set policy.bad_loss=roll-back-and-skip",
                mend="say policy.bad_loss=stop or ignore, or use dougong.attach",
            )
        self._is_restored = True
        return self.job.restore()

    def begin_step(self) -> None:
        """A step begins. What lies between `end_step` and here, such as an evaluation, belongs to the step before.

        So this is where the state after that step is saved, if it is time, and where the process leaves if the run is
        to stop.
        """
        if not self._is_restored:
            raise UserError("begin_step() came before restore()", where="Loop.begin_step()", mend="call restore() once")
        if self._step is not None:
            raise UserError(
                f"step {self._step.number} was not ended", where="Loop.begin_step()", mend="call end_step() after each"
            )
        self.save_pending()
        self._step = Step(self.job, number=self.job.num_steps + 1, batch=None, data_wait_ns=0)
        self._step.begin()

    def end_step(
        self,
        *,
        loss: float | torch.Tensor | None = None,
        tokens: int | None = None,
        samples: Sequence[int] | None = None,
        grad_norm: float | torch.Tensor | None = None,
    ) -> None:
        """The step is finished: its optimizer has stepped. What this rank did is recorded as by `Step.record`."""
        step, self._step = self._step, None
        if step is None:
            raise UserError(
                "end_step() came without begin_step()", where="Loop.end_step()", mend="call begin_step() before each"
            )
        step.record(loss=loss, tokens=tokens, samples=samples, grad_norm=grad_norm)
        step.data_wait_ns, self._data_wait_ns = self._data_wait_ns, 0
        step.end()
        self._is_save_pending = True

    def evaluating(self, *, is_over: bool = False) -> None:
        """An evaluation between two steps begins, makes progress, or is over; each call is a sign of life."""
        if self._step is None:
            self.job.is_at(Phase.BETWEEN if is_over else Phase.EVALUATION)

    def save_pending(self) -> None:
        """Save now what `begin_step` would save, for a loop that reads the next batch before the step begins."""
        if self._is_save_pending:
            self._is_save_pending = False
            self.job.save_if_due()

    def finish(self) -> None:
        """All steps are done. The last state is saved durably before the script goes on."""
        self.save_pending()
        self.job.finish()


class _DictState:
    """A dict of plain values as a part of the state."""

    def __init__(self, values: MutableMapping[str, Any]) -> None:
        self._values = values

    def state_dict(self) -> dict[str, Any]:
        return dict(self._values)

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self._values.clear()
        self._values.update(state_dict)
