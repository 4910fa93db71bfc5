"""`dougong run` as one of several: each host runs the same command, as with `srun torchrun`.

They find each other through the run directory, which must be on a file system that all of them see. The head, rank 0,
keeps the controller; every member keeps an agent for its own host, and starts it again if it dies.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import FrameType

import click
import msgspec

from dougong.cli.run_options import Membership, RunOptions, endpoint, shape
from dougong.errors import UserError
from dougong.event import store
from dougong.run.history import JobHistory, replay
from dougong.run.layout import RunDirectory, forget_memory
from dougong.run.settings import RunSettings, load_settings, run_directory, save_settings

_POLL_S = 0.2
_WAIT_FOR_HEAD_S = 600.0
_JOIN_S = 600.0
_EXIT_CODES = {"finished": 0, "failed": 1, "stopped": 130}


def join(options: RunOptions, member: Membership, command: tuple[str, ...]) -> int:
    """Take part in the run of all members; its exit code."""
    if options.chaos is not None:
        raise UserError(
            "--chaos reaches the processes of one machine only",
            where="command line",
            mend="leave it out, or run on the local backend with --standalone",
        )
    for name in ("spares", "cluster", "reference"):
        if getattr(options, name):
            click.echo(f"warning: --{name} has no effect when several launchers form the run", err=True)
    run = run_directory(options.run_dir or Path("runs") / member.name)
    if member.is_head:
        return _lead(options, member, command, run)
    return _follow(member, run)


def component_of(member: Membership, node_rank: int) -> str:
    """A member's component path: the host's name where it is known."""
    host = member.hosts[node_rank] if member.hosts else f"node-{node_rank:02d}"
    return f"{member.name}/{host}"


def _lead(options: RunOptions, member: Membership, command: tuple[str, ...], run: RunDirectory) -> int:
    from dougong.cli.run_start import check_port, check_writable, supervise, write_run

    if member.listen_port:
        check_port(member.listen_port, option="--rdzv-endpoint")
    is_resume = run.settings.exists()
    if is_resume:
        # the same job started again: a scheduler put it back into its queue, perhaps on other hosts
        if _history(run).end == "finished":
            raise UserError(
                f"the run in {run.root} is finished already",
                where="--run-dir, --rdzv-id",
                mend="give this run another name or directory",
            )
        settings = _moved(load_settings(run), options, member)
        save_settings(run, settings)
    else:
        check_writable(run)
        settings = _settings(options, member, command, run)
        write_run(run, settings)
    with _OwnAgent(run, settings.nodes[0]):
        return supervise(run, settings, options, chaos=None, is_resume=is_resume)


def _follow(member: Membership, run: RunDirectory) -> int:
    began_s = time.monotonic()
    known = _history(run)
    component = component_of(member, member.node_rank)
    # a run directory of an earlier start names other hosts until the head of this one has taken it up
    while not run.address.exists() or not run.settings.exists() or component not in load_settings(run).nodes:
        if time.monotonic() - began_s > _WAIT_FOR_HEAD_S:
            raise UserError(
                f"the head has not made {run.root} within {_WAIT_FOR_HEAD_S:.0f} s",
                where="--run-dir",
                mend="start rank 0 too, and give a run directory on a file system that all hosts share",
            )
        time.sleep(_POLL_S)
    previous = {number: signal.signal(number, _leave_it_to_the_head) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with _OwnAgent(run, component) as agent:
            while True:
                history = _history(run)
                if history.end and history.num_starts > known.num_starts:
                    agent.wait()
                    if history.end == "finished":
                        agent.forget_memory()
                    return _EXIT_CODES[history.end]
                agent.keep()
                time.sleep(_POLL_S)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _OwnAgent:
    """This host's agent, started again when it dies before the job has ended."""

    def __init__(self, run: RunDirectory, component: str) -> None:
        from dougong.backend.local.nodes import LocalNodes
        from dougong.run.layout import node_directory

        settings = load_settings(run) if run.settings.exists() else None
        assert settings is not None
        memory_root = Path(settings.memory_root)
        self._nodes = LocalNodes(
            run.root,
            run_id=settings.run_id,
            memory_of=lambda name: node_directory(settings.run_id, name, memory_root=memory_root).root,
        )
        self._component = component
        self._run_id = settings.run_id
        self._memory_root = memory_root

    def __enter__(self) -> _OwnAgent:
        self._nodes.start_agent(self._component)
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def keep(self) -> None:
        self._nodes.start_agent(self._component)

    def forget_memory(self) -> None:
        forget_memory(self._run_id, memory_root=self._memory_root)

    def wait(self) -> None:
        """Until the agent has left by itself, a few seconds at most; then it is ended."""
        deadline_s = time.monotonic() + 10.0
        while self._nodes.has_agent(self._component) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        self._nodes.end_agent(self._component)


def _settings(options: RunOptions, member: Membership, command: tuple[str, ...], run: RunDirectory) -> RunSettings:
    from dougong.cli.run_start import settings_for

    num_cpus = len(os.sched_getaffinity(0))
    wanted = msgspec.structs.replace(shape(options, num_cpus=num_cpus), num_nodes=member.num_nodes)
    settings = settings_for(options, wanted, command, run, is_chaos=False)
    return msgspec.structs.replace(
        settings,
        backend="joined",
        cluster_name=member.name,
        nodes=tuple(component_of(member, node_rank) for node_rank in range(member.num_nodes)),
        spares=(),
        policy=msgspec.structs.replace(settings.policy, join_s=_JOIN_S, gather_s=_JOIN_S),
        threads_per_worker=max(1, num_cpus // wanted.procs_per_node),
        listen_host="0.0.0.0",
        listen_port=member.listen_port,
        advertised_host=_advertised_host(options, member),
    )


def _moved(settings: RunSettings, options: RunOptions, member: Membership) -> RunSettings:
    """The settings of an earlier start, on the hosts of this one."""
    if len(settings.nodes) != member.num_nodes:
        raise UserError(
            f"the run has {len(settings.nodes)} nodes, this start {member.num_nodes}",
            where="the number of launchers",
            mend="start as many as before; the number of ranks cannot change yet",
        )
    return msgspec.structs.replace(
        settings,
        cluster_name=member.name,
        nodes=tuple(component_of(member, node_rank) for node_rank in range(member.num_nodes)),
        listen_port=member.listen_port,
        advertised_host=_advertised_host(options, member),
    )


def _advertised_host(options: RunOptions, member: Membership) -> str:
    import socket

    if options.rdzv_endpoint or options.master_addr:
        return endpoint(options.rdzv_endpoint)[0] if options.rdzv_endpoint else str(options.master_addr)
    return member.hosts[0] if member.hosts and _resolves(member.hosts[0]) else socket.gethostname()


def _resolves(host: str) -> bool:
    import socket

    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


def _history(run: RunDirectory) -> JobHistory:
    return replay(store.read(run.events, streams=("job",))) if run.events.exists() else JobHistory()


def _leave_it_to_the_head(number: int, frame: FrameType | None) -> None:
    click.echo("stopping: the head has every rank save after its step", err=True)
