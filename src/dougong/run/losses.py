"""From what an agent reports to a loss in words."""

from __future__ import annotations

import signal

from dougong.run import wire
from dougong.run.decide import Loss
from dougong.run.letters import ErrorRaised


def loss_of_error(letter: ErrorRaised, component: str) -> Loss:
    """The script raised. A broken collective is rarely the cause, so it sorts behind every other loss."""
    return Loss(
        rank=letter.rank,
        component=component,
        cause_class="network" if letter.is_broken_collective else "exception",
        detail=letter.error,
        order=(int(letter.is_broken_collective), letter.time_ns),
        onset_ns=letter.time_ns,
        traceback=letter.traceback,
    )


def loss_of_end(message: wire.WorkerEnded, component: str) -> Loss:
    """A process ended that should not have."""
    return Loss(
        rank=message.rank,
        component=component,
        cause_class="crash",
        detail=_how(message),
        order=(0, message.time_ns),
        onset_ns=message.time_ns,
        traceback=message.log_tail if message.exit_code else "",
    )


def _how(message: wire.WorkerEnded) -> str:
    if message.signal is not None:
        return f"ended by signal {message.signal} ({signal.Signals(message.signal).name})"
    if message.exit_code is None:
        return "ended, its exit code is not known"
    return f"exited with code {message.exit_code}"
