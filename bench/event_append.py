"""Events a second into the log, durably, beside the floor: the same bytes in the same batches, written and fsynced.

    python bench/event_append.py [--seconds 1.0] [--out bench/results/event_append.json]

The floor is measured in the same run, in turns with the log, on the same file system. `ratio` = log / floor.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from pathlib import Path

from dougong.clock import SystemClock
from dougong.event.codec import encode
from dougong.event.kinds import Recorded, StepFinished
from dougong.event.log import EventLog

BATCH_SIZES = (1, 100, 1000)
NUM_THREADS = 16
NUM_TURNS = 5
TARGET_EVENTS_PER_S = 20_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each measurement lasts")
    parser.add_argument("--out", type=Path, default=Path("bench/results/event_append.json"))
    parser.add_argument("--directory", type=Path, help="the file system to measure (default: the temporary directory)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        rows = [measure(Path(directory), batch_size=size, duration_s=options.seconds) for size in BATCH_SIZES]
        shared_per_s = threads_events_per_s(Path(directory), duration_s=options.seconds)
    for row in rows:
        print(
            f"batch {row['batch_size']:>4}: {row['log_events_per_s']:>9,.0f} events/s, "
            f"floor {row['floor_events_per_s']:>9,.0f}, ratio {row['ratio']:.2f}"
        )
    print(f"{NUM_THREADS} threads, each waiting for its own event: {shared_per_s:,.0f} events/s")
    best_per_s = max(row["log_events_per_s"] for row in rows)
    print(f"target {TARGET_EVENTS_PER_S:,} events/s: {'reached' if best_per_s >= TARGET_EVENTS_PER_S else 'MISSED'}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "rows": rows,
        "num_threads": NUM_THREADS,
        "threads_events_per_s": shared_per_s,
        "target_events_per_s": TARGET_EVENTS_PER_S,
        "best_events_per_s": best_per_s,
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n")


def measure(directory: Path, *, batch_size: int, duration_s: float) -> dict[str, float]:
    """Log and floor in turns; the median of each, in events/s."""
    turn_s = duration_s / NUM_TURNS
    log_per_s: list[float] = []
    floor_per_s: list[float] = []
    for _turn in range(NUM_TURNS):
        log_per_s.append(log_events_per_s(directory, batch_size=batch_size, duration_s=turn_s))
        floor_per_s.append(floor_events_per_s(directory, batch_size=batch_size, duration_s=turn_s))
    log_median, floor_median = sorted(log_per_s)[NUM_TURNS // 2], sorted(floor_per_s)[NUM_TURNS // 2]
    return {
        "batch_size": batch_size,
        "log_events_per_s": log_median,
        "floor_events_per_s": floor_median,
        "ratio": log_median / floor_median,
    }


def log_events_per_s(directory: Path, *, batch_size: int, duration_s: float) -> float:
    """Append `batch_size` events, commit, and so on; every event is made anew, as a controller does."""
    num_events = 0
    with EventLog.open(directory, stream=f"bench-{batch_size}", clock=SystemClock()) as log:
        begin_s = time.perf_counter()
        while (elapsed_s := time.perf_counter() - begin_s) < duration_s:
            for _ in range(batch_size):
                num_events += 1
                log.append(step(num_events))
            log.commit()
    return num_events / elapsed_s


def floor_events_per_s(directory: Path, *, batch_size: int, duration_s: float) -> float:
    """The same bytes, encoded before the clock starts: one write and one fsync for each batch."""
    line = encode(Recorded(stream=f"bench-{batch_size}", seq=10_000, time_ns=time.time_ns(), event=step(10_000)))
    batch = line * batch_size
    num_events = 0
    fd = os.open(directory / "floor", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    begin_s = time.perf_counter()
    while (elapsed_s := time.perf_counter() - begin_s) < duration_s:
        os.write(fd, batch)
        os.fsync(fd)
        num_events += batch_size
    os.close(fd)
    return num_events / elapsed_s


def threads_events_per_s(directory: Path, *, duration_s: float) -> float:
    """Threads that each wait until their own event is durable, and so share commits."""
    counts = [0] * NUM_THREADS
    with EventLog.open(directory, stream="threads", clock=SystemClock()) as log:
        begin_s = time.perf_counter()

        def write(index: int) -> None:
            while time.perf_counter() - begin_s < duration_s:
                counts[index] += 1
                log.append_durable(step(counts[index]))

        threads = [threading.Thread(target=write, args=(index,)) for index in range(NUM_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(counts) / (time.perf_counter() - begin_s)


def step(number: int) -> StepFinished:
    """The event that is written most."""
    return StepFinished(
        generation=1,
        first_step=number,
        last_step=number,
        begin_ns=1_780_000_000_000_000_000 + number,
        end_ns=1_780_000_000_500_000_000 + number,
        is_redo=False,
        step_s=0.5,
        between_s=0.001,
        data_wait_s=0.002,
        checkpoint_stall_s=0.0,
        max_step_s=0.5,
        tokens=4096,
        loss=2.718281828,
    )


if __name__ == "__main__":
    main()
