"""From the loss of a node to the first step that every rank has finished after it, from the copies on other nodes:
`dougong run` beside torchrun, which restarts from its file on disk.

    python bench/peer_restore.py [--rounds 5] [--out bench/results/peer_restore.json]

Ours plays two nodes and a spare, saves in memory every 5 steps and never durably; the node of one rank dies with its
agent, its worker and all of its memory once its state was copied, and the rank comes back on the spare. Torchrun has
the easier part: only the process of one rank dies, on one node, and the file that it saved every 5 steps lies in the
page cache. The rank changes with the round.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import run_recovery
from _launch import (
    DOUGONG,
    SCRIPTS,
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
from run_recovery import KILL_AFTER_STEP, LIMIT_S, MODELS, SAVE_EVERY, Recovery

from dougong.backend.local.nodes import LocalNodes
from dougong.event.kinds import CheckpointSaved, RecoveryDecided
from dougong.run.layout import node_directory
from dougong.run.settings import load_settings, run_directory

TARGET_RATIO = 0.2
SHAPE = ("--nodes", "2", "--procs-per-node", "1", "--spares", "1", "--oversubscribe", "--no-score")
SAVES = ("--memory-every", str(SAVE_EVERY), "--durable-every", "1000000")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--out", type=Path, default=Path("bench/results/peer_restore.json"))
    options = parser.parse_args()
    found = machine()
    measured: dict[str, list[tuple[Recovery, Recovery]]] = {model: [] for model in options.models}
    for number in range(options.rounds):
        for model in options.models:
            theirs = run_recovery.measure("torchrun", model, victim=number % 2)
            ours = lose_node(model, victim=number % 2)
            measured[model].append((ours, theirs))
            print(f"round {number + 1}, {model}: {ours.first_step_s} s, torchrun {theirs.first_step_s} s", flush=True)
    rows = {model: _row(pairs) for model, pairs in measured.items()}
    write_result(
        options.out,
        {
            "benchmark": "peer_restore",
            "machine": found,
            "num_rounds": options.rounds,
            "models": rows,
            "target_ratio": TARGET_RATIO,
            "is_reached": all(row["ratio"] is not None and row["ratio"] <= TARGET_RATIO for row in rows.values()),
        },
    )
    _print(rows)


def lose_node(model: str, *, victim: int) -> Recovery:
    """One start, one lost node, one recovery from the copy; then the script runs to its end."""
    with tempfile.TemporaryDirectory(prefix="dougong-bench-") as folder:
        directory = Path(folder)
        marks, run_dir = directory / "marks", directory / "run"
        script = (str(SCRIPTS / "attached_train.py"), *MODELS[model], "--marks", str(marks))
        command = (*DOUGONG, *SHAPE, *SAVES, "--run-dir", str(run_dir), *script)
        try:
            started_ns = time.monotonic_ns()
            with running(command, log_path=directory / "launcher.log") as launcher:
                pid = run_recovery.wait_for_step(marks, victim)
                _wait_for_copy(run_dir)
                killed_ns, killed_wall_ns = time.monotonic_ns(), time.time_ns()
                _kill_node(run_dir, victim)
                wait(launcher, limit_s=LIMIT_S)
            decided = [event for _, event in of_kind(events_of(run_dir), RecoveryDecided)]
            assert [event.restore_source for event in decided] == ["peer"], decided
            written = read_marks(marks)
            first_step_s, new_step_s = run_recovery.recovery_s(
                written, victim=victim, victim_pid=pid, killed_ns=killed_ns
            )
            finished_ns = {step: run_recovery.finished_ns(written, step, since_ns=0) for step in (1, 2, 12)}
            first_ns, second_ns, twelfth_ns = finished_ns[1], finished_ns[2], finished_ns[12]
            assert first_ns is not None and second_ns is not None and twelfth_ns is not None
            return Recovery(
                first_step_s=first_step_s,
                new_step_s=new_step_s,
                cold_start_s=(first_ns - started_ns) / 1e9,
                step_s=(twelfth_ns - second_ns) / 1e10,
                stages_s=run_recovery.stages_of(run_dir, since_ns=killed_wall_ns),
            )
        finally:
            sweep(run_dir)


def _wait_for_copy(run_dir: Path) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        saved = of_kind(events_of(run_dir), CheckpointSaved)
        if any(event.tier == "peer" for _, event in saved):
            return
        time.sleep(0.05)
    raise TimeoutError(f"nothing was copied within {LIMIT_S:g} s, {KILL_AFTER_STEP} steps after the start")


def _kill_node(run_dir: Path, victim: int) -> None:
    settings = load_settings(run_directory(run_dir))
    memory_root = Path(settings.memory_root)
    nodes = LocalNodes(
        run_dir,
        run_id=settings.run_id,
        memory_of=lambda component: node_directory(settings.run_id, component, memory_root=memory_root).root,
    )
    nodes.kill_node(settings.nodes[victim])


def _row(pairs: list[tuple[Recovery, Recovery]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, recoveries in (("ours", [our for our, _ in pairs]), ("torchrun", [their for _, their in pairs])):
        for field in ("first_step_s", "new_step_s"):
            values = [value for recovery in recoveries if (value := getattr(recovery, field)) is not None]
            row[f"{name}_{field}"] = round(statistics.median(values), 4) if values else None
            row[f"{name}_{field}_range"] = spread(values)
        row[f"{name}_num_never_back"] = sum(recovery.first_step_s is None for recovery in recoveries)
    row["ratio"] = run_recovery.ratio_of([our for our, _ in pairs], [their for _, their in pairs])
    row["ours_stages_s"] = run_recovery.median_stages([our for our, _ in pairs])
    return row


def _print(rows: dict[str, dict[str, Any]]) -> None:
    table = [
        (
            model,
            name,
            str(row[f"{name}_first_step_s"]),
            str(row[f"{name}_new_step_s"]),
            str(row["ratio"]) if name == "ours" else "",
            str(row[f"{name}_num_never_back"]),
        )
        for model, row in rows.items()
        for name in ("torchrun", "ours")
    ]
    print_table(("model", "who", "first step, s", "first new step, s", "ratio", "never back"), table)
    print(f"target: at most {TARGET_RATIO:g} of torchrun")


if __name__ == "__main__":
    main()
