"""The controller of a run: gathers what the agents see, asks `decide`, applies the answer, and writes the events.

It holds no state that is not in the event log or with the agents, so one that was killed is replaced by the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Coroutine, Iterable
from functools import partial
from typing import Any, Literal

import msgspec

from dougong.backend.nodes import NodeBackend
from dougong.clock import Clock
from dougong.errors import DougongError, NodeUnreachable, StoreWriteFailed
from dougong.event import kinds
from dougong.event.log import EventLog
from dougong.run import decide as rules
from dougong.run import letters, wire
from dougong.run.announcements import Announcements
from dougong.run.checkpoints import CheckpointDesk, CheckpointLetter, Outcome, newest_committed, newest_good
from dougong.run.copy_rounds import CopiedJob, CopyRounds
from dougong.run.evidence import Bundle, flights_of, write_bundle
from dougong.run.fitness import Fitness, untested_at_start
from dougong.run.hang import Finding, find_hang
from dougong.run.history import JobHistory
from dougong.run.layout import RunDirectory, write_atomically
from dougong.run.links import Links
from dougong.run.losses import loss_of_end, loss_of_error
from dougong.run.node_session import NodeSession, onset_of_silence_ns, ranks_by_node, ranks_of
from dougong.run.page import Phase, StepRecord
from dougong.run.progress import JobProgress, is_sampled
from dougong.run.reception import Reception
from dougong.run.repairs import Repairs
from dougong.run.restore_choice import must_travel
from dougong.run.save_desk import SaveDesk
from dougong.run.save_rhythm import steps_within
from dougong.run.settings import RunSettings
from dougong.run.silence import Silence
from dougong.run.stacks import name_culprit
from dougong.run.status_rhythm import fleet_rhythm, grown
from dougong.run.vigil import News, Vigil
from dougong.run.webhook import send_webhook
from dougong.telemetry.samples import SampleSink

_MAX_DECISIONS = 8
_STACKS_S = 3.0
_STOP_S = 90.0
_STOP_NOTICE_S = 0.5
_SIGTERM_GRACE_S = 10.0
_LAUNCH_S = 120.0
_DISMISS_S = 8.0
_STORE_RETRY_S = 1.0

Status = Literal["gathering", "preflight", "running", "tearing-down", "backing-off", "ended"]


class Controller:
    """Runs one job to its end. `run()` returns "finished", "failed" or "stopped"."""

    def __init__(
        self,
        run: RunDirectory,
        settings: RunSettings,
        *,
        token: bytes,
        log: EventLog,
        samples: SampleSink,
        backend: NodeBackend,
        clock: Clock,
        history: JobHistory,
        is_resume: bool,
        reception_of: type[Reception] = Reception,
    ) -> None:
        self._run = run
        self._settings = settings
        self._log = log
        self._samples = samples
        self._backend = backend
        self._clock = clock
        self._history = history
        self._is_asked_to_resume = is_resume
        # a controller that died between a resume and its first start leaves the resume to the next one
        self._is_resume = is_resume or (history.num_starts > 1 and not history.has_run_since_start)
        now_s = self._now_s()
        lost = frozenset[str]() if is_resume else history.lost_nodes
        names = sorted((*settings.nodes, *settings.spares), key=history.preference)
        self._nodes = {name: NodeSession(name, is_lost=name in lost, now_s=now_s) for name in names}
        self._rhythm = fleet_rhythm(len(names))
        self._silence = Silence(settings.hang)
        self._status: Status = "gathering"
        self._status_since_s = now_s
        self._generation = history.generation
        self._placement = history.placement
        self._by_node = ranks_by_node(history.placement)
        self._is_attached = history.is_attached
        self._is_resumed = history.is_resumed
        self._has_stepped = history.last_step > 0
        self._num_restarts = 0 if is_resume else history.num_restarts
        self._num_fruitless = 0 if is_resume else history.num_fruitless
        self._progress = JobProgress(max_step=history.max_step)
        self._losses: list[rules.Loss] = []
        self._loss_since_s = 0.0
        self._last_traceback = ""
        self._finished: set[int] = set()
        self._said_done: set[int] = set()
        self._stopped: set[int] = set()
        self._killed: set[str] = set()
        self._staying: set[int] = set()
        self._rung: kinds.Rung = history.rung
        self._is_growing = False
        self._backoff_until_s = 0.0
        self._pending: rules.Place | None = None
        self._stop_since_s: float | None = None
        self._is_stop_sent = False
        self._evidence: dict[int, wire.RankEvidence] = {}
        self._stacks_from: set[str] = set()
        self._last_stall_s = 0.0
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._is_store_failing = False
        self._store_retry_s = 0.0
        self._end = ""
        self._is_leaving = False
        self._restore = wire.Restore(source="none")
        self._launched: set[str] = set()
        self._links = Links(self._nodes)
        self._repairs = Repairs(self._nodes, backend=backend, policy=settings.policy)
        self._announcements = Announcements(settings, history)
        self._reception = reception_of(
            self._nodes,
            token=token,
            clock=clock,
            on_hello=self._connected,
            on_message=self._hear,
            on_gone=self._disconnected,
        )
        self._desk = CheckpointDesk(settings, clock=clock, world_size=len(history.placement) or settings.world_size)
        self._saves = SaveDesk(settings, history, now_s=now_s)
        self._copies = CopyRounds(settings, self._nodes)
        self._fitness = Fitness(
            untested=untested_at_start(settings, history, is_resume=is_resume),
            quarantined=() if is_resume else history.quarantined_nodes,
        )
        self._before_preflight: Status = "gathering"
        self._vigil = Vigil(settings, history, ledger=run.ledger)
        self._vigil.begin_generation(self._placement)
        self._give_up = ""

    async def run(self) -> str:
        """Serve agents and decide until the job ends."""
        self._begin()
        address = await self._reception.open(self._settings)
        write_atomically(self._run.address, msgspec.json.encode(address), mode=0o600)
        try:
            while self._status != "ended":
                await self._step()
                if self._failure is not None:
                    raise self._failure
                looked_s = self._now_s()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), self._rhythm.look_s)
                # thousands of nodes answer one by one: what they say is looked at together
                if (rest_s := looked_s + self._rhythm.look_gap_s - self._now_s()) > 0:
                    await asyncio.sleep(rest_s)
                self._wake.clear()
        finally:
            self._reception.close()
            with contextlib.suppress(OSError, StoreWriteFailed):
                self._samples.close()
                self._log.close()
        return self._end

    def ask_stop(self) -> None:
        """Save and leave (Ctrl-C, or the launcher is gone)."""
        if self._stop_since_s is None:
            self._stop_since_s = self._now_s()
            self._wake.set()

    # --- beginning ---

    def _begin(self) -> None:
        """Write what starts here, and take up what an earlier controller left."""
        settings = self._settings
        if not self._history.is_created:
            self._record(
                kinds.JobCreated(
                    job=settings.run_id,
                    version=settings.version,
                    command=settings.command,
                    backend=settings.backend,
                    world_size=settings.world_size,
                    num_accelerators=settings.num_accelerators,
                    nodes=settings.nodes,
                    spares=settings.spares,
                )
            )
        is_restart = self._history.is_started and not self._is_asked_to_resume
        self._record(kinds.ControllerStarted(pid=os.getpid(), is_restart=is_restart))
        if self._is_asked_to_resume:
            for component in sorted(self._history.lost_nodes | self._history.quarantined_nodes):
                self._record(kinds.NodeRepaired(component=component))
        if not self._history.is_started or self._is_asked_to_resume:
            self._record(kinds.JobStarted(job=settings.run_id, is_resume=self._is_resume))
        elif self._history.has_run_since_start:
            # an earlier controller of this start: its ranks may run, or their end was being seen to
            self._become("tearing-down" if self._history.is_broken else "running")
        if self._history.generation > 0:
            self._progress.begin_generation(
                self._generation,
                world_size=len(self._placement) or settings.world_size,
                last_step=self._history.last_step,
            )
        self._log.commit()

    # --- one round: load, decide, apply ---

    async def _step(self) -> None:
        self._write_ranges(is_forced=False)
        self._note_memory_checkpoints()
        self._see_to_rhythm()
        self._record_all(self._copies.look(self._copied_job(), now_s=self._now_s()))
        self._see_to_stop()
        for component in self._reception.drop_silent():
            # at once: a new one is not started where the old one still seems to run
            await self._end_agent(component)
        self._record_all(self._links.look(now_s=self._now_s()))
        for node in self._repairs.due(now_s=self._now_s()):
            self._spawn(self._repairs.ask(node))
        self._note_late_launch()
        self._see_to_lingering()
        for _ in range(_MAX_DECISIONS):
            view = self._view(self._find_hang())
            self._see_to_preflight(view)
            self._keep_vigil()
            decision = rules.decide(view, self._settings.policy)
            await self._apply(decision)
            if isinstance(decision, rules.Wait) or self._status == "ended":
                break
        self._commit()

    def _copied_job(self) -> CopiedJob:
        return CopiedJob(
            generation=self._generation,
            placement=self._placement,
            is_running=self._status == "running" and not self._losses,
            is_attached=self._is_attached,
            step_s=self._progress.fast_step_s,
        )

    async def _apply(self, decision: rules.Decision) -> None:
        match decision:
            case rules.Wait():
                return
            case rules.RestartAgent():
                for component in (decision.component, *decision.others):
                    await self._restart_agent(component)
            case rules.LoseNode():
                self._lose_node(decision.component, decision.reason)
            case rules.Quarantine():
                self._record_all(self._fitness.quarantine(decision.component, decision.reason))
            case rules.Interrupt():
                await self._interrupt(decision)
            case rules.EndStaying():
                self._end_staying(decision.reason)
            case rules.Place():
                await self._place(decision)
            case rules.ProbeNodes():
                self._begin_preflight(decision.components)
            case rules.Grow():
                self._is_growing = True
                self._ask_ranks_to_leave()
            case rules.Regroup():
                self._write_ranges(is_forced=True)
                await self._desk.finish()
                self._tear_down()
            case rules.Finish():
                self._write_ranges(is_forced=True)
                await self._leave("finished", kinds.JobFinished(step=self._progress.max_step), is_memory_kept=False)
            case rules.Stop():
                self._write_ranges(is_forced=True)
                event = kinds.JobStopped(step=self._progress.last_step, reason=decision.reason)
                is_needed = self._is_attached and self._desk.last_durable_step < self._progress.last_step
                await self._leave("stopped", event, is_memory_kept=is_needed)
            case rules.GiveUp():
                self._write_ranges(is_forced=True)
                event = kinds.JobFailed(reason=decision.reason, traceback=self._last_traceback)
                # memory left behind by every script that fails would fill the node; a resume starts from durable ones
                await self._leave("failed", event, is_memory_kept=False)

    def _view(self, finding: Finding | None) -> rules.JobView:
        now_s = self._now_s()
        # who could stay is asked only once somebody is lost, for it means looking at every rank
        is_calm = self._status == "running" and not (self._losses or finding or self._has_lost_node())
        living = [] if is_calm else self._living_ranks()
        return rules.JobView(
            status=self._status,
            generation=self._generation,
            procs_per_node=self._settings.procs_per_node,
            num_nodes=len(self._settings.nodes),
            placement=self._placement,
            nodes=tuple(
                node.view(
                    now_s=now_s,
                    was_known=self._history.is_started,
                    is_ready=not self._is_resume or self._status != "gathering" or node.component in self._killed,
                    is_quarantined=node.component in self._fitness.quarantined,
                )
                for node in self._nodes.values()
            ),
            losses=tuple(self._losses),
            loss_settle_s=now_s - self._loss_since_s if self._losses else 0.0,
            finding=finding,
            finished_ranks=tuple(sorted(self._finished)),
            killed_nodes=tuple(sorted(self._killed)),
            teardown_s=now_s - self._status_since_s,
            backoff_left_s=max(0.0, self._backoff_until_s - now_s),
            gathering_s=now_s - self._status_since_s,
            num_restarts=self._num_restarts,
            num_fruitless=self._num_fruitless,
            can_stay=tuple(rank.rank for rank in living if rank.can_stay),
            staying=tuple(sorted(self._staying)),
            unwound=tuple(rank.rank for rank in living if rank.phase == Phase.UNWOUND),
            slow_step_s=self._progress.learnt().p99_s or 0.0 if self._staying else 0.0,
            rung=self._rung,
            is_restored=self._announcements.is_restored,
            running_s=now_s - self._status_since_s,
            min_nodes=self._settings.min_nodes,
            is_attached=self._is_attached,
            is_growing=self._is_growing,
            is_probing=self._links.is_asking(now_s=now_s),
            cut_links=self._links.cut,
            has_left=bool(self._stopped) and len(self._stopped | self._finished) == len(self._placement),
            is_stop_wanted=self._stop_since_s is not None,
            is_stop_complete=self._stop_since_s is not None
            and len(self._stopped | self._finished) == len(self._placement) > 0,
            give_up=self._give_up,
            untested=self._fitness.untested,
            keepers=self._copies.keepers,
        )

    def _has_lost_node(self) -> bool:
        return any(self._nodes[component].is_lost for component in self._by_node)

    def _living_ranks(self) -> list[wire.RankStatus]:
        """The ranks of this generation as last heard of, but those that do not run any more."""
        return [
            rank
            for rank in ranks_of(self._nodes.values())
            if rank.generation == self._generation and rank.activity not in ("gone", "stopped")
        ]

    # --- nodes ---

    async def _restart_agent(self, component: str) -> None:
        node = self._nodes[component]
        node.ask_agent(now_s=self._now_s())
        try:
            await asyncio.to_thread(self._backend.start_agent, component)
        except NodeUnreachable as error:
            self._lose_node(component, error.reason)

    def _lose_node(self, component: str, reason: str) -> None:
        node = self._nodes[component]
        node.is_lost = True
        node.is_fenced = False
        if node.connection is not None:
            node.connection.close()
            node.connection = None
        self._record(kinds.NodeLost(component=component, reason=reason))
        self._spawn(self._fence(component))

    async def _fence(self, component: str) -> None:
        await asyncio.to_thread(self._backend.fence, component)
        self._nodes[component].is_fenced = True

    async def _end_agent(self, component: str) -> None:
        await asyncio.to_thread(self._backend.end_agent, component)

    def _connected(self, node: NodeSession, connection: wire.Connection, hello: wire.Hello) -> None:
        if node.is_lost:
            self._take_back(node, connection)
        elif node.was_connected or (self._history.is_started and not self._is_resume):
            self._record(kinds.AgentReturned(component=node.component, num_workers=len(hello.workers)))
        else:
            role = "active" if node.component in self._settings.nodes else "spare"
            share = self._settings.num_accelerators // max(1, len(self._settings.nodes))
            self._record(kinds.NodeJoined(component=node.component, role=role, num_accelerators=share))
        node.open(connection, hello, now_s=self._now_s())
        connection.send(wire.Welcome(generation=self._generation, wall_ns=self._wall_ns()))
        if self._status == "tearing-down" or (self._status == "gathering" and self._is_resume):
            ranks = self._by_node.get(node.component, ())
            staying = tuple(rank for rank, _ in ranks if rank in self._staying)
            connection.send(wire.Kill(generation=self._generation, staying=staying))
        if self._status == "running":
            self._compare_workers(node, hello)
        self._wake.set()

    def _take_back(self, node: NodeSession, connection: wire.Connection) -> None:
        """A lost node is there again: the last of the spares, once what may still run on it is ended."""
        self._repairs.take_back(node)
        self._nodes[node.component] = self._nodes.pop(node.component)
        share = self._settings.num_accelerators // max(1, len(self._settings.nodes))
        self._fitness.readmit(node.component)
        self._record(kinds.NodeRepaired(component=node.component))
        self._record(kinds.NodeJoined(component=node.component, role="spare", num_accelerators=share))
        connection.send(wire.Kill(generation=self._generation))

    def _compare_workers(self, node: NodeSession, hello: wire.Hello) -> None:
        """Ranks that should run there and do not ended while nobody watched."""
        there = {worker.rank for worker in hello.workers if worker.generation == self._generation}
        for placed in self._placement:
            if placed.component != node.component or placed.rank in there or placed.rank in self._finished:
                continue
            self._spawn(self._lose_unless_explained(placed))

    async def _lose_unless_explained(self, placed: kinds.Placed) -> None:
        """The agent tells again what it knew right after its greeting; give that a moment to arrive."""
        generation = self._generation
        await asyncio.sleep(0.3)
        if self._generation != generation or self._status != "running" or placed.rank in self._finished | self._stopped:
            return
        if placed.rank in self._said_done:
            self._finished.add(placed.rank)
            return
        detail = "ended while its agent was away"
        self._add_loss(
            rules.Loss(
                rank=placed.rank,
                component=placed.component,
                cause_class="crash",
                detail=detail,
                order=(0, self._wall_ns()),
            )
        )

    def _disconnected(self, node: NodeSession, reason: str) -> None:
        if not self._is_leaving and not node.is_lost:
            self._record(kinds.AgentLost(component=node.component, reason=reason))
        self._fitness.lose(node.component)
        self._wake.set()

    # --- pre-flight ---

    def _begin_preflight(self, components: tuple[str, ...]) -> None:
        self._before_preflight = self._status
        self._become("preflight")
        addresses = {component: self._nodes[component].address for component in components}
        for component, order in self._fitness.begin(addresses, now_s=self._now_s()):
            self._nodes[component].send(order)

    def _see_to_preflight(self, view: rules.JobView) -> None:
        """Before a start all wait for it; a node that is free is tested while the others train."""
        has_work = bool(self._fitness.is_testing or self._fitness.untested)
        if self._status != "preflight" and not (self._status == "running" and has_work):
            return
        idle = [component for component in self._free_spares() if component in self._fitness.untested]
        if self._status == "running" and idle and not self._fitness.is_testing:
            addresses = {component: self._nodes[component].address for component in idle}
            for component, order in self._fitness.begin(addresses, now_s=self._now_s()):
                self._nodes[component].send(order)
        news = self._fitness.proceed(
            now_s=self._now_s(), usable=rules.usable_nodes(view), num_needed=len(self._settings.nodes)
        )
        self._record_all(news.events)
        for component, order in news.orders:
            self._nodes[component].send(order)
        if news.is_over and self._status == "preflight":
            self._become(self._before_preflight)

    # --- what agents say ---

    def _hear(self, node: NodeSession, message: wire.AgentMessage) -> None:
        match message:
            case wire.Hello():
                return
            case wire.Status():
                node.status = message
                node.status_s = self._now_s()
                self._silence.hear(node.component, message, generation=self._generation, now_s=node.status_s)
                self._is_attached = self._is_attached or any(
                    rank.is_attached for rank in message.ranks if rank.generation == self._generation
                )
                return
            case wire.Steps():
                self._hear_steps(message)
                return
            case wire.StepsOfNode():
                for part in message.parts:
                    self._hear_steps(part)
                return
            case wire.Received():
                self._hear_letter(node, message.letter)
            case wire.WorkerEnded():
                self._hear_end(node, message)
            case wire.Launched():
                if message.generation == self._generation:
                    self._launched.add(node.component)
            case wire.LaunchFailed():
                if message.generation == self._generation:
                    self._hear_launch_failed(node, message)
            case wire.CopiesHeld():
                self._record_all(self._copies.hear(node, message))
            case wire.Killed():
                node.is_cleared = node.is_cleared or not message.undead
                if message.generation >= self._generation:
                    node.snapshots = message.snapshots
                    node.copies = message.copies
                    node.free_port = message.free_port
                    node.note_undead(message)
                    if not message.undead:
                        self._killed.add(node.component)
                    if self._is_stop_sent and self._status == "running":
                        self._stopped.update(p.rank for p in self._placement if p.component == node.component)
            case wire.Preflighted():
                self._fitness.hear(node.component, message)
            case wire.LinksProbed():
                self._links.hear(node.component, message)
            case wire.StacksTaken():
                if message.generation == self._generation:
                    self._evidence.update({one.rank: one for one in message.ranks})
                    self._stacks_from.add(node.component)
        self._wake.set()

    def _hear_steps(self, message: wire.Steps) -> None:
        if message.generation != self._generation:
            return
        before = self._progress.last_step
        before_max = self._progress.max_step
        fresh = self._progress.add(message.rank, message.records)
        self._follow(self._vigil.add_steps(message.rank, fresh, generation=self._generation))
        if is_sampled(message.rank, world_size=len(self._placement)):
            with contextlib.suppress(OSError):  # what a full disk does not take now is kept for the next flush
                self._sample(message.rank, fresh)
        self._last_stall_s = max(
            (r.checkpoint_stall_ns / 1e9 for r in fresh if r.checkpoint_stall_ns), default=self._last_stall_s
        )
        if self._progress.max_step > before_max:
            self._num_fruitless = 0
        if self._progress.last_step > before and not self._has_stepped:
            self._has_stepped = True
            self._progress.note_start(self._now_s() - self._status_since_s)
        if self._progress.last_step > before and not self._is_resumed:
            self._is_resumed = True
            self._write_ranges(is_forced=True)
            self._record(kinds.JobResumed(generation=self._generation, step=self._progress.last_step))

    def _sample(self, rank: int, records: tuple[StepRecord, ...]) -> None:
        times_ns, steps = [record.end_ns for record in records], [record.step for record in records]
        durations_s = [(record.end_ns - record.begin_ns) / 1e9 for record in records]
        self._samples.append(f"step_s/rank-{rank}", times_ns, steps, durations_s)
        told = [(record.end_ns, record.step, record.loss) for record in records if record.loss is not None]
        if told:
            times_ns, steps, losses = zip(*told, strict=True)
            self._samples.append(f"loss/rank-{rank}", times_ns, steps, losses)

    def _hear_letter(self, node: NodeSession, letter: letters.WorkerLetter) -> None:
        if letter.generation != self._generation:
            return
        match letter:
            case letters.ModelFound():
                self._record_all(self._announcements.model(letter))
            case letters.PeakMeasured():
                self._record_all(self._announcements.peak(letter))
            case letters.Restored():
                self._record_all(self._announcements.restored(letter))
            case letters.ErrorRaised():
                self._add_loss(loss_of_error(letter, node.component))
            case letters.ScriptEnded():
                if letter.exit_code == 0:
                    self._said_done.add(letter.rank)
            case letters.Stopped():
                self._stopped.add(letter.rank)
            case letters.WarningGiven():
                self._record(kinds.WarningRaised(component=node.component, text=f"rank {letter.rank}: {letter.text}"))
            case letters.OrderPut():
                return  # for the agent alone
            case letters.LossFoundBad() | letters.SaveRefused() | letters.Fingerprinted():
                saved_step = max(self._announcements.last_memory_step, self._desk.last_durable_step)
                spares = self._free_spares()
                self._follow(self._vigil.hear(letter, saved_step=saved_step, spares=spares, now_s=self._now_s()))
            case letters.Probed():
                return  # its agent gathers these itself
            case (
                letters.ShardWritten()
                | letters.ShardFailed()
                | letters.ShardSkipped()
                | letters.ShardHeld()
                | letters.SaveAgain()
                | letters.MetadataWritten()
            ):
                self._spawn(self._see_to_checkpoint(letter))

    def _hear_end(self, node: NodeSession, message: wire.WorkerEnded) -> None:
        if message.generation != self._generation:
            return
        if self._status in ("tearing-down", "preflight", "backing-off"):
            self._staying.discard(message.rank)
            return
        if message.exit_code == 0 or (
            message.exit_code is None and message.signal is None and self._is_over(message.rank)
        ):
            self._finished.add(message.rank)
            return
        if self._stop_since_s is not None and self._is_stop_sent and not self._is_attached:
            self._stopped.add(message.rank)
            return
        if any(loss.rank == message.rank for loss in self._losses):
            return
        self._add_loss(loss_of_end(message, node.component))

    def _hear_launch_failed(self, node: NodeSession, message: wire.LaunchFailed) -> None:
        rank = next(p.rank for p in self._placement if p.component == node.component)
        detail = f"its node could not start it: {message.reason}"
        if (origin := message.bad_origin) is not None:
            rank = origin.rank
            self._record(self._copies.refuse(origin, self._restore, reason=message.reason))
        loss = rules.Loss(
            rank=rank, component=node.component, cause_class="host", detail=detail, is_failure=origin is None
        )
        self._add_loss(loss)

    def _is_over(self, rank: int) -> bool:
        return rank in self._finished | self._said_done | self._stopped

    def _add_loss(self, loss: rules.Loss) -> None:
        if self._status != "running":
            return
        if not self._losses:
            self._loss_since_s = self._now_s()
        self._losses.append(loss)
        self._wake.set()

    # --- losses, stragglers, silent corruption ---

    def _keep_vigil(self) -> None:
        if self._status == "running":
            self._follow(
                self._vigil.look(
                    last_step=self._progress.last_step,
                    durable_step=self._desk.last_durable_step,
                    spares=self._free_spares(),
                    now_s=self._now_s(),
                )
            )

    def _follow(self, news: News) -> None:
        self._record_all(news.events)
        if news.hold_saves_until:
            self._broadcast(wire.HoldSaves(until_step=news.hold_saves_until))
        for component, reason in news.cordoned:
            self._record_all(self._fitness.quarantine(component, reason))
        self._fitness.doubt(news.doubted)
        self._give_up = self._give_up or news.give_up
        for loss in news.losses:
            self._add_loss(loss)

    def _free_spares(self) -> tuple[str, ...]:
        """Nodes that could take over at once."""
        taken = self._by_node.keys() | self._fitness.quarantined
        return tuple(
            node.component
            for node in self._nodes.values()
            if node.connection is not None and not node.is_lost and node.component not in taken
        )

    # --- steps and checkpoints ---

    def _note_memory_checkpoints(self) -> None:
        if self._status != "running":
            return
        statuses = (node.status for node in self._nodes.values() if node.status is not None)
        snapshots = (snapshot for status in statuses for snapshot in status.snapshots)
        self._record_all(
            self._announcements.memory(
                snapshots, generation=self._generation, stall_s=self._last_stall_s, now_s=self._now_s()
            )
        )

    def _write_ranges(self, *, is_forced: bool) -> None:
        ranges = self._progress.take_ranges(is_forced=is_forced)
        if ranges:
            # an event that says a step is finished must not outlive the step's samples
            with contextlib.suppress(OSError):
                self._samples.flush()
        self._record_all(ranges)

    def _see_to_rhythm(self) -> None:
        """Save more or less often from a step on that no rank has reached."""
        self._saves.note_steps(self._progress.take_steps())
        if not self._saves.is_due(now_s=self._now_s()):
            return
        if self._status != "running" or self._losses or not self._is_attached or self._stop_since_s is not None:
            return
        advice = self._saves.advise(now_s=self._now_s(), generation=self._generation, highest_step=self._highest_step())
        if advice is not None:
            order, event = advice
            self._broadcast(order)
            self._record(event)

    async def _see_to_checkpoint(self, letter: CheckpointLetter) -> None:
        generation = self._generation
        outcome = await self._desk.take(letter)
        self._record_all(outcome.events)
        self._saves.note_saved(outcome.events)
        if self._generation == generation:
            self._deliver(outcome)
        self._wake.set()
        if isinstance(outcome.letter, letters.CheckpointCommitted):
            try:
                self._record_all(await self._desk.retire())
            except (OSError, DougongError) as error:
                self._record(kinds.WarningRaised(component="checkpoints", text=f"old ones cannot be deleted: {error}"))

    def _deliver(self, outcome: Outcome) -> None:
        """The metadata is rank 0's to write; what becomes of a checkpoint is for all that wait for it."""
        match outcome.letter:
            case letters.WriteMetadata():
                self._send_to_rank(0, wire.Deliver(rank=0, letter=outcome.letter))
            case letters.CheckpointCommitted() | letters.DropCheckpoint() | letters.Reopened():
                for placed in self._placement:
                    self._nodes[placed.component].send(wire.Deliver(rank=placed.rank, letter=outcome.letter))
            case None:
                return

    # --- hangs ---

    def _note_late_launch(self) -> None:
        """A node that was told to start its ranks and does not say that it did."""
        if self._status != "running" or self._now_s() - self._status_since_s < _LAUNCH_S or self._losses:
            return
        if self._announcements.is_restored or self._progress.last_step:
            return
        for placed in self._placement:
            if placed.component not in self._launched and self._nodes[placed.component].connection is not None:
                detail = f"its node did not start it within {_LAUNCH_S:g} s"
                loss = rules.Loss(rank=placed.rank, component=placed.component, cause_class="host", detail=detail)
                self._add_loss(loss)
                return

    def _see_to_lingering(self) -> None:
        """A script that has ended may still join threads and write; a process that then does nothing is not waited for.

        Only its end tells how it ended, so before that a rank is finished only by this.
        """
        lingering = self._said_done - self._finished
        for node in self._nodes.values() if lingering else ():
            for rank in node.status.ranks if node.status is not None else ():
                if rank.generation != self._generation or rank.rank not in lingering:
                    continue
                if min(rank.idle_s, rank.quiet_s) > self._settings.hang.outside_step_s:
                    self._finished.add(rank.rank)
                    text = f"rank {rank.rank}: its script ended well, its process {rank.pid} does not leave"
                    self._record(kinds.WarningRaised(component=node.component, text=text))

    def _find_hang(self) -> Finding | None:
        if self._status != "running" or self._losses:
            return None
        now_s = self._now_s()
        if not self._silence.is_worth_a_look(now_s=now_s):
            return None
        statuses: list[wire.RankStatus] = []
        for component in self._by_node:
            node = self._nodes[component]
            age_s = now_s - node.status_s
            if node.status is None or age_s > self._rhythm.stale_s:
                return None
            ranks = [rank for rank in node.status.ranks if rank.generation == self._generation]
            statuses.extend([grown(rank, age_s=age_s) for rank in ranks] if self._rhythm.is_large else ranks)
        if len(statuses) < len(self._placement) - len(self._finished):
            return None
        return find_hang(statuses, learnt=self._progress.learnt(), rule=self._settings.hang)

    async def _gather_stacks(self) -> None:
        self._evidence.clear()
        self._stacks_from.clear()
        asked = {placed.component for placed in self._placement if self._nodes[placed.component].connection is not None}
        for component in asked:
            self._nodes[component].send(wire.TakeStacks(generation=self._generation))
        deadline_s = self._now_s() + _STACKS_S
        while not asked <= self._stacks_from and self._now_s() < deadline_s:
            await asyncio.sleep(0.01)

    def _write_evidence(self, finding_reason: str, verdict: str) -> str:
        directory = self._run.evidence / f"generation-{self._generation:03d}"
        ranks = tuple(one for _, one in sorted(self._evidence.items()))
        try:
            write_bundle(directory, Bundle(reason=finding_reason, verdict=verdict, ranks=ranks))
        except OSError as error:
            return f"could not be written: {error}"
        return str(directory.relative_to(self._run.root))

    # --- interruption and recovery ---

    async def _interrupt(self, decision: rules.Interrupt) -> None:
        loss = decision.loss
        detail, evidence, rank, component = loss.detail, "", loss.rank, loss.component
        onset_ns = loss.onset_ns
        if decision.wants_stacks:
            onset_ns = onset_of_silence_ns(ranks_of(self._nodes.values()), now_ns=self._clock.wall_ns())
            await self._gather_stacks()
            if loss.cause_class == "hang":
                stacks = {one.rank: one.stack for one in self._evidence.values()}
                flights = flights_of(tuple(self._evidence.values()))
                rank, verdict = name_culprit(stacks, suspect=loss.rank, flights=flights)
                component = next(placed.component for placed in self._placement if placed.rank == rank)
                detail = f"{detail}; {verdict}"
            evidence = self._write_evidence(decision.reason, detail)
        self._write_ranges(is_forced=True)
        self._last_traceback = loss.traceback
        self._is_growing = False
        event = kinds.WorkerLost(
            generation=self._generation,
            rank=rank,
            component=component,
            cause_class=loss.cause_class,
            detail=detail,
            onset_ns=onset_ns,
            last_step=self._progress.last_step,
            traceback=loss.traceback,
            evidence=evidence,
            is_failure=loss.is_failure,
        )
        self._record(event)
        self._saves.note_loss()
        self._num_fruitless += loss.is_failure
        if loss.cause_class in ("hang", "network") or self._links.cut:
            self._links.ask(now_s=self._now_s())
        # of a broken link nobody is the culprit; of a hang the stacks may name another one than was suspected
        culprits = set[int]() if loss.cause_class == "network" else {rank}
        self._staying = (set(decision.staying) | ({loss.rank} if decision.staying else set())) - culprits
        self._tear_down()
        if self._settings.webhook_url:
            self._spawn(self._tell_webhook(event))

    def _tear_down(self) -> None:
        """End the workers of this generation, but those that stay."""
        self._become("tearing-down")
        self._killed.clear()
        for component, ranks in self._by_node.items():
            staying = tuple(rank for rank, _ in ranks if rank in self._staying)
            self._nodes[component].send(wire.Kill(generation=self._generation, staying=staying))

    def _end_staying(self, reason: str) -> None:
        self._record(kinds.WarningRaised(component="run", text=f"no recovery in the process: {reason}"))
        self._staying.clear()
        self._pending = None
        self._tear_down()

    async def _tell_webhook(self, event: kinds.WorkerLost) -> None:
        status, detail = await asyncio.to_thread(
            send_webhook, self._settings.webhook_url, run_id=self._settings.run_id, event=event
        )
        self._record(kinds.WebhookSent(status=status, detail=detail))

    async def _place(self, decision: rules.Place) -> None:
        """Choose the state to go on from, say so, and start the ranks, now or after the back-off."""
        if self._pending is None or self._status != "backing-off":
            self._restore = self._vigil.completed(await self._choose_restore(decision.placement))
            if decision.staying and self._restore.source == "none":
                self._end_staying("there is no state to go back to")
                return
            if travelling := must_travel(self._restore, decision.placement, ranks=decision.staying):
                self._end_staying(f"the state of rank(s) {', '.join(map(str, travelling))} lies on other nodes")
                return
            self._pending = decision
            if self._generation > 0:
                self._record(
                    kinds.RecoveryDecided(
                        generation=self._generation + 1,
                        rung="cold" if decision.rung == "first" else decision.rung,
                        restore_step=self._restore.step,
                        restore_source=self._restore.source if self._is_attached else "script",
                        backoff_s=decision.backoff_s,
                        reason=f"{decision.reason}; {self._restore.reason}",
                    )
                )
            if decision.backoff_s > 0:
                self._backoff_until_s = self._now_s() + decision.backoff_s
                self._become("backing-off")
                return
        self._launch(decision)

    async def _choose_restore(self, placement: tuple[kinds.Placed, ...]) -> wire.Restore:
        if self._generation == 0:
            return wire.Restore(source="none", reason="the first start")
        self._follow(self._vigil.before_start())
        snapshots = [
            snapshot
            for placed in placement
            for snapshot in self._nodes[placed.component].snapshots
            if snapshot.rank == placed.rank and self._vigil.trusts(snapshot.generation, snapshot.step)
        ]
        choose = partial(
            rules.choose_restore,
            snapshots,
            world_size=len(placement),
            is_attached=self._is_attached,
            copies=self._copies.copies(trusts=self._vigil.trusts),
            homes={placed.rank: placed.component for placed in placement},
            refused=self._copies.refused,
        )
        listed = None
        if self._is_attached:
            trusts = self._vigil.trusts
            listed = await asyncio.to_thread(newest_committed, self._settings.checkpoint_url, trusts=trusts)
        choice = choose(durable=listed)
        if choice.source != "durable":
            return choice
        # only one that is about to be used is read through: that takes as long as its bytes
        durable, rejected = await asyncio.to_thread(
            newest_good,
            self._settings.checkpoint_url,
            checkpoint_key=self._settings.checkpoint_key,
            trusts=self._vigil.trusts,
        )
        self._record_all(rejected)
        return choose(durable=durable)

    def _launch(self, decision: rules.Place) -> None:
        is_first = self._status == "gathering"
        if self._generation > 0 and len(decision.placement) != len(self._placement):
            self._record(
                kinds.WorldResized(
                    generation=self._generation + 1,
                    from_world_size=len(self._placement),
                    to_world_size=len(decision.placement),
                    step=self._restore.step,
                    reason=decision.reason,
                )
            )
        self._generation += 1
        self._num_restarts += not is_first
        self._placement = decision.placement
        self._by_node = ranks_by_node(decision.placement)
        self._pending = decision
        self._rung = decision.rung
        staying, self._staying = self._staying, set[int]()
        self._is_growing = False
        self._losses.clear()
        self._finished.clear()
        self._said_done.clear()
        self._stopped.clear()
        self._launched.clear()
        self._give_up = ""
        self._vigil.begin_generation(decision.placement)
        self._is_resumed = self._generation == 1
        self._silence.begin_generation(num_ranks=len(decision.placement))
        self._has_stepped = False
        self._announcements.begin_generation(world_size=len(decision.placement), reason=decision.reason)
        self._desk.begin_generation(self._generation, world_size=len(decision.placement))
        self._progress.begin_generation(self._generation, world_size=len(decision.placement))
        self._saves.begin_generation(self._restore.source)
        self._record(
            kinds.GenerationStarted(
                generation=self._generation,
                placement=decision.placement,
                rung=decision.rung,
                reason=f"{decision.reason}; {self._restore.reason}",
            )
        )
        self._commit()
        self._become("running")
        head = self._nodes[next(iter(self._by_node))]
        for index, (component, ranks) in enumerate(self._by_node.items()):
            self._nodes[component].send(
                wire.Launch(
                    generation=self._generation,
                    num_restarts=self._num_restarts,
                    ranks=ranks,
                    world_size=len(decision.placement),
                    node_rank=index,
                    num_nodes=len(self._by_node),
                    master_address=head.address,
                    master_port=self._settings.master_port or head.free_port,
                    restore=self._restore,
                    memory_every_steps=self._saves.rhythm.memory_every_steps,
                    durable_every_steps=self._saves.rhythm.durable_every_steps,
                    staying=tuple(rank for rank, _ in ranks if rank in staying),
                    has_staying=bool(staying),
                    is_cold=decision.rung == "cold",
                )
            )

    # --- stopping ---

    def _see_to_stop(self) -> None:
        if self._stop_since_s is None or self._status != "running":
            return
        waited_s = self._now_s() - self._stop_since_s
        if not self._is_stop_sent:
            self._is_stop_sent = True
            if self._is_attached:
                if not self._is_growing:  # else they have been asked, and some may have left
                    self._ask_ranks_to_leave()
            else:
                self._broadcast(wire.Kill(generation=self._generation, grace_s=_SIGTERM_GRACE_S))
        elif self._is_attached and waited_s > _STOP_S:
            self._stopped.update(placed.rank for placed in self._placement)
            self._record(
                kinds.WarningRaised(
                    component="run", text=f"not every rank saved within {_STOP_S:g} s; stopped as it is"
                )
            )

    def _ask_ranks_to_leave(self) -> None:
        """After a step that is far enough ahead for all of them to hear of it in time."""
        notice = 1 + steps_within(_STOP_NOTICE_S, step_s=self._progress.fast_step_s)
        stop_at = max(1, self._highest_step()) + notice
        self._broadcast(wire.StopAt(step=stop_at))

    def _highest_step(self) -> int:
        """Statuses of a large fleet are seconds old; what all ranks have finished is told at once."""
        told = max((rank.step for rank in ranks_of(self._nodes.values())), default=0)
        return max(told, self._progress.last_step)

    async def _leave(self, end: str, event: kinds.AnyEvent, *, is_memory_kept: bool) -> None:
        await self._desk.finish()
        self._is_leaving = True
        self._record(event)
        self._commit()
        self._reception.dismiss(is_memory_kept=is_memory_kept)
        deadline_s = self._now_s() + _DISMISS_S
        while (waited := self._reception.not_dismissed()) and self._now_s() < deadline_s:
            await asyncio.sleep(0.02)
        for component in waited:
            await self._end_agent(component)
        self._end = end
        self._become("ended")

    # --- small things ---

    def _become(self, status: Status) -> None:
        self._status = status
        self._status_since_s = self._now_s()

    def _send_to_rank(self, rank: int, message: wire.ToAgent) -> None:
        for placed in self._placement:
            if placed.rank == rank:
                self._nodes[placed.component].send(message)

    def _broadcast(self, message: wire.ToAgent) -> None:
        for node in self._nodes.values():
            node.send(message)

    def _commit(self) -> None:
        """A full disk does not stop training: events wait in memory, and are written when there is room again."""
        if self._now_s() < self._store_retry_s:
            return
        try:
            self._samples.flush() if self._is_store_failing else None
            self._log.commit()
        except (StoreWriteFailed, OSError) as error:
            if not self._is_store_failing:
                self._is_store_failing = True
                with contextlib.suppress(OSError):  # the log lies on the same disk
                    sys.stderr.write(f"events and samples cannot be written, trying again every second: {error}\n")
                    sys.stderr.flush()
                self._record(kinds.WarningRaised(component="events", text=f"they could not be written: {error}"))
            self._store_retry_s = self._now_s() + _STORE_RETRY_S
        else:
            self._is_store_failing = False

    def _record(self, event: kinds.AnyEvent) -> None:
        self._log.append(event)

    def _record_all(self, events: Iterable[kinds.AnyEvent]) -> None:
        self._log.append_many(tuple(events))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """A bug ends the controller: the next one takes over from the event log."""
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
            self._wake.set()

    def _now_s(self) -> float:
        return self._clock.monotonic_ns() / 1e9

    def _wall_ns(self) -> int:
        return self._clock.wall_ns()
