"""From the onset of a silent fault to the moment the run knows: a stopped process, and a lock that is never released.

    python bench/run_detection.py [--rounds 3] [--out bench/results/run_detection.json]

A stop is found within 3 s; a hang of an attached script within max(3 s, 6 × p99 step), so it is measured with short
steps and with long ones. A stop begins when the signal is sent; a hang when its rank has finished its last step, which
the script notes itself. For scale, measured once before and not here: torchrun found a stopped rank after 1,800 s, the
time-out of gloo's process group.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml
from _launch import (
    DOUGONG,
    SCRIPTS,
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

from dougong import telemetry
from dougong.event.describe import describe
from dougong.event.kinds import FaultInjected, JobFinished, Recorded, WorkerLost
from dougong.spec.chaos import FaultKind

STOP_LIMIT_S = 3.0
HANG_MIN_S = 3.0
HANG_P99_FACTOR = 6.0
LIMIT_S = 180.0
TORCHRUN_CITED_S = 1800.1


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One fault, again and again in one run of one script."""

    name: str
    fault: FaultKind
    step_s: float
    every_steps: int
    is_attached: bool = True


CASES = (
    Case(name="stopped, attached", fault="stop-worker", step_s=0.02, every_steps=60),
    Case(name="stopped, unmodified", fault="stop-worker", step_s=0.0, every_steps=60, is_attached=False),
    Case(name="hang, 20 ms steps", fault="hang-worker", step_s=0.02, every_steps=60),
    Case(name="hang, 0.7 s steps", fault="hang-worker", step_s=0.7, every_steps=8),
)


class Detection(msgspec.Struct, frozen=True, kw_only=True):
    """One fault found: how long after its onset, and how long it may have taken."""

    found_s: float
    limit_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="faults of each case")
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], help="only these")
    parser.add_argument("--out", type=Path, default=Path("bench/results/run_detection.json"))
    options = parser.parse_args()
    found = machine()
    cases = [case for case in CASES if options.cases is None or case.name in options.cases]
    rows = {case.name: _row(measure(case, num_faults=options.rounds)) for case in cases}
    print_table(
        ("fault", "found after (median)", "slowest", "limit", "in time"),
        [
            (
                name,
                f"{row['found_s']:.2f} s",
                f"{row['found_s_range'][1]:.2f} s",
                f"{row['limit_s']:.2f} s",
                f"{row['num_in_time']} of {row['num_found']}",
            )
            for name, row in rows.items()
        ],
    )
    write_result(
        options.out,
        {
            "benchmark": "run_detection",
            "machine": found,
            "num_rounds": options.rounds,
            "cases": rows,
            "torchrun_cited_s": TORCHRUN_CITED_S,
            "is_reached": all(row["num_in_time"] == options.rounds for row in rows.values()),
        },
    )


def measure(case: Case, *, num_faults: int) -> tuple[Detection, ...]:
    """One run with the fault `num_faults` times, on alternating ranks."""
    with tempfile.TemporaryDirectory(prefix="dougong-bench-") as folder:
        directory = Path(folder)
        run_dir, marks, chaos = directory / "run", directory / "marks", directory / "chaos.yaml"
        faults = [
            {"kind": case.fault, "at_step": case.every_steps * (number + 1), "rank": number % 2}
            for number in range(num_faults)
        ]
        chaos.write_text(yaml.safe_dump({"seed": 1, "faults": faults}))
        options = ("--nodes", "2", "--run-dir", str(run_dir), "--chaos", str(chaos))
        script = _script(case, directory, num_steps=case.every_steps * (num_faults + 1))
        try:
            with running((*DOUGONG, *options, *script, "--marks", str(marks)), log_path=directory / "log") as launcher:
                wait(launcher, limit_s=LIMIT_S)
            records = events_of(run_dir)
            if not of_kind(records, JobFinished):
                last = "\n".join(describe(record.event) for record in records[-10:])
                raise RuntimeError(f"{case.name}: the run did not finish; its last events:\n{last}")
            return _detections(case, records, read_marks(marks), run_dir)
        finally:
            sweep(run_dir)


def _script(case: Case, directory: Path, *, num_steps: int) -> tuple[str, ...]:
    if case.is_attached:
        return (str(SCRIPTS / "small_train.py"), "--step-s", str(case.step_s), "--steps", str(num_steps))
    own = (str(SCRIPTS / "own_checkpoint_train.py"), "--checkpoint", str(directory / "state.pt"))
    return (*own, "--steps", str(20 * num_steps))


def _detections(case: Case, records: Sequence[Recorded], marks: Sequence[Mark], run_dir: Path) -> tuple[Detection, ...]:
    """Each fault with the first loss after it."""
    losses = of_kind(records, WorkerLost)
    found: list[Detection] = []
    for injected_ns, fault in of_kind(records, FaultInjected):
        lost_ns = next((time_ns for time_ns, _ in losses if time_ns > injected_ns), None)
        if lost_ns is None:
            continue
        onset_ns = injected_ns
        if case.fault == "hang-worker":
            last_mark_ns = [mark.wall_ns for mark in marks if mark.rank == fault.rank and mark.wall_ns < lost_ns]
            onset_ns = max(injected_ns, *last_mark_ns)
        limit_s = STOP_LIMIT_S if case.fault == "stop-worker" else _hang_limit_s(run_dir, before_ns=lost_ns)
        found.append(Detection(found_s=(lost_ns - onset_ns) / 1e9, limit_s=limit_s))
    return tuple(found)


def _hang_limit_s(run_dir: Path, *, before_ns: int) -> float:
    """max(3 s, 6 × p99 of the steps so far), each step as long as its slowest rank."""
    slowest_s: dict[int, float] = {}
    for rank in range(2):
        samples = telemetry.read(run_dir / "telemetry", f"step_s/rank-{rank}", until_ns=before_ns)
        for step, step_s in zip(samples.indices, samples.values, strict=True):
            slowest_s[step] = max(step_s, slowest_s.get(step, 0.0))
    p99_s = sorted(slowest_s.values())[int(0.99 * len(slowest_s))] if slowest_s else 0.0
    return max(HANG_MIN_S, HANG_P99_FACTOR * p99_s)


def _row(detections: Sequence[Detection]) -> dict[str, Any]:
    times_s = [detection.found_s for detection in detections]
    return {
        "found_s": round(statistics.median(times_s), 3),
        "found_s_range": spread(times_s),
        "limit_s": round(statistics.median(detection.limit_s for detection in detections), 3),
        "num_found": len(detections),
        "num_in_time": sum(detection.found_s <= detection.limit_s for detection in detections),
    }


if __name__ == "__main__":
    main()
