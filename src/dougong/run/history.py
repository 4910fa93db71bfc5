"""What the event log tells a controller that starts on an existing run: where the job stands."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from dougong.event.kinds import (
    BatchesSkipped,
    CheckpointSaved,
    ControllerStarted,
    CorruptionSuspected,
    GenerationStarted,
    JobCreated,
    JobFailed,
    JobFinished,
    JobResumed,
    JobStarted,
    JobStopped,
    ModelDescribed,
    NodeLost,
    NodeQuarantined,
    NodeRepaired,
    PeakDescribed,
    Placed,
    PreflightDone,
    Recorded,
    RecoveryDecided,
    ReplicasCompared,
    Rung,
    SaveRhythmChosen,
    StateRestored,
    StepFinished,
    WorkerLost,
)
from dougong.run.corruption import Distrust
from dougong.run.letters import Skip


class JobHistory(msgspec.Struct, frozen=True, kw_only=True):
    """The fold of a job's events, as far as a controller needs it."""

    is_created: bool = False
    num_starts: int = 0
    is_started: bool = False
    has_run_since_start: bool = False
    """A generation was started since the last JobStarted."""
    is_ended: bool = False
    """Finished, failed or stopped, and not started again since."""
    end: str = ""
    generation: int = 0
    placement: tuple[Placed, ...] = ()
    rung: Rung = "first"
    """Of the last start of the ranks."""
    is_broken: bool = False
    """A rank was lost and no new generation was started since."""
    is_attached: bool = False
    is_restored: bool = False
    """The ranks of this generation hold their state."""
    is_resumed: bool = False
    num_restarts: int = 0
    num_fruitless: int = 0
    max_step: int = 0
    last_step: int = 0
    """Of this generation, as far as recorded."""
    lost_nodes: frozenset[str] = frozenset()
    quarantined_nodes: frozenset[str] = frozenset()
    skips: tuple[Skip, ...] = ()
    agreed: tuple[int, int] = (0, 0)
    """Generation and step of the last comparison that found all ranks' state equal."""
    distrusts: tuple[Distrust, ...] = ()
    is_preflight_done: bool = False
    """Since the last JobStarted."""
    returned_nodes: tuple[str, ...] = ()
    """Lost since the job's start and back again, in the order of their return."""
    is_model_described: bool = False
    is_peak_described: bool = False
    last_durable_step: int = 0
    num_controllers: int = 0
    save_rhythm: SaveRhythmChosen | None = None
    """The last one that was announced."""
    num_losses: int = 0
    """Interruptions, over all starts."""
    num_memory_losses: int = 0
    """Those after which the state had to come from storage, or from nothing."""
    operating_s: float = 0.0
    """From each start to its end, or to the last event."""

    def preference(self, component: str) -> int:
        """The smaller, the sooner a node is chosen: one that was lost and came back is the last."""
        return self.returned_nodes.index(component) + 1 if component in self.returned_nodes else 0


def replay(records: Iterable[Recorded]) -> JobHistory:
    """The state of the job after all of `records`."""
    history, started_ns, last_ns, ended_s = JobHistory(), 0, 0, 0.0
    steps: Recorded | None = None  # of a long row of finished steps, all but the highest and the last say nothing
    max_step = 0
    for record in records:
        last_ns = record.time_ns
        event = record.event
        if isinstance(event, StepFinished):
            steps, max_step = record, max(max_step, event.last_step)
            continue
        if isinstance(event, CheckpointSaved) and event.tier == "memory":
            continue  # one a second, like the steps; what memory holds is told by the agents
        if steps is not None:
            history, steps = _after_steps(history, steps, max_step), None
        if isinstance(event, JobStarted):
            started_ns = last_ns
        elif isinstance(event, JobFinished | JobFailed | JobStopped) and started_ns:
            ended_s, started_ns = ended_s + (last_ns - started_ns) / 1e9, 0
        history = _advance(history, record)
    if steps is not None:
        history = _after_steps(history, steps, max_step)
    operating_s = ended_s + ((last_ns - started_ns) / 1e9 if started_ns else 0.0)
    return msgspec.structs.replace(history, operating_s=max(0.0, operating_s))


def _after_steps(history: JobHistory, last: Recorded, max_step: int) -> JobHistory:
    """`last` ends a row of finished steps, the highest of which is `max_step`."""
    assert isinstance(last.event, StepFinished)
    return msgspec.structs.replace(
        history,
        last_step=last.event.last_step,
        max_step=max(history.max_step, max_step),
        num_fruitless=0 if max_step > history.max_step else history.num_fruitless,
    )


def _advance(history: JobHistory, record: Recorded) -> JobHistory:
    change = msgspec.structs.replace
    match record.event:
        case JobCreated():
            return change(history, is_created=True)
        case JobStarted():
            return change(
                history,
                is_started=True,
                is_ended=False,
                end="",
                num_starts=history.num_starts + 1,
                has_run_since_start=False,
                is_preflight_done=False,
                num_restarts=0,
                num_fruitless=0,
                returned_nodes=(),
            )
        case ControllerStarted():
            return change(history, num_controllers=history.num_controllers + 1)
        case GenerationStarted() as event:
            return change(
                history,
                generation=event.generation,
                placement=event.placement,
                has_run_since_start=True,
                is_broken=False,
                is_restored=False,
                is_resumed=event.generation == 1,
                last_step=0,
                num_restarts=history.num_restarts + history.has_run_since_start,
                rung=event.rung,
            )
        case StateRestored() as event:
            return change(history, is_attached=True, is_restored=True, last_step=event.step)
        case JobResumed():
            return change(history, is_resumed=True)
        case WorkerLost() as event:
            return change(
                history,
                is_broken=True,
                num_fruitless=history.num_fruitless + event.is_failure,
                num_losses=history.num_losses + 1,
            )
        case RecoveryDecided() as event if event.restore_source in ("durable", "none"):
            return change(history, num_memory_losses=history.num_memory_losses + history.is_broken)
        case SaveRhythmChosen() as event:
            return change(history, save_rhythm=event)
        case NodeLost() as event:
            return change(history, lost_nodes=history.lost_nodes | {event.component})
        case NodeRepaired() as event:
            others = tuple(name for name in history.returned_nodes if name != event.component)
            return change(
                history,
                lost_nodes=history.lost_nodes - {event.component},
                returned_nodes=(*others, event.component),
                quarantined_nodes=history.quarantined_nodes - {event.component},
            )
        case BatchesSkipped() as event:
            return change(history, skips=(*history.skips, Skip(step=event.step, generation=event.generation)))
        case ReplicasCompared() as event:
            return change(history, agreed=(event.generation, event.step))
        case CorruptionSuspected() as event:
            distrust = Distrust(
                generation=event.generation,
                agreed_generation=event.agreed_generation,
                agreed_step=event.agreed_step,
            )
            return change(history, distrusts=(*history.distrusts, distrust))
        case NodeQuarantined() as event:
            return change(history, quarantined_nodes=history.quarantined_nodes | {event.component})
        case PreflightDone():
            return change(history, is_preflight_done=True)
        case ModelDescribed():
            return change(history, is_model_described=True)
        case PeakDescribed():
            return change(history, is_peak_described=True)
        case CheckpointSaved() as event if event.tier == "durable":
            return change(history, last_durable_step=event.step)
        case JobFinished():
            return change(history, is_ended=True, end="finished")
        case JobFailed():
            return change(history, is_ended=True, end="failed")
        case JobStopped():
            return change(history, is_ended=True, end="stopped")
        case _:
            return history
