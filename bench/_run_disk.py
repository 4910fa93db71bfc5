"""The floor of a durable save: as many bytes, written by two processes at once past the page cache, and synced.

    python bench/_run_disk.py BYTES FILE ROUNDS

One process of the two: `began_ns ended_ns` a line, each round once a line came in, so that both begin together.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

from _run_systems import NUM_RANKS

CHUNK_BYTES = 16 << 20


def measure(*, rounds: int, state_mb: float, directory: Path) -> list[float]:
    """Seconds of each round, from the first beginning to the last end."""
    num_bytes = max(CHUNK_BYTES, round(state_mb * 1e6 / NUM_RANKS) // CHUNK_BYTES * CHUNK_BYTES)
    script = (sys.executable, str(Path(__file__).resolve()), str(num_bytes))
    writers = [
        subprocess.Popen(
            (*script, str(directory / f"floor-{rank}"), str(rounds)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(NUM_RANKS)
    ]
    times_s: list[float] = []
    try:
        for writer in writers:
            assert writer.stdout is not None
            writer.stdout.readline()
        for _ in range(rounds):
            spans_ns = []
            for writer in writers:
                assert writer.stdin is not None
                writer.stdin.write("go\n")
                writer.stdin.flush()
            for writer in writers:
                assert writer.stdout is not None
                spans_ns.append([int(word) for word in writer.stdout.readline().split()])
            times_s.append((max(span[1] for span in spans_ns) - min(span[0] for span in spans_ns)) / 1e9)
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    return times_s


def main() -> None:
    num_bytes, path, rounds = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    memory = mmap.mmap(-1, CHUNK_BYTES)
    memory.write(os.urandom(1 << 20) * (CHUNK_BYTES >> 20))
    print("ready", flush=True)
    for _ in range(rounds):
        sys.stdin.readline()
        began_ns = time.monotonic_ns()
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
        os.posix_fallocate(fd, 0, num_bytes)
        for _ in range(num_bytes // CHUNK_BYTES):
            assert os.write(fd, memory) == CHUNK_BYTES
        os.fsync(fd)
        os.close(fd)
        print(began_ns, time.monotonic_ns(), flush=True)
        path.unlink()


if __name__ == "__main__":
    main()
