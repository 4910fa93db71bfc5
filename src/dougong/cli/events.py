"""`dougong events`: what happened in a run."""

from __future__ import annotations

import difflib
import os
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path

import click

from dougong.errors import UserError
from dougong.event.codec import KINDS, encode
from dougong.event.describe import describe
from dougong.event.index import Wanted, component_of, kind_of, query
from dougong.event.kinds import Recorded, Unknown
from dougong.event.segment import stream_names
from dougong.event.store import read
from dougong.event.tail import follow

_ROW = "{time:<23}  {place:<16}  {kind:<18}  {component:<22}  {sentence}"


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path), default=Path("runs/latest"))
@click.option("--follow", "is_following", is_flag=True, help="Go on printing events as they are written.")
@click.option("--json", "is_json", is_flag=True, help="Print lines of JSON, as they are stored.")
@click.option("--kind", "kinds", multiple=True, metavar="K", help="Only this kind, for example WorkerLost; repeatable.")
@click.option("--component", "component_prefix", metavar="PREFIX", help="Only parts whose path begins so.")
@click.option("--stream", metavar="S", help="Only events that this writer wrote.")
@click.option(
    "--limit", type=click.IntRange(min=1), metavar="N", help="Only the newest N; with --follow, stop after N."
)
def events(
    run_dir: Path,
    is_following: bool,
    is_json: bool,
    kinds: tuple[str, ...],
    component_prefix: str | None,
    stream: str | None,
    limit: int | None,
) -> None:
    """What happened in the run at RUN_DIR (default: runs/latest), oldest first."""
    directory = _events_directory(run_dir, stream=stream, is_following=is_following)
    wanted = Wanted(
        kinds=tuple(_known_kind(kind) for kind in kinds),
        component_prefix=component_prefix,
        streams=None if stream is None else (stream,),
        limit=limit,
    )
    unknown: Counter[str] = Counter()
    try:
        records = _followed(directory, wanted) if is_following else _past(directory, wanted)
        _print(records, unknown, is_json=is_json, is_live=is_following)
    except KeyboardInterrupt:
        pass  # the way to end --follow
    except BrokenPipeError:
        _silence_stdout()
    except OSError as error:
        raise _cannot_read(directory, error) from error
    _report_unknown(unknown)


def _events_directory(run_dir: Path, *, stream: str | None, is_following: bool) -> Path:
    directory = run_dir / "events"
    if is_following and run_dir.is_dir():
        return directory
    if not directory.is_dir():
        what = "it has no events" if run_dir.is_dir() else "there is no such run directory"
        mend = "name the directory that `dougong run --run-dir` was given, or start a run"
        raise UserError(f"{str(run_dir)!r}: {what}", where=str(directory), mend=mend)
    streams = stream_names(directory)
    if stream is not None and stream not in streams:
        mend = f"one of {', '.join(streams)}" if streams else "no stream has been written yet"
        raise UserError(f"{stream!r} is not a stream of this run", where="--stream", mend=mend)
    return directory


def _known_kind(kind: str) -> str:
    if kind in KINDS:
        return kind
    lower = {name.lower(): name for name in KINDS}
    near = difflib.get_close_matches(kind.lower(), lower, n=1)
    hint = f"did you mean {lower[near[0]]}? " if near else ""
    raise UserError(f"{kind!r} is not a kind of event", where="--kind", mend=f"{hint}valid: {', '.join(sorted(KINDS))}")


def _past(directory: Path, wanted: Wanted) -> Iterator[Recorded]:
    if wanted == Wanted():
        return read(directory)
    return query(
        directory,
        kinds=wanted.kinds,
        component_prefix=wanted.component_prefix,
        streams=wanted.streams,
        limit=wanted.limit,
    )


def _followed(directory: Path, wanted: Wanted) -> Iterator[Recorded]:
    return islice(filter(wanted.takes, follow(directory, stop=lambda: False)), wanted.limit)


def _print(records: Iterator[Recorded], unknown: Counter[str], *, is_json: bool, is_live: bool) -> None:
    if not is_json:
        header = _ROW.format(time="TIME", place="STREAM#SEQ", kind="KIND", component="COMPONENT", sentence="WHAT")
        print(header, flush=is_live)
    for record in records:
        if isinstance(record.event, Unknown):
            unknown[record.event.kind] += 1
        print(encode(record).decode().rstrip("\n") if is_json else _row(record), flush=is_live)
    sys.stdout.flush()


def _row(record: Recorded) -> str:
    seconds, rest_ns = divmod(record.time_ns, 10**9)
    time = datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S") + f".{rest_ns // 10**6:03d}"
    place = f"{record.stream}#{record.seq}"
    return _ROW.format(
        time=time,
        place=place,
        kind=kind_of(record),
        component=component_of(record) or "-",
        sentence=describe(record.event),
    )


def _silence_stdout() -> None:
    """The reader is gone: nothing more can be said there, and Python must not try at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _cannot_read(directory: Path, error: OSError) -> UserError:
    return UserError(
        f"events cannot be read: {error.strerror or error}",
        where=str(error.filename or directory),
        mend="check the permissions of the run directory",
    )


def _report_unknown(unknown: Counter[str]) -> None:
    if unknown:
        kinds = ", ".join(f"{kind} ({count})" for kind, count in sorted(unknown.items()))
        print(f"{unknown.total()} events of kinds that this version does not know: {kinds}", file=sys.stderr)
