"""CPU time of `dougong --help` against the floor of starting Python at all, measured in turn.

    python bench/cli_start.py [--out bench/results/cli_start.json]

The target is 100 ms of CPU. Times are seconds of user and system time together.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

NUM_ROUNDS = 15
TARGET_CPU_S = 0.100
# What the installed script does; it may lie elsewhere than this interpreter expects.
SCRIPT = "import sys; from dougong.cli.main import main; sys.argv = ['dougong', '--help']; sys.exit(main())"
HELP = [sys.executable, "-c", SCRIPT]
FLOOR = [sys.executable, "-c", "pass"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results/cli_start.json"))
    options = parser.parse_args()
    cpu_s: dict[str, list[float]] = {"help": [], "floor": []}
    for command in (HELP, FLOOR):  # once unmeasured, so that byte code and page cache are warm for both
        _cpu_s(command)
    for _ in range(NUM_ROUNDS):
        cpu_s["help"].append(_cpu_s(HELP))
        cpu_s["floor"].append(_cpu_s(FLOOR))
    help_s, floor_s = statistics.median(cpu_s["help"]), statistics.median(cpu_s["floor"])
    result = {
        "benchmark": "cli_start",
        "num_rounds": NUM_ROUNDS,
        "help_cpu_s": round(help_s, 4),
        "help_cpu_s_range": [round(min(cpu_s["help"]), 4), round(max(cpu_s["help"]), 4)],
        "floor_cpu_s": round(floor_s, 4),
        "floor_cpu_s_range": [round(min(cpu_s["floor"]), 4), round(max(cpu_s["floor"]), 4)],
        "help_to_floor_ratio": round(help_s / floor_s, 2),
        "target_cpu_s": TARGET_CPU_S,
        "is_reached": help_s <= TARGET_CPU_S,
    }
    print(f"dougong --help: {help_s * 1e3:.0f} ms of CPU; python -c pass: {floor_s * 1e3:.0f} ms")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")


def _cpu_s(command: list[str]) -> float:
    """User and system time of one process, from the kernel's own account of it."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
