"""From the SIGKILL or SIGSTOP of one rank, or the loss of its node, to the next step on every rank.

The kill falls half a step after the last save was complete: with us, after a memory checkpoint was whole on every rank,
of which one is made every 5 steps, as by default. Steps that were finished since that save are done again; what counts
is the first step that every rank finishes after its restart, and that of the first new one is told beside it.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import yaml
from _launch import events_of, of_kind
from _run_systems import (
    DLROVER_RUN,
    NUM_RANKS,
    NVRX,
    OFTEN_COPIED,
    OURS,
    TORCHRUN_SAVING,
    Launch,
    Record,
    System,
    first_said_ns,
    launched,
    load_1_min,
    options_of,
    records_of,
)

from dougong.event.kinds import FaultInjected, GenerationStarted, StateRestored, WorkerLost
from dougong.run.layout import RunDirectory, node_directory
from dougong.run.settings import load_settings
from dougong.run.snapshot import SnapshotFiles

START_LIMIT_S = 90.0
BACK_LIMIT_S = 60.0
COMPUTE_S = 0.1
SMALL_MB = 0.3
STEPS_BEFORE = 5
NODE_EVERY_STEPS = 110  # copies on peers are made in rounds, which at full size take 6 s and begin every 12
SYSTEMS = (OURS, TORCHRUN_SAVING, DLROVER_RUN, NVRX)


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from the kill; None = it did not come back within a minute, or the stage is not known.

    `new_step_s`: the first step that not all ranks had finished before, on every rank. `any_step_s`: any step. The
    stages are those of the killed rank's next process; `detected_s` is when the launcher first said something.
    `restored_s` is how long the slowest rank took to put its state back, by the run's own account.
    """

    victim: int
    new_step_s: float | None = None
    any_step_s: float | None = None
    detected_s: float | None = None
    started_s: float | None = None
    imported_s: float | None = None
    group_s: float | None = None
    built_s: float | None = None
    loaded_s: float | None = None
    restored_s: float | None = None
    rung: str = ""
    source: str = ""
    num_redone: int | None = None


class KillFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one start of one system. `step_s`: a step with nothing wrong."""

    system: str
    is_full: bool
    load_average: float
    step_s: float
    recoveries: tuple[Recovery, ...]


def measure(
    system: System,
    *,
    kills: int,
    is_full: bool,
    state_mb: float,
    directory: Path,
    by: signal.Signals = signal.SIGKILL,
    limit_s: float = BACK_LIMIT_S,
) -> KillFigures:
    """One start and `kills` kills (or stops), on alternating ranks. Raises RuntimeError if it does not even start."""
    load_average = load_1_min()
    arguments = {"state_mb": state_mb if is_full else SMALL_MB, "compute_s": COMPUTE_S, "quiet_steps": 3}
    done: list[tuple[int, int, int]] = []
    with launched(system, options_of(arguments), directory=directory) as launch:
        since_ns = 0
        for number in range(kills):
            victim = number % NUM_RANKS
            pid = _wait_until_saved(launch, victim=victim, since_ns=since_ns)
            time.sleep(0.5 * _step_s(records_of(directory)))
            killed_ns, killed_wall_ns = time.monotonic_ns(), time.time_ns()
            os.kill(pid, by)
            done.append((victim, killed_ns, killed_wall_ns))
            since_ns = _wait_until_back(launch, victim=victim, killed_ns=killed_ns, limit_s=limit_s)
            if not since_ns:
                break
    return _figures(launch, done, is_full=is_full, load_average=load_average)


def measure_node_loss(*, losses: int, state_mb: float, directory: Path) -> KillFigures:
    """Two nodes with one rank each; one is lost with its memory, and a spare takes its place."""
    load_average = load_1_min()
    chaos = directory / "chaos.yaml"
    directory.mkdir(parents=True, exist_ok=True)
    steps = [NODE_EVERY_STEPS * (number + 1) for number in range(losses)]
    chaos.write_text(yaml.safe_dump({"seed": 1, "faults": [{"kind": "kill-node", "at_step": step} for step in steps]}))
    shape = ("--nodes", str(NUM_RANKS), "--procs-per-node", "1", "--spares", str(losses), *OFTEN_COPIED[2:])
    system = msgspec.structs.replace(OURS, launcher=OURS.launcher[: OURS.launcher.index("--standalone")])
    arguments = options_of({"state_mb": state_mb, "compute_s": COMPUTE_S, "steps": NODE_EVERY_STEPS * (losses + 1)})
    durable = ("--durable-every", "1000000")  # a newer state on the disk would be taken
    options = (*shape, *durable, "--chaos", str(chaos), "--run-dir", str(directory / "run"))
    with launched(system, arguments, directory=directory, options=options) as launch:
        launch.process.wait(timeout=START_LIMIT_S + losses * BACK_LIMIT_S)
    done: list[tuple[int, int, int]] = []
    records = records_of(directory)
    for wall_ns, event in of_kind(events_of(launch.run_dir), FaultInjected):
        near = min(records, key=lambda record: abs(record.wall_ns - wall_ns))  # ties wall time to monotonic time
        done.append((_rank_lost(launch, wall_ns), near.ns + wall_ns - near.wall_ns, wall_ns))
        assert event.fault == "kill-node"
    return _figures(launch, done, is_full=True, load_average=load_average)


def _rank_lost(launch: Launch, injected_ns: int) -> int:
    losses = of_kind(events_of(launch.run_dir), WorkerLost)
    return next((event.rank for wall_ns, event in losses if wall_ns >= injected_ns), 0)


def _wait_until_saved(launch: Launch, *, victim: int, since_ns: int) -> int:
    """The victim's process, once every rank has a complete save of a step that was finished since `since_ns`."""
    deadline_s = time.monotonic() + START_LIMIT_S
    kind, wanted = ("step", STEPS_BEFORE) if launch.system is OURS else ("save", 1)
    saved_before: int | None = None
    while time.monotonic() < deadline_s and launch.process.poll() is None:
        records = [record for record in records_of(launch.directory) if record.ns > since_ns and record.kind == kind]
        by_rank = [[record for record in records if record.rank == rank] for rank in range(NUM_RANKS)]
        is_there = all(len(own) >= wanted for own in by_rank)
        if is_there and launch.system is OURS:
            saved = _saved_in_memory(launch)
            saved_before = saved if saved_before is None else saved_before
            is_there = saved > saved_before  # just now
        elif is_there:
            is_there = len({own[-1].step for own in by_rank}) == 1
        if is_there:
            return by_rank[victim][-1].pid
        time.sleep(0.005)
    raise RuntimeError(f"{launch.system.name} did not come to a save\n{launch.log[-2000:]}")


def _saved_in_memory(launch: Launch) -> int:
    """The newest step of which every rank has a whole memory checkpoint; 0 = there is none."""
    run = RunDirectory(launch.run_dir)
    settings = load_settings(run)
    node = node_directory(settings.run_id, settings.nodes[0], memory_root=Path(settings.memory_root))
    held = [{slot.step for slot in SnapshotFiles(node.snapshot(rank)).slots()} for rank in range(NUM_RANKS)]
    return max(set.intersection(*held), default=0)


