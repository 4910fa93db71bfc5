"""What a person sees while a run goes on: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from dougong.event import kinds
from dougong.event.describe import describe
from dougong.event.kinds import Recorded
from dougong.run.settings import RunSettings
from dougong.score.fold import JobFold
from dougong.units import format_ratio, format_si

if TYPE_CHECKING:
    from rich.console import RenderableType

_NUM_EVENTS = 8
_PLAIN_STEPS_S = 5.0
_SILENT_KINDS = (kinds.StepFinished, kinds.CheckpointSaved)


class Figures:
    """The few figures of the live view, folded from the events as they come."""

    def __init__(self, settings: RunSettings) -> None:
        self._fold = JobFold()
        self.settings = settings
        self.step = 0
        self.loss: float | None = None
        self.tokens_per_s: float | None = None
        self.flop_per_token: float | None = None
        self.peak_flop_per_s: float | None = None
        self.checkpoint = "none yet"
        self.generation = 0
        self.state = "starting"
        self.nodes = dict.fromkeys((*settings.nodes, *settings.spares), "waiting")
        self.recent: deque[Recorded] = deque(maxlen=_NUM_EVENTS)

    @property
    def ettr_ratio(self) -> float | None:
        return self._fold.ettr

    @property
    def mfu_ratio(self) -> float | None:
        if self.tokens_per_s is None or not self.flop_per_token or not self.peak_flop_per_s:
            return None
        return self.tokens_per_s * self.flop_per_token / self.peak_flop_per_s

    def take(self, record: Recorded) -> None:
        """Fold one event in."""
        self._fold.advance(record)
        event = record.event
        match event:
            case kinds.StepFinished():
                self._take_steps(event)
            case kinds.ModelDescribed():
                self.flop_per_token = event.model_flop_per_token
            case kinds.PeakDescribed():
                self.peak_flop_per_s = event.peak_flop_per_s
            case kinds.CheckpointSaved():
                self.checkpoint = f"step {event.step} ({event.tier})"
            case kinds.GenerationStarted():
                self.generation = event.generation
                self.state = "starting" if event.generation == 1 else "recovering"
                self._place(event)
            case kinds.JobResumed():
                self.state = "running"
            case kinds.WorkerLost():
                self.state = "interrupted"
            case kinds.NodeJoined():
                self.nodes[event.component] = "spare" if event.role == "spare" else "ready"
            case kinds.NodeLost():
                self.nodes[event.component] = "LOST"
            case kinds.AgentLost():
                self.nodes[event.component] = "no agent"
            case kinds.AgentReturned():
                self.nodes[event.component] = "active" if event.num_workers else "ready"
            case kinds.JobFinished() | kinds.JobFailed() | kinds.JobStopped():
                self.state = type(event).__name__.removeprefix("Job").lower()
            case _:
                pass
        if not isinstance(event, _SILENT_KINDS):
            self.recent.append(record)

    def _take_steps(self, event: kinds.StepFinished) -> None:
        self.step = event.last_step
        self.loss = event.loss
        span_s = (event.end_ns - event.begin_ns) / 1e9
        if event.tokens is not None and span_s > 0:
            self.tokens_per_s = event.tokens / span_s
        if self.state in ("starting", "running"):
            self.state = "running"

    def _place(self, event: kinds.GenerationStarted) -> None:
        placed = {item.component for item in event.placement}
        for component, state in self.nodes.items():
            if component in placed:
                self.nodes[component] = "active"
            elif state == "active":
                self.nodes[component] = "spare"


class LiveView:
    """A panel that is drawn again a few times a second, on stderr."""

    def __init__(self, figures: Figures) -> None:
        from rich.console import Console
        from rich.live import Live

        self._figures = figures
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, refresh_per_second=4, get_renderable=self._render)

    def __enter__(self) -> LiveView:
        self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.__exit__(None, None, None)

    def show(self, records: list[Recorded]) -> None:
        for record in records:
            self._figures.take(record)

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        f = self._figures
        head = Table.grid(padding=(0, 3))
        head.add_row(
            *(Text(name, style="dim") for name in ("step", "loss", "tokens/s", "MFU", "ETTR", "checkpoint", "state"))
        )
        head.add_row(
            str(f.step),
            "-" if f.loss is None else f"{f.loss:.4f}",
            "-" if f.tokens_per_s is None else format_si(f.tokens_per_s, ""),
            "-" if f.mfu_ratio is None else format_ratio(f.mfu_ratio),
            "-" if f.ettr_ratio is None else format_ratio(f.ettr_ratio),
            f.checkpoint,
            Text(f"{f.state} (generation {f.generation})", style="bold"),
        )
        nodes = Text("   ".join(f"{_short(name)}: {state}" for name, state in f.nodes.items()))
        events = Text("\n".join(_line(record) for record in f.recent), no_wrap=True, overflow="ellipsis")
        return Group(Text(f"dougong run {f.settings.run_id}", style="bold"), head, nodes, events)


class PlainView:
    """One line per event on stderr, and rank 0's own output on stdout."""

    def __init__(self, figures: Figures, *, rank_0_log: Path) -> None:
        self._figures = figures
        self._log = _LogTail(rank_0_log)
        self._last_steps_s = 0.0

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *_: object) -> None:
        self._log.copy_to_stdout()

    def show(self, records: list[Recorded]) -> None:
        self._log.copy_to_stdout()
        for record in records:
            self._figures.take(record)
            if not isinstance(record.event, _SILENT_KINDS):
                self.say(_line(record))
            elif (
                isinstance(record.event, kinds.StepFinished) and time.monotonic() - self._last_steps_s > _PLAIN_STEPS_S
            ):
                self._last_steps_s = time.monotonic()
                self.say(self._steps_line(record))

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _steps_line(self, record: Recorded) -> str:
        f = self._figures
        parts = [f"step {f.step}"]
        if f.loss is not None:
            parts.append(f"loss {f.loss:.4f}")
        if f.tokens_per_s is not None:
            parts.append(f"{f.tokens_per_s:.0f} tokens/s")
        if f.mfu_ratio is not None:
            parts.append(f"MFU {format_ratio(f.mfu_ratio)}")
        if f.ettr_ratio is not None:
            parts.append(f"ETTR {format_ratio(f.ettr_ratio)}")
        return f"{_clock_text(record.time_ns)}  {', '.join(parts)}"


class _LogTail:
    """What a log has got since the last look, without the lines that mark a new generation."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def copy_to_stdout(self) -> None:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return
        complete = content[: content.rfind(b"\n") + 1]
        self._offset += len(complete)
        lines = [line for line in complete.splitlines(keepends=True) if not line.startswith(b"--- generation ")]
        if lines:
            sys.stdout.buffer.write(b"".join(lines))
            sys.stdout.buffer.flush()


def _line(record: Recorded) -> str:
    event = record.event
    text = f"unknown kind {event.kind}" if isinstance(event, kinds.Unknown) else describe(event)
    kind = event.kind if isinstance(event, kinds.Unknown) else type(event).__name__
    return f"{_clock_text(record.time_ns)}  {kind}: {text}".replace("\n", " ")


def _clock_text(time_ns: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time_ns / 1e9)) + f".{time_ns // 100_000_000 % 10}"


def _short(component: str) -> str:
    return component.rsplit("/", 1)[-1]
