"""The few lines in a training script that let Dougong save and restore everything.

```python
job = dougong.attach(model=model, optimizer=optimizer, lr_scheduler=sched, data=loader)
for step in job.steps(until=1000):         # resumes, or rolls back, to the exact sample
    with step as batch:                    # a broken collective unwinds to here; the loop replays the step
        step.record(loss=train_step(batch), tokens=n)
```
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist

from dougong.errors import UserError
from dougong.run.ahead import snapshot_files
from dougong.run.bad_loss import skips_before
from dougong.run.capture import Capture, fenced_storages
from dougong.run.copier import Copier, CopyJob, Done
from dougong.run.data_position import DataPosition
from dougong.run.fingerprint import fingerprint, flip_bit, replicated
from dougong.run.group import ReplaceableGroup, can_stay, default_group, join_store, keep_until_exit
from dougong.run.letters import (
    Fingerprinted,
    Letter,
    LossFoundBad,
    ModelFound,
    PeakMeasured,
    Rejoin,
    Restored,
    SaveRefused,
    ShardFailed,
    Stopped,
    WarningGiven,
    from_agent,
    post,
)
from dougong.run.log_continuation import ContinuedWriter
from dougong.run.loss_gate import LossGate
from dougong.run.page import ControlFault, Page, Phase, SaveTimes, StepRecord
from dougong.run.peak import measure_gemm_flop_per_s
from dougong.run.persist import Persister, PersistRequest
from dougong.run.place import WorkerPlace, rank_and_world_size, worker_place
from dougong.run.put_in import move_out
from dougong.run.reducers import ArrivalOrders, renew_reducers
from dougong.run.sample_ledger import SampleLedger
from dougong.run.saved_state import ADOPT_BYTES, SavedState, verified
from dougong.run.sharding import Sharding, ranks_of
from dougong.run.snapshot import Slot, SnapshotFiles
from dougong.run.state import Progress, gather, num_parameters, put_back, read_branch
from dougong.run.step import Step
from dougong.run.watch import Watch
from dougong.run.worker import do_control_fault

_VERDICT_TIMEOUT_S = 600.0
_VERDICT_POLL_S = 0.002


class Stateful(Protocol):
    """Anything whose state can be saved."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def attach(
    *,
    model: torch.nn.Module,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    data: Any = None,
    model_flop_per_token: float | None = None,
    hardware_flop_per_token: float | None = None,
    stage: int | None = None,
    replicated_over: Sequence[int] | dist.ProcessGroup | None = None,
    **others: Stateful,
) -> Job:
    """A job whose whole state is saved and restored by Dougong.

    `data` is any iterable of batches; one with `state_dict()` and `load_state_dict()` (StatefulDataLoader) is asked
    for its position itself. `others` are further objects with the same two methods (a gradient scaler, an EMA model
    …). `model_flop_per_token` is what MFU counts; without it, 6 FLOP per parameter and token are assumed and the
    score says so. How the state lies over the ranks is found from DDP, DTensors and `ZeroRedundancyOptimizer`; only a
    pipeline has to be told: `replicated_over`, the ranks that hold the same stage, and, if the stages use the same
    parameter names, the number of this rank's `stage`. Under plain Python or torchrun the loop runs just the same,
    without saving. Raises UserError for an object without state.
    """
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "lr_scheduler": lr_scheduler, **others}
    present = {name: part for name, part in parts.items() if part is not None}
    for name, part in present.items():
        if not hasattr(part, "state_dict") or not hasattr(part, "load_state_dict"):
            raise UserError(
                f"{type(part).__name__} has no state_dict() and load_state_dict()",
                where=f"attach({name}=…)",
                mend="give an object that has both, or leave it out",
            )
    if reserved := sorted({"rng", "data", "progress"} & set(present)):
        raise UserError(f"the name {reserved[0]!r} is taken", where="attach()", mend="give the object another name")
    job = Job(present, data=data, stage=stage, replicated_over=ranks_of(replicated_over))
    job.describe_model(model_flop_per_token, hardware_flop_per_token)
    return job


