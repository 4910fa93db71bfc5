"""The drawings of the report, as inline SVG: nothing is told by colour alone, every mark has a title to hover over."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from dougong.score.accounts import PHASES, Band, Phase
from dougong.score.curve import thinned
from dougong.score.interruption import Interruption
from dougong.score.words import PHASE_WORDS
from dougong.units import DAY_S, HOUR_S, MINUTE_S, format_duration, format_ratio

_NS = 1e9
WIDTH = 1000
_LANE_TOP, _LANE_HEIGHT = 30, 70
_MAX_BANDS = 1500
_NUM_COLUMNS = 400
_MAX_POINTS = 600
_MAX_TRIANGLES = 60
_LABEL_CHAR_WIDTH = 6.4

# A pattern is a path in a tile of 8 x 8; the tile's ground has the colour of the class `p-<phase>` in the style sheet.
_PATTERNS: dict[Phase, str] = {
    "train": "",
    "between": "M1 1h1.5v1.5h-1.5zM5 5h1.5v1.5h-1.5z",
    "data_wait": "M0 2h8",
    "checkpoint_stall": "M2 0v8M6 0v8",
    "init": "M0 8L8 0",
    "unfinished": "M0 0L8 8M8 0L0 8",
    "detect": "M0 4h8M4 0v8",
    "decide": "M4 0v8",
    "restart": "M0 0L8 8",
    "reload": "M0 4L4 0M4 8L8 4M0 0l1 -1M8 8l1 -1",
    "redo": "M0 4q2 -4 4 0t4 0",
    "shutdown": "M0 6h8M0 2h3",
    "idle": "M3 3h2v2h-2z",
}


def pattern_definitions() -> str:
    """The patterns, to stand once in the page."""
    tiles = "".join(
        f'<pattern id="p-{phase}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f'<rect width="8" height="8" class="p-{phase}"/><path d="{path}" class="ink"/></pattern>'
        for phase, path in _PATTERNS.items()
    )
    return f'<svg width="0" height="0" aria-hidden="true" class="defs"><defs>{tiles}</defs></svg>'


def swatch(phase: Phase) -> str:
    """A small sample of a phase's colour and pattern."""
    return (
        '<svg width="22" height="14" aria-hidden="true" class="swatch">'
        f'<rect width="22" height="14" fill="url(#p-{phase})"/></svg>'
    )


def timeline_svg(bands: Sequence[Band], interruptions: Sequence[Interruption]) -> str:
    """The bands of a job from left to right, with a marker at the onset of each interruption."""
    if not bands:
        return "<p>No time has passed yet.</p>"
    begin_ns, end_ns = bands[0].begin_ns, bands[-1].end_ns
    scale = WIDTH / max(1, end_ns - begin_ns)
    lane = _columns(bands, begin_ns, end_ns) if len(bands) > _MAX_BANDS else _bands(bands, begin_ns, scale)
    markers = "".join(
        _marker(item, place=place, x=(item.onset_ns - begin_ns) * scale, is_roomy=len(interruptions) <= _MAX_TRIANGLES)
        for place, item in enumerate(interruptions, start=1)
    )
    axis = _time_axis((end_ns - begin_ns) / _NS)
    height = _LANE_TOP + _LANE_HEIGHT + 26
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="group" aria-labelledby="timeline-title" class="drawing">'
        '<title id="timeline-title">Goodput timeline: what the wall time went into, and where faults struck</title>'
        f"{lane}{markers}{axis}</svg>"
    )


def loss_svg(losses: Sequence[tuple[int, float]]) -> str:
    """The loss by step; nothing of fewer than two points."""
    points = thinned(losses, max_points=_MAX_POINTS)
    if len(points) < 2:
        return ""
    first_step, last_step = points[0][0], points[-1][0]
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    height, left, bottom = 240, 56, 28
    x_scale = (WIDTH - left - 8) / max(1, last_step - first_step)
    y_scale = (height - bottom - 8) / ((high - low) or 1.0)
    path = " ".join(
        f"{left + (step - first_step) * x_scale:.1f},{8 + (high - loss) * y_scale:.1f}" for step, loss in points
    )
    y_labels = "".join(
        f'<text x="{left - 6}" y="{12 + (high - value) * y_scale:.1f}" text-anchor="end">{value:.3g}</text>'
        f'<path d="M{left} {8 + (high - value) * y_scale:.1f}H{WIDTH - 8}" class="grid"/>'
        for value in (low, (low + high) / 2, high)
    )
    x_labels = (
        f'<text x="{left}" y="{height - 8}">step {first_step:,}</text>'
        f'<text x="{WIDTH - 8}" y="{height - 8}" text-anchor="end">step {last_step:,}</text>'
    )
    title = f"Loss from {points[0][1]:.4g} at step {first_step:,} to {points[-1][1]:.4g} at step {last_step:,}"
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}" class="drawing">'
        f'<title>{escape(title)}</title>{y_labels}{x_labels}<polyline points="{path}" class="curve"/></svg>'
    )


def share_bar(share: float, *, phase: Phase) -> str:
    """A horizontal bar for a share of 0..1."""
    width = max(0.0, min(1.0, share)) * 100
    return (
        '<svg width="100%" height="14" aria-hidden="true" class="bar"><rect width="100%" height="14" class="track"/>'
        f'<rect width="{width:.2f}%" height="14" fill="url(#p-{phase})"/></svg>'
    )


