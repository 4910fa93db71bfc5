"""`dougong checkpoint`: which durable checkpoints there are, and whether they are what was written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from dougong.cli.checkpoint_change import export, remove, unlock
from dougong.cli.checkpoint_place import Meter, bytes_there, checkpoint_url, of_step, sealer_at, stored_at
from dougong.clock import SystemClock
from dougong.errors import CheckpointDamaged
from dougong.run import manifest
from dougong.units import format_bytes, format_duration

if TYPE_CHECKING:
    from dougong.run.sealed import Sealer

_ROW = "{step:>10}  {generation:>10}  {size:>9}  {state:<12}  {age:>13}  {directory}"


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
    """List, verify, export, unlock and remove durable checkpoints."""


for command in (export, remove, unlock):
    checkpoint.add_command(command)


@checkpoint.command("ls")
@click.argument("place", metavar="[RUN_DIR_OR_URL]", default="runs/latest")
@click.option("--json", "is_json", is_flag=True, help="Print JSON; null = not known.")
def list_checkpoints(place: str, is_json: bool) -> None:
    """What is stored for a run (default: runs/latest) or at a URL, newest first. Reads no tensor."""
    url = checkpoint_url(place)
    listed = tuple(_listed(url, stored, now_ns=SystemClock().wall_ns()) for stored in stored_at(url))
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
@click.option(
    "--checkpoint-key", type=click.Path(path_type=Path), help="Key of encrypted ones: also find what others wrote."
)
@click.option("--json", "is_json", is_flag=True, help="Print the verdicts as JSON.")
def verify(place: str, step: int | None, checkpoint_key: Path | None, is_json: bool) -> int:
    """Read every byte of the checkpoints of a run (default: runs/latest) or at a URL. Exit code 1: one is damaged."""
    sealer = sealer_at(checkpoint_key)
    url = checkpoint_url(place)
    chosen = of_step(stored_at(url), step, url=url)
    total_bytes = sum(_listed(url, stored, now_ns=0).num_bytes or 0 for stored in chosen if stored.is_committed)
    meter = Meter(total_bytes, clock=SystemClock(), is_tty=sys.stderr.isatty())
    verdicts: list[Verified] = []
    for stored in chosen:
        verdicts.append(_verified(url, stored, on_read=meter.advance, sealer=sealer))
        if not is_json:
            meter.clear()
            click.echo(_verdict_line(verdicts[-1]))
    meter.clear()
    report = _report(url, tuple(verdicts))
    if is_json:
        _print_json(report)
    _say_newest(report)
    return 1 if report.num_damaged else 0


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
        num_bytes = bytes_there(url, stored.directory)
    return Listed(
        directory=stored.directory,
        step=stored.step,
        generation=stored.generation,
        is_committed=stored.is_committed,
        num_bytes=num_bytes,
        age_s=age_s,
        problem=problem,
    )


def _verified(url: str, stored: manifest.Stored, *, on_read: Callable[[int], None], sealer: Sealer | None) -> Verified:
    verdict, num_bytes, path, reason = "good", 0, "", ""
    if not stored.is_committed:
        verdict, reason = "uncommitted", "it was never committed; it is being written, or a crash left it"
    else:
        try:
            num_bytes = manifest.verify(url, stored.directory, on_read=on_read, sealer=sealer).num_bytes
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
