"""A single value of a file: from text to a number, a truth or a choice, with the units that field names tell."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
import msgspec.inspect as mi

from dougong.spec.yaml_source import Scalar
from dougong.units import parse_duration_s, parse_quantity


def parse_value(item: Scalar, info: mi.Type, unit: FieldUnit | None) -> object:
    """What `item` says as `info`. Raises ValueError, with what is wrong in words."""
    match info:
        case mi.LiteralType():
            for choice in info.values:
                if str(choice) == item.text:
                    return choice
            raise ValueError(f"{item.text!r} is not one of the choices")
        case mi.BoolType():
            if item.text.lower() in ("true", "false"):
                return item.text.lower() == "true"
            raise ValueError(f"{item.text!r} is neither true nor false")
        case mi.StrType():
            return _text(item, info)
        case mi.IntType():
            number = _number(item.text, unit)
            if isinstance(number, float):
                if not number.is_integer():
                    raise ValueError(f"{item.text!r} is not a whole number")
                number = round(number)
            return _bounded(number, info, item.text)
        case mi.FloatType():
            return _bounded(float(_number(item.text, unit)), info, item.text)
        case mi.AnyType():
            return item.text
        case _:
            raise AssertionError(f"no file may hold a {info!r}")


def _text(item: Scalar, info: mi.StrType) -> str:
    if item.is_null:
        raise ValueError("nothing stands where a text is wanted")
    if info.pattern is not None and re.match(info.pattern, item.text) is None:
        raise ValueError(f"{item.text!r} has a form that is not allowed")
    return item.text


_INT = re.compile(r"[+-]?[0-9][0-9_]{0,30}\Z")
_FLOAT = re.compile(r"[+-]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)([eE][+-]?[0-9]+)?\Z")


def _number(text: str, unit: FieldUnit | None) -> float | int:
    text = text.strip()
    is_bare = _FLOAT.match(text) is not None
    if is_bare and unit is not None and unit.must_be_written and float(text) != 0:
        raise ValueError(f"{text!r} has no unit")
    if _INT.match(text):
        return int(text)
    if is_bare:
        number = float(text)
    elif unit is None:
        raise ValueError(f"{text!r} is not a number")
    else:
        number = unit.parse(text)
    if not math.isfinite(number):
        raise ValueError(f"{text!r} is too large")
    return number


def _bounded(number: float, info: mi.IntType | mi.FloatType, text: str) -> float:
    bounds = (
        (info.ge is not None and number < info.ge, f"at least {info.ge}"),
        (info.gt is not None and number <= info.gt, f"more than {info.gt}"),
        (info.le is not None and number > info.le, f"at most {info.le}"),
        (info.lt is not None and number >= info.lt, f"less than {info.lt}"),
    )
    for is_broken, bound in bounds:
        if is_broken:
            raise ValueError(f"{text!r} must be {bound}")
    return number


def mend_value(text: str, info: mi.Type, unit: FieldUnit | None) -> str:
    """How to write a value of the kind `info` instead of `text`."""
    if isinstance(info, mi.LiteralType):
        return did_you_mean(text, [str(choice) for choice in info.values])
    if isinstance(info, mi.IntType | mi.FloatType) and unit is not None:
        return f"write for example {unit.examples}"
    return describe(info)


def describe(info: mi.Type) -> str:
    """How to write a value of the kind `info`."""
    match info:
        case mi.LiteralType():
            return f"one of {', '.join(str(value) for value in info.values)}"
        case mi.IntType():
            return "write a whole number" + (f", at least {info.ge}" if info.ge is not None else "")
        case mi.FloatType():
            return "write a number"
        case mi.BoolType():
            return "write true or false"
        case mi.StrType() if info.pattern is not None:
            return "write letters, digits and . _ + - only, a letter or digit first"
        case mi.StructType():
            return f"write a table with the keys {', '.join(keys_of(info.cls))}"
        case mi.VarTupleType():
            return "write a list"
        case _:
            return "write a text"


def stand_in(info: mi.Type) -> Any:
    """A value of the right type for one that could not be read, so that the rest of the file can still be judged.

    A number is NaN where it may be, since no comparison with NaN is true and so no rule is broken by it.
    """
    match info:
        case mi.StructType():
            return info.cls(**{field.name: stand_in(field.type) for field in info.fields if field.required})
        case mi.VarTupleType():
            return ()
        case mi.UnionType():
            return None if any(isinstance(one, mi.NoneType) for one in info.types) else stand_in(info.types[0])
        case mi.LiteralType():
            return info.values[0]
        case mi.IntType():
            return max(info.ge or 0, 0)
        case mi.FloatType():
            return math.nan
        case mi.BoolType():
            return False
        case _:
            return ""


def did_you_mean(word: str, choices: Sequence[str], *, also: Sequence[str] = ()) -> str:
    """The mend for a word that is not one of `choices`: the nearest one first, then all of them.

    `also` are valid too, but too many to list.
    """
    near = nearest(word, [*choices, *also])
    start = f"did you mean {near!r}? " if near else ""
    return f"{start}valid: {', '.join(choices) if choices else '(none)'}"


def nearest(word: str, choices: Sequence[str]) -> str | None:
    """The one of `choices` that `word` is probably meant to be."""
    near = difflib.get_close_matches(word[:80].lower(), [choice.lower() for choice in choices], n=1, cutoff=0.7)
    return next(choice for choice in choices if choice.lower() == near[0]) if near else None


# --- units -----------------------------------------------------------------------------------------------------------


class FieldUnit(msgspec.Struct, frozen=True):
    """The unit that the end of a field's name tells. `must_be_written`: the key is the short one, without the unit."""

    ending: str
    units: tuple[tuple[str, float], ...]
    examples: str
    must_be_written: bool = False

    def named(self) -> FieldUnit:
        return msgspec.structs.replace(self, must_be_written=True)

    def parse(self, text: str) -> float:
        if self.ending == "_s":
            return parse_duration_s(text)
        if self.ending == "_ratio":
            return float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)
        for unit, factor in self.units:
            try:
                return parse_quantity(text, unit=unit) * factor
            except ValueError:
                continue
        raise ValueError(f"{text!r} is not a quantity in {' or '.join(unit for unit, _ in self.units)}")


