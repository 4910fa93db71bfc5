"""The durable side of a worker: has the node's writer put snapshots on storage, in a thread beside training.

Training never waits for it. A durable checkpoint that is due while the one before is not settled everywhere (committed,
or dropped) is skipped, and said so: all ranks then drop that step and are in step again at the next.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

import msgspec

from dougong.errors import DougongError
from dougong.run import manifest
from dougong.run.dcp_shard import METADATA_NAME, metadata_bytes
from dougong.run.letters import (
    CheckpointCommitted,
    DropCheckpoint,
    OrderDone,
    OrderPut,
    Rejoin,
    Reopened,
    SaveAgain,
    ShardFailed,
    ShardHeld,
    ShardSkipped,
    StorageCause,
    WriteMetadata,
    from_agent,
    post,
)
from dougong.run.place import WorkerPlace
from dougong.run.shard_plan import ShardPlanner
from dougong.run.snapshot import SnapshotFiles
from dougong.run.storage_alarm import cause_of
from dougong.run.write_order import FileOrder, Given, Kind, WriteOrder, is_taken, order_path, put_order

_POLL_S = 0.02
_LOOK_S = 2.0
_TICK_S = 1.0
_PATIENCE_S = 600.0
"""How long a writer may give no sign of work on an order before the rank gives it up."""
_SILENCE_S = 5.0
"""An order that is gone without a word: its writer was killed between the two."""
_PEER_FACTOR = 10.0
"""Other ranks may take so many times as long to write as this one did."""


class PersistRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Write buffer `index`, which holds `step`."""

    index: int
    num_bytes: int
    step: int
    stall_s: float


class _InHand(msgspec.Struct, kw_only=True):
    """The checkpoint that is not settled yet."""

    request: PersistRequest
    place: WorkerPlace
    began_ns: int
    written_ns: int = 0
    """When this rank's own part was on storage; 0 = not yet."""
    write_s: float = 0.0
    looked_ns: int = 0
    order_mtime_ns: int = 0
    sign_ns: int = 0
    """When the writer last gave a sign of work on the order."""

    @property
    def step(self) -> int:
        return self.request.step

    @property
    def directory(self) -> str:
        return manifest.directory_name(self.request.step, generation=self.place.generation)


