from __future__ import annotations

import types
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dougong.event.codec import KINDS, decode, encode
from dougong.event.kinds import (
    Cause,
    NodeFigures,
    NodeLost,
    NodeRepaired,
    Placed,
    Recorded,
    StepFinished,
    Unknown,
    WarningRaised,
)

TEXT = st.text(max_size=30)
INTEGER = st.integers(-(2**63), 2**63 - 1)


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    if hint is str:
        return TEXT
    if hint is bool:
        return st.booleans()
    if hint is int:
        return INTEGER
    if hint is float:
        return st.floats(allow_nan=False)
    if hint is type(None):
        return st.none()
    if hint in NESTED:
        return NESTED[hint]
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return structs(hint)
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) is tuple and get_args(hint)[-1] is not Ellipsis:
        return st.tuples(*(values_of(part) for part in get_args(hint)))
    if get_origin(hint) is tuple:
        return st.lists(values_of(get_args(hint)[0]), max_size=3).map(tuple)
    assert isinstance(hint, types.UnionType), hint
    return st.one_of([values_of(choice) for choice in get_args(hint)])


def structs(kind: type[Any]) -> st.SearchStrategy[Any]:
    hints = get_type_hints(kind)
    return st.builds(kind, **{name: values_of(hints[name]) for name in kind.__struct_fields__})


FINITE = st.none() | st.floats(allow_nan=False, allow_infinity=False)
"""Only a number of the event itself may be infinite."""
NESTED: dict[Any, st.SearchStrategy[Any]] = {
    Placed: structs(Placed),
    NodeFigures: st.builds(NodeFigures, component=TEXT, flop_per_s=FINITE, bytes_per_s=FINITE),
}
JSON = st.recursive(
    st.none() | st.booleans() | INTEGER | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
UNKNOWN = st.builds(
    lambda kind, fields: Unknown(
        kind=kind, fields_json=msgspec.json.encode({**fields, "kind": kind, "b": 1.50}).decode()
    ),
    TEXT.filter(lambda kind: kind not in KINDS),
    st.dictionaries(TEXT, JSON, max_size=3),
)


def records(events: st.SearchStrategy[Any]) -> st.SearchStrategy[Recorded]:
    causes = st.none() | st.builds(Cause, stream=TEXT, seq=INTEGER)
    return st.builds(Recorded, stream=TEXT, seq=INTEGER, time_ns=INTEGER, event=events, cause=causes)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_decode_undoes_encode_for_every_kind(kind: str) -> None:
    @given(records(structs(KINDS[kind])))
    def law(recorded: Recorded) -> None:
        line = encode(recorded)
        assert line.endswith(b"\n")
        assert line.count(b"\n") == 1
        assert decode(line) == recorded

    law()


@given(records(UNKNOWN))
def test_an_unknown_kind_comes_back_byte_for_byte(recorded: Recorded) -> None:
    line = encode(recorded)
    assert decode(line) == recorded
    assert encode(decode(line)) == line


def test_the_line_has_the_agreed_form() -> None:
    recorded = Recorded(
        stream="run", seq=2, time_ns=3, cause=Cause(stream="a", seq=1), event=WarningRaised(component="n", text="t")
    )
    assert encode(recorded) == (
        b'{"stream":"run","seq":2,"time_ns":3,"cause":["a",1],'
        b'"event":{"kind":"WarningRaised","component":"n","text":"t"}}\n'
    )


def test_fields_of_a_newer_version_are_passed_over() -> None:
    line = b'{"stream":"a","seq":1,"time_ns":2,"new":[1],"event":{"kind":"NodeRepaired","x":{},"component":"n"}}'
    assert decode(line).event == NodeRepaired(component="n")


def test_a_choice_of_a_newer_version_makes_the_kind_unknown_and_is_kept() -> None:
    event = NodeLost(component="n", reason="gone")
    line = encode(Recorded(stream="a", seq=1, time_ns=2, event=event)).replace(b'"node"', b'"meteorite"')
    recorded = decode(line)
    assert isinstance(recorded.event, Unknown)
    assert recorded.event.kind == "NodeLost"
    assert encode(recorded) == line


@given(st.sampled_from([float("nan"), float("inf"), float("-inf")]), st.booleans())
def test_a_number_that_is_not_finite_survives(number: float, is_required: bool) -> None:
    event = StepFinished(
        generation=1,
        first_step=1,
        last_step=1,
        begin_ns=0,
        end_ns=1,
        is_redo=False,
        step_s=number if is_required else 1.0,
        between_s=0.0,
        data_wait_s=0.0,
        checkpoint_stall_s=0.0,
        max_step_s=1.0,
        loss=number,
    )
    line = encode(Recorded(stream="a", seq=1, time_ns=2, event=event))
    back = decode(line).event
    assert repr(back) == repr(event)
    assert encode(decode(line)) == line


def test_text_that_is_not_unicode_can_still_be_written() -> None:
    event = WarningRaised(component="n", text=b"caf\xe9".decode("utf-8", "surrogateescape"))
    back = decode(encode(Recorded(stream="a", seq=1, time_ns=2, event=event))).event
    assert back == WarningRaised(component="n", text="caf\\udce9")


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"{}\n",
        b"\0\0\0\n",
        b'{"stream":"a","seq":1,"time_ns":2,"event":{"kind":"NodeRepaired"}}\n',
        b'{"stream":"a","seq":1,"time_ns":2,"event":{"component":"n"}}\n',
        b'{"stream":"a","seq":"x","time_ns":2,"event":{"kind":"NodeRepaired","component":"n"}}\n',
        b'{"stream":"a\xff","seq":1,"time_ns":2,"event":{"kind":"NodeRepaired","component":"n"}}\n',
    ],
)
def test_a_damaged_line_is_refused(line: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(line)
