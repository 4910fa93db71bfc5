"""`dougong checkpoint export`, `rm` and `unlock`: what takes a checkpoint elsewhere, or away."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from dougong.cli.checkpoint_place import Meter, bytes_there, checkpoint_url, chosen_one, of_step, sealer_at, stored_at
from dougong.clock import SystemClock
from dougong.errors import CheckpointLocked, MissingExtra, UserError
from dougong.run import manifest, retention_lock
from dougong.units import format_bytes, parse_quantity


@click.command("export")
@click.argument("place", metavar="RUN_OR_CHECKPOINT")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(["safetensors"]), default="safetensors", show_default=True)
@click.option("--step", type=click.IntRange(min=1), help="The checkpoint of this step [default: the newest good one].")
@click.option("--part", help="Only this part of the state, such as model, without its name before each tensor's.")
@click.option("--max-file-size", default="5GB", show_default=True, help="Begin another file from this size on.")
@click.option("--checkpoint-key", type=click.Path(path_type=Path), help="The key of an encrypted checkpoint.")
def export(
    place: str,
    out: Path,
    form: str,
    step: int | None,
    part: str | None,
    max_file_size: str,
    checkpoint_key: Path | None,
) -> None:
    """Write the whole tensors of a checkpoint to the directory OUT, from however many ranks they came.

    The checkpoint is verified first. What is no tensor, and what belongs to one rank alone, is left out.
    """
    assert form == "safetensors"
    max_file_bytes = _max_file_bytes(max_file_size)
    sealer = sealer_at(checkpoint_key)
    try:
        from dougong.run.dcp_export import WholeTensors
        from dougong.run.dcp_read import DurableState
    except ImportError as error:
        raise MissingExtra("torch", extra="train", needed_for="dougong checkpoint export") from error
    from dougong.run.safetensors import header_bytes, write_export
    from dougong.run.sealed import UnsealedPlace

    url, directory = chosen_one(place, step=step)
    meter = Meter(bytes_there(url, directory) or 0, clock=SystemClock(), is_tty=sys.stderr.isatty())
    found = manifest.verify(url, directory, on_read=meter.advance, sealer=sealer)
    meter.clear()
    plain, root = manifest.storage_at(url)
    storage = UnsealedPlace(plain, sealer)
    with DurableState(storage, f"{root}/{directory}", world_size=found.world_size) as saved:
        tensors = WholeTensors(saved, part=part)
        entries = tensors.entries()
        if not entries:
            parts = ", ".join(tensors.parts)
            raise UserError(f"{directory} holds no tensor of {part!r}", where="--part", mend=f"one of {parts}")
        header_bytes(entries, metadata={})  # a dtype that the format does not have is told before the first byte
        told = {"format": "pt", "run_id": found.run_id, "step": str(found.step)}
        try:
            _make_empty(out)
            paths = write_export(
                out, entries, content_of=tensors.content_of, metadata=told, max_file_bytes=max_file_bytes
            )
        except OSError as error:
            what = f"it cannot be written: {error.strerror}"
            raise UserError(what, where=str(out), mend="give another place") from error
    for path in paths:
        click.echo(f"{path}  {format_bytes(path.stat().st_size)}")
    click.echo(f"{len(entries)} tensors of {directory}", err=True)


@click.command("rm")
@click.argument("place", metavar="RUN_DIR_OR_URL")
@click.option("--step", type=click.IntRange(min=1), required=True, help="The checkpoints of this step.")
@click.option("--key", type=click.Path(path_type=Path), help="The owner's key: check the record of a lock with it.")
def remove(place: str, step: int, key: Path | None) -> None:
    """Delete checkpoints of one step. A retention lock that holds is respected."""
    url = checkpoint_url(place)
    secret = None if key is None else _key(key)
    for stored in of_step(stored_at(url), step, url=url):
        try:
            manifest.delete(url, stored.directory, moment=retention_lock.now(SystemClock()), key=secret)
        except CheckpointLocked as error:
            raise UserError(
                f"{stored.directory} is not deleted: {error.reason}",
                where=url,
                mend="wait, or open the lock: dougong checkpoint unlock --key FILE",
            ) from error
        except OSError as error:
            raise UserError(
                f"{stored.directory} cannot be deleted: {error.strerror}", where=url, mend="mend the permissions"
            ) from error
        click.echo(stored.directory)


@click.command("unlock")
@click.argument("place", metavar="RUN_DIR_OR_URL")
@click.option("--step", type=click.IntRange(min=1), required=True, help="The checkpoints of this step.")
@click.option("--key", type=click.Path(path_type=Path), required=True, help="The owner's key (--lock-key of the run).")
def unlock(place: str, step: int, key: Path) -> None:
    """Open the retention lock of checkpoints with the owner's key, so that they may be deleted before their time."""
    url = checkpoint_url(place)
    secret = _key(key)
    for stored in of_step(stored_at(url), step, url=url):
        manifest.unlock(url, stored.directory, key=secret)
        click.echo(stored.directory)


def _key(path: Path) -> bytes:
    from dougong.run.sealed import load_key

    return load_key(path, option="--key")


def _max_file_bytes(text: str) -> int:
    try:
        return max(1, round(parse_quantity(text, unit="B")))
    except ValueError as error:
        raise UserError(str(error), where="--max-file-size", mend="for example 5GB") from error


def _make_empty(directory: Path) -> None:
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(
            f"{str(directory)!r} exists and is not an empty directory", where="OUT", mend="give another directory"
        )
    directory.mkdir(parents=True, exist_ok=True)
