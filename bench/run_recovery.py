"""From the SIGKILL of one rank to the first step that every rank has finished after it: `dougong run` beside torchrun.

    python bench/run_recovery.py [--rounds 5] [--out bench/results/run_recovery.json]

Each round starts three launchers in turn with the same options, on two ranks of one node: torchrun on a script that
saves with `torch.save` every 5 steps; `dougong run` on the same training with `dougong.attach`, saved in memory every 5
steps; and `dougong run` on torchrun's own script, unmodified. The rank to kill changes with the round. Times come from
marks that the scripts write themselves. Two sizes: the GPT of `examples/gpt`, whose state is 129 MB, and one of 0.8 MB,
where little is left but the restart itself.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from _launch import (
    DOUGONG,
    SCRIPTS,
    TORCHRUN,
    Mark,
    events_of,
    machine,
    of_kind,
    print_table,
    read_marks,
    running,
    spread,
    sweep,
    wait,
    write_result,
)

from dougong.event.kinds import GenerationStarted, JobResumed, RecoveryDecided, StateRestored, WorkerLost

SAVE_EVERY = 5
KILL_AFTER_STEP = 13  # three steps after a save
LIMIT_S = 90.0
TARGET_RATIO = 0.5
MODELS = {
    "gpt": ("--layers", "6", "--width", "384", "--heads", "6", "--batch-size", "1", "--steps", "20"),
    "small": ("--layers", "1", "--width", "64", "--heads", "4", "--batch-size", "2", "--steps", "120"),
}
SHAPE = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "3")
CONTENDERS = ("torchrun", "attached", "unmodified")
STAGES = (WorkerLost, RecoveryDecided, GenerationStarted, StateRestored, JobResumed)


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from the kill. `first_step_s`: any step, on every rank; `new_step_s`: one never finished before.

    None: it did not come back within the limit. `stages_s`: when the run recorded what, by kind of event. Beside it
    what recovery must not be bought with: `cold_start_s` from the command to the first step on every rank, and
    `step_s`, the mean of the steps 3 to 12, two saves among them.
    """

    first_step_s: float | None
    new_step_s: float | None
    cold_start_s: float
    step_s: float
    stages_s: dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--out", type=Path, default=Path("bench/results/run_recovery.json"))
    options = parser.parse_args()
    found = machine()
    measured: dict[str, dict[str, list[Recovery]]] = {
        model: {name: [] for name in CONTENDERS} for model in options.models
    }
    for number in range(options.rounds):
        for model in options.models:
            for name in CONTENDERS:
                recovery = measure(name, model, victim=number % 2)
                measured[model][name].append(recovery)
                print(f"round {number + 1}, {model}, {name}: {_shown(recovery.first_step_s)}", flush=True)
    rows = {model: _row(by_name) for model, by_name in measured.items()}
    write_result(
        options.out,
        {
            "benchmark": "run_recovery",
            "machine": found,
            "num_rounds": options.rounds,
            "models": rows,
            "target_ratio": TARGET_RATIO,
            "is_reached": all(_is_reached(row["attached_to_torchrun_ratio"]) for row in rows.values()),
        },
    )
    _print(rows)


def measure(name: str, model: str, *, victim: int) -> Recovery:
    """One start, one kill, one recovery; then the script runs to its end."""
    with tempfile.TemporaryDirectory(prefix="dougong-bench-") as folder:
        directory = Path(folder)
        marks, run_dir = directory / "marks", directory / "run"
        command = (*_command(name, directory=directory, run_dir=run_dir), *MODELS[model], "--marks", str(marks))
        try:
            started_ns = time.monotonic_ns()
            with running(command, log_path=directory / "launcher.log") as launcher:
                pid = wait_for_step(marks, victim)
                killed_ns, killed_wall_ns = time.monotonic_ns(), time.time_ns()
                os.kill(pid, signal.SIGKILL)
                # nothing polls while it recovers: the marks are read when all is over
                wait(launcher, limit_s=LIMIT_S)
            stages_s = {} if name == "torchrun" else stages_of(run_dir, since_ns=killed_wall_ns)
            written = read_marks(marks)
            first_ns, second_ns, twelfth_ns = (finished_ns(written, step, since_ns=0) for step in (1, 2, 12))
            assert first_ns is not None and second_ns is not None and twelfth_ns is not None
            first_step_s, new_step_s = recovery_s(written, victim=victim, victim_pid=pid, killed_ns=killed_ns)
            return Recovery(
                first_step_s=first_step_s,
                new_step_s=new_step_s,
                cold_start_s=(first_ns - started_ns) / 1e9,
                step_s=(twelfth_ns - second_ns) / 1e10,
                stages_s=stages_s,
            )
        finally:
            sweep(run_dir)


def _command(name: str, *, directory: Path, run_dir: Path) -> tuple[str, ...]:
    own_script = (str(SCRIPTS / "own_checkpoint_train.py"), "--checkpoint", str(directory / "state.pt"))
    own_script = (*own_script, "--save-every", str(SAVE_EVERY))
    ours = (*DOUGONG, *SHAPE, "--run-dir", str(run_dir), "--memory-every", str(SAVE_EVERY))
    match name:
        case "torchrun":
            return (*TORCHRUN, *SHAPE, *own_script)
        case "unmodified":
            return (*ours, *own_script)
        case _:
            return (*ours, str(SCRIPTS / "attached_train.py"))


