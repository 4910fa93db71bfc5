"""What `dougong run` does with its options: a run directory, a launcher, and at the end the scorecard."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import click
import msgspec

import dougong
from dougong.backend.device import FoundAccelerator
from dougong.backend.local.networks import check_networks
from dougong.backend.nvml import NvmlProbe
from dougong.cli.controller import local_nodes, node_networks
from dougong.cli.launch import EXIT_STOPPED, Launcher, View, point_latest, wait_for_orphan
from dougong.cli.run_options import RunOptions, Shape, membership, mtbf_s, shape
from dougong.cli.time_limit import requeue, stop_at_s
from dougong.clock import SystemClock
from dougong.errors import DougongError, MissingExtra, UserError
from dougong.event import store
from dougong.event.log import EventLog
from dougong.run.history import replay
from dougong.run.layout import RunDirectory, forget_memory, node_directory, write_atomically
from dougong.run.settings import (
    FORMAT_VERSION,
    HangRule,
    Policy,
    RunSettings,
    SaveRule,
    load_settings,
    run_directory,
    save_settings,
)
from dougong.run.timeline import drop_anchor, run_clock
from dougong.spec.chaos import Chaos, load_chaos, resolve
from dougong.units import parse_duration_s

_SETTABLE = ("policy", "hang", "save")
_DEFAULT_CHAOS = Path(dougong.__file__).parent / "spec" / "catalog" / "chaos-default.yaml"


def start(options: RunOptions) -> int:
    """A new run. Returns the exit code; raises UserError for anything that cannot be."""
    for name in options.without_effect:
        click.echo(f"warning: {name} has no effect here", err=True)
    wanted = shape(options, num_cpus=_num_cpus())
    member = membership(options, os.environ, num_nodes=wanted.num_nodes)
    command = _checked_command(options)
    _check_torch()
    # a limit that cannot be shows before the start
    stop_at_s(time_limit=options.time_limit, save_before=options.save_before, environment={}, now_s=0.0)
    if member is not None:
        from dougong.cli.run_member import join

        return join(options, member, command)
    if options.reference is not None:
        load_settings(run_directory(options.reference.resolve()))
    _check_cpus(wanted, options)
    _check_webhook(options.webhook)
    if options.master_port is not None:
        check_port(options.master_port, option="--master-port")
    chaos = _chaos(options)
    if chaos is not None and chaos.wants_networks:
        check_networks()
    run = _new_run_directory(options.run_dir)
    settings = settings_for(options, wanted, command, run, is_chaos=chaos is not None)
    if chaos is not None and chaos.wants_networks:
        settings = _with_networks(settings)
    if chaos is not None:
        resolve(chaos, world_size=settings.world_size, nodes=settings.nodes)  # a wrong target shows before the start
    write_run(run, settings)
    if options.reference is not None:
        (run.root / "reference").write_text(f"{options.reference.resolve()}\n")
    return supervise(run, settings, options, chaos=chaos, is_resume=False)


def go_on(options: RunOptions) -> int:
    """Resume an existing run where it stopped."""
    assert options.resume is not None
    if options.command:
        raise UserError(
            f"--resume goes on with the script of that run; {options.command[0]!r} was given too",
            where="command line",
            mend="leave the script out, or start a new run without --resume",
        )
    run = run_directory(options.resume.resolve())
    settings = load_settings(run)
    wait_for_orphan(run)
    history = replay(store.read(run.events, streams=("job",)))
    if history.end == "finished":
        raise UserError(
            f"the run in {options.resume} is finished at step {history.max_step}",
            where="--resume",
            mend="start a new run; `dougong score` shows how it went",
        )
    for mark in (run.root / "nodes").glob("*.down"):
        mark.unlink()
    return supervise(run, settings, options, chaos=_chaos(options), is_resume=True)


def supervise(
    run: RunDirectory, settings: RunSettings, options: RunOptions, *, chaos: Chaos | None, is_resume: bool
) -> int:
    """Launch, watch, inject what is to be injected; then say how it went."""
    ends_s = stop_at_s(
        time_limit=options.time_limit, save_before=options.save_before, environment=os.environ, now_s=time.time()
    )
    launcher = Launcher(run, is_resume=is_resume, view=_view(run, settings), stop_at_s=ends_s)
    drop_anchor(run, SystemClock())
    networks = node_networks(settings)
    if networks is not None:
        networks.set_up()
    injector = None
    if chaos is not None:
        injector = _injector(run, settings, chaos, launcher)
        injector.start()
    point_latest(run.root)
    click.echo(f"run {settings.run_id} in {_shown(run.root)}", err=True)
    try:
        code = launcher.supervise()
    finally:
        if injector is not None:
            injector.stop()
    if settings.backend == "local":
        local_nodes(run, settings).end_leftovers((*settings.nodes, *settings.spares))
    if networks is not None:
        networks.tear_down()
    if code == 0:
        forget_memory(settings.run_id, memory_root=Path(settings.memory_root))
    _say_how_it_went(run, code, wants_score=not options.no_score)
    if launcher.is_out_of_time and options.requeue and code == EXIT_STOPPED:
        click.echo(requeue(os.environ), err=True)
    return code


def settings_for(
    options: RunOptions, wanted: Shape, command: tuple[str, ...], run: RunDirectory, *, is_chaos: bool
) -> RunSettings:
    """The settings of a run on this machine. Raises UserError for keys that cannot be read."""
    _check_keys(options)
    nodes, spares, cluster_name = _nodes(options, wanted)
    peak, peak_source = rank_peak(NvmlProbe().accelerators().accelerators)
    total = wanted.num_nodes * wanted.procs_per_node
    settings = RunSettings(
        format_version=FORMAT_VERSION,
        run_id=secrets.token_hex(4),
        version=dougong.__version__,
        command=command,
        working_directory=os.getcwd(),
        backend=options.backend,
        cluster_name=cluster_name,
        nodes=nodes,
        spares=spares,
        num_accelerators=total,
        procs_per_node=wanted.procs_per_node,
        policy=Policy(max_restarts=options.max_restarts),
        hang=HangRule(),
        save=SaveRule(
            memory_every_steps=options.memory_every,
            durable_every_steps=options.durable_every,
            keep_durable=options.keep,
            mtbf_s=mtbf_s(options),
            lock_s=_lock_s(options.retention_lock),
        ),
        checkpoint_url=_checkpoint_url(options, run),
        memory_root=str(_memory_root(run)),
        threads_per_worker=max(1, _num_cpus() // total),
        peak_flop_per_s=peak,
        peak_source=peak_source,
        master_port=options.master_port or 0,
        webhook_url=options.webhook,
        is_chaos=is_chaos,
        wants_preflight=options.preflight,
        min_nodes=wanted.min_nodes,
        checkpoint_key=_absolute(options.checkpoint_key),
        lock_key=_absolute(options.lock_key),
    )
    for text in options.settings:
        settings = with_setting(settings, text)
    if settings.save.memory_root:
        memory_root = Path(settings.save.memory_root).absolute()
        _check_takes_files(memory_root, option="--set save.memory_root")
        settings = msgspec.structs.replace(settings, memory_root=str(memory_root))
    return settings


def _lock_s(text: str | None) -> float:
    """Raises UserError."""
    try:
        return 0.0 if text is None else parse_duration_s(text)
    except ValueError as error:
        raise UserError(str(error), where="--retention-lock", mend="for example 12h or 7d") from error


def _check_keys(options: RunOptions) -> None:
    """The keys are read here once, so that a mistake shows before the start, and never stored.

    Raises UserError, and MissingExtra.
    """
    if options.checkpoint_key is None and options.lock_key is None:
        return
    from dougong.run.sealed import load_key, load_sealer

    if options.checkpoint_key is not None:
        load_sealer(options.checkpoint_key)
    if options.lock_key is not None:
        load_key(options.lock_key, option="--lock-key")


def _absolute(path: Path | None) -> str:
    return "" if path is None else str(path.absolute())


def with_setting(settings: RunSettings, text: str) -> RunSettings:
    """The settings with one changed, as `hang.startup_s=7200`. Raises UserError that lists the valid names."""
    name, is_given, value = text.partition("=")
    group, _, field = name.partition(".")
    names: dict[str, Policy | HangRule | SaveRule] = {
        f"{part}.{known}": getattr(settings, part)
        for part in _SETTABLE
        for known in getattr(settings, part).__struct_fields__
    }
    if not is_given or name not in names:
        raise UserError(
            f"{text!r} is not a setting", where="--set", mend=f"write NAME=VALUE with one of {', '.join(names)}"
        )
    changed = {**msgspec.structs.asdict(names[name]), field: value}
    try:
        rule: Policy | HangRule | SaveRule = msgspec.convert(changed, type(names[name]), strict=False)
    except msgspec.ValidationError as error:
        raise UserError(f"{text!r}: {error}", where="--set", mend="give a number") from error
    return msgspec.structs.replace(settings, **{group: rule})


def write_run(run: RunDirectory, settings: RunSettings) -> None:
    """The files that make a directory a run. Raises UserError if the disk does not take them."""
    try:
        run.events.mkdir(parents=True, exist_ok=True)
        write_atomically(run.token, secrets.token_bytes(32), mode=0o600)
        save_settings(run, settings)
    except OSError as error:
        raise UserError(
            f"{_shown(run.root)} cannot be written: {error.strerror}",
            where="--run-dir",
            mend="give a directory on a disk that is writable and not full",
        ) from error


def _nodes(options: RunOptions, wanted: Shape) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Component paths of the active and the spare nodes, and the cluster's name."""
    count = wanted.num_nodes + options.spares
    if options.cluster is None:
        names = tuple(f"local/rack-01/node-{index:02d}" for index in range(1, count + 1))
        return names[: wanted.num_nodes], names[wanted.num_nodes :], "local"
    from dougong.spec.cluster import load_cluster

    cluster = load_cluster(options.cluster)
    names = tuple(str(node.path) for node in cluster.nodes())
    if len(names) < count:
        raise UserError(
            f"{count} nodes are wanted ({wanted.num_nodes} and {options.spares} spare), the cluster has {len(names)}",
            where=str(options.cluster),
            mend="ask for fewer nodes, or describe more",
        )
    return names[: wanted.num_nodes], names[wanted.num_nodes : count], cluster.name


