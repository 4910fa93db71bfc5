"""The durable side of a worker: writes a snapshot to storage beside training, in a thread of its own."""

from __future__ import annotations

import queue
import threading
import time

import msgspec

from dougong.errors import DougongError
from dougong.run import manifest
from dougong.run.dcp_shard import write_metadata, write_shard
from dougong.run.letters import (
    DropCheckpoint,
    MetadataWritten,
    Rejoin,
    ShardFailed,
    ShardWritten,
    WriteMetadata,
    from_agent,
    post,
)
from dougong.run.place import WorkerPlace
from dougong.run.snapshot import SnapshotFiles

_POLL_S = 0.02


class PersistRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Write buffer `index`, which holds `step`."""

    index: int
    num_bytes: int
    step: int
    stall_s: float


class Persister:
    """One checkpoint at a time. The buffer being written is pinned, so the next snapshot takes the other one."""

    def __init__(self, place: WorkerPlace, files: SnapshotFiles) -> None:
        self._place = place
        self._files = files
        self._storage, self._root = manifest.storage_at(place.checkpoint_url)
        self._requests: queue.SimpleQueue[PersistRequest] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._dropped: set[int] = set()
        self._thread = threading.Thread(target=self._work, name="dougong-persist", daemon=True)
        self._thread.start()

    def wait_idle(self) -> None:
        """Until the checkpoint in hand is written."""
        self._idle.wait()

    def submit(self, request: PersistRequest) -> None:
        """Begin to write. `wait_idle` must have been called since the last one."""
        assert self._idle.is_set()
        self._idle.clear()
        self._files.pin(request.index)
        self._requests.put(request)

    def move_to(self, place: WorkerPlace) -> None:
        """Later checkpoints belong to another generation. `wait_idle` must have been called."""
        assert self._idle.is_set()
        self._place = place

    def wait_committed(self, *, step: int) -> bool:
        """Until the checkpoint of `step` exists; False if it never will: a shard failed, or the time-out is over."""
        deadline_ns = time.monotonic_ns() + round(self._place.commit_timeout_s * 1e9)
        while time.monotonic_ns() < deadline_ns:
            if "COMMIT" in self._storage.names(self._directory(step)):
                return True
            if self._idle.is_set():
                self._read_drops()
            if step in self._dropped:
                return False
            time.sleep(_POLL_S)
        return False

    def _work(self) -> None:
        while True:
            request = self._requests.get()
            try:
                self._write(request)
            except (OSError, DougongError, RuntimeError, ValueError) as error:
                letter = ShardFailed(
                    generation=self._place.generation, rank=self._place.rank, step=request.step, reason=str(error)
                )
                self._post(letter)
                self._dropped.add(request.step)
            finally:
                self._files.pin(None)
                self._idle.set()

    def _write(self, request: PersistRequest) -> None:
        began_ns = time.monotonic_ns()
        directory = self._directory(request.step)
        files, items = write_shard(
            self._files.buffer(request.index)[: request.num_bytes],
            place=self._storage,
            directory=directory,
            rank=self._place.rank,
        )
        self._files.pin(None)
        self._post(
            ShardWritten(
                generation=self._place.generation,
                rank=self._place.rank,
                step=request.step,
                directory=directory.rsplit("/", 1)[-1],
                files=files,
                items=items,
                stall_s=request.stall_s,
                write_s=(time.monotonic_ns() - began_ns) / 1e9,
            )
        )
        if self._place.rank == 0:
            self._finish_metadata(request.step, directory)

    def _finish_metadata(self, step: int, directory: str) -> None:
        """Wait for the other ranks' shards (the controller tells), then write the index over all of them."""
        deadline_ns = time.monotonic_ns() + round(self._place.commit_timeout_s * 1e9)
        while time.monotonic_ns() < deadline_ns:
            for path, letter in from_agent(self._place.node.inbox(self._place.rank)):
                if isinstance(letter, Rejoin):
                    continue
                path.unlink(missing_ok=True)
                if letter.step != step or letter.generation != self._place.generation:
                    continue
                match letter:
                    case WriteMetadata():
                        record = write_metadata(letter.items, place=self._storage, directory=directory)
                        self._post(
                            MetadataWritten(
                                generation=self._place.generation, rank=self._place.rank, step=step, file=record
                            )
                        )
                        return
                    case DropCheckpoint():
                        self._dropped.add(step)
                        return
            time.sleep(_POLL_S)

    def _read_drops(self) -> None:
        """The persisting thread is idle, so the inbox is this thread's to read."""
        for path, letter in from_agent(self._place.node.inbox(self._place.rank)):
            if isinstance(letter, DropCheckpoint):
                path.unlink(missing_ok=True)
                self._dropped.add(letter.step)

    def _directory(self, step: int) -> str:
        return f"{self._root}/{manifest.directory_name(step, generation=self._place.generation)}"

    def _post(self, letter: ShardWritten | ShardFailed | MetadataWritten) -> None:
        post(self._place.node.outbox(self._place.rank), letter)
