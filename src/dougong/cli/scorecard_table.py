"""A scorecard as tables in the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dougong.score.accounts import BADPUT_PHASES, GOOD_PHASES, PHASES, Phase
from dougong.score.scorecard import Scorecard, Timeline
from dougong.score.words import NOT_MEASURED, PHASE_MEANINGS, PHASE_WORDS, Row, details, headline
from dougong.units import format_duration, format_ratio

_NS = 1e9
_BAR_WIDTH = 24
_MAX_INTERRUPTIONS = 20
_WIDE = 110


def print_tables(card: Scorecard, timeline: Timeline, *, console: Console | None = None) -> None:
    """Print headline, badput and interruptions to stdout. Colour only decorates; NO_COLOR is respected by rich."""
    console = console or Console(highlight=False)
    is_wide = console.width >= _WIDE
    title = f"Scorecard of {card.job or 'a job'} ({card.outcome})"
    console.print(_rows_table(title, headline(card), has_notes=True))
    console.print(_rows_table("\nAll figures", details(card), has_notes=is_wide))
    console.print(_time_table(card, is_wide=is_wide))
    if timeline.interruptions:
        console.print(_interruption_table(timeline, is_wide=is_wide))
        left_out = len(timeline.interruptions) - _MAX_INTERRUPTIONS
        if left_out > 0:
            console.print(f"… and {left_out} earlier ones: see --html or --json")
    if card.unknown_kinds:
        console.print(f"events of unknown kinds, not counted: {card.unknown_kinds}")


def _rows_table(title: str, rows: Iterable[Row], *, has_notes: bool) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column("index", no_wrap=True)
    table.add_column("value", no_wrap=True)
    if has_notes:
        table.add_column("note", style="dim")
    for row in rows:
        style = "italic dim" if row.value == NOT_MEASURED else "bold"
        cells = (Text(row.name), Text(row.value, style=style), Text(row.note))
        table.add_row(*(cells if has_notes else cells[:2]))
    return table


def _time_table(card: Scorecard, *, is_wide: bool) -> Table:
    table = Table(title="\nWhere the wall time went", title_justify="left", box=None, pad_edge=False)
    for name in ("phase", "time", "share", "", *(("meaning",) if is_wide else ())):
        table.add_column(name, justify="right" if name in ("time", "share") else "left", no_wrap=name != "meaning")
    spent_s: dict[Phase, float] = {phase: getattr(card.time_spent, f"{phase}_ns") / _NS for phase in PHASES}
    lost: list[Phase] = [phase for phase in BADPUT_PHASES if spent_s[phase]]
    shown: tuple[Phase, ...] = (*GOOD_PHASES, *sorted(lost, key=lambda phase: -spent_s[phase]))
    for phase in shown:
        share = spent_s[phase] / card.wall_s if card.wall_s > 0 else 0.0
        bar = "█" * round(share * _BAR_WIDTH) or ("▏" if share > 0 else "")
        cells = (PHASE_WORDS[phase], format_duration(spent_s[phase]), format_ratio(share), bar, PHASE_MEANINGS[phase])
        table.add_row(*(cells if is_wide else cells[:4]))
    return table


def _interruption_table(timeline: Timeline, *, is_wide: bool) -> Table:
    """The newest interruptions; a narrow terminal gets the fewer columns."""
    phases = ("detect", "decide", "restart", "reload", "redo", "repair") if is_wide else ("detect", "redo", "repair")
    table = Table(title="\nInterruptions", title_justify="left", box=None, pad_edge=False)
    for name in ("at", "cause", "component"):
        table.add_column(name, justify="right" if name == "at" else "left", no_wrap=name != "component")
    for name in phases:
        table.add_column("total" if name == "repair" else name, justify="right", no_wrap=True)
    begin_ns = timeline.bands[0].begin_ns if timeline.bands else 0
    for item in timeline.interruptions[-_MAX_INTERRUPTIONS:]:
        table.add_row(
            format_duration(max(0, item.onset_ns - begin_ns) / _NS),
            Text(item.cause_class),
            Text(item.component, overflow="fold"),
            *(format_duration(getattr(item, f"{phase}_ns") / _NS) for phase in phases),
        )
    return table