class Persister:
    """One checkpoint at a time. The buffer being written is pinned, so a later snapshot takes another one."""

    def __init__(self, place: WorkerPlace, files: SnapshotFiles) -> None:
        self._place = place
        self._files = files
        self._storage, self._root = manifest.storage_at(place.checkpoint_url)
        self._planner = ShardPlanner(rank=place.rank)
        self._requests: queue.SimpleQueue[_InHand | None] = queue.SimpleQueue()
        self._is_free = threading.Event()
        self._is_free.set()
        self._has_moved = threading.Event()
        self._busy_step = 0
        self._skipped_step = 0
        self._committed: set[int] = set()
        self._abandoned: int = 0
        self.num_skipped = 0
        self._thread = threading.Thread(target=self._work, name="dougong-persist", daemon=True)
        self._thread.start()

    def may_begin(self, step: int) -> bool:
        """Can a durable checkpoint of `step` begin? Then `submit` or `release` must follow. Never waits.

        If not it is counted as skipped.
        """
        if self._is_free.is_set():
            self._is_free.clear()
            self._busy_step = step
            return True
        self.num_skipped += 1
        self._skipped_step = step
        letter = ShardSkipped(
            generation=self._place.generation,
            rank=self._place.rank,
            step=step,
            busy_step=self._busy_step,
        )
        self._post(letter)
        return False

    def wait_idle(self, *, on_wait: Callable[[], None] = lambda: None) -> None:
        """Until the checkpoint in hand is settled: only where training is over anyway. `on_wait` is called every
        second, to say that this is no hang."""
        while not self._is_free.wait(_TICK_S):
            on_wait()

    def hold(self, step: int) -> None:
        """No durable checkpoint of `step`, though it is due: the state is not to be kept."""
        self._post(ShardHeld(generation=self._place.generation, rank=self._place.rank, step=step))

    def begin_last(self, *, on_wait: Callable[[], None]) -> None:
        """As `may_begin`, where the run ends here and nothing can be skipped: waits until the one before is settled."""
        self.wait_idle(on_wait=on_wait)
        self._is_free.clear()

    def begin_again(self, step: int, *, on_wait: Callable[[], None]) -> bool:
        """As `begin_last`, for a step whose checkpoint was skipped or given up. False = not every rank came to this."""
        self.wait_idle(on_wait=on_wait)
        generation = self._place.generation
        self._post(SaveAgain(generation=generation, rank=self._place.rank, step=step))
        deadline_ns = time.monotonic_ns() + round(self._place.commit_timeout_s * 1e9)
        while time.monotonic_ns() < deadline_ns:
            # the thread has nothing in hand, so the inbox is this thread's to read
            for path, letter in from_agent(self._place.node.inbox(self._place.rank)):
                if isinstance(letter, Reopened) and letter.step == step and letter.generation == generation:
                    path.unlink(missing_ok=True)
                    self._is_free.clear()
                    return True
            on_wait()
            time.sleep(_POLL_S)
        return False

    def was_skipped(self, step: int) -> bool:
        return step == self._skipped_step

    def release(self) -> None:
        """Nothing is to be written after all: there was no snapshot."""
        self._is_free.set()

    def submit(self, request: PersistRequest) -> None:
        """Have the writer write it. `may_begin` must have said yes."""
        assert not self._is_free.is_set()
        self._busy_step = request.step
        self._files.pin(request.index)
        now_ns = time.monotonic_ns()
        # with the generation of now: a roll-back may come before the thread does
        self._requests.put(_InHand(request=request, place=self._place, began_ns=now_ns, sign_ns=now_ns))

    def move_to(self, place: WorkerPlace) -> None:
        """Later checkpoints belong to another generation; the one in hand can never be complete and is given up."""
        self._abandoned = self._place.generation
        self._place = place
        self._planner = ShardPlanner(rank=place.rank)
        self._has_moved.clear()
        self._requests.put(None)
        self._has_moved.wait(_LOOK_S)

    def wait_committed(self, *, step: int, on_wait: Callable[[], None] = lambda: None) -> bool:
        """Until the checkpoint of `step` exists; False if it never will: a shard failed, or the time-out is over."""
        self.wait_idle(on_wait=on_wait)
        return step in self._committed

    # --- the thread ---

    def _work(self) -> None:
        while True:
            hand = self._requests.get()
            if hand is None:
                self._is_free.set()
                self._has_moved.set()
                continue
            try:
                if self._abandoned < hand.place.generation:
                    self._order_shard(hand)
                self._see_through(hand)
            except (OSError, DougongError, RuntimeError, ValueError, msgspec.MsgspecError) as error:
                with contextlib.suppress(OSError):
                    self._take_back(hand)
                self._fail(hand, str(error), cause=cause_of(error))
            finally:
                self._files.pin(None)
                self._is_free.set()

    def _order_shard(self, hand: _InHand) -> None:
        request = hand.request
        plan = self._planner.plan(self._files.buffer(request.index)[: request.num_bytes])
        order = WriteOrder(
            kind="shard",
            generation=hand.place.generation,
            rank=hand.place.rank,
            step=hand.step,
            checkpoint_url=hand.place.checkpoint_url,
            directory=hand.directory,
            buffer_path=str(self._files.path(request.index)),
            files=plan.files,
            items=plan.items,
            stall_s=request.stall_s,
            asked_ns=hand.began_ns,
        )
        self._put(order)

    def _see_through(self, hand: _InHand) -> None:
        """Until the checkpoint is settled. The buffer is free once the writer has read it."""
        while not self._is_settled(hand):
            if self._abandoned >= hand.place.generation:
                self._take_back(hand)
                return
            if self._is_overdue(hand):
                return
            time.sleep(_POLL_S)

    def _is_settled(self, hand: _InHand) -> bool:
        for path, letter in from_agent(hand.place.node.inbox(hand.place.rank)):
            if isinstance(letter, Rejoin | Reopened):
                continue
            path.unlink(missing_ok=True)
            if letter.step != hand.step or letter.generation != hand.place.generation:
                continue
            match letter:
                case OrderDone():
                    if letter.reason:
                        self._take_back(hand)
                        return True
                    if letter.order == "shard":
                        self._note_written(hand, letter)
                case WriteMetadata():
                    self._order_metadata(hand, letter)
                case CheckpointCommitted():
                    self._committed.add(hand.step)
                    return True
                case DropCheckpoint():
                    self._take_back(hand)
                    return True
        return False

    def _note_written(self, hand: _InHand, letter: OrderDone) -> None:
        self._files.pin(None)
        hand.written_ns = hand.looked_ns = time.monotonic_ns()
        hand.write_s = letter.write_s

    def _order_metadata(self, hand: _InHand, letter: WriteMetadata) -> None:
        """All shards are there (the controller tells); rank 0 makes the index over all of them."""
        order = WriteOrder(
            kind="metadata",
            generation=hand.place.generation,
            rank=hand.place.rank,
            step=hand.step,
            checkpoint_url=hand.place.checkpoint_url,
            directory=hand.directory,
            buffer_path="",
            files=(FileOrder(METADATA_NAME, (Given(metadata_bytes(letter.items)),)),),
            asked_ns=time.monotonic_ns(),
        )
        self._put(order)

    def _is_overdue(self, hand: _InHand) -> bool:
        """The letter that settles it may be lost with an agent or a controller: look at the storage, and give up in
        the end."""
        now_ns = time.monotonic_ns()
        if not hand.written_ns:
            return self._is_writer_silent(hand, now_ns)
        if now_ns - hand.looked_ns > _LOOK_S * 1e9:
            hand.looked_ns = now_ns
            if "COMMIT" in self._storage.names(f"{self._root}/{hand.directory}"):
                self._committed.add(hand.step)
                return True
        limit_s = max(hand.place.commit_timeout_s, _PEER_FACTOR * hand.write_s)
        if now_ns - hand.written_ns < limit_s * 1e9:
            return False
        self._fail(hand, f"it was not committed within {limit_s:.0f} s", cause="slow")
        return True

    def _is_writer_silent(self, hand: _InHand, now_ns: int) -> bool:
        """A writer begins an order at once, and gives a sign every second while it writes."""
        try:
            found = order_path(hand.place.node, hand.place.rank, "shard").stat()
        except FileNotFoundError:
            limit_s, mtime_ns = _SILENCE_S, 0
        else:
            is_begun = not found.st_mode & 0o200
            limit_s, mtime_ns = _PATIENCE_S if is_begun else hand.place.commit_timeout_s, found.st_mtime_ns
        if mtime_ns != hand.order_mtime_ns:
            hand.order_mtime_ns, hand.sign_ns = mtime_ns, now_ns
        silent_s = (now_ns - hand.sign_ns) / 1e9
        if silent_s < limit_s:
            return False
        self._take_back(hand)
        self._fail(hand, f"nothing was heard of the node's writer for {silent_s:.0f} s", cause="other")
        return True

    def _take_back(self, hand: _InHand) -> None:
        """Remove the orders; the writer ends what it is at. Wait for that, since it reads the buffer."""
        kinds: tuple[Kind, ...] = ("shard", "metadata")
        for kind in kinds:
            path = order_path(hand.place.node, hand.place.rank, kind)
            deadline_ns = time.monotonic_ns() + round(_PATIENCE_S * 1e9)
            taken = path.with_name(f".{path.name}.back")
            try:
                path.rename(taken)
            except FileNotFoundError:
                continue
            while is_taken(taken) and time.monotonic_ns() < deadline_ns:
                time.sleep(_POLL_S)
            taken.unlink(missing_ok=True)

    def _put(self, order: WriteOrder) -> None:
        path = put_order(self._place.node, order)
        letter = OrderPut(generation=order.generation, rank=order.rank, path=str(path))
        post(self._place.node.outbox(order.rank), letter)

    def _fail(self, hand: _InHand, reason: str, *, cause: StorageCause) -> None:
        letter = ShardFailed(
            generation=hand.place.generation,
            rank=hand.place.rank,
            step=hand.step,
            reason=reason,
            cause=cause,
        )
        self._post(letter)

    def _post(self, letter: ShardFailed | ShardSkipped | ShardHeld | SaveAgain) -> None:
        with contextlib.suppress(OSError):  # full shared memory must not stop training for the sake of a word
            post(self._place.node.outbox(self._place.rank), letter)
