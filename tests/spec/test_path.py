"""Component paths and their ranges."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dougong.errors import UserError
from dougong.spec.path import (
    compress,
    expand,
    format_path,
    in_order,
    matches,
    natural_key,
    parent,
    parse_path,
    parse_range,
)

SEGMENTS = st.from_regex(r"[a-c]{0,2}[0-9]{0,3}(-[0-9]{1,3})?[a-b]?", fullmatch=True).filter(bool)
PATHS = st.lists(SEGMENTS, min_size=1, max_size=3).map("/".join)


@given(st.lists(PATHS, max_size=40))
def test_expand_of_compress_is_the_same_paths_in_order(paths: list[str]) -> None:
    assert expand(compress(paths)) == in_order(paths)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=60), st.integers(1, 3))
def test_expand_of_compress_keeps_padded_numbers(pairs: list[tuple[int, int]], width: int) -> None:
    paths = [f"rack-{a:0{width}d}/node-{b}" for a, b in pairs]
    assert expand(compress(paths)) == in_order(paths)


@given(st.lists(PATHS, min_size=1, max_size=20))
def test_every_path_is_inside_one_of_its_ranges(paths: list[str]) -> None:
    ranges = [parse_range(text) for text in compress(paths)]
    for path in paths:
        (inside,) = [one for one in ranges if path in one]
        index = inside.index(path)
        assert index is not None
        assert list(inside)[index] == path


@given(PATHS)
def test_format_of_parse_is_the_same_path(path: str) -> None:
    assert format_path(parse_path(path)) == path


def test_zeros_in_front_are_kept() -> None:
    assert expand("rack-[08-11]") == ("rack-08", "rack-09", "rack-10", "rack-11")
    assert expand("rack-[8-11]") == ("rack-8", "rack-9", "rack-10", "rack-11")


def test_several_ranges_multiply() -> None:
    assert len(parse_range("hall-a/rack-[01-32]/node-[01-04]")) == 128
    assert compress(expand("hall-a/rack-[01-32]/node-[01-04]")) == ("hall-a/rack-[01-32]/node-[01-04]",)


def test_a_list_of_stretches_is_a_range() -> None:
    assert expand("n[1,3,5-7]") == ("n1", "n3", "n5", "n6", "n7")


def test_numbers_are_ordered_as_numbers() -> None:
    assert in_order(["n-10", "n-2", "n-1"]) == ("n-1", "n-2", "n-10")
    assert natural_key("n-2") < natural_key("n-10")


@pytest.mark.parametrize(
    "text",
    ["", "/", "a//b", "a b", "n[", "n]", "n[]", "n[a-b]", "n[3-1]", "n[01-1]", "n[1-02]", "n[1,1]", "n[1-2][3-4]", "é"],
)
def test_what_is_no_range_is_a_mistake_of_the_user(text: str) -> None:
    with pytest.raises(UserError):
        parse_range(text)


def test_a_range_of_too_many_is_refused_before_it_is_built() -> None:
    for text in ("n[0-999999999999]", "a[1-9999]/b[1-9999]/c[1-9999]"):
        with pytest.raises(UserError, match="more than"):
            parse_range(text)


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("hall-a", "hall-a/rack-03/node-017", True),
        ("hall-a", "hall-ab/rack-03", False),
        ("hall-a/rack-[01-04]", "hall-a/rack-03/node-017/accel-5", True),
        ("hall-a/rack-[01-04]", "hall-a/rack-05", False),
        ("hall-a/rack-[01-04]", "hall-a/rack-3", False),
        ("hall-a/rack-03/node-017", "hall-a/rack-03", False),
    ],
)
def test_a_pattern_names_what_lies_below_it(pattern: str, path: str, expected: bool) -> None:
    assert matches(pattern, path) is expected


@given(st.text(max_size=30))
def test_no_text_crashes_the_parser(text: str) -> None:
    with contextlib.suppress(UserError):
        parse_range(text)


def test_the_parent_of_the_first_segment_is_nothing() -> None:
    assert parent("hall-a/rack-03") == "hall-a"
    assert parent("hall-a") == ""
