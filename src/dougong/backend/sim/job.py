"""A simulated training job: faults strike it, it recovers, and it writes the events that a real one writes.

The model. Nodes fail as independent Poisson processes, in training and in recovery alike. A fault stops every rank at
once; it is noticed, decided upon, the ranks start again and load the newest checkpoint, each taking the scenario's
time. A fault that takes its node is answered with a spare; without one the job waits for a repair. Planned work waits
for the end of the range of steps under way and saves first, so that no step is lost to it.

Thinned, to keep a month of thousands of nodes small: steps come in ranges of at most ten minutes; of the checkpoints
of a range only the last is written as an event (their stall is in the range); a placement holds one rank a node, and
after the first generation only the nodes that were exchanged.
"""

from __future__ import annotations

from collections.abc import Callable

from dougong.backend.sim.opening import opening_events
from dougong.backend.sim.progress import NS, Pace, pace_of
from dougong.event.kinds import (
    AnyEvent,
    Cause,
    CheckpointSaved,
    FaultInjected,
    GenerationStarted,
    JobFinished,
    JobResumed,
    JobStopped,
    NodeLost,
    NodeRepaired,
    Placed,
    RecoveryDecided,
    StateRestored,
    StepFinished,
    WorkerLost,
)
from dougong.event.store import EventStore
from dougong.sim.chance import Chance
from dougong.sim.engine import Engine, Scheduled
from dougong.spec.cluster import Cluster, Node
from dougong.spec.scenario import FaultCause, FaultModel, Recovery, SimJob

_RANGE_NS = 600 * NS
# bf16 weights, and fp32 master weights with two moments: the state of mixed-precision Adam.
_BYTES_PER_PARAMETER = 14
_NEVER_S = 1e10  # three hundred years
_NO_NODE = ""  # a place whose node is lost and not yet replaced


