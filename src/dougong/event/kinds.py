"""The kinds of event: what can happen in a cluster and to a job.

A kind is never renamed. A new field has a default, so that old logs stay readable. A component is named by its path in
the cluster description (`hall-a/rack-03/node-017`). Wall times are nanoseconds since the Unix epoch.
"""

from __future__ import annotations

from typing import Literal

import msgspec

CauseClass = Literal[
    "crash",  # a process ended by a signal or a non-zero exit
    "exception",  # the script raised
    "stopped",  # a process was stopped (SIGSTOP) and no longer runs
    "hang",  # alive but making no progress
    "node",  # the whole node is gone
    "accelerator",  # an accelerator, its memory or its link failed
    "network",
    "storage",
    "host",  # CPU, DRAM, PSU, SSD, chassis, thermal
    "software",
    "silent-corruption",
    "straggler",  # a rank that computes much more slowly than the others
    "maintenance",  # planned or unplanned work by people
    "unknown",
]

Rung = Literal["first", "in-process", "standby", "cold", "replaced-node", "resized"]
"""How far the ranks are started anew, from the cheapest to the dearest."""

Tier = Literal[
    "memory",  # of the node itself
    "peer",  # of another node too
    "durable",
]


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=True):
    """Base of all kinds."""


class Cause(msgspec.Struct, frozen=True, array_like=True):
    """The event that led to this one: its stream and its `seq` there."""

    stream: str
    seq: int


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """One rank on one node."""

    rank: int
    local_rank: int
    component: str


# --- the job -------------------------------------------------------------------------------------------------------


class JobCreated(Event, frozen=True, kw_only=True):
    """A job was accepted; nothing runs yet."""

    job: str
    version: str
    command: tuple[str, ...]
    backend: str
    world_size: int
    num_accelerators: int
    nodes: tuple[str, ...]
    spares: tuple[str, ...] = ()


class JobStarted(Event, frozen=True, kw_only=True):
    """The wall clock of the job starts to count (again, after a resume by hand)."""

    job: str
    is_resume: bool = False


class ModelDescribed(Event, frozen=True, kw_only=True):
    """FLOP per token of the model, for MFU and HFU. `None` = not known."""

    num_parameters: int
    model_flop_per_token: float | None
    hardware_flop_per_token: float | None
    source: str


class PeakDescribed(Event, frozen=True, kw_only=True):
    """The peak of all the accelerators of the job together: the denominator of MFU."""

    peak_flop_per_s: float
    source: str


class GenerationStarted(Event, frozen=True, kw_only=True):
    """The ranks were started, for the first time or again. Each start has its own generation number."""

    generation: int
    placement: tuple[Placed, ...]
    rung: Rung
    reason: str


class StateRestored(Event, frozen=True, kw_only=True):
    """All ranks hold the state of `step`. `source` "none" = started from scratch. `reload_s` = the slowest rank."""

    generation: int
    step: int
    source: Literal["none", "memory", "peer", "durable"]
    reload_s: float
    reason: str


class StepFinished(Event, frozen=True, kw_only=True):
    """Steps `first_step`..`last_step` (1-based, inclusive) were finished, without a gap between them.

    `is_redo`: these steps had been finished before and were lost with a fault. `step_s` is the sum over the steps of
    the time inside the step; `between_s` the time between steps (evaluation, saving by the script itself);
    `checkpoint_stall_s` the time the training thread waited for a checkpoint; all of the slowest rank.
    `loss` is rank 0's at `last_step`. `None` = the script does not tell.
    """

    generation: int
    first_step: int
    last_step: int
    begin_ns: int
    end_ns: int
    is_redo: bool
    step_s: float
    between_s: float
    data_wait_s: float
    checkpoint_stall_s: float
    max_step_s: float
    tokens: int | None = None
    loss: float | None = None


class CheckpointSaved(Event, frozen=True, kw_only=True):
    """A checkpoint is complete. `stall_s` blocked training; `write_s` ran beside it."""

    step: int
    generation: int
    tier: Tier
    num_bytes: int
    stall_s: float
    write_s: float
    path: str = ""


class CheckpointRejected(Event, frozen=True, kw_only=True):
    """A checkpoint was not used, and why."""

    step: int
    tier: Tier
    path: str
    reason: str


class CheckpointDeleted(Event, frozen=True, kw_only=True):
    """A durable checkpoint was removed by the retention rule."""

    step: int
    path: str
    reason: str


