"""What a run is started with: written once to `run.json`, read by controller, agents and workers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from dougong.errors import UserError
from dougong.run.layout import RunDirectory, write_atomically

FORMAT_VERSION = 1


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """When to try again and when to give up."""

    max_restarts: int | None = None
    """Restarts in all; None = no limit as long as the job makes progress between them."""
    max_fruitless: int = 3
    """Failures in a row without one new step between them, after which the job is given up."""
    backoff_first_s: float = 1.0
    """Wait before the second fruitless restart; doubles with each. The first restart never waits."""
    backoff_max_s: float = 60.0
    node_grace_s: float = 10.0
    """How long a node may be silent before it counts as lost, if its backend cannot tell."""
    gather_s: float = 30.0
    """How long a start waits for the nodes chosen to train before a spare takes their place."""
    join_s: float = 60.0
    """How long a node that was never there may take to come."""
    spare_wait_s: float = 60.0
    """How long to wait for a node when none is left to take a lost one's place."""
    teardown_s: float = 10.0
    """How long the workers of a node may take to die before the node counts as lost."""
    return_every_s: float = 2.0
    """How often a lost node's backend is asked whether it can be used again; doubles with each return of the node."""
    is_in_process: bool = True
    """May ranks that are well stay in their processes while a lost one is replaced?"""
    unwind_s: float = 5.0
    """How long they may take to leave their broken step (or twice their slow step, if that is longer)."""
    rejoin_s: float = 120.0
    """How long a recovery in the process may take before all ranks are started anew."""
    shrink_wait_s: float = 10.0
    """How long to wait for a node that may still come before going on with fewer (`--nnodes MIN:MAX`)."""
    grow_wait_s: float = 10.0
    """How long a job with fewer nodes runs before it takes in one that is free."""
    bad_loss: Literal["ignore", "stop", "roll-back-and-skip"] = "ignore"
    """What follows a loss that is not finite, or a spike. No checkpoint is taken after one, whatever the policy."""
    straggler: Literal["name", "replace"] = "name"
    """A rank that computes much more slowly than the others is named; by "replace" its node makes room for a spare."""
    straggler_z: float = 3.5
    straggler_ratio: float = 1.3
    straggler_steps: int = 20


class HangRule(msgspec.Struct, frozen=True, kw_only=True):
    """How long no progress may last. See `dougong.run.hang`."""

    attached_min_s: float = 2.2
    attached_p99_factor: float = 4.5
    unmodified_first_s: float = 600.0
    unmodified_min_s: float = 60.0
    unmodified_factor: float = 10.0
    startup_s: float = 1800.0
    outside_step_s: float = 60.0
    active_s: float = 600.0
    stopped_s: float = 1.0
    unwound_s: float = 1.5
    first_step_s: float = 60.0
    """In the first step of a start, until the first one of this job is known."""
    checkpoint_s: float = 60.0
    compile_s: float = 1800.0
    evaluation_s: float = 600.0
    restart_min_s: float = 30.0
    """A start after the first, in which all ranks do nothing at all for so long, hangs."""
    restart_factor: float = 4.0
    """Or so many times the longest start so far, if that is longer."""


