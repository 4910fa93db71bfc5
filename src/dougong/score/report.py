"""The report: one self-contained HTML page of a scorecard, which needs no network and no script."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from dougong.score.accounts import BADPUT_PHASES, GOOD_PHASES, PHASES, Phase
from dougong.score.drawing import loss_svg, pattern_definitions, share_bar, swatch, timeline_svg
from dougong.score.interruption import Interruption
from dougong.score.scorecard import Scorecard, Timeline
from dougong.score.style import STYLE
from dougong.score.words import (
    DEFINITIONS,
    NOT_MEASURED,
    PHASE_MEANINGS,
    PHASE_WORDS,
    Row,
    details,
    duration,
    headline,
    rate,
    ratio,
)
from dougong.units import format_duration, format_ratio, format_si

_NS = 1e9


def render_html(card: Scorecard, timeline: Timeline) -> str:
    """The page. All text is escaped; it loads nothing from anywhere."""
    title = f"Scorecard of {card.job or 'a job'}"
    sections = (
        _headline(card),
        _section("Goodput timeline", timeline_svg(timeline.bands, timeline.interruptions) + _legend(card)),
        _section("Where the wall time went", _time_table(card)),
        _section("Interruptions", _interruption_table(timeline)),
        _loss_section(timeline),
        _section("All figures", _rows_table(details(card))),
        _section("Model FLOP utilisation, term by term", _utilisation(card)),
        _section("Definitions", _definitions()),
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{pattern_definitions()}\n"
        f"<header><h1>{escape(title)}</h1><p>{_subtitle(card)}</p></header>\n<main>\n"
        + "\n".join(section for section in sections if section)
        + "\n</main>\n</body>\n</html>\n"
    )


def _subtitle(card: Scorecard) -> str:
    parts = [f"the job is <strong>{escape(card.outcome)}</strong>", f"{format_duration(card.wall_s)} wall time"]
    if card.num_accelerators is not None and card.num_nodes is not None:
        parts.append(f"{card.num_accelerators:,} accelerators on {card.num_nodes:,} nodes")
    if card.steps is not None:
        parts.append(f"{card.steps:,} steps")
    if card.unknown_kinds:
        unknown = ", ".join(f"{num} {kind}" for kind, num in card.unknown_kinds.items())
        parts.append(f"events of unknown kinds: {escape(unknown)}")
    return " · ".join(parts)


def _headline(card: Scorecard) -> str:
    tiles = "".join(
        f'<div class="tile"><dt>{escape(row.name)}</dt><dd class="{_value_class(row)}">{escape(row.value)}</dd>'
        f'<dd class="note">{escape(row.note)}</dd></div>'
        for row in headline(card)
    )
    return f'<section aria-label="Headline figures"><dl class="tiles">{tiles}</dl></section>'


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _value_class(row: Row) -> str:
    return "missing" if row.value == NOT_MEASURED else "value"


def _legend(card: Scorecard) -> str:
    present: list[Phase] = [phase for phase in PHASES if getattr(card.time_spent, f"{phase}_ns")]
    items = "".join(f"<li>{swatch(phase)} {escape(PHASE_WORDS[phase])}</li>" for phase in present)
    marker = (
        '<li><svg width="14" height="12" aria-hidden="true"><path d="M2 1h10l-5 10z" class="fault"/></svg> fault</li>'
    )
    return f'<ul class="legend">{items}{marker if card.interruptions else ""}</ul>'


def _time_table(card: Scorecard) -> str:
    spent_s: dict[Phase, float] = {phase: getattr(card.time_spent, f"{phase}_ns") / _NS for phase in PHASES}
    shown: tuple[Phase, ...] = (*GOOD_PHASES, *sorted(BADPUT_PHASES, key=lambda phase: -spent_s[phase]))
    rows = "".join(_time_row(phase, spent_s[phase], wall_s=card.wall_s) for phase in shown)
    return (
        '<table class="spent"><thead><tr><th scope="col">phase</th><th scope="col">time</th><th scope="col">share</th>'
        f'<th scope="col" class="wide"><span class="unseen">bar</span></th><th scope="col">meaning</th></tr></thead>'
        f"<tbody>{rows}</tbody><tfoot><tr><th scope='row'>wall time</th><td>{format_duration(card.wall_s)}</td>"
        f"<td>100 %</td><td></td><td>idle beside it: {format_duration(card.idle_s)}</td></tr></tfoot></table>"
    )


def _time_row(phase: Phase, spent_s: float, *, wall_s: float) -> str:
    share = spent_s / wall_s if wall_s > 0 else 0.0
    return (
        f"<tr><th scope='row'>{swatch(phase)} {escape(PHASE_WORDS[phase])}</th><td>{format_duration(spent_s)}</td>"
        f"<td>{format_ratio(share)}</td><td>{share_bar(share, phase=phase)}</td>"
        f"<td>{escape(PHASE_MEANINGS[phase])}</td></tr>"
    )


def _interruption_table(timeline: Timeline) -> str:
    if not timeline.interruptions:
        return "<p>None.</p>"
    begin_ns = timeline.bands[0].begin_ns if timeline.bands else 0
    rows = "".join(
        _interruption_row(item, place=place, begin_ns=begin_ns)
        for place, item in enumerate(timeline.interruptions, start=1)
    )
    names = (
        "no.",
        "at",
        "cause",
        "component",
        "what",
        "detect",
        "decide",
        "restart",
        "reload",
        "redo",
        "total",
        "answer",
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    return (
        '<div class="scroll" role="region" aria-label="Interruptions" tabindex="0">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _interruption_row(item: Interruption, *, place: int, begin_ns: int) -> str:
    onset = format_duration(max(0, item.onset_ns - begin_ns) / _NS)
    phases = "".join(
        f"<td>{format_duration(part_ns / _NS)}</td>"
        for part_ns in (
            item.detect_ns,
            item.decide_ns,
            item.restart_ns,
            item.reload_ns,
            item.redo_ns,
            item.repair_ns,
        )
    )
    return (
        f'<tr id="interruption-{place}"><th scope="row">{place}</th>'
        f"<td>{onset if item.is_onset_known else f'after {onset}'}</td><td>{escape(item.cause_class)}</td>"
        f"<td>{escape(item.component)}</td><td>{escape(_what(item))}</td>{phases}<td>{escape(_answer(item))}</td></tr>"
    )


def _what(item: Interruption) -> str:
    injected = f" (injected: {item.fault})" if item.fault is not None and item.fault != item.detail else ""
    redone = f"; {item.num_redone_steps:,} steps redone" if item.num_redone_steps else ""
    return f"rank {item.rank}: {item.detail}{injected}{redone}"


def _answer(item: Interruption) -> str:
    if item.resumed_ns is None:
        return "cut short by the next" if item.is_overtaken else "not resumed"
    source = f", from {item.restore_source}" if item.restore_source not in (None, "none") else ""
    return f"{item.rung or 'unknown'}{source}"


def _loss_section(timeline: Timeline) -> str:
    drawing = loss_svg(timeline.losses)
    return _section("Loss", drawing) if drawing else ""


def _rows_table(rows: Sequence[Row]) -> str:
    body = "".join(
        f'<tr><th scope="row">{escape(row.name)}</th><td class="{_value_class(row)}">{escape(row.value)}</td>'
        f"<td>{escape(row.note)}</td></tr>"
        for row in rows
    )
    return f"<table><tbody>{body}</tbody></table>"


def _utilisation(card: Scorecard) -> str:
    terms = card.utilisation_terms
    rows = (
        Row("tokens per second, steady steps", rate(terms.steady_tokens_per_s), "warm-up and stalls left out"),
        Row("x model FLOP per token", _flop(terms.model_flop_per_token, "FLOP/token"), terms.flop_source),
        Row("/ peak of all accelerators", _flop(terms.peak_flop_per_s, "FLOP/s"), terms.peak_source),
        Row("= MFU", ratio(card.mfu)),
        Row("hardware FLOP per token", _flop(terms.hardware_flop_per_token, "FLOP/token"), terms.flop_source),
        Row("HFU", ratio(card.hfu)),
        Row("longest step", duration(card.step_times.max_s if card.step_times else None)),
    )
    return _rows_table(rows)


def _flop(value: float | None, unit: str) -> str:
    return NOT_MEASURED if value is None else format_si(value, unit)


def _definitions() -> str:
    items = "".join(
        f"<dt>{escape(item.name)}</dt><dd>{escape(item.text)} "
        f'<span class="note">Source: {escape(item.source)}</span></dd>'
        for item in DEFINITIONS
    )
    return f"<p>“{NOT_MEASURED}” is not 0: nothing in the run told it.</p><dl class='definitions'>{items}</dl>"
