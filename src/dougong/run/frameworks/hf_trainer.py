# pyright: standard, reportMissingImports=false
"""Hugging Face `Trainer`: every step a heartbeat, and a restart goes on at the very next batch.

```python
trainer = Trainer(...)
trainer.add_callback(DougongCallback(trainer))
trainer.train()
```

A Trainer resumes from a folder of its own, and only to a step that was logged and saved there. Here the state comes
from memory, or from a durable checkpoint of Dougong, so six of the Trainer's methods are taken over on the one object
that is given, each for the one thing that its name says. What they restore is everything that the loop computes with:
parameters, optimizer, schedule, loss sums between two logs, the Trainer's own state and its callbacks', random states,
and the batch, drawn again with the random numbers of then.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from dougong.errors import MissingExtra, UserError
from dougong.run.attach import Job
from dougong.run.frameworks.ranks import check_world_size
from dougong.run.hooks import Loop
from dougong.run.log_continuation import keep_in_step, keep_mlflow_run
from dougong.run.state import restore_rng, rng_state

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState, TrainerState
except ImportError as error:
    raise MissingExtra(error.name or "transformers", extra="hf", needed_for="dougong.hf") from None

_TAKEN_OVER = (
    "_inner_training_loop",
    "_init_training_state",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_scaler",
    "_load_rng_state",
    "get_batch_samples",
    "training_step",
    "log",
)
_FOLDER = "dougong"
"""Stands where the Trainer expects the folder that it resumes from; nothing is read there."""
_WHERE = "DougongCallback(trainer)"


class DougongCallback(TrainerCallback):
    """Add it to the trainer that it is made for: `trainer.add_callback(DougongCallback(trainer))`.

    At a restart the batches of the epoch that were trained on are read again, since a collator may draw random numbers.
    `has_random_batches=False` promises that no data set, transform or collator does, and they are passed over by their
    numbers instead. Without `dougong run` the callback changes nothing. Raises UserError for a trainer that Dougong
    does not know how to resume.
    """

    def __init__(self, trainer: Any, *, has_random_batches: bool = True) -> None:
        _check(trainer)
        self._trainer = trainer
        self._has_random_batches = has_random_batches
        self._loop: Loop | None = None
        self._position = _Position()
        self._saved: dict[str, Any] | None = None
        self._rng: dict[str, Any] | None = None
        """Random state of the step that is resumed from, until the data have come to its place."""
        self._iterators: tuple[Iterator[Any], Iterator[Any]] | None = None
        """The Trainer's iterator of the resumed epoch, and the one that is read in its place."""
        self._loss: torch.Tensor | None = None
        self._num_tokens: int | None = None
        for name in _TAKEN_OVER:
            original = getattr(trainer, name)
            own = functools.partial(getattr(self, f"_own_{name.removeprefix('_')}"), original)
            setattr(trainer, name, functools.update_wrapper(own, original))

    # --- called by the Trainer ---

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._saved is None:
            self._give_parts()
            self._running.restore()
        else:
            self._put_back_sums(self._saved)
            args.eval_on_start = False  # it was done before the first step
        self._continue_logs()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._rng is None:
            self._position.begin_epoch()
            self._running.save_pending()
        elif self._position.num_batches == 0:
            restore_rng(self._rng)
            self._rng = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._running.is_in_step:  # a stream may end within a step, whose gradients then stay for the next
            self._loss = None
            self._running.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._running.end_step(loss=self._loss, tokens=self._num_tokens)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._loop is not None:
            self._loop.evaluating()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._loop is not None:
            self._loop.evaluating(is_over=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._position.is_finished = True
        self._running.finish()

    # --- the job's `data`: what each rank has for itself ---

    def state_dict(self) -> dict[str, Any]:
        """What the Trainer itself knows, besides its model, optimizer and schedule."""
        trainer = self._trainer
        return {
            "state": json.dumps(asdict(trainer.state)),
            "callbacks": json.dumps([[type(part).__name__, part.state()] for part in self._exportable()]),
            "loss_sum": trainer._tr_loss.detach(),
            "loss_total": trainer._total_loss_scalar,
            "last_logged_step": trainer._globalstep_last_logged,
            "initial_step": trainer._initial_global_step,
            "initial_tokens": trainer._initial_num_input_tokens_seen,
            "flos": float(trainer.current_flos),
            "position": self._position.state_dict(),
            "world_size": self._running.job.world_size,
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Nothing yet: the Trainer makes its parts at different moments, and each is put back then, from `_saved`."""

    # --- instead of the Trainer's methods, in the order in which it calls them ---

    def _own_inner_training_loop(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self not in self._trainer.callback_handler.callbacks:
            raise UserError(
                "the callback is not among the trainer's",
                where=_WHERE,
                mend="trainer.add_callback(DougongCallback(trainer))",
            )
        if self._loop is not None:
            raise UserError(
                "train() was called a second time; a run saves and restores one training",
                where=_WHERE,
                mend="do the second training in a run of its own",
            )
        self._loop = Loop(Job({}, data=self))
        if self._loop.job.is_resuming:
            kwargs["resume_from_checkpoint"] = _FOLDER
        return original(*args, **kwargs)

    def _own_init_training_state(
        self,
        original: Any,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        """The state of then, and the epoch and the batch in it from which the loop goes on."""
        saved = self._running.job.saved_data()
        if saved is not None:
            check_world_size(saved["world_size"], self._running.job.world_size, where=_WHERE)
        folder = resume_from_checkpoint if saved is None else None
        begin = original(max_steps, num_update_steps_per_epoch, num_train_epochs, folder, trial)
        if saved is None:
            return begin
        trainer, fresh = self._trainer, self._trainer.state
        trainer.state = TrainerState(**json.loads(saved["state"]))
        for name in ("max_steps", "num_train_epochs", "is_local_process_zero", "is_world_process_zero"):
            setattr(trainer.state, name, getattr(fresh, name))
        self._put_back_callbacks(json.loads(saved["callbacks"]))
        self._saved = saved
        self._position.load_state_dict(saved["position"])
        if self._position.is_finished:
            del trainer.state.log_history[-1]  # of the end, which comes again
        if self._position.is_finished or trainer.state.global_step >= max_steps:
            return num_train_epochs, 0
        return self._position.epoch, self._position.num_batches

    def _own_load_from_checkpoint(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if self._saved is None else None

    def _own_load_optimizer_and_scheduler(self, original: Any, checkpoint: str | None) -> Any:
        if self._saved is None:
            return original(checkpoint)
        self._give_parts()
        self._running.restore()
        self._rng = rng_state()
        return None

    def _own_load_scaler(self, original: Any, checkpoint: str | None) -> Any:
        return original(checkpoint) if self._saved is None else None

    def _own_load_rng_state(self, original: Any, checkpoint: str | None) -> Any:
        return original(checkpoint) if self._saved is None else None

    def _own_get_batch_samples(self, original: Any, epoch_iterator: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        """Between two steps: save if it is time, then read what the next step needs."""
        self._running.save_pending()
        rng, self._rng = self._rng, None
        if rng is not None and self._has_random_batches:
            again = self._position.read_again(self._trainer.callback_handler.train_dataloader)
            self._iterators = epoch_iterator, again
            restore_rng(rng)
        elif rng is not None:
            restore_rng(self._position.rng_at_first)
        if self._iterators is not None and self._iterators[0] is epoch_iterator:
            epoch_iterator = self._iterators[1]
        found = original(self._position.watch(epoch_iterator), *args, **kwargs)
        if rng is not None and not self._has_random_batches:
            restore_rng(rng)  # reading began the epoch anew, which draws a number
        self._num_tokens = _count_tokens(found[0])
        return found

    def _own_training_step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        loss = original(*args, **kwargs)
        self._loss = loss if self._loss is None else self._loss + loss
        return loss

    def _own_log(self, original: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        """The mean loss at the end is of all steps; the rates are of those since this start, as is the time."""
        num_steps = self._trainer.state.global_step
        if self._saved is not None and "train_runtime" in logs and num_steps:
            for name in ("train_samples_per_second", "train_steps_per_second"):
                if name in logs:
                    logs[name] *= 1 - self._running.job.resumed_step / num_steps
        return original(logs, *args, **kwargs)

    # --- the parts ---

    @property
    def _running(self) -> Loop:
        assert self._loop is not None
        return self._loop

    def _give_parts(self) -> None:
        trainer, job = self._trainer, self._running.job
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # out of Accelerate's wrapper
        scaler = {} if trainer.accelerator.scaler is None else {"scaler": trainer.accelerator.scaler}
        job.take_in(model=trainer.model_wrapped, optimizer=optimizer, lr_scheduler=trainer.lr_scheduler, **scaler)
        job.describe_model(None, None)

    def _exportable(self) -> list[Any]:
        return [part for part in self._trainer.callback_handler.callbacks if isinstance(part, ExportableState)]

    def _put_back_callbacks(self, saved: list[Any]) -> None:
        """In place, so that whoever holds a callback holds the restored one."""
        left = self._exportable()
        for name, state in saved:
            found = next((part for part in left if type(part).__name__ == name), None)
            if found is not None:
                left.remove(found)
                for attribute, value in state.get("attributes", {}).items():
                    setattr(found, attribute, value)

    def _put_back_sums(self, saved: dict[str, Any]) -> None:
        trainer = self._trainer
        trainer._tr_loss = saved["loss_sum"].to(trainer.args.device)
        if self._position.is_finished:  # it has been added to the total
            trainer._tr_loss = torch.zeros_like(trainer._tr_loss)
        trainer._total_loss_scalar = saved["loss_total"]
        trainer._globalstep_last_logged = saved["last_logged_step"]
        trainer._initial_global_step = saved["initial_step"]
        trainer._initial_num_input_tokens_seen = saved["initial_tokens"]
        trainer.current_flos = saved["flos"]

    def _continue_logs(self) -> None:
        """Loggers of the Trainer that were made by now; the directory and W&B's run come from the environment."""
        job = self._running.job
        for part in self._trainer.callback_handler.callbacks:
            if type(part).__name__ == "TensorBoardCallback" and part.tb_writer is not None:
                keep_in_step(job, part.tb_writer)
            if type(part).__name__ == "MLflowCallback" and part._ml_flow.active_run() is not None:
                keep_mlflow_run(part._ml_flow.active_run().info.run_id)


class _Position:
    """Where in the data the loop is: the epoch, how many of its batches were read, and the random states of then.

    Accelerate's loaders read one batch ahead, so a batch is made with the random numbers of the step before its own.
    """

    def __init__(self) -> None:
        self.epoch = -1
        self.num_batches = 0
        self.is_finished = False
        self.rng_at_first: dict[str, Any] = {}
        """Before the first batch of this epoch was asked for."""
        self.rng_at_last: dict[str, Any] = {}
        """Before the last batch so far was asked for."""

    def begin_epoch(self) -> None:
        self.epoch += 1
        self.num_batches = 0

    def watch(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """The batches of `iterator`, each counted when it is asked for."""
        while True:
            self.rng_at_last = rng_state()
            if self.num_batches == 0:
                self.rng_at_first = self.rng_at_last
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self.num_batches += 1
            yield batch

    def read_again(self, loader: Any) -> Iterator[Any]:
        """An iterator of this epoch that has given the batches read so far. Raises UserError if it ends before that."""
        _tell_epoch(loader, self.epoch)
        iterator = iter(loader)
        restore_rng(self.rng_at_first)
        for batch in range(self.num_batches):
            if batch == self.num_batches - 1:
                restore_rng(self.rng_at_last)
            if next(iterator, _END) is _END:
                raise UserError(
                    f"the data has {batch} batches in epoch {self.epoch}, the run is {self.num_batches} into it",
                    where="Trainer(train_dataset=…)",
                    mend="give the same data with the same batch size as before, or start a new run",
                )
        return iterator

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


_END = object()


def _tell_epoch(loader: Any, epoch: int) -> None:
    """As the Trainer does before each epoch: the loader, and the sampler within its sampler."""
    inner: Any = getattr(getattr(loader, "batch_sampler", None), "batch_sampler", None)
    for part in (loader, inner):
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def _count_tokens(batches: list[Any]) -> int | None:
    """Tokens of this rank's part of a step; None for data that are not texts."""
    counts = [batch["input_ids"].numel() for batch in batches if isinstance(batch, dict) and "input_ids" in batch]
    return sum(counts) if counts and len(counts) == len(batches) else None


def _check(trainer: Any) -> None:
    import transformers

    unknown = [name for name in _TAKEN_OVER if not callable(getattr(trainer, name, None))]
    if unknown:
        raise UserError(
            f"a {type(trainer).__name__} of transformers {transformers.__version__} has no {unknown[0]}()",
            where=_WHERE,
            mend="give it a transformers.Trainer, of the version that `pip install 'dougong[hf]'` brings",
        )
    if trainer.is_deepspeed_enabled:
        raise UserError(
            "DeepSpeed keeps its own state, which is not saved", where=_WHERE, mend="use DDP or FSDP, or leave it out"
        )
    if trainer.args.auto_find_batch_size:
        raise UserError(
            "auto_find_batch_size begins the training several times", where=_WHERE, mend="give the batch size that fits"
        )
