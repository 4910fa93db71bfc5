"""`dougong checkpoint`: which durable checkpoints there are, and whether they are what was written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import click
import msgspec

from dougong.clock import Clock, SystemClock
from dougong.errors import CheckpointDamaged, UserError
from dougong.run import manifest
from dougong.run.layout import RunDirectory
from dougong.run.settings import load_settings, run_directory
from dougong.units import format_bytes, format_duration, format_si

_ROW = "{step:>10}  {generation:>10}  {size:>9}  {state:<12}  {age:>13}  {directory}"
_QUIET_S = 1.0
_TTY_EVERY_S = 0.2
_LOG_EVERY_S = 10.0


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint as it is listed. `num_bytes` and `age_s` None = not known; `problem` "" = none seen."""

    directory: str
    step: int
    generation: int
    is_committed: bool
    num_bytes: int | None
    age_s: float | None
    problem: str = ""


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on a checkpoint: `good`, `damaged` or `uncommitted`. `path` is the file that is wrong."""

    directory: str
    step: int
    generation: int
    verdict: str
    num_bytes: int
    path: str = ""
    reason: str = ""


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """What `ls --json` prints."""

    url: str
    checkpoints: tuple[Listed, ...]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `verify --json` prints. `newest_good` is a directory, or null."""

    url: str
    newest_good: str | None
    num_damaged: int
    checkpoints: tuple[Verified, ...]


@click.group()
def checkpoint() -> None:
    """List and verify durable checkpoints."""


@checkpoint.command("ls")
@click.argument("place", metavar="[RUN_DIR_OR_URL]", default="runs/latest")
@click.option("--json", "is_json", is_flag=True, help="Print JSON; null = not known.")
def list_checkpoints(place: str, is_json: bool) -> None:
    """What is stored for a run (default: runs/latest) or at a URL, newest first. Reads no tensor."""
    url = checkpoint_url(place)
    listed = tuple(_listed(url, stored, now_ns=SystemClock().wall_ns()) for stored in _stored(url))
    if is_json:
        _print_json(Listing(url=url, checkpoints=listed))
        return
    click.echo(
        _ROW.format(step="STEP", generation="GENERATION", size="SIZE", state="STATE", age="AGE", directory="DIRECTORY")
    )
    for item in listed:
        click.echo(_list_row(item))
    for item in listed:
        if item.problem:
            click.echo(f"{item.directory}: {item.problem}", err=True)
    whole = [item.directory for item in listed if item.is_committed and not item.problem]
    click.echo(f"a resume would try first: {whole[0]}" if whole else f"no good checkpoint in {url}", err=True)


@checkpoint.command("verify")
@click.argument("place", metavar="[RUN_DIR_OR_URL]", default="runs/latest")
@click.option("--step", type=click.IntRange(min=1), help="Only the checkpoints of this step.")
@click.option("--json", "is_json", is_flag=True, help="Print the verdicts as JSON.")
def verify(place: str, step: int | None, is_json: bool) -> int:
    """Read every byte of the checkpoints of a run (default: runs/latest) or at a URL. Exit code 1: one is damaged."""
    url = checkpoint_url(place)
    chosen = _of_step(_stored(url), step, url=url)
    total_bytes = sum(_listed(url, stored, now_ns=0).num_bytes or 0 for stored in chosen if stored.is_committed)
    meter = Meter(total_bytes, clock=SystemClock(), is_tty=sys.stderr.isatty())
    verdicts: list[Verified] = []
    for stored in chosen:
        verdicts.append(_verified(url, stored, on_read=meter.advance))
        if not is_json:
            meter.clear()
            click.echo(_verdict_line(verdicts[-1]))
    meter.clear()
    report = _report(url, tuple(verdicts))
    if is_json:
        _print_json(report)
    _say_newest(report)
    return 1 if report.num_damaged else 0


def checkpoint_url(place: str) -> str:
    """The URL of the checkpoints of a run directory, of a directory of checkpoints, or itself. Raises UserError."""
    if "://" in place:
        return place
    run = run_directory(Path(place))
    if not run.root.is_dir():
        what = "is not a directory" if run.root.exists() else "does not exist"
        raise UserError(
            f"{place!r} {what}",
            where="command line",
            mend="give a run directory, a directory of checkpoints, or a URL of them",
        )
    if not run.settings.exists() and manifest.list_stored(str(run.root)):
        return str(run.root)
    return _url_of_run(run)


def _url_of_run(run: RunDirectory) -> str:
    """As the run recorded it; beside `run.json` if the run directory was moved or copied since."""
    recorded = load_settings(run).checkpoint_url
    if "://" not in recorded and not Path(recorded).is_dir() and run.checkpoints.is_dir():
        return str(run.checkpoints)
    return recorded


