"""From a tree of YAML to frozen structs: one converter for every file Dougong reads.

- An unknown key is an error, with the nearest valid one; a key that is merely misspelt is then read as the one meant,
  so that the mistakes behind it are found in the same pass.
- The key of a number is its field (`memory_bytes`) or the field without its unit (`memory`); the value is a number in
  SI base units or a text with a unit (`80GB`, `400Gb/s`, `2.3kW`, `30d`). The short key takes no bare number.
- A tuple of structs may be written as a list, or as a table from the first field to the rest; when a single text or
  number is the rest, it is the second field.
- A struct may have `flaws()`, which yields what is wrong between its fields.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol, TypeVar, cast, runtime_checkable

import msgspec
import msgspec.inspect as mi

from dougong.errors import Problems, UserError
from dougong.spec.values import (
    FieldUnit,
    describe,
    did_you_mean,
    keys_of,
    mend_value,
    nearest,
    parse_value,
    short_key,
    stand_in,
    unit_of,
)
from dougong.spec.yaml_source import Entry, Item, Listing, Scalar, Source, Table, read_yaml

T = TypeVar("T")
Warn = Callable[[UserError], None]


class SpecWarning(UserWarning):
    """Something in a file that is allowed but has no effect or is unlikely to be meant."""


def warn_python(problem: UserError) -> None:
    """Say a warning through Python's own `warnings` (stderr by default)."""
    warnings.warn(str(problem), SpecWarning, stacklevel=2)


class Flaw(msgspec.Struct, frozen=True):
    """What is wrong between the fields of a struct, at `field` (`nodes[3].type`; "" = the struct itself).

    It is left out when one of `needs` could not be read, since it would only be a consequence of that.
    """

    field: str
    what: str
    mend: str
    is_warning: bool = False
    needs: tuple[str, ...] = ()


@runtime_checkable
class Checked(Protocol):
    """A struct that knows the rules between its fields."""

    def flaws(self) -> Iterator[Flaw]: ...


Hook = Callable[[Item, str, "Reading"], object]
"""Reads an item, at its place, into a value of the type it is registered for."""


class Reading:
    """One pass over one file: the mistakes so far, and where each field stands."""

    def __init__(self, file: str, *, hooks: Mapping[type, Hook]) -> None:
        self.file = file
        self.hooks = hooks
        self.problems: list[UserError] = []
        self.warnings: list[UserError] = []
        self._lines: dict[str, tuple[int, str]] = {}
        self._failed: set[str] = set()

    def stand(self, place: str, line: int, *, shown: str) -> None:
        """Remember that the field at `place` is on `line`; people are shown `shown`."""
        self._lines[place] = (line, shown)

    def fail(self, place: str, what: str, *, mend: str, line: int | None = None) -> None:
        """The value at `place` cannot be used; what depends on it is not judged."""
        self._failed.add(place)
        self.problems.append(UserError(what, where=self.where(place, line=line), mend=mend))

    def doubt(self, place: str) -> None:
        """The value at `place` is a stand-in, for a reason that is told already."""
        self._failed.add(place)

    def complain(self, place: str, what: str, *, mend: str, line: int | None = None) -> None:
        """Something at `place` is wrong, but the values are known."""
        self.problems.append(UserError(what, where=self.where(place, line=line), mend=mend))

    def judge(self, value: object, place: str) -> None:
        """Note the flaws that `value`, read at `place`, tells of itself."""
        if not isinstance(value, Checked):
            return
        for flaw in value.flaws():
            at = join(place, flaw.field)
            if self._is_doubtful(at) or any(self._has_failed(join(place, need)) for need in flaw.needs):
                continue
            problem = UserError(flaw.what, where=self.where(at), mend=flaw.mend)
            (self.warnings if flaw.is_warning else self.problems).append(problem)

    def where(self, place: str, *, line: int | None = None) -> str:
        """`cluster.yaml:12 nodes[3].accelerators`, with the line of the nearest part that is written in the file."""
        known = place
        while known and known not in self._lines:
            known = known[: max(known.rfind("."), known.rfind("["), 0)]
        known_line, shown = self._lines.get(known, (1, ""))
        return f"{self.file}:{line or known_line} {shown}{place[len(known) :] if known else place}".rstrip()

    def shown(self, place: str) -> str:
        return self._lines[place][1] if place in self._lines else place

    def _has_failed(self, place: str) -> bool:
        return any(_is_within(place, failed) for failed in self._failed)

    def _is_doubtful(self, place: str) -> bool:
        return any(_is_within(place, failed) or _is_within(failed, place) for failed in self._failed)