def rank_peak(found: Sequence[FoundAccelerator]) -> tuple[float | None, str]:
    """The dense BF16 peak of one rank's accelerator, and where the figure is from; (None, "") = measure it.

    What the driver says is there counts, not what a description says. All ranks have the same kind.
    """
    from dougong.spec import catalog

    if not found:
        return None, ""
    try:
        kind = catalog.accelerator(found[0].name)
    except UserError:
        return None, ""
    peak = kind.peak_flop_per_s("bf16")
    return (None, "") if peak is None else (peak, f"dense BF16 peak of {kind.name}, {kind.source}")


def _checked_command(options: RunOptions) -> tuple[str, ...]:
    if not options.command:
        raise UserError("no script was given", where="command line", mend="dougong run [OPTIONS] -- train.py ARGS…")
    if options.module:
        _check_module(options.command[0])
        return ("-m", *options.command)
    script = Path(options.command[0])
    if not script.is_file():
        what = "is a directory" if script.is_dir() else "does not exist"
        raise UserError(
            f"the script {str(script)!r} {what}",
            where=f"command line, seen from {_shown(Path.cwd())}",
            mend="give the path of a Python script; options of dougong stand before it",
        )
    if not os.access(script, os.R_OK):
        raise UserError(f"the script {str(script)!r} cannot be read", where="command line", mend="mend its permissions")
    return options.command


