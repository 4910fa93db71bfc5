"""What the commands about checkpoints share: where the checkpoints are, which are meant, how far a long reading is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dougong.clock import Clock
from dougong.errors import UserError
from dougong.run import manifest
from dougong.run.layout import RunDirectory
from dougong.run.settings import load_settings, run_directory
from dougong.units import format_bytes, format_duration, format_si

if TYPE_CHECKING:
    from dougong.run.sealed import Sealer

_QUIET_S = 1.0
_TTY_EVERY_S = 0.2
_LOG_EVERY_S = 10.0


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


def stored_at(url: str) -> tuple[manifest.Stored, ...]:
    try:
        return manifest.list_stored(url)
    except OSError as error:
        raise UserError(
            f"checkpoints cannot be listed: {error.strerror or error}",
            where=url,
            mend="check that the storage is there and may be read",
        ) from error


def of_step(stored: tuple[manifest.Stored, ...], step: int | None, *, url: str) -> tuple[manifest.Stored, ...]:
    chosen = tuple(item for item in stored if step is None or item.step == step)
    if step is not None and not chosen:
        steps = ", ".join(str(number) for number in sorted({item.step for item in stored}))
        raise UserError(
            f"there is no checkpoint of step {step} in {url}",
            where="--step",
            mend=f"one of {steps}" if steps else "none has been written there yet",
        )
    return chosen


def chosen_one(place: str, *, step: int | None) -> tuple[str, str]:
    """The URL and the directory of one committed checkpoint: given by its own path, or the newest good of a run."""
    parent, _, name = place.rstrip("/").rpartition("/")
    if manifest.is_directory_name(name) and step is None:
        return parent or ".", name
    url = checkpoint_url(place)
    stored = of_step(stored_at(url), step, url=url)
    good = [item for item in stored if item.is_committed and not item.is_rejected]
    if not good:
        raise UserError(
            f"there is no good checkpoint in {url}", where=place, mend="`dougong checkpoint ls` shows what there is"
        )
    return url, good[0].directory


def bytes_there(url: str, directory: str) -> int | None:
    """What an uncommitted checkpoint holds so far; it may be vanishing while we look."""
    place, root = manifest.storage_at(url)
    try:
        return sum(place.size_bytes(f"{root}/{directory}/{name}") for name in place.names(f"{root}/{directory}"))
    except OSError:
        return None


def sealer_at(path: Path | None) -> Sealer | None:
    if path is None:
        return None
    from dougong.run.sealed import load_sealer

    return load_sealer(path)


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
        self._lock = threading.Lock()

    def advance(self, num_bytes: int) -> None:
        """So many more bytes are read, in any thread."""
        with self._lock:
            self._advance(num_bytes)

    def _advance(self, num_bytes: int) -> None:
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
