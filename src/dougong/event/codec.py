"""Events as lines of JSON: `{"stream":…,"seq":…,"time_ns":…,"cause":[stream,seq]|null,"event":{"kind":…,…}}`."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from functools import cache
from typing import cast, get_args, get_type_hints

import msgspec

from dougong.event.kinds import AnyEvent, Cause, Recorded, Unknown

KINDS: Mapping[str, type[AnyEvent]] = {kind.__name__: kind for kind in get_args(AnyEvent)}


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    stream: str
    seq: int
    time_ns: int
    cause: Cause | None = None
    event: AnyEvent


class _RawLine(msgspec.Struct, frozen=True, kw_only=True):
    stream: str
    seq: int
    time_ns: int
    cause: Cause | None = None
    event: msgspec.Raw


class _KindOnly(msgspec.Struct, frozen=True):
    kind: str


_encoder = msgspec.json.Encoder()
_strict = msgspec.json.Decoder(_Line)
_lax = msgspec.json.Decoder(_Line, strict=False)
_raw = msgspec.json.Decoder(_RawLine)
_kind_only = msgspec.json.Decoder(_KindOnly)


def encode(recorded: Recorded) -> bytes:
    """One line, newline included.

    A number that is not finite is written as the string "nan", "inf" or "-inf"; a byte smuggled into a text by
    `surrogateescape` is written as `\\udcNN`, which is no longer the same text but can be read.
    """
    event = recorded.event
    if isinstance(event, Unknown):
        assert "\n" not in event.fields_json
        return _encode_line(recorded, msgspec.Raw(event.fields_json.encode()))
    if any(not math.isfinite(getattr(event, name) or 0.0) for name in _float_fields(type(event))):
        return _encode_line(recorded, _readable(msgspec.to_builtins(event)))
    try:
        return _encode_line(recorded, event)
    except UnicodeEncodeError:
        return _encode_line(recorded, _readable(msgspec.to_builtins(event)))


def decode(line: bytes) -> Recorded:
    """The record of one line, with or without its newline. A kind that this version does not know becomes `Unknown`.

    So does a known kind with a choice (`cause_class`, `rung`) that this version does not know. Fields that a newer
    version added are passed over. Raises `msgspec.DecodeError`: the line is damaged.
    """
    try:
        return _recorded(_strict.decode(line))
    except msgspec.ValidationError:
        return _decode_unusual(line)


def _encode_line(recorded: Recorded, event: object) -> bytes:
    values = {
        "stream": recorded.stream,
        "seq": recorded.seq,
        "time_ns": recorded.time_ns,
        "cause": recorded.cause,
        "event": event,
    }
    return _encoder.encode(values) + b"\n"


def _decode_unusual(line: bytes) -> Recorded:
    raw = _raw.decode(line)
    kind = _kind_only.decode(raw.event).kind
    if kind in KINDS:
        try:
            return _recorded(_lax.decode(line))  # takes "nan" for a number
        except msgspec.ValidationError as error:
            if not str(error).startswith("Invalid enum value"):
                raise
    return _recorded(raw, event=Unknown(kind=kind, fields_json=bytes(raw.event).decode()))


def _recorded(line: _Line | _RawLine, *, event: Unknown | None = None) -> Recorded:
    known = line.event if isinstance(line, _Line) else event
    assert known is not None
    return Recorded(stream=line.stream, seq=line.seq, time_ns=line.time_ns, event=known, cause=line.cause)


@cache
def _float_fields(kind: type[AnyEvent]) -> tuple[str, ...]:
    hints = get_type_hints(kind)
    return tuple(
        name
        for name in kind.__struct_fields__
        if hints[name] is float or (isinstance(hints[name], types.UnionType) and float in get_args(hints[name]))
    )


def _readable(value: object) -> object:
    """The same tree of builtins with only what JSON can say."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        fields = cast("dict[str, object]", value)
        return {name: _readable(item) for name, item in fields.items()}
    if isinstance(value, (list, tuple)):
        return [_readable(item) for item in cast("list[object]", value)]
    return value