def _check_module(name: str) -> None:
    """Its top-level package is looked for, from here as `python -m` would, without importing anything."""
    from importlib.util import find_spec

    sys.path.insert(0, os.getcwd())
    try:
        spec = find_spec(name.partition(".")[0])
    except ValueError:
        spec = None
    finally:
        del sys.path[0]
    if spec is None:
        raise UserError(
            f"there is no module {name!r}",
            where=f"command line, seen from {_shown(Path.cwd())}",
            mend="give a module that `python -m` finds from here, or a script without -m",
        )


def _check_torch() -> None:
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise MissingExtra("torch", extra="train", needed_for="dougong run")


def _check_cpus(wanted: Shape, options: RunOptions) -> None:
    total = wanted.num_nodes * wanted.procs_per_node
    if total > _num_cpus() and not options.oversubscribe:
        raise UserError(
            f"{total} ranks ({wanted.num_nodes} nodes x {wanted.procs_per_node}) on {_num_cpus()} CPUs",
            where="--nodes, --procs-per-node",
            mend="ask for fewer ranks, or add --oversubscribe if they may share CPUs",
        )


def check_port(port: int, *, option: str) -> None:
    """Raises UserError if the port is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise UserError(
                f"port {port} cannot be used: {error.strerror}",
                where=option,
                mend="end what listens there, give another port, or leave it out to have a free one chosen",
            ) from error


def _check_webhook(url: str) -> None:
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(url)
        is_good = not url or (parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0)
    except ValueError:
        is_good = False
    if not is_good:
        raise UserError(f"{url!r} is not a web address", where="--webhook", mend="for example https://host/path")


def _chaos(options: RunOptions) -> Chaos | None:
    if options.chaos is None:
        return None
    path = _DEFAULT_CHAOS if options.chaos == "default" else Path(options.chaos)
    return load_chaos(path)


def _with_networks(settings: RunSettings) -> RunSettings:
    """The controller listens where the nodes' networks reach it."""
    networked = msgspec.structs.replace(settings, has_networks=True)
    networks = node_networks(networked)
    assert networks is not None
    return msgspec.structs.replace(networked, listen_host=networks.controller_address)