def load_typed(path: Path | str, type_: type[T], *, warn: Warn = warn_python, hooks: Mapping[type, Hook] = {}) -> T:
    """The `type_` that the YAML file at `path` describes. Raises Problems with everything that is wrong."""
    return convert(read_yaml(path), type_, warn=warn, hooks=hooks)


def convert(source: Source, type_: type[T], *, warn: Warn = warn_python, hooks: Mapping[type, Hook] = {}) -> T:
    """The `type_` that `source` describes. Raises Problems; tells what is merely odd to `warn`."""
    reading = Reading(source.file, hooks=hooks)
    reading.problems.extend(source.problems)
    value = read_item(source.root, type_, "", reading)
    if reading.problems:
        raise Problems(sorted(reading.problems, key=lambda problem: _line_of(problem, file=source.file)))
    for warning in reading.warnings:
        warn(warning)
    return value


def read_item(item: Item, type_: type[T], place: str, reading: Reading) -> T:
    """The value of `item` as `type_`, or a stand-in when the mistakes noted in `reading` leave none. For hooks."""
    if place not in ("",):
        reading.stand(place, item.line, shown=reading.shown(place))
    else:
        reading.stand("", item.line, shown="")
    return cast("T", _value(item, _type_info(type_), place, reading, unit=None))


def join(place: str, field: str) -> str:
    """The place of `field` inside `place`."""
    if not place or not field:
        return place or field
    return f"{place}{field}" if field.startswith("[") else f"{place}.{field}"


# --- by type -------------------------------------------------------------------------------------------------------


def _value(item: Item, info: mi.Type, place: str, reading: Reading, *, unit: FieldUnit | None) -> object:
    match info:
        case mi.StructType():
            return _struct(item, info, place, reading)
        case mi.VarTupleType():
            return _tuple(item, info.item_type, place, reading, unit=unit)
        case mi.UnionType():
            return _union(item, info, place, reading, unit=unit)
        case _:
            return _scalar(item, info, place, reading, unit=unit)


def _struct(item: Item, info: mi.StructType, place: str, reading: Reading) -> object:
    hook = reading.hooks.get(info.cls)
    if hook is not None:
        return hook(item, place, reading)
    if not isinstance(item, Table):
        reading.fail(place, f"{_show(item)} is not a table of keys", mend=f"keys: {', '.join(keys_of(info.cls))}")
        return stand_in(info)
    value = _from_fields(info, item.entries, {}, place, reading)
    reading.judge(value, place)
    return value


def _from_fields(
    info: mi.StructType, entries: Sequence[Entry], given: Mapping[str, object], place: str, reading: Reading
) -> object:
    """The struct of `entries` and the fields already `given`."""
    written = _match_keys(info, entries, given, place, reading)
    values = dict(given)
    for field in info.fields:
        at = join(place, field.encode_name)
        if field.name in written:
            entry = written[field.name]
            reading.stand(at, entry.line, shown=join(reading.shown(place), entry.key))
            unit = unit_of(field.name)
            if unit is not None and entry.key != field.encode_name:
                unit = unit.named()
            values[field.name] = _value(entry.value, field.type, at, reading, unit=unit)
        elif field.required and field.name not in given:
            names = " or ".join(repr(key) for key, name in keys_of(info.cls).items() if name == field.name)
            reading.fail(at, f"the key {names} is missing", mend=_example(field))
            values[field.name] = stand_in(field.type)
    return info.cls(**values)


def _match_keys(
    info: mi.StructType, entries: Sequence[Entry], given: Mapping[str, object], place: str, reading: Reading
) -> dict[str, Entry]:
    """The entry of each field; complains of unknown keys and of fields written twice."""
    keys = {key: name for key, name in keys_of(info.cls).items() if name not in given}
    written: dict[str, Entry] = {}
    misspelt: list[Entry] = []
    for entry in entries:
        name = keys.get(entry.key)
        if name is None:
            misspelt.append(entry)
        elif name in written:
            reading.complain(
                join(place, entry.key), f"{name!r} is given twice, also as {written[name].key!r}",
                mend="keep one of them", line=entry.line,
            )  # fmt: skip
        else:
            written[name] = entry
    for entry in misspelt:
        free = [key for key, name in keys.items() if name not in written]
        mend = did_you_mean(entry.key, free) if nearest(entry.key, free) else did_you_mean(entry.key, list(keys))
        reading.complain(
            join(reading.shown(place), entry.key), f"unknown key {entry.key!r}", mend=mend, line=entry.line
        )
        near = nearest(entry.key, free)
        if near is not None:
            written[keys[near]] = Entry(near, entry.value, entry.line)
    return written


