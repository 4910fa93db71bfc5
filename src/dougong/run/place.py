"""What a worker knows of its place in the run. The one file of the runtime that reads the environment of a worker."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

from dougong.run.layout import NodeDirectory, RunDirectory
from dougong.run.letters import Skip
from dougong.run.save_rhythm import first_rhythm
from dougong.run.settings import RunSettings
from dougong.run.wire import Launch

VARIABLE = "DOUGONG_WORKER"
PREFLIGHT_VARIABLE = "DOUGONG_PREFLIGHT"


class WorkerPlace(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of one generation: where its files are and from what it resumes."""

    run_id: str
    run_root: str
    node_root: str
    checkpoint_url: str
    generation: int
    rank: int
    local_rank: int
    world_size: int
    restore_source: Literal["none", "memory", "peer", "durable"]
    restore_step: int
    restore_directory: str
    memory_every_steps: int
    durable_every_steps: int
    commit_timeout_s: float
    wants_peak: bool
    is_chaos: bool
    restore_generation: int = 0
    """The generation that wrote the memory checkpoint; 0 = the newest that has the step."""
    is_newcomer: bool = False
    """Its peers stayed in their processes: it builds its model alone and joins them when the steps begin."""
    restore_world_size: int = 0
    """Of the ranks that saved the state; 0 = as many as now, or as the checkpoint says."""
    is_read_once: bool = True
    """At load, one rank reads each box and broadcasts it."""
    checkpoint_key: str = ""
    skips: tuple[Skip, ...] = ()
    spike_z: float = 0.0
    fingerprint_every_steps: int = 0

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(Path(self.run_root))

    @property
    def node(self) -> NodeDirectory:
        return NodeDirectory(Path(self.node_root))


class PreflightPlace(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of one stage of a pre-flight: alone (stage 0), or in a group with the ranks of another node."""

    serial: int
    stage: int
    rank: int
    local_rank: int
    world_size: int
    master_address: str
    master_port: int
    timeout_s: float
    box: str
    """Directory for the answer."""


def worker_place() -> WorkerPlace | None:
    """The place of this process, or None if it was not started by `dougong run`."""
    text = os.environ.get(VARIABLE)
    return None if text is None else msgspec.json.decode(text, type=WorkerPlace)


def rank_and_world_size() -> tuple[int, int]:
    """As torchrun sets them; (0, 1) for a plain process."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def preflight_place() -> PreflightPlace | None:
    """The place of this process in a pre-flight, if it is a test of one."""
    text = os.environ.get(PREFLIGHT_VARIABLE)
    return None if text is None else msgspec.json.decode(text, type=PreflightPlace)


def preflight_variables(place: PreflightPlace) -> dict[str, str]:
    return {PREFLIGHT_VARIABLE: msgspec.json.encode(place).decode()}


def worker_variables(place: WorkerPlace) -> dict[str, str]:
    return {VARIABLE: msgspec.json.encode(place).decode()}


def place_of(
    settings: RunSettings, run: RunDirectory, node: NodeDirectory, launch: Launch, *, rank: int, local_rank: int
) -> WorkerPlace:
    """The place of a rank that is about to be started."""
    return WorkerPlace(
        run_id=settings.run_id,
        run_root=str(run.root),
        node_root=str(node.root),
        checkpoint_url=settings.checkpoint_url,
        generation=launch.generation,
        rank=rank,
        local_rank=local_rank,
        world_size=launch.world_size,
        restore_source=launch.restore.source,
        restore_step=launch.restore.step,
        restore_directory=launch.restore.directory,
        memory_every_steps=launch.memory_every_steps or first_rhythm(settings.save).memory_every_steps,
        durable_every_steps=launch.durable_every_steps or first_rhythm(settings.save).durable_every_steps,
        commit_timeout_s=settings.save.commit_timeout_s,
        wants_peak=launch.generation == 1 and settings.peak_flop_per_s is None,
        is_chaos=settings.is_chaos,
        restore_generation=launch.restore.generation,
        is_newcomer=launch.has_staying,
        restore_world_size=launch.restore.world_size,
        is_read_once=settings.save.is_read_once,
        checkpoint_key=settings.checkpoint_key,
        skips=launch.restore.skips,
        spike_z=settings.save.spike_z,
        fingerprint_every_steps=settings.save.fingerprint_every_steps,
    )


def torchrun_variables(place: WorkerPlace, settings: RunSettings, launch: Launch) -> dict[str, str]:
    """The environment that torchrun gives a worker (source: torch.distributed.run, "Environment Variables").

    The store is hosted by rank 0 on a port of its own for each generation, so no key of an earlier one can be read.
    """
    max_restarts = settings.policy.max_restarts or 0
    return {
        "LOCAL_RANK": str(place.local_rank),
        "RANK": str(place.rank),
        "GROUP_RANK": str(launch.node_rank),
        "ROLE_RANK": str(place.rank),
        "ROLE_NAME": "default",
        "LOCAL_WORLD_SIZE": str(settings.procs_per_node),
        "WORLD_SIZE": str(place.world_size),
        "GROUP_WORLD_SIZE": str(launch.num_nodes),
        "ROLE_WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": launch.master_address,
        "MASTER_PORT": str(launch.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(launch.num_restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": place.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": str(place.node.root / f"rank-{place.rank}.error.json"),
        "TORCH_FR_BUFFER_SIZE": os.environ.get("TORCH_FR_BUFFER_SIZE", "2000"),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
