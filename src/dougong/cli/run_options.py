"""The options of `dougong run`, torchrun's own among them, and what they mean together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from dougong.errors import UserError
from dougong.units import parse_duration_s

_LOOPBACK = ("localhost", "127.0.0.1", "[::1]", "0.0.0.0")


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """As given on the command line; None = not given."""

    command: tuple[str, ...]
    cluster: Path | None = None
    nodes: int | None = None
    procs_per_node: int | None = None
    spares: int = 0
    backend: str = "local"
    chaos: str | None = None
    run_dir: Path | None = None
    resume: Path | None = None
    checkpoint_dir: str | None = None
    memory_every: int = 5
    durable_every: int = 50
    keep: int = 3
    mtbf: str | None = None
    checkpoint_key: Path | None = None
    retention_lock: str | None = None
    lock_key: Path | None = None
    settings: tuple[str, ...] = ()
    preflight: bool = False
    webhook: str = ""
    oversubscribe: bool = False
    reference: Path | None = None
    no_score: bool = False
    max_restarts: int | None = None
    nnodes: str | None = None
    min_nodes: int | None = None
    time_limit: str | None = None
    save_before: str = "120s"
    requeue: bool = False
    nproc_per_node: str | None = None
    rdzv_endpoint: str | None = None
    rdzv_backend: str | None = None
    rdzv_id: str | None = None
    rdzv_conf: str | None = None
    standalone: bool = False
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    monitor_interval: str | None = None
    log_dir: str | None = None
    module: bool = False

    @property
    def without_effect(self) -> tuple[str, ...]:
        """The options given that change nothing here."""
        names = ("rdzv_backend", "rdzv_conf", "master_addr", "monitor_interval", "log_dir", "mtbf")
        return tuple(f"--{name.replace('_', '-')}" for name in names if self._is_idle(name))

    def _is_idle(self, name: str) -> bool:
        if name == "master_addr" and self.node_rank is not None:
            return False
        if name == "mtbf" and not (self.memory_every and self.durable_every):
            return False
        return getattr(self, name) is not None


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """How many nodes, and how many ranks on each."""

    num_nodes: int
    procs_per_node: int
    min_nodes: int = 0
    """With how few nodes the job may go on; 0 = only with all."""


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    """This process is one of several, one on each host, that form the run together."""

    name: str
    node_rank: int
    num_nodes: int
    hosts: tuple[str, ...]
    """Host of each node, or empty where only ranks are known."""
    listen_port: int
    is_head: bool


def shape(options: RunOptions, *, num_cpus: int) -> Shape:
    """Nodes and ranks per node. `--nodes` and `--nnodes` are one thing; so are the two for ranks. Raises UserError."""
    fewest, nnodes = (0, None) if options.nnodes is None else _nnodes(options.nnodes)
    if options.nodes is not None and nnodes is not None and options.nodes != nnodes:
        raise UserError(
            f"--nodes {options.nodes} and --nnodes {options.nnodes} contradict each other",
            where="command line",
            mend="give one of the two",
        )
    nproc = None if options.nproc_per_node is None else _nproc(options.nproc_per_node, num_cpus=num_cpus)
    if options.procs_per_node is not None and nproc is not None and options.procs_per_node != nproc:
        raise UserError(
            f"--procs-per-node {options.procs_per_node} and --nproc-per-node {options.nproc_per_node}"
            " contradict each other",
            where="command line",
            mend="give one of the two",
        )
    num_nodes = options.nodes or nnodes or 1
    fewest = options.min_nodes or fewest
    if fewest > num_nodes:
        raise UserError(
            f"at least {fewest} nodes of {num_nodes}",
            where="--min-nodes",
            mend=f"give 1 to {num_nodes}, or leave it out",
        )
    return Shape(
        num_nodes=num_nodes,
        procs_per_node=options.procs_per_node or nproc or 1,
        min_nodes=fewest if fewest < num_nodes else 0,
    )


def mtbf_s(options: RunOptions) -> float:
    """`--mtbf` in seconds; 0 = not given. Raises UserError."""
    if options.mtbf is None:
        return 0.0
    try:
        duration_s = parse_duration_s(options.mtbf)
    except ValueError as error:
        raise UserError(str(error), where="--mtbf", mend="write for example 3h or 90min") from None
    if duration_s <= 0:
        raise UserError(f"{options.mtbf!r} is no time between failures", where="--mtbf", mend="give more than 0")
    return duration_s


def membership(options: RunOptions, environment: Mapping[str, str], *, num_nodes: int) -> Membership | None:
    """Is this one of several launchers? Inside a Slurm step of several tasks, or with `--rdzv-endpoint` of another
    host.

    Source of the variables: srun(1), "OUTPUT ENVIRONMENT VARIABLES". A batch script that does not use srun is task 0
    too, but of no step, and the other tasks are never started. Raises UserError.
    """
    if options.standalone:
        return None
    if "SLURM_PROCID" in environment and _num_slurm_tasks(environment) > 1 and options.nodes is None:
        return _slurm_membership(options, environment)
    if options.rdzv_endpoint is None and options.master_addr and options.node_rank is not None and num_nodes > 1:
        return Membership(
            name=options.rdzv_id or f"static-{options.master_addr}-{options.master_port or 0}",
            node_rank=options.node_rank,
            num_nodes=num_nodes,
            hosts=(),
            listen_port=0,
            is_head=options.node_rank == 0,
        )
    if options.rdzv_endpoint is None or num_nodes == 1:
        return None
    host, port = endpoint(options.rdzv_endpoint)
    if options.node_rank is None:
        if host in _LOOPBACK:
            return None
        raise UserError(
            f"--rdzv-endpoint {options.rdzv_endpoint} is on another host, and which node this is was not told",
            where="command line",
            mend="give --node-rank N, a different N on each host; or --standalone for all nodes on this machine",
        )
    return Membership(
        name=options.rdzv_id or f"rdzv-{host}-{port}",
        node_rank=options.node_rank,
        num_nodes=num_nodes,
        hosts=(),
        listen_port=port,
        is_head=options.node_rank == 0,
    )


def endpoint(text: str) -> tuple[str, int]:
    """`host:port` or `host`. Raises UserError."""
    host, _, port = text.rpartition(":") if ":" in text else (text, "", "29400")
    if not host or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise UserError(f"{text!r} is not HOST:PORT", where="--rdzv-endpoint", mend="for example localhost:29400")
    return host, int(port)


def slurm_hosts(node_list: str) -> tuple[str, ...]:
    """The hosts of a Slurm node list, `gpu[01-03,07],login1`. Raises UserError for what cannot be read."""
    try:
        return tuple(host for part in _split_outside_brackets(node_list) for host in _expanded(part))
    except ValueError:
        raise UserError(
            f"the node list {node_list!r} cannot be read", where="SLURM_NODELIST", mend="give --nnodes"
        ) from None


def _expanded(part: str) -> list[str]:
    """`rack[1-2]n[01-02]` has several brackets; the last one counts fastest. Raises ValueError."""
    head, bracket, rest = part.partition("[")
    if "]" in head:
        raise ValueError(part)
    if not bracket:
        return [part]
    body, closing, tail = rest.partition("]")
    if not closing or not body:
        raise ValueError(part)
    hosts: list[str] = []
    for item in body.split(","):
        first, _, last = item.partition("-")
        for number in range(int(first), int(last or first) + 1):
            hosts += [f"{head}{number:0{len(first)}d}{end}" for end in _expanded(tail)]
    return hosts


def _num_slurm_tasks(environment: Mapping[str, str]) -> int:
    """Tasks of this step; 1 outside of a step."""
    if "SLURM_STEP_ID" not in environment and "SLURM_STEPID" not in environment:
        return 1
    return int(environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or "1")


def _slurm_membership(options: RunOptions, environment: Mapping[str, str]) -> Membership:
    hosts = slurm_hosts(environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", ""))
    node_rank = int(environment["SLURM_PROCID"])
    num_nodes = _num_slurm_tasks(environment)
    port = endpoint(options.rdzv_endpoint)[1] if options.rdzv_endpoint else 0
    step = environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID", "0"))
    return Membership(
        name=f"slurm-{environment.get('SLURM_JOB_ID', '0')}-{step}",
        node_rank=node_rank,
        num_nodes=num_nodes,
        hosts=hosts if len(hosts) == num_nodes else (),
        listen_port=port,
        is_head=node_rank == 0,
    )


def _nnodes(text: str) -> tuple[int, int]:
    """torchrun's N or MIN:MAX: the fewest nodes, and as many as are wanted."""
    low, _, high = text.partition(":")
    if not low.isdigit() or (high and not high.isdigit()) or int(high or low) < max(1, int(low)):
        raise UserError(
            f"{text!r} is not a number of nodes", where="--nnodes", mend="write N or MIN:MAX, for example 2"
        )
    return int(low), int(high or low)


def _nproc(text: str, *, num_cpus: int) -> int:
    if text in ("auto", "gpu"):
        count = _num_accelerators()
        if count:
            return count
        if text == "gpu":
            raise UserError("no GPU was found", where="--nproc-per-node gpu", mend="give a number, or cpu")
    if text in ("auto", "cpu"):
        return num_cpus
    if not text.isdigit() or int(text) < 1:
        raise UserError(f"{text!r} is not a number of ranks", where="--nproc-per-node", mend="N, auto, cpu or gpu")
    return int(text)


def _num_accelerators() -> int:
    return len([name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit()])


def _split_outside_brackets(text: str) -> list[str]:
    parts, depth = [""], 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part for part in parts if part]
