"""Any message or letter, drawn from its type. Integers fit into 64 bits, as those of the program do."""

from __future__ import annotations

import types
import typing
from typing import Any

import msgspec
from hypothesis import strategies as st

_LEAVES: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=8),
    bytes: st.binary(max_size=8),
    types.NoneType: st.none(),
}


def values(of: Any) -> st.SearchStrategy[Any]:
    """Values of a type made of structs, unions, tuples, literals and plain types."""
    if of in _LEAVES:
        return _LEAVES[of]
    origin, arguments = typing.get_origin(of), typing.get_args(of)
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(values(argument) for argument in arguments))
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values(arguments[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*(values(argument) for argument in arguments))
    assert issubclass(of, msgspec.Struct), of
    hints = typing.get_type_hints(of)
    return st.builds(of, **{name: values(hints[name]) for name in of.__struct_fields__})
