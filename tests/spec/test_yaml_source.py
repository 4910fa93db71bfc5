"""The tree of a YAML file: lines, keys written twice, and text that is no YAML at all."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dougong.errors import DougongError, Problems, UserError
from dougong.spec.yaml_source import Listing, Scalar, Table, parse_yaml, read_yaml


def test_everything_knows_its_line() -> None:
    root = parse_yaml("a: 1\nb:\n  - x\n  - y\n", file="f.yaml").root
    assert isinstance(root, Table)
    assert [(entry.key, entry.line) for entry in root.entries] == [("a", 1), ("b", 2)]
    assert root.entries[1].value == Listing((Scalar("x", True, 3), Scalar("y", True, 4)), 3)


def test_a_key_written_twice_is_told_with_both_lines() -> None:
    (problem,) = parse_yaml("a: 1\nb: 2\na: 3\n", file="f.yaml").problems
    assert problem.where == "f.yaml:3"
    assert "'a'" in problem.what
    assert "line 1" in problem.mend


@pytest.mark.parametrize("text", ["a: !!python/object:os.system x", "a: !local x", "a: !!python/name:os.system ''"])
def test_a_tag_is_refused_and_builds_nothing(text: str) -> None:
    (problem,) = parse_yaml(text, file="f.yaml").problems
    assert "tag" in problem.what


def test_an_alias_inside_itself_is_told() -> None:
    (problem,) = parse_yaml("a: &a [*a]", file="f.yaml").problems
    assert "inside itself" in problem.what


def test_a_shared_alias_is_read_once() -> None:
    """Nine levels of nine aliases each would be 9^9 items."""
    lines = ["a0: &a0 x"] + [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    assert parse_yaml("\n".join(lines), file="f.yaml").problems == ()


def test_broken_yaml_is_told_with_its_line() -> None:
    with pytest.raises(Problems) as caught:
        parse_yaml("a: 1\nb: [1, 2\nc: 3\n", file="f.yaml")
    assert caught.value.problems[0].where.startswith("f.yaml:")
    assert caught.value.problems[0].where != "f.yaml:1"


@pytest.mark.parametrize("content", [b"", b"# only a comment\n", b"\xff\xfe\x00", b"\x00", b"---\na: 1\n---\nb: 2\n"])
def test_a_file_without_one_document_is_a_mistake_of_the_user(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    with pytest.raises((UserError, Problems)):
        read_yaml(path)


def test_a_missing_file_and_a_folder_are_mistakes_of_the_user(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(UserError):
            read_yaml(path)


def test_deep_nesting_is_told() -> None:
    for depth in (100, 3000):
        with contextlib.suppress(DougongError):
            assert parse_yaml("[" * depth + "]" * depth, file="f.yaml").problems


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=st.characters(blacklist_categories=["Cs"]), max_size=200))
def test_no_text_crashes(text: str) -> None:
    with contextlib.suppress(DougongError):
        parse_yaml(text, file="f.yaml")
