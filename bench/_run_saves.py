"""What a save costs a step of training, method by method: held up, lost, complete after; and whether it is whole.

Lost = over all steps from the save until it is complete, what each took longer than a step with no save about. It
holds the blocking and what saving beside training slows down.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec
from _launch import events_of, of_kind
from _run_systems import (
    DCP_ASYNC,
    DCP_SAVE,
    DCP_TUNED,
    DLROVER_DISK,
    DLROVER_MEMORY,
    OURS,
    TORCH_FILES,
    Record,
    System,
    launched,
    load_1_min,
    memory_floor_s,
    options_of,
    slowest_s,
    wait_for_records,
)
from _run_verify import Verdict, newest, verify

from dougong.event.kinds import CheckpointSaved

LIMIT_S = 400.0
STEPS_OF_A_MEMORY_SAVE = 2  # within which a copy in memory is over
OUR_EVERY = 7  # steps; a durable save takes about three


class Method(msgspec.Struct, frozen=True, kw_only=True):
    """A way to save. `estimate_s`: how long measuring it takes at full size."""

    name: str
    system: System
    is_durable: bool
    is_synced: bool
    estimate_s: float


class SaveFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one method, each save but the first (which also makes its memory). Seconds; the slowest rank's.

    `floor_s`: copying the state into touched shared memory, both ranks at once, in this same run. `durable_s` is empty
    for what stays in memory. `restore_s`: back into the live tensors, the files in the page cache.
    """

    method: str
    is_synced: bool
    is_busy: bool
    load_average: float
    base_step_s: float
    floor_s: tuple[float, ...]
    first_block_s: float
    block_s: tuple[float, ...]
    lost_s: tuple[float, ...]
    durable_s: tuple[float, ...]
    restore_s: tuple[float, ...] = ()
    verdict: Verdict | None = None


METHODS = (
    Method(name="torch.save", system=TORCH_FILES, is_durable=True, is_synced=False, estimate_s=55),
    Method(name="DCP save", system=DCP_SAVE, is_durable=True, is_synced=True, estimate_s=65),
    Method(name="DCP async_save", system=DCP_ASYNC, is_durable=True, is_synced=True, estimate_s=70),
    Method(name="DCP async_save, tuned", system=DCP_TUNED, is_durable=True, is_synced=True, estimate_s=75),
    Method(name="DLRover memory", system=DLROVER_MEMORY, is_durable=False, is_synced=False, estimate_s=35),
    Method(name="DLRover disk", system=DLROVER_DISK, is_durable=True, is_synced=False, estimate_s=70),
    Method(name="Dougong memory", system=OURS, is_durable=False, is_synced=False, estimate_s=30),
    Method(name="Dougong", system=OURS, is_durable=True, is_synced=True, estimate_s=50),
)
BUSY_METHODS = ("DCP async_save, tuned", "DLRover disk", "Dougong memory", "Dougong")
RESTORED = ("torch.save", "DCP save", "DLRover memory", "Dougong memory")


def measure(method: Method, *, is_busy: bool, rounds: int, state_mb: float, directory: Path) -> SaveFigures:
    """`rounds` saves and one more before them, in one start. Raises RuntimeError if the script does not end well."""
    load_average = load_1_min()
    arguments = {"state_mb": state_mb, "busy": is_busy, "floor_rounds": 5, "prepare": True}
    is_ours = method.system is OURS
    arguments["restore_rounds"] = rounds if method.name in RESTORED and not is_busy else 0
    options: tuple[str, ...] = ()
    if is_ours:
        every = OUR_EVERY if method.is_durable else STEPS_OF_A_MEMORY_SAVE + 2
        arguments["steps"] = every * (rounds + 2) - 1
        durable_every = every if method.is_durable else 100_000
        options = options_of({"memory_every": every, "durable_every": durable_every, "keep": 3})
    else:
        arguments |= {"saves": rounds + 1, "quiet_steps": 3}
    with launched(method.system, options_of(arguments), directory=directory, options=options) as launch:
        records = wait_for_records(launch, limit_s=LIMIT_S)
    saves = _our_saves(records, directory, method) if is_ours else _their_saves(records, method)
    return _figures(method, records, saves, is_busy=is_busy, load_average=load_average, directory=directory)


class Save(msgspec.Struct, frozen=True, kw_only=True):
    """One save after `step`. `end_ns`: when it was complete, monotonic; None = it stays in memory."""

    step: int
    begin_ns: int
    block_s: float
    end_ns: int | None