class Job:
    """A training job in this process: its steps, and its place in the run."""

    def __init__(
        self,
        parts: dict[str, Any],
        *,
        data: Any,
        stage: int | None = None,
        replicated_over: tuple[int, ...] | None = None,
    ) -> None:
        self._parts = parts
        self._place = worker_place()
        self._step = 0
        self._num_tokens = 0
        self._stall_ns = 0
        self._between_since_ns = time.monotonic_ns()
        self._page: Page | None = None
        self._persister: Persister | None = None
        self._files: SnapshotFiles | None = None
        self._copier: Copier | None = None
        self._watch: Watch | None = None
        self._is_fresh = True
        self._is_blocking = False
        self._wants_own_memory = False
        self._has_room = False
        self._orders = ArrivalOrders(())
        self._ledger: SampleLedger | None = None
        self._is_ledger_warned = False
        self._is_memory_warned = False
        self._expected_save = 0
        self._submitted_step = 0
        self._refused_step = 0
        self._loaded_step = 0
        self._until: int | None = None
        self._resumed_step = 0
        self._can_go_back = True
        self._log_writers: list[ContinuedWriter] = []
        self.rank, self.world_size = rank_and_world_size()
        self._data = None if data is None else DataPosition(data, rank=self.rank, world_size=self.world_size)
        self._sharding = Sharding(
            parts, rank=self.rank, world_size=self.world_size, stage=stage, replicated_over=replicated_over
        )
        if self._place is not None:
            self._page = Page.open(self._place.node.page(self._place.rank))
            if self._page.is_attached:
                raise UserError(
                    "attach() was called twice in this process; a run saves and restores one job",
                    where="attach()",
                    mend="give the other objects to the first attach(), as further keyword arguments",
                )
            self._page.mark_attached()
            self._save_times = SaveTimes(
                memory_every_steps=self._place.memory_every_steps, durable_every_steps=self._place.durable_every_steps
            )
            _leave_sigterm_to_the_launcher()
            self._files = snapshot_files(self._place.node.snapshot(self._place.rank))
            self._persister = Persister(self._place, self._files)
            self._copier = Copier(self._files)
            self._watch = Watch(self._page, generation=self._place.generation)
            _fence_optimizers(self._copier)
            self._orders = ArrivalOrders(self._parts.values())
            self._ledger = SampleLedger(self._place)
        self._gate = LossGate(spike_z=0.0 if self._place is None else self._place.spike_z)

    @property
    def num_steps(self) -> int:
        """Steps finished, over all restarts."""
        return self._step

    @property
    def num_tokens(self) -> int:
        """Tokens recorded by this rank, over all restarts."""
        return self._num_tokens

    def describe_model(self, model_flop_per_token: float | None, hardware_flop_per_token: float | None) -> None:
        """Tell the run what a token costs, and measure the peak if the run wants it."""
        place = self._place
        if place is None:
            return
        if place.rank == 0:
            count = num_parameters(self._parts["model"])
            is_given = model_flop_per_token is not None
            letter = ModelFound(
                generation=place.generation,
                rank=place.rank,
                num_parameters=count,
                model_flop_per_token=model_flop_per_token if is_given else 6.0 * count,
                hardware_flop_per_token=hardware_flop_per_token,
                source="given by the script" if is_given else "6 FLOP per parameter and token, attention not counted",
            )
            self._post(letter)
        if place.wants_peak:
            rate, source = measure_gemm_flop_per_s()
            self._post(PeakMeasured(generation=place.generation, rank=place.rank, flop_per_s=rate, source=source))

    def steps(self, *, until: int | None = None) -> Iterator[Step]:
        """The steps still to do: up to number `until`, beginning new epochs of the data as needed; without it, one
        epoch.

        Everything between two steps (evaluation, logging) belongs to the step before: a restart does not do it again.
        """
        self._until = until
        self._restore()
        while until is None or self._step < until:
            began_ns = time.monotonic_ns()
            self._pass_over_skipped(is_endless=until is not None)
            batch = self._next_batch(is_endless=until is not None)
            if batch is _END:
                break
            step = Step(self, number=self._step + 1, batch=batch, data_wait_ns=time.monotonic_ns() - began_ns)
            yield step
            if not step.is_entered:
                raise UserError(
                    f"step {step.number} was not entered, so it would come again for ever",
                    where="for step in job.steps()",
                    mend="do the step inside `with step as batch:`",
                )
            if step.is_finished:
                self._between_steps()
        self._finish()

    def compiling(self) -> AbstractContextManager[None]:
        """`with job.compiling():` around what compiles for long (`torch.compile`, CUDA graphs), in a step or outside.

        A hang in there is found after `hang.compile_s` instead of the few seconds of a step.
        """
        return self._in_phase(Phase.COMPILE)

    def evaluating(self) -> AbstractContextManager[None]:
        """`with job.evaluating():` around an evaluation between two steps; its budget is `hang.evaluation_s`."""
        return self._in_phase(Phase.EVALUATION)

    @contextlib.contextmanager
    def _in_phase(self, phase: Phase) -> Generator[None]:
        if self._page is None:
            yield
            return
        before = self._page.phase
        self._page.enter(phase, now_ns=time.monotonic_ns())
        try:
            yield
        finally:
            self._page.enter(before, now_ns=time.monotonic_ns())

    # --- called by Step ---

    def begin_step(self) -> int:
        now_ns = time.monotonic_ns()
        if self._page is not None and self._place is not None:
            self._page.enter(Phase.STEP, now_ns=now_ns)
            if self._place.is_chaos:
                fault = self._page.take_fault()
                if fault is ControlFault.FLIP:
                    flip_bit(self._parts)
                do_control_fault(fault)
            if (group := default_group()) is not None:
                group.first_entered_ns = 0
        return now_ns

    def finish_step(self, step: Step) -> None:
        now_ns = time.monotonic_ns()
        self._step = step.number
        self._num_tokens += step.tokens or 0
        if self._page is None:
            return
        assert self._ledger is not None and self._copier is not None
        if step.samples is not None:
            self._write_ledger(step.number, step.samples)
        fence_ns = self._copier.take_fence_ns()
        between_ns = step.begin_ns - self._between_since_ns - step.data_wait_ns - self._stall_ns
        self._page.finish_step(
            StepRecord(
                step=step.number,
                begin_ns=step.begin_ns + fence_ns,  # the wait for a copy is the checkpoint's, not the step's
                end_ns=now_ns,
                data_wait_ns=step.data_wait_ns,
                loss=step.loss,
                tokens=step.tokens,
                checkpoint_stall_ns=self._stall_ns + fence_ns,
                between_ns=max(0, between_ns),
                compute_ns=_until_first_collective_ns(step.begin_ns),
            )
        )
        self._stall_ns = 0
        self._between_since_ns = now_ns
        self._page.enter(Phase.BETWEEN, now_ns=now_ns)
        self._look_at_loss(step)
        self._compare_replicas()

    def _look_at_loss(self, step: Step) -> None:
        assert self._place is not None
        reason = self._gate.take(step=step.number, loss=step.loss, grad_norm=step.grad_norm)
        if reason:
            place = self._place
            self._post(LossFoundBad(generation=place.generation, rank=place.rank, step=step.number, reason=reason))

    def _compare_replicas(self) -> None:
        """Every so many steps: tell the fingerprint of what must be the same on all ranks now."""
        place = self._place
        if place is None or not place.fingerprint_every_steps or self._step % place.fingerprint_every_steps:
            return
        began_ns = time.monotonic_ns()
        tensors = tuple(replicated(self._parts, world_size=place.world_size))
        if tensors:
            digest = fingerprint(tensors)
            self._post(Fingerprinted(generation=place.generation, rank=place.rank, step=self._step, digest=digest))
        self._stall_ns += time.monotonic_ns() - began_ns

    def _write_ledger(self, step: int, samples: tuple[int, ...], *, is_skipped: bool = False) -> None:
        """A full disk must not stop training for the sake of the proof that it went well."""
        assert self._ledger is not None and self._place is not None
        try:
            self._ledger.write(step, samples, is_skipped=is_skipped)
        except OSError as error:
            if not self._is_ledger_warned:
                self._is_ledger_warned = True
                self._warn(f"the sample ledger cannot be written from step {step} on: {error.strerror}")

    def unwind(self, error: BaseException) -> bool:
        """A collective broke in this step. Wait for the verdict: the end of this process, or to roll back and go on.

        True = rolled back, the loop replays. Raises `error` again when no verdict comes. A rank can go on only if its
        process group can be replaced under the model (`dougong.init_process_group`).
        """
        if self._page is None or self._place is None:
            raise error
        self._page.enter(Phase.UNWOUND, now_ns=time.monotonic_ns())
        group = default_group()
        if group is not None:
            group.abandon()
        deadline_ns = time.monotonic_ns() + round(_VERDICT_TIMEOUT_S * 1e9)
        while time.monotonic_ns() < deadline_ns:
            for path, letter in from_agent(self._place.node.inbox(self._place.rank)):
                if isinstance(letter, Rejoin) and letter.generation > self._place.generation and group is not None:
                    path.unlink(missing_ok=True)
                    self._rejoin(letter, group)
                    return True
            time.sleep(_VERDICT_POLL_S)
        raise error

    def _rejoin(self, letter: Rejoin, group: ReplaceableGroup) -> None:
        """Roll back first, while the newcomer is still starting; then meet it."""
        assert self._place is not None and self._persister is not None
        assert self._copier is not None and self._watch is not None
        self._copier.give_up()
        self._copier.take_fence_ns()
        self._place = msgspec.structs.replace(
            self._place,
            generation=letter.generation,
            restore_source=letter.restore_source,
            restore_step=letter.restore_step,
            restore_generation=letter.restore_generation,
            restore_directory=letter.restore_directory,
            skips=letter.skips,
        )
        self._persister.move_to(self._place)
        if self._page is not None:
            self._save_times.take(self._page.save_order, step=None)
        self._watch.move_to(letter.generation)
        for part in self._parts.values():
            if hasattr(part, "zero_grad"):
                part.zero_grad(set_to_none=True)  # half a backward pass may lie there
        store = join_store(letter.master_address, letter.master_port)
        self._restore(then=lambda: group.replace(store, generation=letter.generation))
        assert self._ledger is not None
        self._ledger.move_to(letter.generation)

    # --- saving and restoring ---

    def _between_steps(self) -> None:
        """After the body of the loop, its evaluation included: save if it is time, and leave if asked."""
        place, page = self._place, self._page
        if place is None or page is None:
            return
        wants_stop = self.is_stop_due
        self._save_times.take(page.save_order, step=self._step)
        is_due, is_memory_due = self._save_times.is_durable(self._step), self._save_times.is_due(self._step)
        if wants_stop or is_due or is_memory_due:
            self._save_if_good(
                is_memory_due=is_memory_due, is_due=is_due, is_last=wants_stop or (is_due and self._step == self._until)
            )
        elif not self._has_room:
            self._make_room()
        elif self._saves_after(self._step + 1):
            self._wait_for_copy()
        if wants_stop:
            self._leave_resumable()

    def _saves_after(self, step: int) -> bool:
        assert self._page is not None
        return self._save_times.is_due(step) or 0 < self._page.stop_at_step <= step

    def _wait_for_copy(self) -> None:
        """One step before a save the one before must be whole, on every rank: nobody comes to that save before all have
        done this step. So a rank that writes over its older snapshot knows that all have the newer one."""
        assert self._copier is not None and self._page is not None
        if not self._copier.is_idle:
            began_ns = time.monotonic_ns()
            self._page.enter(Phase.CHECKPOINT, now_ns=began_ns)
            self._copier.wait()
            now_ns = time.monotonic_ns()
            self._stall_ns += now_ns - began_ns
            self._page.enter(Phase.BETWEEN, now_ns=now_ns)
        self._expected_save = self._step + 1

    def _save_if_good(self, *, is_memory_due: bool, is_due: bool, is_last: bool) -> None:
        """`is_due`: durably, unless the one before is not finished everywhere. At the last step that is waited for."""
        assert self._persister is not None
        if self._refuses_save():
            if is_due or is_last:
                self._persister.hold(self._step)
            return
        if is_last:
            self._persister.begin_last(on_wait=self._is_saving)
        is_durable = is_last or (is_due and self._persister.may_begin(self._step))
        if is_durable or is_memory_due:
            self._save(is_durable=is_durable)

    def _refuses_save(self) -> bool:
        """Is the state not worth replacing the last good one: this rank's loss is bad, or another's was lately?"""
        assert self._place is not None and self._page is not None
        reason = self._gate.why_refused()
        if reason:
            self._refused_step = self._step  # asked again at this step, the answer is the same
            place = self._place
            self._post(SaveRefused(generation=place.generation, rank=place.rank, step=self._step, reason=reason))
        return self._step <= max(self._refused_step, self._page.saves_held_until_step)

    def _make_room(self) -> None:
        """After the first step the size of the state is known; its memory is allocated beside the next ones."""
        assert self._copier is not None
        self._has_room = True
        num_bytes = self._capture().num_bytes
        if num_bytes >= ADOPT_BYTES and self._copier.is_idle:
            self._copier.make_room(num_bytes)

    def _save(self, *, is_durable: bool) -> None:
        assert self._place is not None and self._page is not None
        assert self._copier is not None and self._persister is not None
        began_ns = time.monotonic_ns()
        self._page.enter(Phase.CHECKPOINT, now_ns=began_ns)
        for writer in self._log_writers:
            writer.flush()  # what was logged up to this step must not be lost when the run goes back to it
        self._copier.wait()
        if self._wants_own_memory:
            self._leave_adopted()
        capture = self._capture()
        step = self._step
        stall_s = (time.monotonic_ns() - began_ns) / 1e9
        self._copier.begin(
            CopyJob(
                capture=capture,
                step=step,
                generation=self._place.generation,
                world_size=self._place.world_size,
                on_done=lambda done: self._copied(done, step=step, stall_s=stall_s, is_durable=is_durable),
                # else a slower rank may still be copying the state saved last, and have none but the one before that
                num_kept=1 if self._expected_save == step else 2,
            )
        )
        if self._is_blocking or not capture.is_overlapped:
            self._copier.fence()
        now_ns = time.monotonic_ns()
        self._copier.take_fence_ns()
        self._stall_ns += now_ns - began_ns
        self._page.enter(Phase.BETWEEN, now_ns=now_ns)

    def _capture(self) -> Capture:
        tree = gather(
            self._parts,
            data=None if self._data is None else self._data.state(),
            progress=Progress(step=self._step, num_tokens=self._num_tokens, orders=self._orders.orders),
        )
        return Capture(tree, fenced=fenced_storages(self._parts), sharding=self._sharding)

    def _is_saving(self) -> None:
        """The node's writer is at work, and this process is not: it does not hang."""
        if self._page is not None:
            self._page.enter(Phase.CHECKPOINT, now_ns=time.monotonic_ns())

    def _copied(self, done: Done, *, step: int, stall_s: float, is_durable: bool) -> None:
        """In the copying thread: the snapshot is there, or it is not."""
        assert self._place is not None and self._persister is not None
        if done.is_changed:
            self._is_blocking = True
            self._warn(f"{done.reason} outside of the optimizer's step; from now on training waits for each copy")
        if done.slot is None:
            if is_durable:
                self._persister.release()
            if done.is_given_up:
                return
            assert self._files is not None
            self._wants_own_memory = not done.is_changed and self._files.adopted_index is not None
            # training goes on without this checkpoint, and a person is told
            self._post(
                ShardFailed(generation=self._place.generation, rank=self._place.rank, step=step, reason=done.reason)
            )
            return
        self._tell_private_memory()
        if is_durable:
            self._submitted_step = step
            self._persister.submit(
                PersistRequest(
                    index=done.slot.index,
                    num_bytes=done.slot.num_bytes,
                    step=step,
                    stall_s=stall_s,
                )
            )

    def _tell_private_memory(self) -> None:
        """Once: durable checkpoints are written all the same."""
        assert self._files is not None
        if self._files.is_private and not self._is_memory_warned:
            self._is_memory_warned = True
            where = self._files.path(0).parent
            self._warn(f"shared memory is full ({where}): this rank's memory checkpoints do not outlive its process")

    def _warn(self, text: str) -> None:
        assert self._place is not None
        self._post(WarningGiven(generation=self._place.generation, rank=self._place.rank, text=text))

    def _post(self, letter: Letter) -> None:
        """Something for the run to know. A full memory does not stop training for the sake of a word."""
        assert self._place is not None
        with contextlib.suppress(OSError):
            post(self._place.node.outbox(self._place.rank), letter)

    def _leave_resumable(self) -> None:
        assert self._place is not None and self._page is not None and self._persister is not None
        keep_until_exit()
        self._page.enter(Phase.CHECKPOINT, now_ns=time.monotonic_ns())
        assert self._copier is not None
        self._copier.wait()
        if self._step == self._submitted_step:  # else there was no room for it, and nothing will be committed
            self._persister.wait_committed(step=self._step, on_wait=self._is_saving)
        letter = Stopped(generation=self._place.generation, rank=self._place.rank, step=self._step)
        post(self._place.node.outbox(self._place.rank), letter)
        self._page.enter(Phase.STOPPED_CLEAN, now_ns=time.monotonic_ns())
        raise SystemExit(0)

    def _finish(self) -> None:
        """The loop is done: the last state is saved durably before the script goes on."""
        if self._place is None or self._page is None or self._persister is None:
            return
        keep_until_exit()
        if self._step == 0:
            return
        assert self._copier is not None
        self._copier.wait()
        self._page.enter(Phase.CHECKPOINT, now_ns=time.monotonic_ns())
        is_submitted = self._step == self._submitted_step
        if self._step != self._loaded_step and (is_submitted or not self._refuses_save()):
            self._save_last()
        self._page.enter(Phase.BETWEEN, now_ns=time.monotonic_ns())

    def _save_last(self) -> None:
        """Until it is durable. If it was skipped or given up, all ranks try once more."""
        assert self._persister is not None and self._copier is not None
        if self._step != self._submitted_step and not self._persister.was_skipped(self._step):
            self._persister.begin_last(on_wait=self._is_saving)
            self._save(is_durable=True)
            self._copier.wait()
        if not self._is_committed() and self._persister.begin_again(self._step, on_wait=self._is_saving):
            self._save(is_durable=True)
            self._copier.wait()
            self._is_committed()

    def _is_committed(self) -> bool:
        """Is the state of this step durable? Waits until that is known."""
        assert self._persister is not None
        if self._step != self._submitted_step:
            return False
        return self._persister.wait_committed(step=self._step, on_wait=self._is_saving)

    def _restore(self, *, then: Callable[[], None] | None = None) -> None:
        """Take up the saved state, then meet the other ranks (`then`, or a newcomer its peers)."""
        place, page = self._place, self._page
        if place is None or page is None:
            return
        began_ns = time.monotonic_ns()
        page.enter(Phase.RESTORING, now_ns=began_ns)
        adopted, tree = self._saved(place).tree()
        if tree is not None:
            if self._data is not None and tree["data"] is not None:
                self._data.load(tree["data"])
            progress = put_back(tree, self._parts)
            self._step, self._num_tokens = progress.step, progress.num_tokens
            self._orders.take(progress.orders)
        self._gate.forget()
        self._refused_step = 0
        reload_ns = time.monotonic_ns() - began_ns
        if adopted is not None:
            self._save_before_change(adopted)
        self._is_fresh = False
        # a state that was loaded from a durable checkpoint has one already; of another generation's none is known
        self._submitted_step = 0
        self._loaded_step = self._step if place.restore_source == "durable" else 0
        self._resumed_step = self._step
        for writer in self._log_writers:
            writer.go_back(self._step)
        page.mark_restored(step=self._step)
        self._meet(then)
        page.mark_can_stay(can_stay=can_stay() and self._can_go_back)
        now_ns = time.monotonic_ns()
        page.enter(Phase.STARTING, now_ns=now_ns)
        self._between_since_ns = now_ns
        letter = Restored(
            generation=place.generation,
            rank=place.rank,
            step=self._step,
            source=place.restore_source,
            reload_s=reload_ns / 1e9,
        )
        post(place.node.outbox(place.rank), letter)

    def _meet(self, then: Callable[[], None] | None) -> None:
        assert self._place is not None
        group = default_group()
        if then is None and group is not None and group.is_alone:
            then = partial(group.replace, group.store, generation=self._place.generation)
        if then is not None:
            then()
        if self._place.restore_source != "none":
            renew_reducers(self._parts.values(), self._orders.orders)

    def _saved(self, place: WorkerPlace) -> SavedState:
        assert self._files is not None
        return SavedState(place, self._files, self._parts, self._sharding, is_fresh=self._is_fresh)

    def _save_before_change(self, slot: Slot) -> None:
        """The tensors live in the snapshot itself: before the optimizer changes them, it is copied to another buffer.

        It is the same state, so it keeps its name. Without memory for that the tensors get memory of their own.
        """
        assert self._copier is not None and self._files is not None
        job = CopyJob(
            capture=self._capture(),
            step=slot.step,
            generation=slot.generation,
            world_size=slot.world_size,
            on_done=self._saved_before_change,
            lived_in=slot,
        )
        self._copier.begin(job)

    def _saved_before_change(self, done: Done) -> None:
        if done.slot is None:
            self._warn(f"the checkpoint restored from is not kept in memory: {done.reason}")

    def _leave_adopted(self) -> None:
        """There is no room for a third buffer: the tensors move to memory of their own, and give theirs back."""
        assert self._files is not None
        self._wants_own_memory = False
        if self._files.adopted_index is not None:
            move_out(self._parts, self._files.buffer(self._files.adopted_index))
            self._files.give_back()

    def _pass_over_skipped(self, *, is_endless: bool) -> None:
        """Leave out the batches that made the loss of the coming step bad in earlier generations."""
        if self._place is None or self._ledger is None:
            return
        skips = skips_before(self._step + 1, self._place.skips)
        samples: list[int] = []
        for skip in skips:
            if self._next_batch(is_endless=is_endless) is _END:
                return
            samples += self._ledger.samples_of(skip) or ()
        if samples:
            self._write_ledger(self._step + 1, tuple(samples), is_skipped=True)

    def _next_batch(self, *, is_endless: bool) -> Any:
        if self._data is None:
            return None
        try:
            return self._data.next_batch()
        except StopIteration:
            if not is_endless:
                return _END
            if not self._data.has_read_this_epoch:
                raise UserError(
                    "the data has no batch at all", where="attach(data=…)", mend="give a loader with at least one batch"
                ) from None
            self._data.end_epoch()
            return self._data.next_batch()

    # --- for loops that belong to somebody else: `dougong.run.hooks` and the framework callbacks ---

    @property
    def resumed_step(self) -> int:
        """The step whose state this process took up, or went back to, last; 0 = it began anew."""
        return self._resumed_step

    @property
    def is_resuming(self) -> bool:
        """There is a saved state to take up."""
        return self._place is not None and self._place.restore_source != "none"

    @property
    def is_in_run(self) -> bool:
        """This process was started by `dougong run`, so its state is saved."""
        return self._place is not None

    @property
    def num_skips(self) -> int:
        """Batches that the run wants left out, since they made the loss bad."""
        return 0 if self._place is None else len(self._place.skips)

    def is_at(self, phase: Phase) -> None:
        """A sign of life from a framework that tells its phases by callbacks."""
        if self._page is not None:
            self._page.enter(phase, now_ns=time.monotonic_ns())

    def take_in(self, **parts: Any) -> None:
        """More parts of the state, for a framework that makes them after the job."""
        self._parts.update(parts)
        self._sharding = Sharding(self._parts, rank=self.rank, world_size=self.world_size)
        if self._place is not None:
            self._orders = ArrivalOrders(self._parts.values())

    def do_not_go_back(self) -> None:
        """The loop cannot take a step back, so this process ends when a collective breaks."""
        self._can_go_back = False

    def saved_data(self) -> dict[str, Any] | None:
        """What `data` saved on this rank, ahead of `restore`; None if there is nothing to take up."""
        place = self._place
        if place is None or place.restore_source == "none":
            return None
        if place.restore_source == "durable":
            with self._saved(place).durable() as saved:
                return saved.rank_tree(self.rank % saved.world_size)["data"]["loader"]
        files, slot = self._saved(place).slot()
        return read_branch(verified(files, slot), "data")["loader"]

    def restore(self) -> int:
        """Put the saved state back, if there is one; the number of steps finished so far."""
        self._restore()
        return self._step

    def next_batch(self) -> Any:
        """The next batch of `data`, epoch after epoch."""
        return self._next_batch(is_endless=True)

    def save_if_due(self) -> None:
        """Between two steps: save if it is time, and leave if asked."""
        self._between_steps()

    def save_now(self, *, is_durable: bool) -> None:
        """Save the state as it is; durably in any case if the run is to stop, and if asked for unless the durable save
        before is not finished everywhere."""
        if self._place is None:
            return
        assert self._persister is not None
        if self.is_stop_due:
            self._persister.begin_last(on_wait=self._is_saving)
        elif is_durable:
            is_durable = self._persister.may_begin(self._step)
        self._save(is_durable=is_durable or self.is_stop_due)

    @property
    def is_stop_due(self) -> bool:
        """The run has asked this rank to save and leave, and the step is reached."""
        return self._page is not None and bool(self._page.stop_at_step) and self._step >= self._page.stop_at_step

    def leave_if_asked(self) -> None:
        """After a durable save: end this process cleanly if the run is to stop."""
        if self.is_stop_due:
            self._leave_resumable()

    def wait_durable(self) -> None:
        """Wait until the last durable save is committed."""
        if self._copier is not None:
            self._copier.wait()
        if self._persister is not None and self._submitted_step:
            self._persister.wait_committed(step=self._submitted_step)

    def finish(self) -> None:
        """All steps are done: save the last state durably."""
        self._finish()

    def keep_log(self, writer: ContinuedWriter) -> None:
        """Flush `writer` with every save, and tell it when the run goes back to an earlier step."""
        self._log_writers.append(writer)


def _until_first_collective_ns(begin_ns: int) -> int:
    """What this rank computed alone in a step; 0 = not known: only a replaceable group tells when it is entered."""
    group = default_group()
    return max(0, group.first_entered_ns - begin_ns) if group is not None and group.first_entered_ns else 0


def _fence_optimizers(copier: Copier) -> None:
    """No optimizer of this process changes anything while it is being copied."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def before_step(_optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        copier.fence()

    register_optimizer_step_pre_hook(before_step)


def _leave_sigterm_to_the_launcher() -> None:
    """A scheduler signals every process of a job; the launcher is told too, and has all ranks save at one step.

    A handler of the script's own stays.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


_END = object()
