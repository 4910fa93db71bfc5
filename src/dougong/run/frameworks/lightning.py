# pyright: standard, reportMissingImports=false
"""Lightning's `Trainer`: every optimizer step a heartbeat, and a restart goes on at the very next batch.

```python
trainer = Trainer(callbacks=[DougongCallback()], ...)
trainer.fit(model, data)
```

Lightning resumes within an epoch only from loaders that keep their own position. Here any loader is brought to its
place again, by reading the epoch's batches so far with the random numbers of then; and what Lightning's checkpoints
leave out is kept too: means over an epoch that is not over, states of torchmetrics, monitored values.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

from dougong.errors import MissingExtra, UserError
from dougong.run.attach import Job
from dougong.run.frameworks.ranks import check_world_size
from dougong.run.hooks import Loop
from dougong.run.log_continuation import keep_in_step
from dougong.run.state import restore_rng, rng_state

try:
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.loggers import TensorBoardLogger
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
    from lightning.pytorch.trainer import call
    from torchmetrics import Metric
except ImportError as error:
    raise MissingExtra(error.name or "lightning", extra="lightning", needed_for="dougong.lightning") from None

_WHERE = "Trainer(callbacks=[DougongCallback()])"
_SAVED_APART = ("state_dict", "optimizer_states", "lr_schedulers")
_NOT_RESTORED = ("hyper_parameters", "hparams_name", "hparams_type")
"""Ends of the names under which a checkpoint describes how its objects were made."""


class DougongCallback(Callback):
    """Among the callbacks of a trainer, it saves and restores all of `fit()`. For one device per rank, alone or DDP.

    A step is an optimizer step, so several batches where gradients are accumulated. Without `dougong run` the callback
    changes nothing. Raises UserError at the start of `fit()` for what it does not know how to resume.
    """

    def __init__(self) -> None:
        self._loop: Loop | None = None
        self._state: _LoopState | None = None
        self._losses: list[torch.Tensor] = []
        self._global_step = 0
        self._is_finished = False

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._check(trainer)
        self._state = _LoopState(trainer)
        job = Job(_parts(trainer), data=self._state)
        job.describe_model(None, None)
        self._loop = Loop(job)
        self._loop.restore()
        self._state.watch_loops(self._loop)
        self._global_step = trainer.global_step

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                # Lightning counts what it logs from 0
                keep_in_step(self._running.job, logger.experiment, first_step=0)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self._running.is_in_step:
            self._losses = []
            self._running.begin_step()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self._state is not None
        self._state.merge_means()
        if isinstance(outputs, dict) and isinstance(outputs.get("loss"), torch.Tensor):
            self._losses.append(outputs["loss"].detach())
        if trainer.global_step != self._global_step:
            self._global_step = trainer.global_step
            loss = sum(self._losses[1:], self._losses[0]) / len(self._losses) if self._losses else None
            self._running.end_step(loss=loss)

    def on_validation_batch_start(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if self._loop is not None and trainer.state.fn == "fit":
            self._loop.evaluating()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._loop is not None and trainer.state.fn == "fit":
            self._loop.evaluating(is_over=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._is_finished = True
        self._running.finish()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if not self._is_finished:  # it was at its end already when it was restored
            self._running.finish()

    @property
    def _running(self) -> Loop:
        assert self._loop is not None
        return self._loop

    def _check(self, trainer: Any) -> None:
        if self._loop is not None:
            raise UserError(
                "fit() was called a second time; a run saves and restores one training",
                where=_WHERE,
                mend="do the second training in a run of its own",
            )
        if type(trainer.strategy) not in (DDPStrategy, SingleDeviceStrategy):
            raise UserError(
                f"{type(trainer.strategy).__name__} keeps its state in parts of its own, which are not saved",
                where=_WHERE,
                mend='Trainer(strategy="ddp"), or leave the callback out',
            )


class _LoopState:
    """The job's `data`: what each rank has for itself, loops, callbacks, means, and the position in the data."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer
        self._rng: dict[str, Any] | None = None
        """Random state of the step that is resumed from, until the data have come to its place."""
        self._means: dict[str, dict[str, Any]] = {}
        """Sums over the epoch so far, of a restored state, that wait for their key to be logged again."""
        self._num_batches = 0
        self._reload_epoch: float = 0.0
        self._rng_at_setup: dict[str, Any] = {}
        """Before the loaders were made, which began the first epoch."""
        self._rng_at_begin: dict[str, Any] | None = None
        """Before a later epoch was begun; None in the first one of these loaders."""
        self._rng_at_first: dict[str, Any] = {}
        self._rng_at_last: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Taken between two batches."""
        trainer = self._trainer
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        return {
            "checkpoint": {
                name: part
                for name, part in checkpoint.items()
                if name not in _SAVED_APART and not name.endswith(_NOT_RESTORED)
            },
            "monitored": dict(trainer._logger_connector._callback_metrics),
            "means": {key: _metric_state(metric) for key, metric in self._results.items()} | self._means,
            "metrics": {name: _metric_state(metric) for name, metric in _metrics(trainer.lightning_module)},
            "num_batches": self._num_batches,
            "world_size": trainer.world_size,
            "reload_epoch": float(trainer.fit_loop._last_train_dl_reload_epoch),
            "rng_at_setup": self._rng_at_setup,
            "rng_at_begin": self._rng_at_begin,
            "rng_at_first": self._rng_at_first,
            "rng_at_last": self._rng_at_last,
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        trainer, saved = self._trainer, state_dict
        check_world_size(saved["world_size"], trainer.world_size, where=_WHERE)
        connector = trainer._checkpoint_connector
        own = {
            "state_dict": trainer.lightning_module.state_dict(),
            "optimizer_states": [optimizer.state_dict() for optimizer in trainer.optimizers],
            "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        }
        connector._loaded_checkpoint = {**saved["checkpoint"], **own}
        call._call_lightning_module_hook(trainer, "on_load_checkpoint", connector._loaded_checkpoint)
        connector.restore_datamodule()
        connector.restore_callbacks()
        connector.restore_precision_plugin_state()
        connector.restore_loops()
        connector._loaded_checkpoint = {}  # nor does a `ckpt_path` overwrite what has been restored
        trainer._logger_connector._callback_metrics.update(saved["monitored"])
        for name, metric in _metrics(trainer.lightning_module):
            _set_metric_state(metric, saved["metrics"].get(name, {}))
        self._means = saved["means"]
        self._num_batches = saved["num_batches"]
        self._reload_epoch = saved["reload_epoch"]
        self._rng_at_setup = saved["rng_at_setup"]
        self._rng_at_begin = saved["rng_at_begin"]
        self._rng_at_first = saved["rng_at_first"]
        self._rng_at_last = saved["rng_at_last"]
        self._rng = {}

    def watch_loops(self, loop: Loop) -> None:
        """Have Lightning's loops tell where they are; and bring them there once, if a state was restored."""
        if self._rng is not None:
            self._rng = rng_state()
            warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch")
        fit_loop, epoch_loop = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop
        fit_loop.setup_data = functools.partial(self._set_up_data, fit_loop.setup_data)
        epoch_loop.on_run_start = functools.partial(self._begin_epoch, epoch_loop.on_run_start)
        epoch_loop.advance = functools.partial(self._advance, epoch_loop.advance, loop)

    def merge_means(self) -> None:
        """After the first batch since a restore: add the sums of the epoch so far to those begun anew."""
        for key in [key for key in self._means if key in self._results]:
            _add_sums(self._results[key], self._means.pop(key))

    # --- instead of the loops' methods ---

    def _set_up_data(self, original: Any) -> None:
        fit_loop = self._trainer.fit_loop
        is_due = fit_loop._combined_loader is None or fit_loop._should_reload_train_dl
        if is_due and self._rng is None:
            self._rng_at_setup = rng_state()
        elif is_due:
            restore_rng(self._rng_at_setup)
        original()
        if is_due and self._rng is not None:
            fit_loop._last_train_dl_reload_epoch = self._reload_epoch

    def _begin_epoch(self, original: Any, data_fetcher: Any) -> None:
        if self._rng is None:
            self._num_batches = 0
            self._rng_at_begin = rng_state() if self._trainer.current_epoch > 0 else None
            original(data_fetcher)
            return
        num_fetched = data_fetcher.fetched
        original(data_fetcher)
        data_fetcher.fetched = num_fetched
        if self._rng_at_begin is not None:
            restore_rng(self._rng_at_begin)
            iter(data_fetcher)
        self._read_again(data_fetcher)
        restore_rng(self._rng)
        self._rng = None
        # what follows is the next batch, not the rest of the last one
        self._trainer.fit_loop.epoch_loop.restarting = False

    def _read_again(self, data_fetcher: Any) -> None:
        for batch in range(self._num_batches):
            if batch == 0:
                restore_rng(self._rng_at_first)
            if batch == self._num_batches - 1:
                restore_rng(self._rng_at_last)
            if next(data_fetcher, None) is None:
                raise UserError(
                    f"the data has {batch} batches in epoch {self._trainer.current_epoch}, the run is "
                    f"{self._num_batches} into it",
                    where="Trainer.fit()",
                    mend="give the same data with the same batch size as before, or start a new run",
                )

    def _advance(self, original: Any, loop: Loop, data_fetcher: Any) -> None:
        """One batch. Before it is read is between two steps."""
        loop.save_pending()
        self._rng_at_last = rng_state()
        if self._num_batches == 0:
            self._rng_at_first = self._rng_at_last
        self._num_batches += 1
        original(data_fetcher)

    @property
    def _results(self) -> dict[str, Any]:
        return self._trainer.fit_loop.epoch_loop._results


