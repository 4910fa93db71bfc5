"""Memory checkpoints and couriers for tests, without training and without PyTorch."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec

from dougong.run.courier_orders import CourierMessage
from dougong.run.layout import NodeDirectory, node_directory
from dougong.run.settings import RunSettings, SaveRule, run_directory, save_settings
from dougong.run.snapshot import Slot, SnapshotFiles
from dougong.run.wire import CourierAddress
from tests.run.made_settings import settings_at

TOKEN = b"t" * 32


def save(prefix: Path, content: bytes, *, step: int, generation: int = 1, world_size: int = 2) -> Slot:
    """A memory checkpoint as a rank makes it."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    files = SnapshotFiles(prefix)
    files.reserve(len(content))
    index = files.next_index()
    files.void(index)
    files.buffer(index)[: len(content)] = content
    return files.publish(index, step=step, generation=generation, world_size=world_size, num_bytes=len(content))


def flip_a_bit(prefix: Path, slot: Slot, *, offset_bytes: int = 100) -> None:
    """As memory without ECC would."""
    with prefix.with_name(f"{prefix.name}.buf{slot.index}").open("r+b") as file:
        file.seek(offset_bytes)
        byte = file.read(1)[0]
        file.seek(offset_bytes)
        file.write(bytes([byte ^ 0x10]))


class CourierProcess:
    """A real courier of one node, spoken to as its agent would."""

    def __init__(self, root: Path, component: str, *, save: SaveRule | None = None) -> None:
        self.component = component
        self.settings = msgspec.structs.replace(settings_at(root), procs_per_node=1, save=save or SaveRule())
        self.node = node_of(self.settings, component)
        run = run_directory(root / "run")
        run.root.mkdir(parents=True, exist_ok=True)
        run.token.write_bytes(TOKEN)
        save_settings(run, self.settings)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dougong.run.courier", str(run.root), component],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._said: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self.port: int = self.hear().port

    def __enter__(self) -> CourierProcess:
        return self

    def __exit__(self, *_error: object) -> None:
        self.process.kill()
        self.process.wait()
        self._listener.join(timeout=10)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    @property
    def address(self) -> CourierAddress:
        return CourierAddress(component=self.component, host="127.0.0.1", port=self.port)

    def order(self, message: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(message) + b"\n")
        self.process.stdin.flush()

    def hear(self, *, timeout_s: float = 60.0) -> Any:
        return msgspec.json.decode(self._said.get(timeout=timeout_s), type=CourierMessage)

    def hear_until(self, condition: Any) -> Any:
        """The first message of which the condition is true."""
        while not condition(message := self.hear()):
            pass
        return message

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            json.loads(line)
            self._said.put(line)


def node_of(settings: RunSettings, component: str) -> NodeDirectory:
    node = node_directory(settings.run_id, component, memory_root=Path(settings.memory_root))
    node.root.mkdir(parents=True, exist_ok=True)
    return node
