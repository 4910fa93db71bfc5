"""Trees of plain values with tensors as leaves, to bytes and back, without pickle.

`state_dict()`s are dicts, lists, tuples, numbers, strings and tensors. `dismantle` splits a tree into a skeleton
(msgpack) and its leaves; `assemble` puts them together. A value of another type is a user's mistake that names the
place in the state.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from dougong.errors import UserError

_PLAIN = (bool, float, str, bytes, type(None))
_INT_LIMIT = 2**63
_Path = tuple[str | int, ...]


class Leaf(msgspec.Struct, frozen=True):
    """A leaf and where it stands in the tree; `key_path` is that in DCP's manner: keys as text, numbers for places."""

    path: tuple[str | int, ...]
    value: Any
    key_path: tuple[str | int, ...]


def dismantle(tree: object, *, is_leaf: Callable[[object], bool]) -> tuple[bytes, tuple[Leaf, ...]]:
    """The skeleton of a tree, and its leaves in the order of the walk. Raises UserError for other types."""
    leaves: list[Leaf] = []

    def walk(value: object, path: _Path, key_path: _Path) -> object:
        if is_leaf(value):
            leaves.append(Leaf(path, value, key_path))
            return ["x", len(leaves) - 1]
        kind: type[object] = type(value)
        if isinstance(value, _PLAIN) and type(value) in _PLAIN:
            return value
        if type(value) is int:
            return value if -_INT_LIMIT <= value < _INT_LIMIT else ["i", str(value)]
        if isinstance(value, dict):
            pairs = [
                [walk(key, path, key_path), walk(item, (*path, _step(key)), (*key_path, str(key)))]
                for key, item in cast("dict[Any, Any]", value).items()
            ]
            return ["o" if isinstance(value, OrderedDict) else "d", pairs]
        if kind is list or kind is tuple:
            content = enumerate(cast("Sequence[object]", value))
            items = [walk(item, (*path, index), (*key_path, index)) for index, item in content]
            return ["l" if kind is list else "t", items]
        scalar = cast("Any", value)
        if hasattr(scalar, "item") and getattr(scalar, "shape", None) == ():
            return walk(scalar.item(), path, key_path)  # of NumPy
        raise UserError(
            f"a {type(value).__module__}.{type(value).__qualname__} in the state cannot be saved without pickle",
            where="state" + "".join(f"[{part!r}]" for part in path),
            mend="keep tensors, arrays, numbers, strings, lists, tuples and dicts in the objects given to attach()",
        )

    return msgspec.msgpack.encode(walk(tree, (), ())), tuple(leaves)


def assemble(skeleton: bytes, leaves: Sequence[object]) -> Any:
    """The tree again. Law: assemble(*dismantle(tree)) == tree, types of containers included."""

    def build(value: Any) -> Any:
        if not isinstance(value, list):
            return value
        tag, content = cast("list[Any]", value)
        match tag:
            case "x":
                return leaves[content]
            case "i":
                return int(content)
            case "d":
                return {build(key): build(item) for key, item in content}
            case "o":
                return OrderedDict((build(key), build(item)) for key, item in content)
            case "l":
                return [build(item) for item in content]
            case "t":
                return tuple(build(item) for item in content)
            case _:
                raise ValueError(f"unknown tag {tag!r} in a saved state")

    return build(msgspec.msgpack.decode(skeleton))


def _step(key: object) -> str | int:
    return key if isinstance(key, str | int) else repr(key)
