"""Copies the state into shared memory beside training, in a thread, with a fence before the optimizer's next step."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import msgspec

from dougong.run.capture import Capture
from dougong.run.snapshot import GivenUp, Slot, SnapshotFiles


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """How a copy went. `slot` None = it is no snapshot, and why."""

    slot: Slot | None
    reason: str = ""
    is_changed: bool = False
    """Something changed the state while it was copied."""
    is_given_up: bool = False
    """Nobody wants it any more (`Copier.give_up`)."""


class CopyJob(msgspec.Struct, kw_only=True):
    """What to copy and under which name.

    `lived_in`: the tensors of the capture live in this snapshot, and nothing has changed since; so its bytes are copied
    as they are, checksum included, and it is void once the copy is published.
    """

    capture: Capture
    step: int
    generation: int
    world_size: int
    on_done: Callable[[Done], None]
    num_kept: int = 1
    """So many of the newest snapshots are not written over, if there is room."""
    lived_in: Slot | None = None


class Copier:
    """One copy at a time. `fence` holds the optimizer up until the state may change again."""

    def __init__(self, files: SnapshotFiles) -> None:
        self._files = files
        self._jobs: queue.SimpleQueue[CopyJob | int] = queue.SimpleQueue()
        self._may_change = threading.Event()
        self._is_idle = threading.Event()
        self._may_change.set()
        self._is_idle.set()
        self._is_unwanted = threading.Event()
        self._fence_ns = 0
        self._thread = threading.Thread(target=self._work, name="dougong-copy", daemon=True)
        self._thread.start()

    def begin(self, job: CopyJob) -> None:
        """Start to copy; the copy before must be done (`wait`)."""
        assert self._is_idle.is_set()
        self._is_idle.clear()
        self._may_change.clear()
        self._jobs.put(job)

    def make_room(self, num_bytes: int) -> None:
        """Have the buffers' memory allocated beforehand: fresh pages cost several times the copy itself."""
        self.wait()
        self._is_idle.clear()
        self._jobs.put(num_bytes)

    def fence(self) -> None:
        """Return when the state may be changed. The time it took is in `take_fence_ns`."""
        if self._may_change.is_set():
            return
        began_ns = time.monotonic_ns()
        self._may_change.wait()
        self._fence_ns += time.monotonic_ns() - began_ns

    def take_fence_ns(self) -> int:
        """How long training has waited at the fence since this was last asked."""
        waited_ns, self._fence_ns = self._fence_ns, 0
        return waited_ns

    def wait(self) -> None:
        """Until nothing is being copied."""
        self._is_idle.wait()

    def give_up(self) -> None:
        """Break off the copy in hand, if any, and wait for that: the state goes back to one before it."""
        self._is_unwanted.set()
        self._is_idle.wait()
        self._is_unwanted.clear()

    @property
    def is_idle(self) -> bool:
        return self._is_idle.is_set()

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if isinstance(job, int):
                self._reserve(job)
                self._is_idle.set()
                continue
            done = Done(slot=None)
            try:
                done = self._copy(job)
            except GivenUp:
                done = Done(slot=None, reason="given up", is_given_up=True)
            except OSError as error:
                done = Done(slot=None, reason=f"no shared memory for it: {error.strerror} (df -h /dev/shm)")
            except (RuntimeError, ValueError) as error:
                done = Done(slot=None, reason=str(error))
            finally:
                self._let_go(job, done)

    def _let_go(self, job: CopyJob, done: Done) -> None:
        """Whatever fails here, nobody waits for this copy any more."""
        try:
            if done.slot is None and job.lived_in is not None:
                self._files.void(job.lived_in.index)  # it is about to be trained in
        finally:
            self._may_change.set()
            try:
                job.on_done(done)
            finally:
                self._is_idle.set()

    def _reserve(self, num_bytes: int) -> None:
        try:
            self._files.reserve(num_bytes)
            self._files.touch()
        except OSError:
            return  # the copy will say so

    def _is_wanted(self) -> bool:
        return not self._is_unwanted.is_set()

    def _copy(self, job: CopyJob) -> Done:
        index = self._files.next_index(num_kept=job.num_kept)
        if job.lived_in is not None:
            return self._copy_out(job, job.lived_in, index)
        num_bytes = job.capture.num_bytes
        self._files.reserve(num_bytes, only=index)
        self._files.touch(only=index)
        self._files.void(index)
        job.capture.write(self._files.buffer(index), is_wanted=self._is_wanted)
        if changed := job.capture.changed_meanwhile():
            return _changed(changed)
        self._may_change.set()
        return Done(slot=self._publish(job, index, num_bytes=num_bytes, digest=None))

    def _copy_out(self, job: CopyJob, slot: Slot, index: int) -> Done:
        """Copy the snapshot that the tensors live in: they may change once another buffer holds it."""
        self._files.reserve(slot.num_bytes, only=index)
        self._files.void(index)
        self._files.copy(slot, index)
        if changed := job.capture.changed_meanwhile():
            return _changed(changed)
        published = self._publish(job, index, num_bytes=slot.num_bytes, digest=slot.digest)
        self._files.void(slot.index)
        return Done(slot=published)

    def _publish(self, job: CopyJob, index: int, *, num_bytes: int, digest: bytes | None) -> Slot:
        return self._files.publish(
            index,
            step=job.step,
            generation=job.generation,
            world_size=job.world_size,
            num_bytes=num_bytes,
            digest=digest,
            is_wanted=self._is_wanted,
        )


def _changed(path: str) -> Done:
    return Done(slot=None, reason=f"{path} was changed while it was copied", is_changed=True)