class SaveRule(msgspec.Struct, frozen=True, kw_only=True):
    """How often an attached script is saved."""

    memory_every_steps: int = 5
    """0 = chosen from what a save costs and how often the job is interrupted. See `dougong.run.save_rhythm`."""
    durable_every_steps: int = 50
    """0 = chosen, likewise."""
    keep_durable: int = 3
    commit_timeout_s: float = 60.0
    """How long the end of a script waits for its last checkpoint to be committed."""
    mtbf_s: float = 0.0
    """Mean time between interruptions of the whole job, as far as known before; 0 = what published clusters have."""
    memory_max_s: float = 300.0
    """A chosen interval between saves in memory is never longer."""
    durable_max_s: float = 3600.0
    """A chosen interval between durable saves is never longer."""
    is_read_once: bool = True
    """At a durable restore, one rank reads what several need, and broadcasts it; else each reads for itself."""
    write_bytes_per_s: float = 0.0
    """The most that the writer of a node puts on storage; 0 = as fast as it goes."""
    lock_s: float = 0.0
    """How long nothing deletes a committed checkpoint; 0 = no lock."""
    peer_copies: int = 1
    """On how many other nodes a copy of each node's memory checkpoints is kept; 0 = none."""
    peer_every_s: float = 1.0
    """At least so long between two rounds of copies."""
    peer_busy_ratio: float = 0.1
    """Copying takes at most this share of the time: a round that took long is followed by a longer pause."""
    peer_max_bytes_per_s: float = 0.0
    """No courier sends faster; 0 = as fast as it goes."""
    spike_z: float = 0.0
    """A loss so many robust standard deviations above the last ones holds checkpoints back; 0 = none does."""
    fingerprint_every_steps: int = 0
    """Steps between two comparisons of the state that must be the same on all ranks; 0 = none."""
    memory_root: str = ""
    """Where memory checkpoints are kept; empty = /dev/shm, or the run directory where there is none."""


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A run, as it was started."""

    format_version: int
    run_id: str
    version: str
    command: tuple[str, ...]
    working_directory: str
    backend: str
    cluster_name: str
    nodes: tuple[str, ...]
    spares: tuple[str, ...]
    num_accelerators: int
    procs_per_node: int
    policy: Policy
    hang: HangRule
    save: SaveRule
    checkpoint_url: str
    memory_root: str
    threads_per_worker: int
    peak_flop_per_s: float | None = None
    """Of one rank's accelerator, from the catalog; None = measure a GEMM."""
    peak_source: str = ""
    listen_host: str = "127.0.0.1"
    listen_port: int = 0
    advertised_host: str = ""
    """How others reach this host, if the controller listens beyond loopback."""
    master_port: int = 0
    webhook_url: str = ""
    is_chaos: bool = False
    has_networks: bool = False
    """Each node that this host plays has a network namespace of its own."""
    min_nodes: int = 0
    """With how few nodes the job may go on; 0 = with all of them only."""
    checkpoint_key: str = ""
    """The file of the key that encrypts durable checkpoints, on every node; "" = they are plain."""
    lock_key: str = ""
    """The file of the owner's key of retention locks, where the controller runs; "" = only time opens them."""
    wants_preflight: bool = False
    """Test every node before the first generation of a start."""

    @property
    def node_host(self) -> str:
        """Where what runs on a node listens for other nodes: only for this host if it plays them all; "" = everyone."""
        return "127.0.0.1" if self.backend == "local" and not self.has_networks else ""

    @property
    def world_size(self) -> int:
        return len(self.nodes) * self.procs_per_node


def save_settings(directory: RunDirectory, settings: RunSettings) -> None:
    # a webhook's address is often its only secret
    mode = 0o600 if settings.webhook_url else 0o644
    write_atomically(directory.settings, msgspec.json.format(msgspec.json.encode(settings), indent=1), mode=mode)


def load_settings(directory: RunDirectory) -> RunSettings:
    """The settings of an existing run. Raises UserError if `directory` holds none, or another version's."""
    try:
        content = directory.settings.read_bytes()
    except FileNotFoundError:
        raise UserError(
            f"{directory.root} is not a run directory (it has no run.json)",
            where="run directory",
            mend="give a directory that `dougong run` made, for example runs/latest",
        ) from None
    except OSError as error:
        raise UserError(
            f"{directory.settings} cannot be read: {error.strerror}", where="run directory", mend="mend its permissions"
        ) from error
    found = _format_version(content)
    if found != FORMAT_VERSION:
        raise UserError(
            f"{directory.root} was written with run format {found}, this program reads {FORMAT_VERSION}",
            where=str(directory.settings),
            mend="use the version of Dougong that wrote it, or start a new run",
        )
    try:
        return msgspec.json.decode(content, type=RunSettings)
    except msgspec.MsgspecError as error:
        raise UserError(
            f"run.json cannot be read: {error}", where=str(directory.settings), mend="restore it, or start a new run"
        ) from error


def run_directory(path: Path) -> RunDirectory:
    return RunDirectory(path.absolute())


class _Versioned(msgspec.Struct):
    format_version: int = 0


def _format_version(content: bytes) -> int:
    try:
        return msgspec.json.decode(content, type=_Versioned).format_version
    except msgspec.MsgspecError:
        return 0
