"""What `dougong.attach` costs a step when nothing is saved: attached steps and plain ones in turn, in one process.

    python bench/attach_overhead.py [--pairs 400] [--out bench/results/attach_overhead.json]

One rank under `dougong run`, with a heartbeat, a record of loss, tokens and sample ids, and checkpoints so rare that
none is due. The difference is measured twice: with steps of some 30 ms of work, as the median of the paired
differences, and with steps that do nothing, where noise hides nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from pathlib import Path

from _launch import DOUGONG, SCRIPTS, machine, print_table, running, sweep, wait, write_result

LIMIT_S = 240.0
NEVER = "1000000000"
TARGET_RATIO = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path("bench/results/attach_overhead.json"))
    options = parser.parse_args()
    found = machine()
    times_ns = measure(num_pairs=options.pairs)
    plain_s, paired_s, interval_s = _medians_s(times_ns["work"])
    empty_plain_s, empty_s, _ = _medians_s(times_ns["nothing"])
    result = {
        "benchmark": "attach_overhead",
        "machine": found,
        "num_pairs": options.pairs,
        "step_s": round(plain_s, 6),
        "overhead_s": round(paired_s, 8),
        "overhead_s_95_percent": [round(value_s, 8) for value_s in interval_s],
        "overhead_ratio": round(paired_s / plain_s, 5),
        "empty_step_s": round(empty_plain_s, 8),
        "empty_overhead_s": round(empty_s, 8),
        "empty_overhead_to_step_ratio": round(empty_s / plain_s, 5),
        "target_ratio": TARGET_RATIO,
        "is_reached": max(paired_s, empty_s) / plain_s < TARGET_RATIO,
    }
    print_table(
        ("steps that do", "step", "attach adds", "of a step"),
        [
            ("some work", f"{plain_s * 1e3:.2f} ms", f"{paired_s * 1e6:.0f} µs", f"{paired_s / plain_s:.2%}"),
            (
                "nothing",
                f"{empty_plain_s * 1e6:.1f} µs",
                f"{empty_s * 1e6:.1f} µs",
                f"{empty_s / plain_s:.2%} (of the above)",
            ),
        ],
    )
    low, high = (value_s * 1e6 for value_s in interval_s)
    print(f"target: less than {TARGET_RATIO:.0%}; 95 % interval of the first: {low:.0f} to {high:.0f} µs")
    write_result(options.out, result)


def measure(*, num_pairs: int) -> dict[str, dict[str, list[int]]]:
    """Nanoseconds of every measured step, attached and plain, with work and without."""
    with tempfile.TemporaryDirectory(prefix="dougong-bench-") as folder:
        run_dir, out = Path(folder) / "run", Path(folder) / "times.json"
        rarely = ("--memory-every", NEVER, "--durable-every", NEVER)
        script = (str(SCRIPTS / "overhead_train.py"), "--pairs", str(num_pairs), "--out", str(out))
        log_path = Path(folder) / "log"
        try:
            with running((*DOUGONG, "--run-dir", str(run_dir), *rarely, *script), log_path=log_path) as launcher:
                code = wait(launcher, limit_s=LIMIT_S)
            if code != 0:
                raise RuntimeError(f"the run ended with {code}\n{log_path.read_text()[-3000:]}")
            return json.loads(out.read_text())
        finally:
            sweep(run_dir)


def _medians_s(times_ns: dict[str, list[int]]) -> tuple[float, float, tuple[float, float]]:
    """A plain step, what the attached one beside it took more, and the 95 % interval of that (order statistics)."""
    differences = sorted(a - p for a, p in zip(times_ns["attached"], times_ns["plain"], strict=True))
    half = round(0.98 * math.sqrt(len(differences)))
    low, high = max(0, len(differences) // 2 - half), min(len(differences) - 1, len(differences) // 2 + half)
    interval_s = (differences[low] / 1e9, differences[high] / 1e9)
    return statistics.median(times_ns["plain"]) / 1e9, statistics.median(differences) / 1e9, interval_s


if __name__ == "__main__":
    main()