class Meter:
    """Says on stderr how far a long reading is: bytes, rate, time left. Says nothing about a short one."""

    def __init__(
        self, total_bytes: int, *, clock: Clock, is_tty: bool, say: Callable[[str], None] | None = None
    ) -> None:
        self._total_bytes = total_bytes
        self._clock = clock
        self._is_tty = is_tty
        self._say = say or _say_on_stderr
        self._began_ns = clock.monotonic_ns()
        self._next_s = _QUIET_S if is_tty else _LOG_EVERY_S
        self._num_bytes = 0
        self._width = 0

    def advance(self, num_bytes: int) -> None:
        """So many more bytes are read."""
        self._num_bytes += num_bytes
        elapsed_s = (self._clock.monotonic_ns() - self._began_ns) / 1e9
        if elapsed_s < self._next_s:
            return
        self._next_s = elapsed_s + (_TTY_EVERY_S if self._is_tty else _LOG_EVERY_S)
        text = self._text(elapsed_s)
        if self._is_tty:
            self._say("\r" + text.ljust(self._width))
            self._width = len(text)
        else:
            self._say(text + "\n")

    def clear(self) -> None:
        """Take the line back, so that something else can be written there."""
        if self._width:
            self._say("\r" + " " * self._width + "\r")
            self._width = 0

    def _text(self, elapsed_s: float) -> str:
        rate_bytes_per_s = self._num_bytes / elapsed_s
        left_bytes = max(0, self._total_bytes - self._num_bytes)
        left = format_duration(left_bytes / rate_bytes_per_s) if rate_bytes_per_s else "unknown time"
        done = f"{format_bytes(self._num_bytes)} of {format_bytes(self._total_bytes)}"
        return f"reading: {done}, {format_si(rate_bytes_per_s, 'B/s')}, {left} left"


def _say_on_stderr(text: str) -> None:
    click.echo(text, nl=False, err=True)


def _stored(url: str) -> tuple[manifest.Stored, ...]:
    try:
        return manifest.list_stored(url)
    except OSError as error:
        raise UserError(
            f"checkpoints cannot be listed: {error.strerror or error}",
            where=url,
            mend="check that the storage is there and may be read",
        ) from error


def _of_step(stored: tuple[manifest.Stored, ...], step: int | None, *, url: str) -> tuple[manifest.Stored, ...]:
    chosen = tuple(item for item in stored if step is None or item.step == step)
    if step is not None and not chosen:
        steps = ", ".join(str(number) for number in sorted({item.step for item in stored}))
        raise UserError(
            f"there is no checkpoint of step {step} in {url}",
            where="--step",
            mend=f"one of {steps}" if steps else "none has been written there yet",
        )
    return chosen


def _listed(url: str, stored: manifest.Stored, *, now_ns: int) -> Listed:
    num_bytes, age_s, problem = (
        None,
        None,
        "it was found damaged by a run (REJECTED mark)" if stored.is_rejected else "",
    )
    if stored.is_committed:
        try:
            found = manifest.read_manifest(url, stored.directory)
            num_bytes, age_s = found.num_bytes, max(0.0, (now_ns - found.time_ns) / 1e9)
        except (CheckpointDamaged, OSError) as error:
            problem = _reason(error)
    else:
        num_bytes = _bytes_there(url, stored.directory)
    return Listed(
        directory=stored.directory,
        step=stored.step,
        generation=stored.generation,
        is_committed=stored.is_committed,
        num_bytes=num_bytes,
        age_s=age_s,
        problem=problem,
    )


def _bytes_there(url: str, directory: str) -> int | None:
    """What an uncommitted checkpoint holds so far; it may be vanishing while we look."""
    place, root = manifest.storage_at(url)
    try:
        return sum(place.size_bytes(f"{root}/{directory}/{name}") for name in place.names(f"{root}/{directory}"))
    except OSError:
        return None


def _verified(url: str, stored: manifest.Stored, *, on_read: Callable[[int], None]) -> Verified:
    verdict, num_bytes, path, reason = "good", 0, "", ""
    if not stored.is_committed:
        verdict, reason = "uncommitted", "it was never committed; it is being written, or a crash left it"
    else:
        try:
            num_bytes = manifest.verify(url, stored.directory, on_read=on_read).num_bytes
        except (CheckpointDamaged, OSError) as error:
            verdict, reason = "damaged", _reason(error)
            path = error.path if isinstance(error, CheckpointDamaged) else f"{url}/{stored.directory}"
    return Verified(
        directory=stored.directory,
        step=stored.step,
        generation=stored.generation,
        verdict=verdict,
        num_bytes=num_bytes,
        path=path,
        reason=reason,
    )


def _reason(error: CheckpointDamaged | OSError) -> str:
    return error.reason if isinstance(error, CheckpointDamaged) else f"it cannot be read: {error.strerror or error}"


def _report(url: str, verdicts: tuple[Verified, ...]) -> Report:
    good = [verdict.directory for verdict in verdicts if verdict.verdict == "good"]
    return Report(
        url=url,
        newest_good=good[0] if good else None,
        num_damaged=sum(verdict.verdict == "damaged" for verdict in verdicts),
        checkpoints=verdicts,
    )


def _say_newest(report: Report) -> None:
    if report.newest_good is not None:
        click.echo(f"newest good: {report.newest_good}", err=True)
    elif report.checkpoints:
        click.echo(f"no good checkpoint in {report.url}", err=True)
    else:
        click.echo(f"no checkpoint in {report.url}", err=True)


def _list_row(item: Listed) -> str:
    return _ROW.format(
        step=item.step,
        generation=item.generation,
        size="-" if item.num_bytes is None else format_bytes(item.num_bytes),
        state=_state(item),
        age="-" if item.age_s is None else format_duration(round(item.age_s)),
        directory=item.directory,
    )


def _state(item: Listed) -> str:
    if not item.is_committed:
        return "uncommitted"
    return "damaged" if item.problem else "committed"


def _verdict_line(verdict: Verified) -> str:
    if verdict.verdict == "good":
        return f"{verdict.directory}  good  {format_bytes(verdict.num_bytes)}"
    where = f"{verdict.path}: " if verdict.path else ""
    return f"{verdict.directory}  {verdict.verdict}  {where}{verdict.reason}"


def _print_json(value: Listing | Report) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
