"""How a simulated job's log begins: who takes part, and what the figures of merit are measured against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dougong import __version__
from dougong.event.kinds import AnyEvent, JobCreated, JobStarted, ModelDescribed, NodeJoined, PeakDescribed
from dougong.spec.cluster import Cluster, Node
from dougong.spec.scenario import SimJob


def opening_events(job: SimJob, *, cluster: Cluster, nodes: Sequence[Node]) -> Iterator[AnyEvent]:
    """The events up to `JobStarted`, in order. The last `job.num_spares` of `nodes` are held in reserve."""
    active = nodes[: job.num_nodes]
    num_accelerators = sum(node.type.num_accelerators for node in active)
    yield JobCreated(
        job=job.name,
        version=__version__,
        command=("simulate", job.name),
        backend="sim",
        world_size=num_accelerators,
        num_accelerators=num_accelerators,
        nodes=tuple(node.path for node in active),
        spares=tuple(node.path for node in nodes[job.num_nodes :]),
    )
    for index, node in enumerate(nodes):
        role = "active" if index < job.num_nodes else "spare"
        yield NodeJoined(component=node.path, role=role, num_accelerators=node.type.num_accelerators)
    if job.num_parameters is not None or job.model_flop_per_token is not None:
        yield ModelDescribed(
            num_parameters=job.num_parameters or 0,
            model_flop_per_token=job.model_flop_per_token,
            hardware_flop_per_token=None,
            source="the scenario",
        )
    peak = _peak(active, cluster=cluster)
    if peak is not None:
        yield peak
    yield JobStarted(job=job.name)


def _peak(nodes: Sequence[Node], *, cluster: Cluster) -> PeakDescribed | None:
    total = 0.0
    for node in nodes:
        peak = cluster.accelerator(node.type.accelerator).peak_flop_per_s("bf16")
        if peak is None:
            return None
        total += peak * node.type.num_accelerators
    names = " and ".join(sorted({node.type.accelerator for node in nodes}))
    return PeakDescribed(peak_flop_per_s=total, source=f"dense bf16 peak of {names}, catalog")
