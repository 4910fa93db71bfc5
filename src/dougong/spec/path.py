"""Component paths: `hall-a/rack-03/node-017/accel-5`, and ranges of them: `hall-a/rack-[01-32]/node-[01-04]`.

A range expands in natural order (`node-2` before `node-10`). Zeros in front are kept: `[08-11]` is 08, 09, 10, 11.
`expand(compress(paths)) == in_order(paths)` for every set of paths.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

import msgspec

from dougong.errors import UserError

MAX_PATHS = 1_000_000
_MAX_DIGITS = 12

_SEGMENT = re.compile(r"[A-Za-z0-9._+:-]+\Z")
_LITERAL = re.compile(r"[A-Za-z0-9._+:/-]*\Z")
_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_STRETCH = re.compile(rf"([0-9]{{1,{_MAX_DIGITS}}})(?:-([0-9]{{1,{_MAX_DIGITS}}}))?\Z")
_DIGITS = re.compile(r"([0-9]+)")


class PathRange(msgspec.Struct, frozen=True):
    """A parsed range: literal text and number tokens in turn, the text first and last."""

    text: str
    literals: tuple[str, ...]
    tokens: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        return math.prod(len(tokens) for tokens in self.tokens)

    def __iter__(self) -> Iterator[str]:
        for chosen in itertools.product(*self.tokens):
            pieces = itertools.zip_longest(self.literals, chosen, fillvalue="")
            yield "".join(itertools.chain.from_iterable(pieces))

    def __contains__(self, path: object) -> bool:
        return isinstance(path, str) and self._chosen(path) is not None

    def index(self, path: str) -> int | None:
        """The position of `path` in the range, from 0; `None` = it is not in it."""
        chosen = self._chosen(path)
        if chosen is None:
            return None
        position = 0
        for tokens, token in zip(self.tokens, chosen, strict=True):
            position = position * len(tokens) + tokens.index(token)
        return position

    def _chosen(self, path: str) -> tuple[str, ...] | None:
        match = _matcher(self.literals).match(path)
        if match is None:
            return None
        chosen: tuple[str, ...] = match.groups()
        is_inside = all(token in tokens for token, tokens in zip(chosen, self.tokens, strict=True))
        return chosen if is_inside else None


def parse_path(path: str) -> tuple[str, ...]:
    """The segments of one path. Raises UserError."""
    segments = tuple(path.split("/"))
    for segment in segments:
        if not _SEGMENT.match(segment):
            raise UserError(
                f"{path!r} is not a component path",
                where=repr(segment),
                mend="write segments of letters, digits and - _ . + : joined by '/': hall-a/rack-03/node-017",
            )
    return segments


def format_path(segments: Iterable[str]) -> str:
    """The path of `segments`."""
    path = "/".join(segments)
    parse_path(path)
    return path


@lru_cache(maxsize=8192)
def parse_range(text: str) -> PathRange:
    """The range that `text` writes; a plain path is a range of one. Raises UserError."""
    parts = _BRACKET.split(text)
    literals, brackets = tuple(parts[0::2]), tuple(parts[1::2])
    if not all(_LITERAL.match(literal) for literal in literals):
        raise _no_range(text, "it has a character that is not allowed, or brackets that do not close")
    if any(not literal for literal in literals[1:-1]):
        raise _no_range(text, "two ranges touch each other")
    tokens = tuple(_tokens(text, bracket) for bracket in brackets)
    parsed = PathRange(text, literals, tokens)
    if len(parsed) > MAX_PATHS:
        raise _no_range(text, f"it names {len(parsed)} components, more than {MAX_PATHS}")
    parse_path(next(iter(parsed)))
    return parsed


def expand(ranges: Iterable[str] | str) -> tuple[str, ...]:
    """Every path that the ranges name, once each, in natural order. Raises UserError."""
    texts = (ranges,) if isinstance(ranges, str) else ranges
    return in_order(path for text in texts for path in parse_range(text))


def in_order(paths: Iterable[str]) -> tuple[str, ...]:
    """The paths without repeats, numbers compared as numbers."""
    return tuple(sorted(set(paths), key=natural_key))


def natural_key(path: str) -> tuple[tuple[object, ...], ...]:
    """A sort key under which `node-2` comes before `node-10`; equal numbers are ordered by their digits."""
    return tuple(_segment_key(segment) for segment in path.split("/"))


def compress(paths: Iterable[str]) -> tuple[str, ...]:
    """The fewest ranges found that name exactly `paths`. Raises UserError for what is no path."""
    groups: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for path in in_order(paths):
        parse_path(path)
        parts = _DIGITS.split(path)
        groups.setdefault(tuple(parts[0::2]), []).append(tuple(parts[1::2]))
    texts = [text for literals, rows in groups.items() for text in _fold(literals, rows)]
    return tuple(sorted(texts, key=natural_key))


def matches(pattern: str, path: str) -> bool:
    """Whether `path` is named by `pattern` (a path or a range) or lies below what it names. Raises UserError."""
    depth = pattern.count("/") + 1
    segments = path.split("/")
    return "/".join(segments[:depth]) in parse_range(pattern)


def parent(path: str) -> str:
    """The path above; "" above the first segment."""
    return path.rpartition("/")[0]


def _no_range(text: str, why: str) -> UserError:
    return UserError(
        f"{text!r} is not a range of paths: {why}", where="path", mend="write hall-a/rack-[01-32]/node-[01-04]"
    )


def _tokens(text: str, bracket: str) -> tuple[str, ...]:
    tokens: list[str] = []
    for stretch in bracket.split(","):
        match = _STRETCH.match(stretch.strip())
        if match is None:
            raise _no_range(text, f"[{bracket}] is not of the form [01-32] or [1,3,5-7]")
        first, last = match[1], match[2] or match[1]
        width = len(first) if first.startswith("0") else 0
        num_tokens = int(last) - int(first) + 1
        if num_tokens < 1:
            raise _no_range(text, f"{stretch} counts down")
        if len(last) < width or (last.startswith("0") and len(last) != len(first)):
            raise _no_range(text, f"{stretch} mixes numbers with and without zeros in front")
        if num_tokens + len(tokens) > MAX_PATHS:
            raise _no_range(text, f"it names more than {MAX_PATHS} components")
        tokens.extend(f"{number:0{width}d}" for number in range(int(first), int(last) + 1))
    if len(set(tokens)) != len(tokens):
        raise _no_range(text, f"[{bracket}] names a number twice")
    return tuple(tokens)


@lru_cache(maxsize=8192)
def _matcher(literals: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("([0-9]+)".join(re.escape(literal) for literal in literals) + r"\Z")


def _segment_key(segment: str) -> tuple[object, ...]:
    parts = _DIGITS.split(segment)
    numbers = tuple((int(part), part) for part in parts[1::2])
    return tuple(itertools.chain.from_iterable(itertools.zip_longest(parts[0::2], numbers, fillvalue=(0, ""))))


def _fold(literals: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Ranges for rows of digits of one shape: rows that differ in one column only are joined, last column first."""
    columns: list[tuple[tuple[str, ...], ...]] = [tuple((token,) for token in row) for row in rows]
    for column in reversed(range(len(literals) - 1)):
        joined: dict[tuple[tuple[str, ...], ...], list[str]] = {}
        for row in columns:
            joined.setdefault(row[:column] + row[column + 1 :], []).extend(row[column])
        columns = [(*rest[:column], tuple(tokens), *rest[column:]) for rest, tokens in joined.items()]
    for row in columns:
        yield "".join(
            itertools.chain.from_iterable(
                itertools.zip_longest(literals, (_write(tokens) for tokens in row), fillvalue="")
            )
        )


def _write(tokens: tuple[str, ...]) -> str:
    """`[01-04,07]` for tokens; a lone token stands as it is."""
    if len(tokens) == 1:
        return tokens[0]
    stretches: list[list[str]] = []
    for token in sorted(tokens, key=lambda token: (int(token), len(token))):
        if stretches and _follows(stretches[-1], token):
            stretches[-1].append(token)
        else:
            stretches.append([token])
    return "[" + ",".join(_stretch(stretch) for stretch in stretches) + "]"


def _follows(stretch: list[str], token: str) -> bool:
    width = len(stretch[0]) if stretch[0].startswith("0") else 0
    number = int(stretch[-1]) + 1
    return len(stretch[0]) <= _MAX_DIGITS and len(token) <= _MAX_DIGITS and token == f"{number:0{width}d}"


def _stretch(stretch: list[str]) -> str:
    return stretch[0] if len(stretch) == 1 else f"{stretch[0]}-{stretch[-1]}"