def _bands(bands: Sequence[Band], begin_ns: int, scale: float) -> str:
    drawn: list[str] = []
    for band in bands:
        x, width = (band.begin_ns - begin_ns) * scale, (band.end_ns - band.begin_ns) * scale
        word = PHASE_WORDS[band.phase]
        title = f"{word}: {format_duration((band.end_ns - band.begin_ns) / _NS)}, from {_since(band, begin_ns)}"
        if band.interruption is not None:
            title += f", interruption {band.interruption + 1}"
        drawn.append(
            f'<rect x="{x:.2f}" y="{_LANE_TOP}" width="{max(width, 0.4):.2f}" height="{_LANE_HEIGHT}" '
            f'fill="url(#p-{band.phase})"><title>{escape(title)}</title></rect>'
        )
        if width > len(word) * _LABEL_CHAR_WIDTH + 10:
            drawn.append(_band_label(word, x=x + width / 2))
    return "".join(drawn)


def _band_label(word: str, *, x: float) -> str:
    half = len(word) * _LABEL_CHAR_WIDTH / 2 + 3
    y = _LANE_TOP + _LANE_HEIGHT / 2
    return (
        f'<rect x="{x - half:.1f}" y="{y - 9}" width="{2 * half:.1f}" height="18" rx="3" class="plate"/>'
        f'<text x="{x:.1f}" y="{y + 4}" text-anchor="middle" class="label">{escape(word)}</text>'
    )


def _since(band: Band, begin_ns: int) -> str:
    return format_duration((band.begin_ns - begin_ns) / _NS)


def _columns(bands: Sequence[Band], begin_ns: int, end_ns: int) -> str:
    """Too many bands for one each: columns of equal time, with the phases' shares stacked, training below."""
    span_ns = max(1, end_ns - begin_ns)
    shares = _shares(bands, begin_ns=begin_ns, span_ns=span_ns)
    width = WIDTH / _NUM_COLUMNS
    drawn: list[str] = []
    for column, spent_ns in enumerate(shares):
        total_ns = sum(spent_ns.values())
        if not total_ns:
            continue
        parts = ", ".join(f"{PHASE_WORDS[phase]} {format_ratio(ns / total_ns)}" for phase, ns in spent_ns.items())
        begin_s = column * span_ns / _NUM_COLUMNS / _NS
        bottom = float(_LANE_TOP + _LANE_HEIGHT)
        title = escape(f"from {format_duration(begin_s)}: {parts}")
        drawn.append(f'<g shape-rendering="crispEdges"><title>{title}</title>')
        for phase in PHASES:
            height = spent_ns.get(phase, 0) / total_ns * _LANE_HEIGHT
            if height > 0:
                bottom -= height
                drawn.append(
                    f'<rect x="{column * width:.2f}" y="{bottom:.2f}" width="{width:.2f}" height="{height:.2f}" '
                    f'fill="url(#p-{phase})"/>'
                )
        drawn.append("</g>")
    return "".join(drawn)


def _shares(bands: Iterable[Band], *, begin_ns: int, span_ns: int) -> list[dict[Phase, int]]:
    shares: list[dict[Phase, int]] = [{} for _ in range(_NUM_COLUMNS)]
    for band in bands:
        first = (band.begin_ns - begin_ns) * _NUM_COLUMNS // span_ns
        last = min(_NUM_COLUMNS - 1, (band.end_ns - begin_ns) * _NUM_COLUMNS // span_ns)
        for column in range(first, last + 1):
            left_ns = max(band.begin_ns, begin_ns + column * span_ns // _NUM_COLUMNS)
            right_ns = min(band.end_ns, begin_ns + (column + 1) * span_ns // _NUM_COLUMNS)
            if right_ns > left_ns:
                shares[column][band.phase] = shares[column].get(band.phase, 0) + right_ns - left_ns
    return shares


def _marker(item: Interruption, *, place: int, x: float, is_roomy: bool) -> str:
    words = f"interruption {place}: {item.cause_class}, {item.component}, {item.detail}"
    shape = "l-5 -10h10z" if is_roomy else "h-0.6v-12h1.2v12z"
    return (
        f'<a href="#interruption-{place}"><path d="M{x:.1f} {_LANE_TOP - 3}{shape}" class="fault"/>'
        f"<title>{escape(words)}</title></a>"
    )


def _time_axis(span_s: float) -> str:
    unit_s, unit = _tick_unit(span_s)
    tick_s = _tick(span_s / unit_s) * unit_s
    y = _LANE_TOP + _LANE_HEIGHT
    drawn: list[str] = []
    for index in range(math.floor(span_s / tick_s) + 1):
        x = index * tick_s / span_s * WIDTH
        anchor = "start" if index == 0 else ("end" if x > WIDTH - 30 else "middle")
        drawn.append(
            f'<path d="M{x:.1f} {y}v6" class="axis"/>'
            f'<text x="{x:.1f}" y="{y + 19}" text-anchor="{anchor}">{index * tick_s / unit_s:g} {unit}</text>'
        )
    return "".join(drawn)


def _tick_unit(span_s: float) -> tuple[float, str]:
    for unit_s, unit in ((DAY_S, "d"), (HOUR_S, "h"), (MINUTE_S, "min")):
        if span_s >= 2 * unit_s:
            return unit_s, unit
    return 1.0, "s"


def _tick(span: float) -> float:
    """A round step that divides `span` into about eight."""
    rough = span / 8
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
