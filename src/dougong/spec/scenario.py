"""What `dougong simulate` plays: a cluster, jobs, faults and what each recovery costs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from dougong.errors import Problems, UserError
from dougong.spec.catalog import accelerator
from dougong.spec.cluster import Cluster, load_cluster, uniform_cluster
from dougong.spec.limits import AtLeastOne, Count, Name, NotNegative, Positive
from dougong.spec.typed import Flaw, Reading, Warn, load_typed, read_item, warn_python
from dougong.spec.yaml_source import Item, Scalar

CauseClass = Literal[
    "crash",
    "exception",
    "stopped",
    "hang",
    "node",
    "accelerator",
    "network",
    "storage",
    "host",
    "software",
    "silent-corruption",
    "straggler",
    "maintenance",
    "unknown",
]
"""The classes of the event log (`event.kinds.CauseClass`, which stands above this room); a test holds them equal."""


class FaultCause(msgspec.Struct, frozen=True, kw_only=True):
    """One cause of interruptions. `weight` is relative to the other causes (a count of a published table will do).

    `takes_node`: the node is out of use for `Scenario.repair_s` and a spare is needed; otherwise the ranks start again
    where they were. `is_planned`: known beforehand, so the job saves first and loses no step.
    """

    name: Name
    weight: NotNegative
    cause_class: CauseClass
    takes_node: bool = False
    is_planned: bool = False


class FaultModel(msgspec.Struct, frozen=True, kw_only=True):
    """How often nodes interrupt a job, and of what. Each node fails as a Poisson process of the same rate."""

    rate_per_1000_node_days: NotNegative
    causes: tuple[FaultCause, ...]

    @property
    def rate_per_node_s(self) -> float:
        """Interruptions a second of one node."""
        return self.rate_per_1000_node_days / (1000 * 86400)

    def flaws(self) -> Iterator[Flaw]:
        if self.rate_per_1000_node_days > 0 and not sum(cause.weight for cause in self.causes) > 0:
            yield Flaw("causes", "faults have a rate but no cause with a weight", mend="give a cause a positive weight")


class DetectTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from the onset of a fault of one class until it is noticed."""

    cause_class: CauseClass
    detect_s: NotNegative


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """What one recovery costs, in its phases. `detect_s` holds for the classes that `detect_by_class` leaves out."""

    detect_s: NotNegative
    decide_s: NotNegative
    restart_s: NotNegative
    reload_s: NotNegative
    detect_by_class: tuple[DetectTime, ...] = ()

    def detect_s_of(self, cause_class: CauseClass) -> float:
        """Seconds until a fault of `cause_class` is noticed."""
        for row in self.detect_by_class:
            if row.cause_class == cause_class:
                return row.detect_s
        return self.detect_s


class CheckpointPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """When a job saves, and how long training waits for it. Exactly one of the two intervals is given."""

    stall_s: NotNegative
    interval_steps: AtLeastOne | None = None
    interval_s: Positive | None = None

    def flaws(self) -> Iterator[Flaw]:
        if (self.interval_steps is None) == (self.interval_s is None):
            yield Flaw(
                "interval_steps" if self.interval_steps is not None else "",
                "a checkpoint interval is given twice" if self.interval_s is not None else "no checkpoint interval",
                mend="give one of interval_steps, interval_s",
            )


class SimJob(msgspec.Struct, frozen=True, kw_only=True):
    """One training job. It runs on `num_nodes` nodes and holds `num_spares` more in reserve.

    `step_s` is the undisturbed time of a step. `num_steps` `None` = it runs until the scenario ends.
    `model_flop_per_token` `None` = not known, so no MFU.
    """

    name: Name
    num_nodes: AtLeastOne
    step_s: Positive
    tokens_per_step: AtLeastOne
    checkpoint: CheckpointPolicy
    num_spares: Count = 0
    start_s: NotNegative = 0.0
    num_steps: AtLeastOne | None = None
    num_parameters: AtLeastOne | None = None
    model_flop_per_token: Positive | None = None


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A simulation. `speed` is simulated seconds for each real one; `None` = as fast as the machine can."""

    name: Name
    seed: Annotated[int, Meta(ge=0)]
    duration_s: Positive
    cluster: Cluster
    jobs: tuple[SimJob, ...]
    faults: FaultModel
    recovery: Recovery
    repair_s: NotNegative
    speed: Positive | None = None

    def flaws(self) -> Iterator[Flaw]:
        if not self.jobs:
            yield Flaw("jobs", "the scenario has no job", mend="describe at least one job")
        for index, job in enumerate(self.jobs):
            needed = job.num_nodes + job.num_spares
            if needed > self.cluster.num_nodes:
                yield Flaw(
                    f"jobs[{index}].num_nodes",
                    f"job {job.name!r} needs {needed} nodes with its spares; the cluster has {self.cluster.num_nodes}",
                    mend="lower num_nodes or num_spares, or describe a larger cluster",
                    needs=("cluster",),
                )
            if job.start_s >= self.duration_s:
                yield Flaw(
                    f"jobs[{index}].start_s",
                    f"job {job.name!r} starts after the scenario has ended and has no effect",
                    mend=f"start it before {self.duration_s:g} s",
                    is_warning=True,
                )
        names = [job.name for job in self.jobs]
        for index, name in enumerate(names):
            if name in names[:index]:
                yield Flaw(f"jobs[{index}].name", f"two jobs are called {name!r}", mend="give each job its own name")


class InlineCluster(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster of equal nodes, described by its size alone."""

    accelerator: str
    num_nodes: AtLeastOne
    accelerators_per_node: AtLeastOne = 8

    def flaws(self) -> Iterator[Flaw]:
        try:
            accelerator(self.accelerator)
        except UserError as error:
            yield Flaw("accelerator", error.what, mend=error.mend)


def load_scenario(path: Path | str, *, warn: Warn = warn_python) -> Scenario:
    """The scenario in the file at `path`. Raises Problems (all of the file's mistakes).

    `cluster` is the path of a cluster file, relative to the scenario's, or `{accelerator, num_nodes}`.
    """
    path = Path(path)
    return load_typed(
        path, Scenario, warn=warn, hooks={Cluster: lambda item, place, reading: _cluster(item, place, reading, path)}
    )


def _cluster(item: Item, place: str, reading: Reading, scenario_path: Path) -> Cluster:
    """Reads the `cluster` of a scenario; a stand-in of one node when it has mistakes."""
    if not isinstance(item, Scalar) or item.is_null:
        inline = read_item(item, InlineCluster, place, reading)
        return _uniform(inline, place, reading)
    try:
        return load_cluster(scenario_path.parent / item.text, warn=reading.warnings.append)
    except Problems as error:
        reading.fail(place, f"{item.text} has {len(error.problems)} problems", mend="mend them; each is told below")
        reading.problems.extend(error.problems)
    except UserError as error:
        reading.fail(place, error.what, mend=error.mend)
    return _STAND_IN


def _uniform(inline: InlineCluster, place: str, reading: Reading) -> Cluster:
    try:
        return uniform_cluster(
            accelerator=inline.accelerator,
            num_nodes=inline.num_nodes,
            accelerators_per_node=inline.accelerators_per_node,
        )
    except UserError:
        reading.doubt(place)  # `InlineCluster.flaws` has told why
        return _STAND_IN


_STAND_IN = uniform_cluster(accelerator="cpu", num_nodes=1, accelerators_per_node=1)
