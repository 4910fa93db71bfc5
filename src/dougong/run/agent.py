"""The agent of one node: starts, watches and ends its workers, keeps their memory checkpoints, and tells the
controller.

It decides nothing. When the controller is away it keeps everything and tells it again; when the agent itself was
killed, the next one takes over the running workers from `workers.json`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec

from dougong.backend.local import process
from dougong.clock import CarriedClock, Clock
from dougong.run import wire
from dougong.run.activity import ActivityState, advance
from dougong.run.copy_store import CopyStore, forget_newer, ranks_in, status_of
from dougong.run.courier_link import CopyUnavailable, CourierLink
from dougong.run.evidence import take_evidence
from dougong.run.layout import NodeDirectory, RunDirectory, write_atomically
from dougong.run.letters import OrderPut, Rejoin, post, read_from_worker, unread
from dougong.run.links import LinkDoor
from dougong.run.log_continuation import log_variables
from dougong.run.page import Page, Phase, SaveOrder, StepRecord
from dougong.run.place import place_of, torchrun_variables, worker_variables
from dougong.run.probe import probe
from dougong.run.reserve import fill_reserve, with_reserve
from dougong.run.settings import RunSettings
from dougong.run.snapshot import SnapshotFiles
from dougong.run.status_rhythm import fleet_rhythm, is_news
from dougong.run.writer_link import WriterLink
from dougong.run.zygote_link import ZygoteLink

_TICK_S = 0.02
_STATUS_S = 0.2
_READING_S = 0.25
_AWAY_S = 1.0
_ORPHAN_S = 30.0
_RECONNECT_S = 0.2
_LOG_TAIL_BYTES = 4096
_EXIT_CODE_S = 0.2


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where the controller listens."""

    host: str
    port: int


class _Worker:
    """A worker in the agent's hands."""

    def __init__(self, worker: wire.RunningWorker, page: Page, pidfd: int) -> None:
        self.worker = worker
        self.page = page
        self.pidfd = pidfd
        self.num_drained = 0
        self.activity: ActivityState | None = None
        self.ending: process.Ending | None = None
        """It is on its way out; the kernel is still freeing its memory."""


