"""Write orders over made-up snapshot buffers, and a writer to carry them out, without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from dougong.run.layout import NodeDirectory
from dougong.run.letters import AgentLetter, WorkerLetter, read_from_agent, read_from_worker, unread
from dougong.run.write_order import FileOrder, Given, Stretch, WriteOrder, put_order
from dougong.run.writer import OrderLine, WriterSettings


def order_at(root: Path, *, rank: int = 0, step: int = 10, num_bytes: int = 300_000, url: str = "") -> WriteOrder:
    """An order for two files over a buffer of random bytes: the first as a shard has it, the second given."""
    node = NodeDirectory(root / "node")
    node.root.mkdir(exist_ok=True)
    buffer = node.root / f"rank-{rank}.buf0"
    buffer.write_bytes(os.urandom(4096 + num_bytes))
    return WriteOrder(
        kind="shard",
        generation=1,
        rank=rank,
        step=step,
        checkpoint_url=url or str(root / "checkpoints"),
        directory=f"step-{step:09d}-g001",
        buffer_path=str(buffer),
        files=(
            FileOrder(f"__{rank}_0.distcp", (Given(bytes(4096)), Stretch(4096, num_bytes), Given(b"end"))),
            FileOrder(f"rank-{rank}.state", (Given(b"state"),)),
        ),
        stall_s=0.5,
    )


def content_of(order: WriteOrder) -> dict[str, bytes]:
    """What the files of the order must hold."""
    buffer = Path(order.buffer_path).read_bytes()
    return {
        file.name: b"".join(
            part.content if isinstance(part, Given) else buffer[part.offset_bytes : part.offset_bytes + part.num_bytes]
            for part in file.segments
        )
        for file in order.files
    }


def writer_command(root: Path, *, write_bytes_per_s: float = 0.0, checkpoint_key: str = "") -> list[str]:
    given = WriterSettings(
        node_root=str(root / "node"), write_bytes_per_s=write_bytes_per_s, checkpoint_key=checkpoint_key
    )
    return [sys.executable, "-P", "-m", "dougong.run.writer", msgspec.json.encode(given).decode()]


@contextmanager
def writer(root: Path, **settings: float | str) -> Iterator[subprocess.Popen[bytes]]:
    """A real writer; it is killed if it has not ended by itself."""
    command = writer_command(root, **settings)  # pyright: ignore[reportArgumentType]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def put(root: Path, order: WriteOrder, process: subprocess.Popen[bytes]) -> None:
    """As a rank and its agent do."""
    assert process.stdin is not None
    path = put_order(NodeDirectory(root / "node"), order)
    process.stdin.write(msgspec.json.encode(OrderLine(path=str(path))) + b"\n")
    process.stdin.flush()


def told_controller(root: Path, rank: int = 0) -> list[WorkerLetter]:
    return [read_from_worker(path) for path in unread(NodeDirectory(root / "node").outbox(rank))]


def told_rank(root: Path, rank: int = 0) -> list[AgentLetter]:
    return [read_from_agent(path) for path in unread(NodeDirectory(root / "node").inbox(rank))]


def files_in(root: Path, order: WriteOrder) -> dict[str, bytes]:
    directory = root / "checkpoints" / order.directory
    return {path.name: path.read_bytes() for path in directory.iterdir()} if directory.is_dir() else {}
