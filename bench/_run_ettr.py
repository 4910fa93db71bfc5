"""The share of a real run's wall time that trained, with a kill, a hang or the loss of a node once a minute.

Counted twice: by the run's own scorecard, and from what the script noted alone: the steps that were done for good, each
as long as an undisturbed one, over the wall time from the job's start to its last step.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import msgspec
import yaml
from _launch import events_of, of_kind
from _run_systems import NUM_RANKS, OFTEN_COPIED, OURS, launched, load_1_min, options_of, records_of

from dougong.event.kinds import FaultInjected, JobStarted, WorkerLost

KINDS = ("kill-worker", "hang-worker", "kill-node")
END_LIMIT_S = 120.0


class EttrFigures(msgspec.Struct, frozen=True, kw_only=True):
    """`by_script` is the second count. `wall_s` is the scorecard's."""

    load_average: float
    ettr: float
    by_script: float
    wall_s: float
    step_s: float
    num_faults: int
    num_interruptions: int
    badput_s: dict[str, float]


def measure(*, duration_s: float, every_s: float, state_mb: float, compute_s: float, directory: Path) -> EttrFigures:
    """A run of `duration_s` that is stopped in order at its end. Raises RuntimeError if it ends before."""
    load_average = load_1_min()
    directory.mkdir(parents=True, exist_ok=True)
    times_s = [every_s * number for number in range(1, int(duration_s / every_s) + 1) if every_s * number < duration_s]
    faults = [{"kind": KINDS[number % len(KINDS)], "at_s": at_s} for number, at_s in enumerate(times_s)]
    chaos = directory / "chaos.yaml"
    chaos.write_text(yaml.safe_dump({"seed": 1, "faults": faults}))
    num_node_losses = sum(fault["kind"] == "kill-node" for fault in faults)
    shape = ("--nodes", str(NUM_RANKS), "--procs-per-node", "1", "--spares", str(num_node_losses + 1))
    system = msgspec.structs.replace(OURS, launcher=OURS.launcher[: OURS.launcher.index("--standalone")])
    arguments = options_of({"state_mb": state_mb, "compute_s": compute_s})
    options = (*shape, *OFTEN_COPIED, "--chaos", str(chaos), "--run-dir", str(directory / "run"))
    with launched(system, arguments, directory=directory, options=options) as launch:
        try:
            code = launch.process.wait(timeout=duration_s)
            raise RuntimeError(f"the run ended with {code} after less than {duration_s:.0f} s\n{launch.log[-3000:]}")
        except subprocess.TimeoutExpired:
            launch.process.send_signal(signal.SIGINT)
        launch.process.wait(timeout=END_LIMIT_S)
    return _figures(directory, load_average=load_average)


def _figures(directory: Path, *, load_average: float) -> EttrFigures:
    run_dir = directory / "run"
    command = (sys.executable, "-m", "dougong.cli.main", "score", "--json", str(run_dir))
    card = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    events, records = events_of(run_dir), records_of(directory)
    started_ns = of_kind(events, JobStarted)[0][0]
    steps = [record for record in records if record.kind == "step"]
    step_s = statistics.median((record.ns - record.begin_ns) / 1e9 for record in steps)
    wall_s = (max(record.wall_ns for record in steps) - started_ns) / 1e9
    return EttrFigures(
        load_average=load_average,
        ettr=card["ettr"],
        by_script=max(record.step for record in steps) * step_s / wall_s,
        wall_s=card["wall_s"],
        step_s=step_s,
        num_faults=len(of_kind(events, FaultInjected)),
        num_interruptions=len(of_kind(events, WorkerLost)),
        badput_s=card["badput_s"],
    )
