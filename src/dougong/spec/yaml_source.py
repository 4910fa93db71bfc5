"""A YAML file as a tree in which everything knows its line, so that every mistake of a file can be told at once.

Only the structure is taken from YAML. What a scalar means (`on`, `007`, `80GB`) is decided later by the type it is read
into (`spec.typed`), so no text turns into a truth or a date by surprise, and no tag can build an object.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import msgspec

from dougong.errors import Problems, UserError

MAX_FILE_BYTES = 64 * 2**20
MAX_DEPTH = 64


class Scalar(msgspec.Struct, frozen=True):
    """A piece of text. `is_plain`: it stands without quotes, so `null` and `~` mean nothing."""

    text: str
    is_plain: bool
    line: int

    @property
    def is_null(self) -> bool:
        return self.is_plain and self.text in ("", "~", "null", "Null", "NULL")


class Listing(msgspec.Struct, frozen=True):
    """Items in order."""

    items: tuple[Item, ...]
    line: int


class Entry(msgspec.Struct, frozen=True):
    """A key with its value; `line` is the key's."""

    key: str
    value: Item
    line: int


class Table(msgspec.Struct, frozen=True):
    """Keys with values, in order, no key twice."""

    entries: tuple[Entry, ...]
    line: int


Item = Scalar | Listing | Table


class Source(msgspec.Struct, frozen=True):
    """A parsed file: its name as shown to people, its root, and the mistakes found so far (keys written twice …)."""

    file: str
    root: Item
    problems: tuple[UserError, ...] = ()


def read_yaml(path: Path | str) -> Source:
    """The tree of the file at `path`. Raises UserError if it cannot be read or is no YAML."""
    path = Path(path)
    try:
        size_bytes = path.stat().st_size
        if size_bytes > MAX_FILE_BYTES:
            raise UserError(
                f"{path} has {size_bytes} bytes, more than the {MAX_FILE_BYTES} that a description may have",
                where=str(path),
                mend="write ranges (rack-[01-32]) in place of single nodes",
            )
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror or error}",
            where=str(path),
            mend="give the path of a readable YAML file",
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text (byte {error.start})", where=str(path), mend="save the file as UTF-8"
        ) from error
    return parse_yaml(text, file=str(path))


def parse_yaml(text: str, *, file: str) -> Source:
    """The tree of `text`; `file` is what mistakes name as their place. Raises UserError if it is no YAML."""
    # Imported here: the command line starts without a YAML parser.
    import yaml

    loader = cast("Any", getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    try:
        root = cast("Any", yaml.compose(text, Loader=loader))  # pyright: ignore[reportUnknownMemberType]
    except yaml.YAMLError as error:
        raise _no_yaml(error, file=file) from error
    except (RecursionError, UnicodeError, ValueError) as error:
        raise UserError(
            f"not readable as YAML: {error}", where=file, mend="simplify the nesting or remove odd characters"
        ) from error
    if root is None:
        raise UserError("the file is empty", where=file, mend="write at least the required keys")
    return _Builder(file).source(root)


class _Builder:
    """Turns the parser's nodes into items, each shared (aliased) node once."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._problems: list[UserError] = []
        self._built: dict[int, Item] = {}
        self._open: set[int] = set()

    def source(self, root: Any) -> Source:
        item = self._item(root)
        return Source(self._file, item, tuple(self._problems))

    def _item(self, node: Any) -> Item:
        identity = id(node)
        if identity in self._built:
            return self._built[identity]
        line: int = node.start_mark.line + 1
        if identity in self._open or len(self._open) > MAX_DEPTH:
            self._problem(line, "nested too deeply, or inside itself", mend="remove the alias or flatten the structure")
            return Scalar("", True, line)
        self._open.add(identity)
        self._check_tag(node.tag, line)
        item = self._content(node, line)
        self._open.discard(identity)
        self._built[identity] = item
        return item

    def _check_tag(self, tag: str, line: int) -> None:
        if not tag.startswith("tag:yaml.org,2002:") or "python/" in tag:
            self._problem(line, f"the tag {tag!r} is not allowed", mend="write plain values without tags")

    def _content(self, node: Any, line: int) -> Item:
        if node.id == "scalar":
            return Scalar(node.value, node.style in (None, ""), line)
        if node.id == "sequence":
            return Listing(tuple(self._item(child) for child in node.value), line)
        return self._table(node.value, line)

    def _table(self, pairs: list[tuple[Any, Any]], line: int) -> Table:
        entries: dict[str, Entry] = {}
        for key_node, value_node in pairs:
            key_line: int = key_node.start_mark.line + 1
            if key_node.id != "scalar":
                self._problem(key_line, "a key is a list or a table", mend="use plain words as keys")
                continue
            key: str = key_node.value
            if key in entries:
                self._problem(
                    key_line,
                    f"the key {key!r} is written twice",
                    mend=f"keep one of them; the first is on line {entries[key].line}",
                )
                continue
            entries[key] = Entry(key, self._item(value_node), key_line)
        return Table(tuple(entries.values()), line)

    def _problem(self, line: int, what: str, *, mend: str) -> None:
        self._problems.append(UserError(what, where=f"{self._file}:{line}", mend=mend))


def _no_yaml(error: Exception, *, file: str) -> Problems:
    mark = getattr(error, "problem_mark", None)
    where = f"{file}:{mark.line + 1}" if mark is not None else file
    reason = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    return Problems([UserError(f"not readable as YAML: {reason}", where=where, mend="mend the YAML syntax here")])