def _tuple(item: Item, item_info: mi.Type, place: str, reading: Reading, *, unit: FieldUnit | None) -> object:
    if isinstance(item, Listing):
        values: list[object] = []
        for index, child in enumerate(item.items):
            at = f"{place}[{index}]"
            reading.stand(at, child.line, shown=f"{reading.shown(place)}[{index}]")
            values.append(_value(child, item_info, at, reading, unit=unit))
        return tuple(values)
    if isinstance(item, Table) and isinstance(item_info, mi.StructType) and item_info.cls not in reading.hooks:
        return tuple(_keyed(entry, index, item_info, place, reading) for index, entry in enumerate(item.entries))
    if isinstance(item, Scalar) and item.is_null:
        return ()
    reading.fail(place, f"{_show(item)} is not a list", mend="write a list: [a, b] or lines with '- '")
    return ()


def _keyed(entry: Entry, index: int, info: mi.StructType, place: str, reading: Reading) -> object:
    """One struct of a tuple written as a table: the key is its first field."""
    at = f"{place}[{index}]"
    reading.stand(at, entry.line, shown=join(reading.shown(place), entry.key))
    first, *rest = info.fields
    key = Scalar(entry.key, False, entry.line)
    given = {first.name: _value(key, first.type, join(at, first.name), reading, unit=None)}
    match entry.value:
        case Table():
            entries = entry.value.entries
        case Scalar() if entry.value.is_null:
            entries = ()
        case Scalar() if rest:
            entries = (Entry(short_key(rest[0].name, info.cls), entry.value, entry.line),)
        case _:
            reading.fail(
                at, f"{_show(entry.value)} is not a table of keys", mend=f"keys: {', '.join(keys_of(info.cls))}"
            )
            return stand_in(info)
    value = _from_fields(info, entries, given, at, reading)
    reading.judge(value, at)
    return value


def _union(item: Item, info: mi.UnionType, place: str, reading: Reading, *, unit: FieldUnit | None) -> object:
    """The first alternative that the item fits. A lone alternative tells its own mistakes."""
    others = [one for one in info.types if not isinstance(one, mi.NoneType)]
    if len(others) < len(info.types) and isinstance(item, Scalar) and item.is_null:
        return None
    if len(others) == 1:
        return _value(item, others[0], place, reading, unit=unit)
    for one in others:
        trial = Reading(reading.file, hooks=reading.hooks)
        value = _value(item, one, place, trial, unit=unit)
        if not trial.problems:
            return value
    reading.fail(place, f"{_show(item)} fits none of its kinds", mend="; or ".join(describe(one) for one in others))
    return stand_in(others[0])


def _scalar(item: Item, info: mi.Type, place: str, reading: Reading, *, unit: FieldUnit | None) -> object:
    if not isinstance(item, Scalar):
        reading.fail(place, f"{_show(item)} stands where a single value is wanted", mend=describe(info))
        return stand_in(info)
    try:
        return parse_value(item, info, unit)
    except ValueError as error:
        reading.fail(place, str(error), mend=mend_value(item.text, info, unit))
        return item.text if isinstance(info, mi.StrType) else stand_in(info)


@lru_cache(maxsize=512)
def _type_info(type_: object) -> mi.Type:
    return mi.type_info(type_)


def _example(field: mi.Field) -> str:
    unit = unit_of(field.name)
    if unit is not None:
        short = field.encode_name.removesuffix(unit.ending)
        return f"add it, for example {short}: {unit.examples.split(',')[0]}"
    info = field.type
    if isinstance(info, mi.LiteralType):
        return f"add it; valid: {', '.join(str(value) for value in info.values)}"
    return f"add it ({describe(info).removeprefix('write ')})"


def _show(item: Item) -> str:
    match item:
        case Scalar():
            return repr(item.text[:80]) if not item.is_null else "nothing"
        case Listing():
            return f"a list of {len(item.items)}"
        case Table():
            return f"a table with the keys {', '.join(entry.key for entry in item.entries[:4])}"


def _is_within(place: str, outer: str) -> bool:
    return not outer or place == outer or place.startswith((f"{outer}.", f"{outer}["))


def _line_of(problem: UserError, *, file: str) -> float:
    """The line of a problem of `file`; what another file has comes last, as it is."""
    match = re.match(r":([0-9]+)", problem.where.removeprefix(file))
    return int(match[1]) if match else math.inf