def _their_saves(records: Sequence[Record], method: Method) -> tuple[Save, ...]:
    found: list[Save] = []
    for step in sorted({record.step for record in records if record.kind == "save"}):
        held = [record for record in records if record.kind == "save" and record.step == step]
        complete_ns = [record.ns for record in records if record.kind == "durable" and record.step == step]
        if method.is_durable and not complete_ns:
            raise RuntimeError(f"{method.name}: the save of step {step} was never complete")
        found.append(
            Save(
                step=step,
                begin_ns=min(record.begin_ns for record in held),
                block_s=max(record.ns - record.begin_ns for record in held) / 1e9,
                end_ns=max(complete_ns) if method.is_durable else None,
            )
        )
    return tuple(found)


def _our_saves(records: Sequence[Record], directory: Path, method: Method) -> tuple[Save, ...]:
    """From the events; the hold-up is what they say or what the script saw between its steps, whichever is longer."""
    last_step = max(record.step for record in records if record.kind == "step")
    tier = "durable" if method.is_durable else "memory"
    events = {
        event.step: (wall_ns, event)
        for wall_ns, event in of_kind(events_of(directory / "run"), CheckpointSaved)
        if event.tier == tier
    }
    every = OUR_EVERY if method.is_durable else STEPS_OF_A_MEMORY_SAVE + 2
    found: list[Save] = []
    for step in range(every, last_step - STEPS_OF_A_MEMORY_SAVE + 1, every):
        ends = [record for record in records if record.kind == "step" and record.step == step]
        after = {
            record.rank: record.begin_ns for record in records if record.kind == "step" and record.step == step + 1
        }
        gap_s = max((after[record.rank] - record.ns) / 1e9 for record in ends)
        said_s, end_ns = 0.0, None
        if step in events:
            wall_ns, event = events[step]
            said_s = event.stall_s
            end_ns = min(record.ns + wall_ns - record.wall_ns for record in ends) if method.is_durable else None
        elif method.is_durable:
            raise RuntimeError(f"no durable checkpoint of step {step} was committed")
        begin_ns = min(record.ns for record in ends)
        found.append(Save(step=step, begin_ns=begin_ns, block_s=max(gap_s, said_s), end_ns=end_ns))
    return tuple(found)


def _figures(
    method: Method,
    records: Sequence[Record],
    saves: Sequence[Save],
    *,
    is_busy: bool,
    load_average: float,
    directory: Path,
) -> SaveFigures:
    ends_ns = _step_ends_ns(records)
    windows = [_window(save, ends_ns) for save in saves]
    disturbed = {step for window in windows for step in window}
    quiet_s = [
        (ends_ns[step] - ends_ns[step - 1]) / 1e9 for step in sorted(ends_ns) if step > 2 and step not in disturbed
    ]
    base_s = statistics.median(quiet_s)
    lost_s = [sum((ends_ns[step] - ends_ns[step - 1]) / 1e9 - base_s for step in window) for window in windows]
    return SaveFigures(
        method=method.name,
        is_synced=method.is_synced,
        is_busy=is_busy,
        load_average=load_average,
        base_step_s=base_s,
        floor_s=tuple(memory_floor_s(records)),
        first_block_s=saves[0].block_s,
        block_s=tuple(save.block_s for save in saves[1:]),
        lost_s=tuple(lost_s[1:]),
        durable_s=tuple((save.end_ns - save.begin_ns) / 1e9 for save in saves[1:] if save.end_ns is not None),
        restore_s=tuple(slowest_s([record for record in records if record.kind == "restore"])),
        verdict=_verdict(method, directory),
    )


def _step_ends_ns(records: Sequence[Record]) -> dict[int, int]:
    """When the slowest rank had finished each step."""
    ends_ns: dict[int, int] = {}
    for record in records:
        if record.kind == "step":
            ends_ns[record.step] = max(record.ns, ends_ns.get(record.step, 0))
    return ends_ns


def _window(save: Save, ends_ns: dict[int, int]) -> range:
    """The steps that the save can have slowed down."""
    if save.end_ns is None:
        return range(save.step + 1, min(save.step + STEPS_OF_A_MEMORY_SAVE, max(ends_ns)) + 1)
    last = next((step for step in sorted(ends_ns) if step > save.step and ends_ns[step] >= save.end_ns), max(ends_ns))
    return range(save.step + 1, last + 1)


def _verdict(method: Method, directory: Path) -> Verdict | None:
    """Of a checkpoint that was written while training went on, read back."""
    if not method.is_durable:
        return None
    if method.system is OURS:
        # the newest was written at the end, with nothing beside it
        return verify("dcp", newest(directory / "run" / "checkpoints", before_last=1))
    if method.system.script == TORCH_FILES.script:
        return verify("torch", directory / "checkpoints")
    kind = "dcp" if method.system.script == DCP_SAVE.script else "torch"
    return verify(kind, newest(directory / "checkpoints"))
