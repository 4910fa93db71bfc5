"""Structs as YAML that loads as the same structs: no defaults, named parts as a table, numbers with their units."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from dougong.spec.values import short_key, unit_text


def dump_typed(value: msgspec.Struct) -> str:
    """The YAML of `value`. What `spec.typed` reads from it is equal to `value`."""
    import yaml

    dumper = cast("Any", getattr(yaml, "CSafeDumper", yaml.SafeDumper))
    return yaml.dump(  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        _fields(value), Dumper=dumper, sort_keys=False, allow_unicode=True, width=110, default_flow_style=None
    )


def _fields(value: msgspec.Struct, *, skip: str = "") -> dict[str, object]:
    written: dict[str, object] = {}
    for field in msgspec.structs.fields(value):
        content = getattr(value, field.name)
        if field.name == skip or (not field.required and content == field.default):
            continue
        text = unit_text(field.encode_name, content)
        if text is not None:
            written[short_key(field.encode_name, type(value))] = text
        else:
            written[field.encode_name] = _plain(content)
    return written


def _plain(content: object) -> object:
    match content:
        case msgspec.Struct():
            return _fields(content)
        case tuple():
            return _items(cast("tuple[object, ...]", content))
        case float() if content.is_integer() and abs(content) < 2**53:
            return int(content)
        case _:
            return content


def _items(items: tuple[object, ...]) -> object:
    """A table by name where every item has its own, a list otherwise."""
    structs = [item for item in items if isinstance(item, msgspec.Struct) and item.__struct_fields__[0] == "name"]
    names = [cast("str", getattr(struct, "name", "")) for struct in structs]
    if structs and len(structs) == len(items) and len(set(names)) == len(names):
        return {name: _fields(struct, skip="name") for name, struct in zip(names, structs, strict=True)}
    return [_plain(item) for item in items]