def _injector(run: RunDirectory, settings: RunSettings, chaos: Chaos, launcher: Launcher):
    from dougong.run.chaos import Injector, Reach

    clock = run_clock(run, SystemClock())
    memory_root = Path(settings.memory_root)
    door = local_nodes(run, settings)
    components = (*settings.nodes, *settings.spares)

    def signal_run(number: signal.Signals) -> None:
        launcher.signal_controller(number)
        door.signal_all(components, number)
        os.kill(os.getpid(), number)

    def directory_of(component: str):
        return node_directory(settings.run_id, component, memory_root=memory_root)

    return Injector(
        resolve(chaos, world_size=settings.world_size, nodes=settings.nodes),
        seed=chaos.seed,
        events=run.events,
        job_stream="job",
        checkpoint_url=settings.checkpoint_url,
        reach=Reach(
            door=door,
            node_directory=directory_of,
            memory_root=memory_root,
            kill_controller=lambda: launcher.signal_controller(signal.SIGKILL),
            signal_launcher=lambda number: os.kill(os.getpid(), number),
            signal_run=signal_run,
        ),
        log=EventLog.open(run.events, stream="chaos", clock=clock),
        clock=clock,
    )


def _view(run: RunDirectory, settings: RunSettings) -> View:
    from dougong.cli.live import Figures, LiveView, PlainView

    figures = Figures(settings)
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        return cast("View", LiveView(figures))
    return cast("View", PlainView(figures, rank_0_log=run.logs / "rank-0.log"))


def _say_how_it_went(run: RunDirectory, code: int, *, wants_score: bool) -> None:
    from dougong.cli.score import print_scorecard, write_report

    try:
        if wants_score:
            print_scorecard(run.root)
        click.echo(f"report: {_shown(write_report(run.root))}", err=True)
    except DougongError as error:
        # how the job ended is the exit code, whatever becomes of its report
        click.echo(f"warning: {error}", err=True)
    if code == 130:
        click.echo(f"stopped; go on with: dougong run --resume {_shown(run.root)}", err=True)


def _new_run_directory(wanted: Path | None) -> RunDirectory:
    path = wanted or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    run = run_directory(path)
    if run.settings.exists():
        raise UserError(
            f"{_shown(run.root)} holds a run already",
            where="--run-dir",
            mend=f"go on with it by `dougong run --resume {_shown(run.root)}`, or give another directory",
        )
    if run.root.exists() and (not run.root.is_dir() or any(run.root.iterdir())):
        raise UserError(
            f"{_shown(run.root)} exists and is not an empty directory", where="--run-dir", mend="give another directory"
        )
    check_writable(run)
    return run


def check_writable(run: RunDirectory) -> None:
    """Make the run directory. Raises UserError if the disk does not take it."""
    try:
        run.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{_shown(run.root)} cannot be made: {error.strerror}",
            where="--run-dir",
            mend="give a directory on a disk that is writable and not full",
        ) from error


def _checkpoint_url(options: RunOptions, run: RunDirectory) -> str:
    if options.checkpoint_dir is None:
        return str(run.checkpoints)
    from dougong.run.manifest import LocalPlace, storage_at

    url = options.checkpoint_dir if "://" in options.checkpoint_dir else str(Path(options.checkpoint_dir).absolute())
    place, path = storage_at(url)
    if url.startswith("memory://"):
        raise UserError(
            "checkpoints in the memory of one process cannot be read by another",
            where="--checkpoint-dir memory://",
            mend="give a directory or a store that all ranks share; memory checkpoints are taken besides",
        )
    if isinstance(place, LocalPlace):
        _check_takes_files(Path(path))
    return url


def _check_takes_files(directory: Path, *, option: str = "--checkpoint-dir") -> None:
    """Raises UserError if a local directory of checkpoints cannot be made or written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK):
            raise PermissionError(0, "it is not writable")
    except OSError as error:
        raise UserError(
            f"{_shown(directory)} cannot hold checkpoints: {error.strerror}",
            where=option,
            mend="give a directory on a disk that is writable",
        ) from error


def _memory_root(run: RunDirectory) -> Path:
    """Shared memory where there is some; else the run directory, which is slower but works."""
    shared = Path("/dev/shm")
    if shared.is_dir() and os.access(shared, os.W_OK):
        return shared
    return run.root / "memory"


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0))


def _shown(path: Path) -> str:
    """A path as a person would type it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