class SimulatedJob:
    """One job of a scenario on `nodes`, the last `num_spares` of which are held in reserve."""

    def __init__(
        self,
        job: SimJob,
        *,
        cluster: Cluster,
        nodes: tuple[Node, ...],
        faults: FaultModel,
        recovery: Recovery,
        repair_s: float,
        engine: Engine,
        chance: Chance,
        log: EventStore,
    ) -> None:
        assert len(nodes) == job.num_nodes + job.num_spares
        self._job = job
        self._cluster = cluster
        self._nodes = nodes
        self._faults = faults
        self._recovery = recovery
        self._repair_ns = round(repair_s * NS)
        self._engine = engine
        self._chance = chance
        self._log = log
        self._pace: Pace = pace_of(job)
        self._active = [node.path for node in nodes[: job.num_nodes]]
        self._spares = [node.path for node in nodes[job.num_nodes :]]
        self._broken: list[str] = []
        self._vacant: list[int] = []
        self._exchanged: set[int] = set()
        self._generation = 0
        self._step = 0  # the last step finished in the trajectory that is held now
        self._highest_step = 0
        self._saved_step = 0
        self._begin_ns = 0
        self._maintenance: FaultCause | None = None
        self._cause: Cause | None = None
        self._timer: Scheduled | None = None
        self._resume_timer: Scheduled | None = None
        self._phase = "created"

    def begin(self) -> None:
        """Schedule the start."""
        self._engine.after(round(self._job.start_s * NS), self._start)

    def stop(self) -> None:
        """End the job where it stands: the scenario is over."""
        if self._phase in ("created", "ended"):
            return
        if self._phase == "train":
            self._report_finished()
        self._end(JobStopped(step=self._step, reason="the scenario ends"))

    @property
    def name(self) -> str:
        return self._job.name

    @property
    def step(self) -> int:
        """The last step finished in the trajectory that is held now."""
        return self._step

    @property
    def phase(self) -> str:
        """`created`, `start`, `train`, `detect`, `decide`, `wait` or `ended`."""
        return self._phase

    # --- begin and end ---

    def _start(self) -> None:
        for event in opening_events(self._job, cluster=self._cluster, nodes=self._nodes):
            self._write(event)
        self._exchanged = set(range(len(self._active)))
        self._phase = "start"
        self._arm_fault()
        self._set_timer(self._recovery.restart_s, self._start_ranks)

    def _end(self, event: JobFinished | JobStopped) -> None:
        self._cancel_timers()
        self._phase = "ended"
        self._write(event)

    # --- faults ---

    def _arm_fault(self) -> None:
        rate_per_s = self._faults.rate_per_node_s * len(self._active)
        if rate_per_s > 0:
            delay_s = self._chance.of(f"{self._job.name}/fault-times").expovariate(rate_per_s)
            if delay_s < _NEVER_S:
                self._engine.after(max(1, round(delay_s * NS)), self._strike)

    def _strike(self) -> None:
        if self._phase == "ended":
            return
        self._arm_fault()
        causes = self._faults.causes
        weights = [cause.weight for cause in causes]
        (cause,) = self._chance.of(f"{self._job.name}/fault-causes").choices(causes, weights)
        if cause.is_planned:
            self._maintenance = self._maintenance or cause
        elif (node := self._draw_node()) != _NO_NODE:
            self._begin_outage(cause, node)

    def _draw_node(self) -> str:
        return self._chance.of(f"{self._job.name}/fault-nodes").choice(self._active)

    def _begin_outage(self, cause: FaultCause, node: str) -> None:
        if self._phase == "train":
            self._report_finished()
        injected = self._write(FaultInjected(fault=cause.name, component=node, rank=self._rank_of(node)))
        if cause.takes_node and node not in self._broken:
            self._broken.append(node)
        if self._phase in ("detect", "decide"):
            return  # the decision that is due answers both
        self._cause = injected
        self._cancel_timers()
        self._phase = "detect"
        detect_s = self._recovery.detect_s_of(cause.cause_class)
        self._set_timer(detect_s, lambda: self._notice(cause, node))

    def _notice(self, cause: FaultCause, node: str) -> None:
        lost = self._write(
            WorkerLost(
                generation=self._generation,
                rank=self._rank_of(node),
                component=node,
                cause_class=cause.cause_class,
                detail=cause.name,
                onset_ns=None if self._cause is not None else self._engine.now_ns,
                last_step=self._step,
            ),
            cause=self._cause,
        )
        self._cause = lost
        self._phase = "decide"
        self._set_timer(self._recovery.decide_s, self._decide)

    # --- recovery ---

    def _decide(self) -> None:
        for node in self._broken:
            self._write(NodeLost(component=node, reason="taken by a fault"), cause=self._cause)
            self._engine.after(self._repair_ns, lambda node=node: self._repair(node))
            place = self._active.index(node)
            self._active[place] = _NO_NODE
            self._vacant.append(place)
        self._broken = []
        self._exchanged.update(self._vacant)
        self._cause = self._write(
            RecoveryDecided(
                generation=self._generation + 1,
                rung="replaced-node" if self._vacant else "cold",
                restore_step=self._saved_step,
                restore_source="durable" if self._saved_step else "none",
                backoff_s=0.0,
                reason=_reason(len(self._vacant), num_spares=len(self._spares)),
            ),
            cause=self._cause,
        )
        self._phase = "wait"
        self._fill_vacant()

    def _fill_vacant(self) -> None:
        while self._vacant and self._spares:
            self._active[self._vacant.pop(0)] = self._spares.pop(0)
        if not self._vacant:
            self._phase = "start"
            self._set_timer(self._recovery.restart_s, self._start_ranks)

    def _repair(self, node: str) -> None:
        if self._phase == "ended":
            return
        self._write(NodeRepaired(component=node))
        self._spares.append(node)
        if self._phase == "wait":
            self._fill_vacant()

    def _start_ranks(self) -> None:
        is_first = self._generation == 0
        self._generation += 1
        exchanged, self._exchanged = sorted(self._exchanged), set()
        self._write(
            GenerationStarted(
                generation=self._generation,
                placement=tuple(
                    Placed(rank=self._first_rank(place), local_rank=0, component=self._active[place])
                    for place in exchanged
                ),
                rung="first" if is_first else ("replaced-node" if exchanged else "cold"),
                reason="the job starts" if is_first else "recovery",
            ),
            cause=self._cause,
        )
        self._set_timer(self._recovery.reload_s if self._saved_step else 0.0, self._restore)

    def _restore(self) -> None:
        self._step = self._saved_step
        self._write(
            StateRestored(
                generation=self._generation,
                step=self._step,
                source="durable" if self._saved_step else "none",
                reload_s=self._recovery.reload_s if self._saved_step else 0.0,
                reason="newest checkpoint" if self._saved_step else "no checkpoint yet",
            ),
            cause=self._cause,
        )
        if self._cause is not None:
            delay_ns = self._pace.duration_ns(self._step + 1, self._step + 1)
            self._resume_timer = self._engine.after(delay_ns, self._resume, priority=-1)
        self._train()

    def _resume(self) -> None:
        self._write(JobResumed(generation=self._generation, step=self._step + 1), cause=self._cause)
        self._cause = None

    # --- training ---

    def _train(self) -> None:
        self._phase = "train"
        self._begin_ns = self._engine.now_ns
        self._timer = self._engine.after(self._pace.duration_ns(self._step + 1, self._range_end()), self._finish_range)

    def _range_end(self) -> int:
        """The last step of the range that begins now: ten minutes on, or where redoing or the job ends."""
        last_step = max(self._step + 1, self._pace.last_finished(self._step + 1, elapsed_ns=_RANGE_NS))
        if self._step < self._highest_step:
            last_step = min(last_step, self._highest_step)
        if self._job.num_steps is not None:
            last_step = min(last_step, self._job.num_steps)
        return last_step

    def _finish_range(self) -> None:
        last_step = self._range_end()
        if self._maintenance is not None and self._pace.last_checkpoint(last_step) != last_step:
            # Saved on purpose: the stall is one that the interval did not ask for.
            self._timer = self._engine.after(self._pace.stall_ns, self._save_for_maintenance)
            return
        self._report_finished()
        self._go_on()

    def _save_for_maintenance(self) -> None:
        self._report_finished(extra_stall_ns=self._pace.stall_ns)
        self._go_on()

    def _go_on(self) -> None:
        if self._job.num_steps is not None and self._step >= self._job.num_steps:
            self._end(JobFinished(step=self._step))
        elif self._maintenance is not None:
            cause, self._maintenance = self._maintenance, None
            node = self._draw_node()
            if cause.takes_node:
                self._broken.append(node)
            self._cancel_timers()
            self._cause = None
            self._notice(cause, node)
        else:
            self._train()

    def _report_finished(self, *, extra_stall_ns: int = 0) -> None:
        """Write the steps finished since the range began, up to now."""
        first_step = self._step + 1
        elapsed_ns = self._engine.now_ns - self._begin_ns
        last_step = min(self._range_end(), self._pace.last_finished(first_step, elapsed_ns=elapsed_ns))
        if last_step < first_step:
            return
        num_steps = last_step - first_step + 1
        stall_ns = self._pace.num_checkpoints(first_step, last_step) * self._pace.stall_ns + extra_stall_ns
        is_redo = last_step <= self._highest_step
        self._write(
            StepFinished(
                generation=self._generation,
                first_step=first_step,
                last_step=last_step,
                begin_ns=self._begin_ns,
                end_ns=self._begin_ns + self._pace.duration_ns(first_step, last_step) + extra_stall_ns,
                is_redo=is_redo,
                step_s=num_steps * self._pace.step_ns / NS,
                between_s=0.0,
                data_wait_s=0.0,
                checkpoint_stall_s=stall_ns / NS,
                max_step_s=self._pace.step_ns / NS,
                tokens=num_steps * self._job.tokens_per_step,
            )
        )
        self._step = last_step
        self._highest_step = max(self._highest_step, last_step)
        self._note_saved(last_step if extra_stall_ns else self._pace.last_checkpoint(last_step))

    def _note_saved(self, step: int) -> None:
        if step <= self._saved_step:
            return
        self._saved_step = step
        self._write(
            CheckpointSaved(
                step=step,
                generation=self._generation,
                tier="durable",
                num_bytes=(self._job.num_parameters or 0) * _BYTES_PER_PARAMETER,
                stall_s=self._job.checkpoint.stall_s,
                write_s=0.0,
            )
        )

    # --- writing and waiting ---

    def _write(self, event: AnyEvent, *, cause: Cause | None = None) -> Cause:
        recorded = self._log.append(event, cause=cause)
        return Cause(recorded.stream, recorded.seq)

    def _rank_of(self, node: str) -> int:
        return self._first_rank(self._active.index(node))

    def _first_rank(self, place: int) -> int:
        return place * self._nodes[0].type.num_accelerators

    def _set_timer(self, delay_s: float, callback: Callable[[], None]) -> None:
        self._timer = self._engine.after(round(delay_s * NS), callback)

    def _cancel_timers(self) -> None:
        for timer in (self._timer, self._resume_timer):
            if timer is not None:
                timer.cancel()


def _reason(num_broken: int, *, num_spares: int) -> str:
    if num_broken == 0:
        return "the nodes are good: the ranks start again where they were"
    if num_broken <= num_spares:
        return f"{num_broken} of {num_spares} spare nodes take the place of what was lost"
    return f"{num_broken} nodes are needed and {num_spares} are spare: the job waits for a repair"