def _parts(trainer: Any) -> dict[str, Any]:
    """The model, and every optimizer and schedule; the first of each under the plain name."""
    parts: dict[str, Any] = {"model": trainer.strategy.model}
    for index, optimizer in enumerate(trainer.optimizers):
        parts["optimizer" if index == 0 else f"optimizer_{index}"] = optimizer
    for index, config in enumerate(trainer.lr_scheduler_configs):
        parts["lr_scheduler" if index == 0 else f"lr_scheduler_{index}"] = config.scheduler
    return parts


def _metrics(module: Any) -> list[tuple[str, Any]]:
    return [(name, part) for name, part in module.named_modules() if isinstance(part, Metric)]


def _metric_state(metric: Any) -> dict[str, Any]:
    """The sums of a metric. torchmetrics leaves them out of `state_dict()`."""
    return {name: getattr(metric, name) for name in metric._defaults} | {"update_count": metric._update_count}


def _set_metric_state(metric: Any, saved: dict[str, Any]) -> None:
    for name in metric._defaults:
        if name in saved:
            setattr(metric, name, saved[name])
    metric._update_count = saved.get("update_count", 0)
    metric._computed = None


def _add_sums(result: Any, saved: dict[str, Any]) -> None:
    """Join what was logged before a restore to what has been logged since, in this order."""
    if not result.is_tensor or "value" not in saved:
        return  # a Metric, restored with its module
    before = saved["value"].to(result.value.device)
    if result.meta.is_mean_reduction:
        result.value = before + result.value
        result.cumulated_batch_size = saved["cumulated_batch_size"] + result.cumulated_batch_size
    elif result.meta.is_max_reduction or result.meta.is_min_reduction:
        result.value = result.meta.reduce_fx(before, result.value)
    elif result.meta.is_sum_reduction and result.meta.on_epoch:
        result.value = before + result.value
    result._update_count += saved["update_count"]
