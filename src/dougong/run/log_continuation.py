"""Logs of an experiment that go on over restarts: TensorBoard, Weights & Biases, MLflow.

After a restart the steps since the restored one are done again, and a logger that only appends would show them twice.
TensorBoard has a remedy in its format: a session that starts at step n makes readers forget what came at n or later.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from dougong.errors import MissingExtra
from dougong.run.layout import RunDirectory, write_atomically
from dougong.run.place import worker_place


class ContinuedWriter(Protocol):
    """A log that is kept in step with the saved state."""

    def flush(self) -> None:
        """Hand everything logged so far to the operating system."""
        ...

    def go_back(self, step: int) -> None:
        """The run has gone back to the state after `step`; what was logged for later steps is void."""
        ...


class TensorBoardLog:
    """A `SummaryWriter` of torch that is flushed with every save and cut off at every return to an earlier step.

    `first_step` is the number under which the script logs its first step, 1 or 0.
    """

    def __init__(self, writer: Any, *, first_step: int = 1) -> None:
        self._writer = writer
        self._first_step = first_step

    def flush(self) -> None:
        self._writer.flush()

    def go_back(self, step: int) -> None:
        """Source: SummaryWriter's `purge_step`, which writes the same record, but only when the writer is made."""
        proto: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        # an experiment may have several writers, `add_hparams` and `add_scalars` make more
        writers: dict[str, Any] = self._writer.all_writers or {}
        for writer in writers.values():
            start = proto.SessionLog(status=proto.SessionLog.START)
            writer.add_event(proto.Event(session_log=start), step + self._first_step)


def summary_writer(job: Any, *, name: str = "", first_step: int = 1, **options: Any) -> Any:
    """A TensorBoard `SummaryWriter` in `log_directory()` whose curves show every step once.

    `job` is what `dougong.attach` or `dougong.loop` returned; `name` is a folder below the directory; `first_step` is
    the number under which the first step is logged, 1 or 0; `options` are those of torch's SummaryWriter. Make it on
    one rank only. Raises MissingExtra without tensorboard.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MissingExtra("tensorboard", extra="hf", needed_for="dougong.summary_writer()") from None
    directory = log_directory()
    writer = SummaryWriter(str(directory / name), **options)
    keep_in_step(getattr(job, "job", job), writer, first_step=first_step)
    return writer


def keep_in_step(job: Any, writer: Any, *, first_step: int = 1) -> None:
    """Let `job` flush and cut off a `SummaryWriter` that somebody else made."""
    log = TensorBoardLog(writer, first_step=first_step)
    log.go_back(job.resumed_step)
    job.keep_log(log)


def log_directory() -> Path:
    """Where the experiment logs of this run lie, the same over all restarts: `tracking` in the run directory.

    Without `dougong run` it is `tracking` in the working directory.
    """
    place = worker_place()
    return Path("tracking") if place is None else place.run.tracking


def keep_mlflow_run(run_id: str) -> None:
    """Have later starts of this run go on in the MLflow run that the server has just made.

    Only the server can make an id, so the first start tells it: `dougong.keep_mlflow_run(mlflow.start_run().info
    .run_id)`. From the next start on MLFLOW_RUN_ID is set for this rank, and `mlflow.start_run()` takes it up.
    """
    place = worker_place()
    if place is not None:
        write_atomically(_mlflow_run(place.run, rank=place.rank), run_id.encode())


def log_variables(run: RunDirectory, *, run_id: str, rank: int, environment: Mapping[str, str]) -> dict[str, str]:
    """What loggers read from a worker's environment so that they go on where they were.

    What the user has set stays. A W&B run is named after this run, and the rank if it is not 0, and resumed if it
    exists; TensorBoard's directory is what the callback of Hugging Face reads. Sources: the environment variables of
    wandb, mlflow, transformers.
    """
    wanted = {
        "WANDB_RUN_ID": f"dougong-{run_id}" if rank == 0 else f"dougong-{run_id}-rank-{rank}",
        "WANDB_RESUME": "allow",
        "TENSORBOARD_LOGGING_DIR": str(run.tracking),
    }
    if (kept := _kept_mlflow_run(run, rank=rank)) is not None:
        wanted["MLFLOW_RUN_ID"] = kept
    if "WANDB_RUN_ID" in environment:  # the user's own run is resumed by the user's own rule
        del wanted["WANDB_RESUME"]
    return {name: value for name, value in wanted.items() if name not in environment}


def _kept_mlflow_run(run: RunDirectory, *, rank: int) -> str | None:
    try:
        return _mlflow_run(run, rank=rank).read_text()
    except OSError:  # none was kept, or the disk fails; a start does not fail for the sake of a log
        return None


def _mlflow_run(run: RunDirectory, *, rank: int) -> Path:
    return run.root / "mlflow" / f"rank-{rank}"