def wait_for_step(marks: Path, victim: int) -> int:
    """The victim's process, once every rank has finished the step after which it is to die."""
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        reached = {mark.rank: mark.pid for mark in read_marks(marks) if mark.step >= KILL_AFTER_STEP}
        if len(reached) == 2:
            return reached[victim]
        time.sleep(0.002)
    raise TimeoutError(f"no rank reached step {KILL_AFTER_STEP} within {LIMIT_S:g} s")


def recovery_s(
    marks: Sequence[Mark], *, victim: int, victim_pid: int, killed_ns: int
) -> tuple[float | None, float | None]:
    """Seconds to the first step and to the first new one; the victim's next process tells where it went on."""
    reborn = [mark for mark in marks if mark.rank == victim and mark.pid != victim_pid]
    if not reborn:
        return None, None
    ended = [mark for mark in marks if mark.rank == victim and mark.pid == victim_pid]
    others = [mark for mark in marks if mark.rank != victim and mark.time_ns <= killed_ns]
    new_step = max(mark.step for mark in (*ended, *others)) + 1
    ends_ns = (finished_ns(marks, max(step, reborn[0].step), since_ns=killed_ns) for step in (0, new_step))
    first_s, new_s = (None if end_ns is None else (end_ns - killed_ns) / 1e9 for end_ns in ends_ns)
    return first_s, new_s


def finished_ns(marks: Sequence[Mark], step: int, *, since_ns: int) -> int | None:
    """When the last rank finished `step`; None if one did not since then.

    After a kill the last time counts: a survivor may have finished the step once more before it ended.
    """
    by_rank: dict[int, int] = {}
    for mark in marks:
        if mark.step == step and mark.time_ns > since_ns and (since_ns or mark.rank not in by_rank):
            by_rank[mark.rank] = mark.time_ns
    return max(by_rank.values()) if len(by_rank) == 2 else None


def stages_of(run_dir: Path, *, since_ns: int) -> dict[str, float]:
    """When the run recorded each step of the recovery, in seconds from the kill."""
    records = events_of(run_dir)
    stages = (
        (kind.__name__, [time_ns for time_ns, _ in of_kind(records, kind) if time_ns > since_ns]) for kind in STAGES
    )
    return {name: (times_ns[0] - since_ns) / 1e9 for name, times_ns in stages if times_ns}


def _row(by_name: dict[str, list[Recovery]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, recoveries in by_name.items():
        for field in ("first_step_s", "new_step_s", "cold_start_s", "step_s"):
            values = [value for recovery in recoveries if (value := getattr(recovery, field)) is not None]
            row[f"{name}_{field}"] = round(statistics.median(values), 4) if values else None
            row[f"{name}_{field}_range"] = spread(values)
        row[f"{name}_num_never_back"] = sum(recovery.first_step_s is None for recovery in recoveries)
    for name in ("attached", "unmodified"):
        row[f"{name}_to_torchrun_ratio"] = ratio_of(by_name[name], by_name["torchrun"])
        row[f"{name}_stages_s"] = median_stages(by_name[name])
    return row


def median_stages(recoveries: list[Recovery]) -> dict[str, float]:
    names = [kind.__name__ for kind in STAGES]
    times_s = {name: [r.stages_s[name] for r in recoveries if name in r.stages_s] for name in names}
    return {name: round(statistics.median(values), 4) for name, values in times_s.items() if values}


def ratio_of(ours: Sequence[Recovery], theirs: Sequence[Recovery]) -> float | None:
    """The median of the rounds' own ratios, since the machine is busier in one round than in another."""
    pairs = ((our.first_step_s, their.first_step_s) for our, their in zip(ours, theirs, strict=True))
    ratios = [our_s / their_s for our_s, their_s in pairs if our_s is not None and their_s is not None]
    return round(statistics.median(ratios), 3) if ratios else None


def _is_reached(ratio: object) -> bool:
    return isinstance(ratio, float) and ratio <= TARGET_RATIO


def _print(rows: dict[str, dict[str, Any]]) -> None:
    table = [
        (
            model,
            name,
            _shown(row[f"{name}_first_step_s"]),
            _shown(row[f"{name}_new_step_s"]),
            "" if name == "torchrun" else str(row[f"{name}_to_torchrun_ratio"]),
            str(row[f"{name}_num_never_back"]),
            _shown(row[f"{name}_cold_start_s"]),
            f"{row[f'{name}_step_s'] * 1e3:.0f} ms",
        )
        for model, row in rows.items()
        for name in CONTENDERS
    ]
    header = (
        "model",
        "launcher and script",
        "first step",
        "first new step",
        "ratio",
        "never back",
        "cold start",
        "step",
    )
    print_table(header, table)
    print(f"target: attached at most {TARGET_RATIO:g} of torchrun")


def _shown(value_s: object) -> str:
    return f"{value_s:.2f} s" if isinstance(value_s, float) else "never"


if __name__ == "__main__":
    main()