def _wait_until_back(launch: Launch, *, victim: int, killed_ns: int, limit_s: float) -> int:
    """When the new step was finished everywhere; 0 if it was not in time."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s and launch.process.poll() is None:
        time.sleep(0.1)  # the times come from the records; polling would only take a core from the recovery
        end_ns = _new_step_ns(records_of(launch.directory), victim=victim, killed_ns=killed_ns)
        if end_ns is not None:
            return end_ns
    return 0


def _figures(
    launch: Launch, done: Sequence[tuple[int, int, int]], *, is_full: bool, load_average: float
) -> KillFigures:
    records = records_of(launch.directory)
    recoveries = tuple(
        _recovery(launch, records, victim=victim, killed_ns=killed_ns, killed_wall_ns=killed_wall_ns)
        for victim, killed_ns, killed_wall_ns in done
    )
    return KillFigures(
        system=launch.system.name,
        is_full=is_full,
        load_average=load_average,
        step_s=_step_s(records),
        recoveries=recoveries,
    )


def _recovery(
    launch: Launch, records: Sequence[Record], *, victim: int, killed_ns: int, killed_wall_ns: int
) -> Recovery:
    loaded = _phase(records, victim=victim, killed_ns=killed_ns, name="loaded")
    new_ns = _new_step_ns(records, victim=victim, killed_ns=killed_ns)
    if loaded is None or new_ns is None:
        return Recovery(victim=victim)
    any_ns = _finished_ns(records, from_step=0, since_ns=loaded.ns)
    stages = {
        f"{name}_s": (phase.ns - killed_ns) / 1e9
        for name in ("started", "imported", "group", "built", "loaded")
        if (phase := _phase(records, victim=victim, killed_ns=killed_ns, name=name)) is not None
    }
    detected_ns, restored_s, rung, source = _told(launch, killed_wall_ns)
    return Recovery(
        victim=victim,
        new_step_s=(new_ns - killed_ns) / 1e9,
        any_step_s=None if any_ns is None else (any_ns - killed_ns) / 1e9,
        detected_s=None if detected_ns is None else (detected_ns - killed_wall_ns) / 1e9,
        restored_s=restored_s,
        rung=rung,
        source=source,
        num_redone=_common_step(records, before_ns=killed_ns) - loaded.step,
        **stages,
    )


def _told(launch: Launch, killed_wall_ns: int) -> tuple[int | None, float | None, str, str]:
    """When the launcher had noticed; with us also how long the reload took, on which rung and from where."""
    if launch.system.script != OURS.script:
        return first_said_ns(launch.log, after_ns=killed_wall_ns), None, "", ""
    events = events_of(launch.run_dir)
    lost = [wall_ns for wall_ns, _ in of_kind(events, WorkerLost) if wall_ns > killed_wall_ns]
    started = [event for wall_ns, event in of_kind(events, GenerationStarted) if wall_ns > killed_wall_ns]
    restored = [event for wall_ns, event in of_kind(events, StateRestored) if wall_ns > killed_wall_ns]
    if not lost or not started or not restored:
        return None, None, "", ""
    return lost[0], restored[0].reload_s, started[0].rung, restored[0].source


def _new_step_ns(records: Sequence[Record], *, victim: int, killed_ns: int) -> int | None:
    """When the slowest rank had finished the first new step; None if one has not."""
    loaded = _phase(records, victim=victim, killed_ns=killed_ns, name="loaded")
    if loaded is None:
        return None
    return _finished_ns(records, from_step=_common_step(records, before_ns=killed_ns) + 1, since_ns=loaded.ns)


def _finished_ns(records: Sequence[Record], *, from_step: int, since_ns: int) -> int | None:
    """When every rank had finished its first step from `from_step` on that ended after `since_ns`."""
    first: dict[int, int] = {}
    for record in records:
        if record.kind == "step" and record.ns > since_ns and record.step >= from_step:
            first.setdefault(record.rank, record.ns)
    return max(first.values()) if len(first) == NUM_RANKS else None


def _common_step(records: Sequence[Record], *, before_ns: int) -> int:
    """The newest step that every rank had finished by then."""
    newest = {record.rank: record.step for record in records if record.kind == "step" and record.ns <= before_ns}
    return min(newest.values()) if len(newest) == NUM_RANKS else 0


def _phase(records: Sequence[Record], *, victim: int, killed_ns: int, name: str) -> Record | None:
    """The first one of this name after the kill, of the killed rank."""
    return next(
        (
            record
            for record in records
            if record.kind == "phase" and record.name == name and record.rank == victim and record.ns > killed_ns
        ),
        None,
    )


def _step_s(records: Sequence[Record]) -> float:
    """The median step, from the end of the one before it."""
    times_s = [(record.ns - record.begin_ns) / 1e9 for record in records if record.kind == "step" and record.rank == 0]
    return statistics.median(times_s) if times_s else COMPUTE_S
