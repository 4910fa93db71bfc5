"""Which nodes can work together when some links between them are cut."""

from __future__ import annotations

from collections.abc import Sequence

Pair = tuple[str, str]


def reach_each_other(preferred: Sequence[str], *, cut: Sequence[Pair]) -> list[str]:
    """As many of the nodes as reach each other, in order: again and again the one with most cut links is left out, of
    those with equally many the one that is preferred least."""
    left = list(preferred)
    while worst := _worst(left, cut):
        left.remove(worst)
    return left


def _worst(nodes: Sequence[str], cut: Sequence[Pair]) -> str | None:
    counts = {name: sum(name in pair and set(pair) <= set(nodes) for pair in cut) for name in nodes}
    most = max(counts.values(), default=0)
    return [name for name in nodes if counts[name] == most][-1] if most else None
