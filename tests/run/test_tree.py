from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dougong.errors import UserError
from dougong.run.tree import assemble, dismantle


class Block:
    """Stands for a tensor."""


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=5)
)
KEYS = st.text(max_size=3) | st.integers() | st.booleans() | st.tuples(st.integers(), st.text(max_size=2))
TREES = st.recursive(
    SCALARS | st.builds(Block),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=12,
)


def is_block(value: object) -> bool:
    return isinstance(value, Block)


def shape(value: Any) -> Any:
    """A value with its types spelt out, so that 1, 1.0 and True differ, and lists and tuples too."""
    if isinstance(value, dict):
        return type(value).__name__, [(shape(key), shape(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [shape(item) for item in value]
    return type(value).__name__, id(value) if isinstance(value, Block) else value


@given(TREES)
def test_a_tree_taken_apart_and_put_together_is_the_same_types_included(tree: Any) -> None:
    skeleton, leaves = dismantle(tree, is_leaf=is_block)
    assert shape(assemble(skeleton, [leaf.value for leaf in leaves])) == shape(tree)


@given(TREES)
def test_a_leafs_path_leads_to_it(tree: Any) -> None:
    for leaf in dismantle(tree, is_leaf=is_block)[1]:
        found = tree
        for part in leaf.path:
            if isinstance(found, dict):
                # a key that is neither text nor number stands in the path as its repr
                found = next(item for key, item in found.items() if key == part or repr(key) == part)
            else:
                found = found[part]
        if all(isinstance(part, str) for part in leaf.path):
            assert isinstance(found, Block | dict | list | tuple)


def test_nan_and_infinity_survive() -> None:
    skeleton, _ = dismantle({"a": float("nan"), "b": float("-inf")}, is_leaf=is_block)
    tree = assemble(skeleton, [])
    assert tree["a"] != tree["a"] and tree["b"] == float("-inf")


def test_a_numpy_scalar_becomes_the_number_it_is() -> None:
    scalars = {"a": numpy.float32(0.5), "b": numpy.int64(3), "c": numpy.bool_(True)}
    assert shape(assemble(dismantle(scalars, is_leaf=is_block)[0], [])) == shape({"a": 0.5, "b": 3, "c": True})


Pair = namedtuple("Pair", "left right")


@pytest.mark.parametrize("foreign", [{1, 2}, object(), Pair(1, 2), 1j, lambda: None, numpy.zeros(2, dtype=object)])
def test_a_foreign_type_is_a_mistake_that_names_type_and_place(foreign: object) -> None:
    with pytest.raises(UserError) as caught:
        dismantle({"sampler": [0, {"seen": foreign}]}, is_leaf=is_block)
    assert type(foreign).__qualname__ in caught.value.what
    assert caught.value.where == "state['sampler'][1]['seen']"


def test_a_skeleton_with_an_unknown_tag_is_refused() -> None:
    import msgspec

    with pytest.raises(ValueError, match="unknown tag 'z'"):
        assemble(msgspec.msgpack.encode(["z", 1]), [])