class FaultInjected(Event, frozen=True, kw_only=True):
    """A fault was injected on purpose (`--chaos`, a campaign, a simulation): the true onset of what follows."""

    fault: str
    component: str
    rank: int | None = None
    detail: str = ""


class WorkerLost(Event, frozen=True, kw_only=True):
    """A rank no longer works: it ended, stopped, hangs, or its node is gone. The job is interrupted.

    One fault that takes several ranks with it writes one `WorkerLost`, of the first rank found.
    `onset_ns`: when it began, as well as the detector can tell; `None` = not known.
    """

    generation: int
    rank: int
    component: str
    cause_class: CauseClass
    detail: str
    onset_ns: int | None = None
    last_step: int | None = None
    traceback: str = ""
    evidence: str = ""
    is_failure: bool = True
    """Does it count among the failures without a new step? Not if only another copy of the state has to be had."""


class RecoveryDecided(Event, frozen=True, kw_only=True):
    """What will be done about a loss, and why."""

    generation: int
    rung: Literal["in-process", "standby", "cold", "replaced-node", "resized"]
    restore_step: int
    restore_source: Literal["none", "memory", "peer", "durable", "script"]
    backoff_s: float
    reason: str


class JobResumed(Event, frozen=True, kw_only=True):
    """The first step after a recovery is finished on every rank."""

    generation: int
    step: int


class JobStopped(Event, frozen=True, kw_only=True):
    """The job was stopped on purpose and can be resumed."""

    step: int
    reason: str


class JobFinished(Event, frozen=True, kw_only=True):
    """Every rank ended well."""

    step: int


class JobFailed(Event, frozen=True, kw_only=True):
    """The job was given up, by which rule, with the first traceback of the first failing rank."""

    reason: str
    traceback: str = ""


# --- nodes and the control plane -----------------------------------------------------------------------------------


class NodeJoined(Event, frozen=True, kw_only=True):
    """A node is in the job's hands."""

    component: str
    role: Literal["active", "spare"]
    num_accelerators: int = 1


class NodeLost(Event, frozen=True, kw_only=True):
    """A node is gone, with all that ran on it and all that its memory held."""

    component: str
    reason: str
    cause_class: CauseClass = "node"


class NodeRepaired(Event, frozen=True, kw_only=True):
    """A lost node can be used again."""

    component: str


class LinkCut(Event, frozen=True, kw_only=True):
    """Two nodes do not reach each other, although both answer the controller; they are not used together."""

    component: str
    peer: str


class LinkHealed(Event, frozen=True, kw_only=True):
    """They reach each other again."""

    component: str
    peer: str


class AgentLost(Event, frozen=True, kw_only=True):
    """The agent of a node does not answer; its workers may still run."""

    component: str
    reason: str


class AgentReturned(Event, frozen=True, kw_only=True):
    """The agent of a node is back, and has taken over `num_workers` running workers."""

    component: str
    num_workers: int


class ControllerStarted(Event, frozen=True, kw_only=True):
    """A controller took charge. `is_restart`: an earlier one died."""

    pid: int
    is_restart: bool


class WorldResized(Event, frozen=True, kw_only=True):
    """The job goes on with another number of ranks, from the state of `step`."""

    generation: int
    from_world_size: int
    to_world_size: int
    step: int
    reason: str


class WebhookSent(Event, frozen=True, kw_only=True):
    """The interruption was told to the webhook. `status` 0 = it could not be reached."""

    status: int
    detail: str