# The longest endings first. Bits a second are turned into bytes only where the file writes b/s.
_UNITS = (
    FieldUnit("_bytes_per_s", (("B/s", 1.0), ("b/s", 0.125)), "400Gb/s, 50GB/s"),
    FieldUnit("_transfers_per_s", (("T/s", 1.0),), "16GT/s"),
    FieldUnit("_flop_per_s", (("FLOP/s", 1.0),), "989TFLOP/s"),
    FieldUnit("_flop_per_token", (("FLOP", 1.0),), "2.4TFLOP"),
    FieldUnit("_bytes", (("B", 1.0),), "80GB, 512GiB"),
    FieldUnit("_ratio", (("%", 0.01),), "0.05, 5%"),
    FieldUnit("_w", (("W", 1.0),), "10.2kW"),
    FieldUnit("_c", (("C", 1.0),), "25C"),
    FieldUnit("_s", (("s", 1.0),), "90s, 5min, 1.5h, 30d"),
)


@lru_cache(maxsize=4096)
def unit_of(field: str) -> FieldUnit | None:
    for unit in _UNITS:
        if field.endswith(unit.ending):
            return unit
    return None


def short_key(field: str, cls: type) -> str:
    """The key of `field` without its unit, or `field` where that would be no word or another field's."""
    return _short_keys(cls)[field]


def unit_text(field: str, value: object) -> str | None:
    """`value` of `field` as text with a unit, where that reads back exactly; `None` = write the bare number."""
    unit = unit_of(field)
    if unit is None or unit.ending not in ("_bytes_per_s", "_transfers_per_s", "_flop_per_s", "_bytes", "_w"):
        return None
    if not isinstance(value, float | int) or value <= 0 or not math.isfinite(value):
        return None
    # Ports are sold by the bit, memory by the byte.
    name, factor = unit.units[-1] if field == "speed_bytes_per_s" else unit.units[0]
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value / factor >= scale:
            text = f"{value / factor / scale:.4f}".rstrip("0").rstrip(".") + prefix + name
            return text if unit.parse(text) == value else None
    return None


@lru_cache(maxsize=512)
def keys_of(cls: type) -> dict[str, str]:
    """Every key that a file may use for `cls`, with the field it means; the short keys first."""
    keys: dict[str, str] = {}
    for field in msgspec.structs.fields(cls):
        keys[short_key(field.encode_name, cls)] = field.name
        keys[field.encode_name] = field.name
    return keys


@lru_cache(maxsize=512)
def _short_keys(cls: type) -> dict[str, str]:
    """The short key of each field. Of two that would share one, the first has it."""
    fields = [field.encode_name for field in msgspec.structs.fields(cls)]
    keys: dict[str, str] = {}
    for field in fields:
        short = _without_unit(field)
        is_taken = not short or short in fields or short in keys.values()
        keys[field] = field if is_taken else short
    return keys


def _without_unit(field: str) -> str:
    unit = unit_of(field)
    if unit is None or unit.ending in ("_flop_per_token", "_ratio"):
        return field
    return field.removesuffix(unit.ending)