class Agent:
    """One node's agent. `run()` returns when the run is over or the controller stays away too long."""

    def __init__(
        self,
        component: str,
        *,
        run: RunDirectory,
        node: NodeDirectory,
        settings: RunSettings,
        token: bytes,
        clock: Clock,
        link_of: type[ZygoteLink] = ZygoteLink,
    ) -> None:
        self._component = component
        self._run = run
        self._node = node
        self._settings = settings
        self._token = token
        self._host_clock = self._clock = clock
        self._workers: dict[int, _Worker] = {}
        self._connection: wire.Connection | None = None
        self._told: list[wire.ToController] = []
        log_path = run.logs / f"zygote-{component.rsplit('/', 1)[-1]}.log"
        self._zygote = link_of(settings, log_path=log_path, spawn=self._spawn)
        writer_log = log_path.with_name(log_path.name.replace("zygote-", "writer-", 1))
        self._writer = WriterLink(settings, node=node, log_path=writer_log, spawn=self._spawn)
        courier_log = run.logs / f"courier-{component.rsplit('/', 1)[-1]}.log"
        self._courier = CourierLink(
            component,
            run=run,
            log_path=courier_log,
            spawn=self._spawn,
            tell=lambda held: self._tell(held, is_kept=False),
        )
        self._generation = 0
        self._killed_generation = 0
        self._stop_at_step = 0
        self._launching = asyncio.Lock()
        self._links = LinkDoor(token=token)
        self._link_port = 0
        self._is_dismissed = False
        self._failure: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._told_ranks: tuple[wire.RankStatus, ...] = ()
        self._told_on: wire.Connection | None = None
        self._last_contact_s = clock.monotonic_ns() / 1e9

    async def run(self) -> None:
        """Serve until dismissed."""
        self._node.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        fill_reserve(self._node.root)
        self._adopt()
        self._link_port = await self._links.open(self._settings.node_host)
        await self._zygote.start()
        await self._writer.take_over()
        watch = asyncio.create_task(self._watch())
        watch.add_done_callback(self._on_task_done)
        try:
            while not self._is_dismissed:
                await self._serve_once()
                if self._failure is not None:
                    raise self._failure
                if watch.done():
                    watch.result()
                if self._now_s() - self._last_contact_s > _ORPHAN_S:
                    await self._end_orphans()
                    return
                if not self._is_dismissed:
                    await asyncio.sleep(_RECONNECT_S)
        finally:
            watch.cancel()
            self._links.close()
            self._zygote.close()
            self._writer.close()
            await self._courier.close()

    # --- speaking with the controller ---

    async def _serve_once(self) -> None:
        try:
            address = msgspec.json.decode(self._run.address.read_bytes(), type=Address)
            connection = await wire.connect(address.host, address.port, token=self._token)
        except (OSError, msgspec.MsgspecError, wire.WireBroken):
            return
        connection.send(self._hello(connection.own_host))
        for worker in self._workers.values():
            worker.num_drained = 0
        for message in self._told:
            connection.send(message)
        self._connection = connection
        try:
            while not self._is_dismissed:
                message = await connection.receive_for_agent()
                self._last_contact_s = self._now_s()
                await self._obey(message)
                await connection.flush()
        except wire.WireBroken:
            self._last_contact_s = self._now_s()
        finally:
            self._connection = None
            connection.close()

    def _hello(self, own_host: str) -> wire.Hello:
        return wire.Hello(
            component=self._component,
            pid=os.getpid(),
            address=own_host,
            free_port=free_port(self._settings.node_host),
            workers=tuple(worker.worker for worker in self._workers.values()),
            snapshots=snapshots_in(self._node),
            courier_port=self._courier.held.courier_port,
            copies=CopyStore(self._node).held(),
            link_port=self._link_port,
        )

    def _tell(self, message: wire.ToController, *, is_kept: bool = True) -> None:
        """Send; what is kept is told again to a controller that was away."""
        if is_kept:
            self._told.append(message)
        if self._connection is not None:
            self._connection.send(message)

    async def _obey(self, message: wire.ControllerMessage) -> None:
        match message:
            case wire.Welcome():
                self._generation = max(self._generation, message.generation)
                if message.wall_ns:  # the run has one time, whatever this host's wall clock says
                    self._clock = CarriedClock(self._host_clock, offset_ns=message.wall_ns - self._now_ns())
            case wire.Launch():
                self._stop_at_step = 0  # at once: a stop right behind it is for ranks that are yet to be started
                self._spawn(self._launch(message))
            case wire.Kill():
                self._spawn(self._kill(message))
            case wire.TakeStacks():
                self._spawn(self._take_stacks(message.generation))
            case wire.ProbeLinks():
                self._spawn(self._probe_links(message))
            case wire.StopAt():
                self._stop_at_step = message.step
                for worker in self._workers.values():
                    worker.page.stop_at_step = message.step
            case wire.SaveEvery():
                order = SaveOrder(message.from_step, message.memory_every_steps, message.durable_every_steps)
                for worker in self._workers.values():
                    worker.page.save_order = order
            case wire.HoldSaves():
                for worker in self._workers.values():
                    worker.page.hold_saves(until_step=message.until_step)
            case wire.Deliver():
                post(self._node.inbox(message.rank), message.letter)
            case wire.CopyOrder():
                self._courier.order(message)
            case wire.Preflight():
                self._spawn(self._preflight(message))
            case wire.Dismiss():
                await self._leave(is_memory_kept=message.is_memory_kept)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """A bug ends the agent: the next one takes over the workers, which is better than one that is half alive."""
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
            if self._connection is not None:
                self._connection.close()

    # --- starting ---

    async def _launch(self, launch: wire.Launch) -> None:
        async with self._launching:
            await self._launch_alone(launch)

    async def _launch_alone(self, launch: wire.Launch) -> None:
        if launch.generation <= max(self._killed_generation, self._generation if self._workers else 0):
            return
        self._generation = launch.generation
        self._told = [message for message in self._told if not _is_of_generation_before(message, launch.generation)]
        staying = [rank for rank, _ in launch.ranks if rank in launch.staying and rank in self._workers]
        await self._end(
            [
                worker
                for worker in self._workers.values()
                if worker.worker.generation < launch.generation and worker.worker.rank not in staying
            ]
        )
        self._forward_letters()
        self._forward_steps()
        try:
            await self._courier.bring(launch.restore, ranks=[rank for rank, _ in launch.ranks])
            for rank, _ in launch.ranks:
                forget_newer(self._node.snapshot(rank), generation=launch.restore.generation, step=launch.restore.step)
            for rank in staying:
                self._have_rejoin(launch, rank)
            if launch.is_cold:
                await self._zygote.renew()
            for rank, local_rank in launch.ranks:
                if rank in staying:
                    continue
                if rank in launch.staying:
                    raise ConnectionError(f"rank {rank} was to stay and is gone")
                await self._start_worker(launch, rank, local_rank)
        except CopyUnavailable as error:
            failed = wire.LaunchFailed(generation=launch.generation, reason=str(error), bad_origin=error.origin)
            self._tell(failed)
            return
        except (OSError, ConnectionError) as error:
            self._tell(wire.LaunchFailed(generation=launch.generation, reason=str(error)))
            return
        self._write_workers()
        self._tell(wire.Launched(generation=launch.generation))

    def _have_rejoin(self, launch: wire.Launch, rank: int) -> None:
        """A rank that stays belongs to the new generation from here on."""
        worker = self._workers[rank]
        worker.worker = msgspec.structs.replace(worker.worker, generation=launch.generation)
        worker.num_drained = worker.page.join_generation(launch.generation)
        worker.page.stop_at_step = self._stop_at_step
        restore = launch.restore
        letter = Rejoin(
            generation=launch.generation,
            rank=rank,
            master_address=launch.master_address,
            master_port=launch.master_port,
            restore_source=restore.source,
            restore_step=restore.step,
            restore_generation=restore.generation,
            restore_directory=restore.directory,
            skips=restore.skips,
        )
        post(self._node.inbox(rank), letter)

    async def _start_worker(self, launch: wire.Launch, rank: int, local_rank: int) -> None:
        for box in (self._node.outbox(rank), self._node.inbox(rank)):
            shutil.rmtree(box, ignore_errors=True)
        path = self._node.page(rank)
        page = with_reserve(self._node.root, lambda: Page.create(path, generation=launch.generation))
        page.stop_at_step = self._stop_at_step
        place = place_of(self._settings, self._run, self._node, launch, rank=rank, local_rank=local_rank)
        log_path = self._run.logs / f"rank-{rank}.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            log.write(f"--- generation {launch.generation} on {self._component}\n".encode())
        logs = log_variables(self._run, run_id=place.run_id, rank=rank, environment=os.environ)
        variables = {**logs, **worker_variables(place), **torchrun_variables(place, self._settings, launch)}
        pid = await self._zygote.fork(variables=variables, log_path=log_path)
        if launch.generation <= self._killed_generation:
            # it was ended before it began: the zygote was still importing when it was asked for
            process.kill(pid)
            raise ConnectionError("ended before it began")
        started = process.start_ticks(pid) or 0
        running = wire.RunningWorker(
            rank=rank, local_rank=local_rank, generation=launch.generation, pid=pid, start_ticks=started
        )
        self._take_in(running, page)

    def _take_in(self, running: wire.RunningWorker, page: Page) -> None:
        """Watch a worker by its pidfd: its end is an event, also when it is not our child.

        One that has ended is buried at once, which tells its last steps and letters.
        """
        pidfd = -1
        if process.is_alive(running.pid, start_ticks_expected=running.start_ticks):
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(running.pid)
        worker = _Worker(running, page, pidfd)
        self._workers[running.rank] = worker
        if pidfd >= 0:
            asyncio.get_running_loop().add_reader(pidfd, self._on_exit, running.rank, pidfd)
        else:
            self._spawn(self._bury(worker))

    def _adopt(self) -> None:
        """Take over the workers that an earlier agent of this node left running."""
        try:
            known = msgspec.json.decode(self._node.workers.read_bytes(), type=tuple[wire.RunningWorker, ...])
        except (OSError, msgspec.MsgspecError):
            return
        for running in known:
            self._generation = max(self._generation, running.generation)
            with contextlib.suppress(OSError, ValueError):
                self._take_in(running, Page.open(self._node.page(running.rank)))

    def _write_workers(self) -> None:
        if self._is_dismissed:
            return  # the node's directory may be gone already, and must not come back
        listed = msgspec.json.encode(tuple(worker.worker for worker in self._workers.values()))
        with_reserve(self._node.root, lambda: write_atomically(self._node.workers, listed))

    # --- watching ---

    async def _watch(self) -> None:
        last_status_s = last_reading_s = looked_s = 0.0
        rhythm = fleet_rhythm(len(self._settings.nodes) + len(self._settings.spares))
        last_phases: list[Phase] = []
        while True:
            now_s = self._now_s()
            if now_s - last_reading_s >= _READING_S:
                # an agent that was itself stopped, or its whole host, cannot tell what the workers did meanwhile
                was_away = now_s - last_reading_s > _AWAY_S
                last_reading_s = now_s
                for worker in self._workers.values():
                    if was_away:
                        worker.activity = None
                    worker.activity = advance(worker.activity, process.read(worker.worker.pid), now_s=now_s)
            self._look_for_endings()
            self._forward_letters()
            self._forward_steps()
            phases = [worker.page.phase for worker in self._workers.values()]
            is_urgent = phases != last_phases and (Phase.UNWOUND in phases or Phase.UNWOUND in last_phases)
            if self._connection is not None and (is_urgent or now_s - looked_s >= _STATUS_S):
                looked_s, last_phases = now_s, phases
                ranks = tuple(self._rank_status(worker, now_s) for worker in self._workers.values())
                is_due = self._connection is not self._told_on or now_s - last_status_s >= rhythm.status_s
                if is_urgent or is_due or is_news(self._told_ranks, ranks):
                    last_status_s, self._told_ranks, self._told_on = now_s, ranks, self._connection
                    fill_reserve(self._node.root)
                    status = wire.Status(ranks=ranks, snapshots=snapshots_in(self._node))
                    self._tell(status, is_kept=False)
            await asyncio.sleep(_TICK_S)

    def _rank_status(self, worker: _Worker, now_s: float) -> wire.RankStatus:
        state = worker.activity
        return wire.RankStatus(
            rank=worker.worker.rank,
            generation=worker.worker.generation,
            pid=worker.worker.pid,
            phase=worker.page.phase,
            step=worker.page.step,
            idle_s=max(0.0, now_s - worker.page.progress_ns / 1e9) if worker.page.pid else 0.0,
            quiet_s=0.0 if state is None else max(0.0, now_s - state.quiet_since_s),
            activity="gone" if state is None else state.activity,
            is_attached=worker.page.is_attached,
            can_stay=worker.page.can_stay,
        )

    def _forward_letters(self) -> None:
        for rank in tuple(self._workers):
            for path in unread(self._node.outbox(rank)):
                self._forward_letter(path)

    def _forward_letter(self, path: Path) -> None:
        try:
            letter = read_from_worker(path)
        except (OSError, msgspec.MsgspecError):
            path.unlink(missing_ok=True)
            return
        if isinstance(letter, OrderPut):
            self._writer.pass_on(letter.path)
        else:
            self._tell(wire.Received(letter=letter))
        path.unlink(missing_ok=True)

    def _forward_steps(self) -> None:
        if self._connection is None:
            return
        offset_ns = self._clock.wall_ns() - self._clock.monotonic_ns()
        parts: list[wire.Steps] = []
        for worker in self._workers.values():
            records, worker.num_drained = worker.page.drain(seen=worker.num_drained)
            if records:
                on_wall = tuple(_shifted(record, offset_ns) for record in records)
                running = worker.worker
                parts.append(wire.Steps(rank=running.rank, generation=running.generation, records=on_wall))
        if parts:
            self._tell(parts[0] if len(parts) == 1 else wire.StepsOfNode(parts=tuple(parts)), is_kept=False)

    def _keep_last_steps(self, worker: _Worker) -> None:
        """All that is in the ring of a worker that ended: no controller may be there to hear it now."""
        records, _ = worker.page.drain(seen=0)
        if records:
            offset_ns = self._clock.wall_ns() - self._clock.monotonic_ns()
            on_wall = tuple(_shifted(record, offset_ns) for record in records)
            self._tell(wire.Steps(rank=worker.worker.rank, generation=worker.worker.generation, records=on_wall))

    def _look_for_endings(self) -> None:
        """A rank with much memory is lost long before the kernel has given all of it back and says so."""
        for rank, worker in tuple(self._workers.items()):
            if worker.pidfd < 0 or worker.ending is not None:
                continue
            running = worker.worker
            worker.ending = process.bad_ending(running.pid, start_ticks_expected=running.start_ticks)
            if worker.ending is not None:
                self._on_exit(rank, worker.pidfd)

    def _on_exit(self, rank: int, pidfd: int) -> None:
        if not asyncio.get_running_loop().remove_reader(pidfd):
            return
        worker = self._workers.get(rank)
        if worker is not None and worker.pidfd == pidfd:
            self._spawn(self._bury(worker))

    async def _bury(self, worker: _Worker) -> None:
        """Say how a worker ended, after its last letters and steps. A moment is given to the zygote to say the exit
        code."""
        time_ns = self._clock.wall_ns()
        if worker.ending is not None:
            exit_code, signal_number = worker.ending.exit_code, worker.ending.signal
        else:
            exit_code, signal_number = await self._zygote.how_it_ended(worker.worker.pid, timeout_s=_EXIT_CODE_S)
        self._forward_letters()
        running = worker.worker
        if exit_code != 0:
            # what a broken script started would hold its ports and devices; one that ended well left it on purpose
            process.kill_group(running.pid, start_ticks_expected=running.start_ticks)
        self._keep_last_steps(worker)
        if self._workers.get(running.rank) is worker:
            del self._workers[running.rank]
            self._write_workers()
        if worker.pidfd >= 0:
            os.close(worker.pidfd)
        self._tell(
            wire.WorkerEnded(
                rank=running.rank,
                generation=running.generation,
                exit_code=exit_code,
                signal=signal_number,
                time_ns=time_ns,
                log_tail="" if exit_code == 0 else _tail(self._run.logs / f"rank-{running.rank}.log"),
            )
        )

    # --- ending ---

    async def _kill(self, order: wire.Kill) -> None:
        old = [worker for worker in self._workers.values() if worker.worker.generation <= order.generation]
        victims = [worker for worker in old if worker.worker.rank not in order.staying]
        for worker in old:
            if worker.worker.rank in order.staying:
                worker.page.cut_generation = order.generation
        self._killed_generation = max(self._killed_generation, order.generation)
        self._forward_steps()
        if order.grace_s > 0:
            for worker in victims:
                process.kill(worker.worker.pid, signal.SIGTERM)
            await self._wait_gone(victims, timeout_s=order.grace_s)
        await self._end(victims)
        alive = [worker.worker for worker in victims if process.is_running(worker.worker.pid)]
        states = (process.read(worker.pid) for worker in alive)
        self._tell(
            wire.Killed(
                generation=order.generation,
                snapshots=snapshots_in(self._node),
                free_port=free_port(self._settings.node_host),
                undead=tuple(worker.rank for worker in alive),
                undead_states=tuple("?" if reading is None else reading.state for reading in states),
                copies=CopyStore(self._node).held(),  # a rank may have found one damaged meanwhile
            ),
            is_kept=False,
        )

    async def _end(self, victims: list[_Worker]) -> None:
        """Kill workers, and their own children, which would wait for them forever (data loading processes)."""
        for worker in victims:
            for pid in (worker.worker.pid, *process.descendants(worker.worker.pid)):
                process.kill(pid)
            process.kill_group(worker.worker.pid, start_ticks_expected=worker.worker.start_ticks)
        await self._wait_gone(victims, timeout_s=self._settings.policy.teardown_s)

    async def _wait_gone(self, workers: list[_Worker], *, timeout_s: float) -> None:
        deadline_s = self._now_s() + timeout_s
        while any(process.is_running(w.worker.pid) for w in workers) and self._now_s() < deadline_s:
            await asyncio.sleep(0.005)

    async def _probe_links(self, order: wire.ProbeLinks) -> None:
        unreachable = await self._links.unreachable(order.peers)
        self._tell(wire.LinksProbed(round=order.round, unreachable=unreachable), is_kept=False)

    async def _take_stacks(self, generation: int) -> None:
        workers = [worker for worker in self._workers.values() if worker.worker.generation == generation]
        ranks = await asyncio.gather(
            *(
                take_evidence(
                    worker.worker.rank,
                    pid=worker.worker.pid,
                    page=worker.page,
                    flight_path=self._node.flight(worker.worker.rank),
                )
                for worker in workers
            )
        )
        self._tell(wire.StacksTaken(generation=generation, ranks=tuple(ranks)), is_kept=False)

    async def _preflight(self, order: wire.Preflight) -> None:
        answer = await probe(order, node=self._node, run=self._run, settings=self._settings, zygote=self._zygote)
        port = free_port(self._settings.node_host)
        self._tell(msgspec.structs.replace(answer, free_port=port), is_kept=False)

    async def _leave(self, *, is_memory_kept: bool) -> None:
        self._is_dismissed = True
        await self._end(list(self._workers.values()))
        self._writer.end()
        await self._courier.close()
        if not is_memory_kept:
            shutil.rmtree(self._node.root, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._node.root.parent.rmdir()

    async def _end_orphans(self) -> None:
        """No controller for long: nobody will ever ask for these workers. Their memory checkpoints stay."""
        await self._leave(is_memory_kept=True)

    def _now_s(self) -> float:
        return self._now_ns() / 1e9

    def _now_ns(self) -> int:
        return self._clock.monotonic_ns()


def snapshots_in(node: NodeDirectory) -> tuple[wire.SnapshotStatus, ...]:
    """All complete memory checkpoints of a node, those of ranks that run elsewhere by now included."""
    found: list[wire.SnapshotStatus] = []
    for rank, prefix in ranks_in(node.root):
        files = SnapshotFiles(prefix)
        found.extend(status_of(slot, rank=rank) for slot in files.slots() if files.is_there(slot))
    return tuple(found)


def free_port(host: str) -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def _shifted(record: StepRecord, offset_ns: int) -> StepRecord:
    return msgspec.structs.replace(record, begin_ns=record.begin_ns + offset_ns, end_ns=record.end_ns + offset_ns)


def _is_of_generation_before(message: wire.ToController, generation: int) -> bool:
    if isinstance(message, wire.Received):
        return message.letter.generation < generation
    return getattr(message, "generation", generation) < generation


def _tail(path: Path) -> str:
    """The end of a log, for the reader of an event."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