class Keeper(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes that keep copies of the memory checkpoints of one node, its `owner`."""

    owner: str
    keepers: tuple[str, ...]


class PeersChosen(Event, frozen=True, kw_only=True):
    """Which nodes keep copies of whose memory checkpoints from now on, and why these."""

    keepers: tuple[Keeper, ...]
    reason: str


class WarningRaised(Event, frozen=True, kw_only=True):
    """Something a person should know that stops nothing."""

    component: str
    text: str


class StorageFailing(Event, frozen=True, kw_only=True):
    """The storage of durable checkpoints does not take them, or not fast enough. Training goes on from memory
    checkpoints, and each one that is due tries again. Written once when it begins, and when the cause changes.

    `step`: of the first checkpoint that was missed.
    """

    step: int
    cause: Literal["full", "read-only", "slow", "gone", "other"]
    path: str
    reason: str
    mend: str


class StorageRecovered(Event, frozen=True, kw_only=True):
    """The storage takes durable checkpoints again, since that of `step`; `num_missed` were not written meanwhile."""

    step: int
    cause: Literal["full", "read-only", "slow", "gone", "other"]
    path: str
    num_missed: int


# --- checks of nodes, losses, speed and state ----------------------------------------------------------------------


class NodeFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a node reached in pre-flight. `None` = no answer, or not measured.

    `flop_per_s`: of its slowest accelerator alone; `bytes_per_s`: the slowest of its all-reduces with a partner, the
    bytes of the buffer over the time.
    """

    component: str
    flop_per_s: float | None = None
    bytes_per_s: float | None = None


class PreflightDone(Event, frozen=True, kw_only=True):
    """The nodes were tested; `bad` ones are not used."""

    nodes: tuple[NodeFigures, ...]
    bad: tuple[str, ...]
    took_s: float
    reason: str


class NodeQuarantined(Event, frozen=True, kw_only=True):
    """A node is no longer given work, although it may still answer. NodeRepaired ends it."""

    component: str
    reason: str


class LinkSuspected(Event, frozen=True, kw_only=True):
    """Two nodes failed a test together that each passed with another: what lies between them is suspect."""

    first: str
    second: str
    reason: str


class SnapshotRefused(Event, frozen=True, kw_only=True):
    """From `step` on no checkpoint replaces the last good one, until the losses are good again. Said once."""

    step: int
    generation: int
    rank: int
    reason: str


class BatchesSkipped(Event, frozen=True, kw_only=True):
    """The batches that `generation` trained as `step` are passed over from now on, on every rank.

    `samples`: their ids by rank, as far as the script told them (`step.record(samples=…)`).
    """

    step: int
    generation: int
    samples: tuple[tuple[int, tuple[int, ...]], ...]
    reason: str


class StragglerNamed(Event, frozen=True, kw_only=True):
    """A rank computes much more slowly than the others, for most of the last steps. Said once per episode.

    `compute_s`: its time in a step before the first collective, `usual_s` the median of all ranks, both medians over
    those steps. `z`: the median of its robust z; `None` with two ranks, where it means nothing.
    """

    generation: int
    rank: int
    component: str
    step: int
    compute_s: float
    usual_s: float
    z: float | None
    detail: str


class CorruptionSuspected(Event, frozen=True, kw_only=True):
    """State that must be the same on all ranks is not. `ranks`: those that differ from the majority, or all if there
    is none. What was saved after `agreed_step` is not used."""

    generation: int
    step: int
    ranks: tuple[int, ...]
    agreed_generation: int
    agreed_step: int
    detail: str


class ReplicasCompared(Event, frozen=True, kw_only=True):
    """The state that must be the same on all ranks was, right after this step."""

    generation: int
    step: int


class SaveRhythmChosen(Event, frozen=True, kw_only=True):
    """From step `from_step` on the ranks save after every so many steps. `mtbf_s` is what is believed of the job."""

    generation: int
    from_step: int
    memory_every_steps: int
    durable_every_steps: int
    mtbf_s: float
    reason: str


AnyEvent = (
    JobCreated
    | JobStarted
    | ModelDescribed
    | PeakDescribed
    | GenerationStarted
    | StateRestored
    | StepFinished
    | CheckpointSaved
    | CheckpointRejected
    | CheckpointDeleted
    | FaultInjected
    | WorkerLost
    | RecoveryDecided
    | JobResumed
    | JobStopped
    | JobFinished
    | JobFailed
    | NodeJoined
    | NodeLost
    | NodeRepaired
    | LinkCut
    | LinkHealed
    | AgentLost
    | AgentReturned
    | ControllerStarted
    | WorldResized
    | WebhookSent
    | PeersChosen
    | WarningRaised
    | StorageFailing
    | StorageRecovered
    | PreflightDone
    | NodeQuarantined
    | LinkSuspected
    | SnapshotRefused
    | BatchesSkipped
    | StragglerNamed
    | CorruptionSuspected
    | ReplicasCompared
    | SaveRhythmChosen
)


class Unknown(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a kind that this version does not know: kept as it was read, counted and reported."""

    kind: str
    fields_json: str


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """An event as it stands in the log: who wrote it (`stream`), its gapless place there (`seq`, from 1), when, and
    what led to it."""

    stream: str
    seq: int
    time_ns: int
    event: AnyEvent | Unknown
    cause: Cause | None = None
