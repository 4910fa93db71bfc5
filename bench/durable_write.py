"""How long a node's writer takes for a durable checkpoint, beside the floor: the same bytes as raw O_DIRECT writes.

    python bench/durable_write.py [--gigabytes 1.1] [--ranks 2] [--out bench/results/durable_write.json]

One writer process, an order from each rank at once, from touched shared memory to synced, checksummed files and the
letters about them. The floor: the same buffers, as many threads, `pwrite` of 8 MiB and one `fsync`, nothing else. Both
in the same run, in turns, on the same file system; medians of five. `ratio` = writer / floor.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from dougong.run.layout import NodeDirectory
from dougong.run.letters import OrderDone, read_from_agent, unread
from dougong.run.write_order import FileOrder, Given, Segment, Stretch, WriteOrder, put_order
from dougong.run.writer import OrderLine, WriterSettings

NUM_TURNS = 5
CHUNK_BYTES = 8 * 2**20
NUM_TENSORS = 148
TARGET_S = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.1, help="state of each rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--directory", type=Path, help="the file system to measure (default: the temporary directory)")
    parser.add_argument("--out", type=Path, default=Path("bench/results/durable_write.json"))
    options = parser.parse_args()
    num_bytes = round(options.gigabytes * 1e9) // 4096 * 4096
    memory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="dougong-bench-"))
    try:
        buffers = [touched_buffer(memory / f"rank-{rank}.buf0", num_bytes) for rank in range(options.ranks)]
        with tempfile.TemporaryDirectory(dir=options.directory) as disk:
            result = measure(buffers, memory=memory, disk=Path(disk), num_bytes=num_bytes)
    finally:
        shutil.rmtree(memory, ignore_errors=True)
    print(
        f"{options.ranks} ranks of {num_bytes / 1e9:.2f} GB: writer {result['writer_s']:.2f} s "
        f"({result['writer_bytes_per_s'] / 1e9:.2f} GB/s), floor {result['floor_s']:.2f} s, ratio {result['ratio']:.2f}"
    )
    print(f"target {TARGET_S:g} s: {'reached' if result['writer_s'] <= TARGET_S else 'MISSED'}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")


def measure(buffers: list[mmap.mmap], *, memory: Path, disk: Path, num_bytes: int) -> dict[str, Any]:
    """Writer and floor in turns; the median of each."""
    node = NodeDirectory(memory)
    given = WriterSettings(node_root=str(memory), write_bytes_per_s=0.0, checkpoint_key="")
    command = [sys.executable, "-P", "-m", "dougong.run.writer", msgspec.json.encode(given).decode()]
    writer = subprocess.Popen(command, stdin=subprocess.PIPE)
    writer_s: list[float] = []
    floor_s: list[float] = []
    try:
        for turn in range(NUM_TURNS):
            writer_s.append(written_s(writer, node, disk, num_ranks=len(buffers), num_bytes=num_bytes, step=turn + 1))
            floor_s.append(raw_s(buffers, disk))
    finally:
        writer.kill()
        writer.wait()
    median_s, floor_median_s = statistics.median(writer_s), statistics.median(floor_s)
    return {
        "num_ranks": len(buffers),
        "num_bytes": num_bytes * len(buffers),
        "writer_s": median_s,
        "writer_s_range": [min(writer_s), max(writer_s)],
        "writer_bytes_per_s": num_bytes * len(buffers) / median_s,
        "floor_s": floor_median_s,
        "floor_s_range": [min(floor_s), max(floor_s)],
        "ratio": median_s / floor_median_s,
        "target_s": TARGET_S,
    }


def written_s(
    writer: subprocess.Popen[bytes], node: NodeDirectory, disk: Path, *, num_ranks: int, num_bytes: int, step: int
) -> float:
    """From the orders being put until the last letter is there."""
    began_s = time.perf_counter()
    for rank in range(num_ranks):
        path = put_order(node, order_of(node, disk, rank=rank, num_bytes=num_bytes, step=step))
        assert writer.stdin is not None
        writer.stdin.write(msgspec.json.encode(OrderLine(path=str(path))) + b"\n")
        writer.stdin.flush()
    for rank in range(num_ranks):
        while not (letters := unread(node.inbox(rank))):
            time.sleep(0.002)
        done = read_from_agent(letters[0])
        assert isinstance(done, OrderDone) and not done.reason, done
    elapsed_s = time.perf_counter() - began_s
    for rank in range(num_ranks):
        shutil.rmtree(node.inbox(rank))
        shutil.rmtree(node.outbox(rank))
    shutil.rmtree(disk / f"step-{step:09d}-g001")
    return elapsed_s


def order_of(node: NodeDirectory, disk: Path, *, rank: int, num_bytes: int, step: int) -> WriteOrder:
    """A shard of so many tensors, each framed as a rank frames them."""
    each_bytes = num_bytes // NUM_TENSORS // 4096 * 4096
    segments: list[Segment] = []
    for index in range(NUM_TENSORS):
        segments += [Given(bytes(4096)), Stretch(index * each_bytes, each_bytes), Given(b"after" * 100)]
        segments.append(Given(bytes(4096 - 500)))
    return WriteOrder(
        kind="shard",
        generation=1,
        rank=rank,
        step=step,
        checkpoint_url=str(disk),
        directory=f"step-{step:09d}-g001",
        buffer_path=str(node.root / f"rank-{rank}.buf0"),
        files=(FileOrder(f"__{rank}_0.distcp", tuple(segments)), FileOrder(f"rank-{rank}.state", (Given(b"x" * 900),))),
        asked_ns=time.monotonic_ns(),
    )


def raw_s(buffers: list[mmap.mmap], disk: Path) -> float:
    """The floor."""
    threads = [
        threading.Thread(target=raw_write, args=(buffer, disk / f"raw-{index}")) for index, buffer in enumerate(buffers)
    ]
    began_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed_s = time.perf_counter() - began_s
    for index in range(len(buffers)):
        (disk / f"raw-{index}").unlink()
    return elapsed_s


def raw_write(buffer: mmap.mmap, path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    view = memoryview(buffer)
    for offset in range(0, len(view), CHUNK_BYTES):
        chunk = view[offset : offset + CHUNK_BYTES]
        assert os.pwrite(fd, chunk, offset) == len(chunk)
    os.fsync(fd)
    os.close(fd)


def touched_buffer(path: Path, num_bytes: int) -> mmap.mmap:
    """Shared memory that is really there, with bytes that differ."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.posix_fallocate(fd, 0, num_bytes)
    buffer = mmap.mmap(fd, num_bytes)
    os.close(fd)
    block = os.urandom(2**20)
    for offset in range(0, num_bytes, 2**20):
        buffer[offset : offset + 2**20] = block[: min(2**20, num_bytes - offset)]
    return buffer


if __name__ == "__main__":
    main()
