from __future__ import annotations

import math
import re
from html.parser import HTMLParser

import pytest

from dougong.event import kinds
from dougong.score.accounts import PHASES, Band
from dougong.score.drawing import loss_svg, timeline_svg
from dougong.score.report import render_html
from dougong.score.scorecard import score_with_timeline
from dougong.score.style import STYLE
from tests.score.story import NS, Story, one_interruption

_VOID = {"meta", "br", "hr", "img", "input", "link"}


class _Checker(HTMLParser):
    """Collects tags and attributes, and whether every tag is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag


def _page(story: Story) -> str:
    return render_html(*score_with_timeline(story.records))


def _checked(page: str) -> _Checker:
    checker = _Checker()
    checker.feed(page)
    assert checker.open == []
    return checker


def test_the_page_loads_nothing_and_runs_nothing() -> None:
    page = _page(one_interruption())
    checker = _checked(page)
    assert "<script" not in page
    assert "url(http" not in page
    assert "@import" not in page
    loading = [item for item in checker.attributes if item[1] in ("src", "srcset", "action") or item[0] == "link"]
    assert loading == []
    assert all((value or "").startswith("#") for _, name, value in checker.attributes if name == "href")


def test_names_and_messages_are_escaped() -> None:
    story = Story()
    story.nodes = ("<img src=x onerror=alert(1)>", '"><script>alert(2)</script>')
    story.created(0)
    story.started(0)
    story.generation(0, 1)
    story.steps(10, 1, 1, 10, begin_s=0, end_s=10)
    story.lost(11, 1, onset_s=10.5)
    story.write(12, kinds.Unknown(kind="<b>", fields_json="{}"))
    page = _page(story)
    _checked(page)
    assert "<script" not in page
    assert "<img" not in page
    assert "<b>" not in page


def test_what_was_not_measured_is_said_in_words() -> None:
    assert "not measured" in _page(Story())


def test_a_run_without_any_event_has_a_page() -> None:
    _checked(_page(Story()))


def test_every_phase_has_a_pattern_a_colour_and_a_title_in_the_drawing() -> None:
    bands = [Band(index * NS, (index + 1) * NS, phase) for index, phase in enumerate(PHASES)]
    drawing = timeline_svg(bands, ())
    page = _page(one_interruption())
    for phase in PHASES:
        assert f"url(#p-{phase})" in drawing
        assert f'<pattern id="p-{phase}"' in page
        assert f".p-{phase}{{" in STYLE
    assert drawing.count("<rect") >= len(PHASES)
    assert drawing.count("<title>") >= len(PHASES)


def test_both_colour_schemes_define_the_same_colours() -> None:
    light, dark = STYLE.split("@media (prefers-color-scheme:dark)")[:2]
    names = re.compile(r"--([a-z]+):")
    assert set(names.findall(light.split("}")[0])) == set(names.findall(dark.split("}}")[0]))


def test_each_interruption_has_a_marker_that_leads_to_its_row() -> None:
    page = _page(one_interruption())
    assert 'href="#interruption-1"' in page
    assert 'id="interruption-1"' in page


def test_a_long_run_is_drawn_in_columns_and_stays_small() -> None:
    bands = [Band(index * NS, (index + 1) * NS, PHASES[index % 4]) for index in range(50_000)]
    drawing = timeline_svg(bands, ())
    assert len(drawing) < 400_000
    assert drawing.count("<g ") == 400


def test_an_outlier_survives_the_thinning_of_the_loss_curve() -> None:
    losses = [(step, 2.0) for step in range(1, 10_001)]
    losses[5000] = (5001, 9.0)
    assert ">9<" in loss_svg(losses)


@pytest.mark.parametrize("losses", [[], [(1, 2.0)], [(1, math.nan), (2, math.inf), (3, 1.0)]])
def test_a_loss_curve_needs_two_finite_points(losses: list[tuple[int, float]]) -> None:
    assert loss_svg(losses) == ""


def test_a_constant_loss_can_be_drawn() -> None:
    assert "polyline" in loss_svg([(1, 2.0), (2, 2.0)])


def test_the_denominator_of_mfu_stands_beside_it() -> None:
    story = one_interruption()
    story.write(
        31,
        kinds.ModelDescribed(
            num_parameters=1, model_flop_per_token=6e9, hardware_flop_per_token=None, source="6 P, counted"
        ),
    )
    story.write(31, kinds.PeakDescribed(peak_flop_per_s=1e12, source="a measured GEMM"))
    page = _page(story)
    assert "a measured GEMM" in page
    assert "1 TFLOP/s" in page
    assert "6 P, counted" in page


def test_the_page_is_the_same_for_the_same_run() -> None:
    assert _page(one_interruption()) == _page(one_interruption())
