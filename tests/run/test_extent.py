from __future__ import annotations

import math

import numpy
from hypothesis import given
from hypothesis import strategies as st

from dougong.run.extent import Box, Extent, deal, intersection, uncovered, whole

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=3).map(tuple)


@st.composite
def splits(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """The boxes of a tensor that was cut again and again, at any place along any dimension."""
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.shape[dim]))
        for begin, size in ((0, at), (at, box.shape[dim] - at)):
            offsets = tuple(o + begin * (d == dim) for d, o in enumerate(box.offsets))
            boxes.append(Box(offsets, tuple(size if d == dim else s for d, s in enumerate(box.shape))))
    return boxes


@st.composite
def two_splits(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box], list[Box]]:
    shape = draw(SHAPES)
    return shape, draw(splits(shape)), draw(splits(shape))


def put_together(box: Box, stored: dict[Box, numpy.ndarray]) -> numpy.ndarray:
    target = numpy.full(box.shape, -1)
    for other, content in stored.items():
        shared = intersection(box, other)
        if shared is not None:
            target[shared.within(box)] = content[shared.within(other)]
    return target


@given(case=two_splits())
def test_boxes_of_one_split_are_put_together_from_those_of_any_other(
    case: tuple[tuple[int, ...], list[Box], list[Box]],
) -> None:
    shape, before, after = case
    tensor = numpy.arange(math.prod(shape)).reshape(shape)
    stored = {box: tensor[box.within(whole(shape))] for box in before if box.num_elements}
    for box in after:
        assert uncovered(box, list(stored)) is None
        assert numpy.array_equal(put_together(box, stored), tensor[box.within(whole(shape))])


@given(case=two_splits(), lost=st.integers(0, 10))
def test_a_box_is_covered_exactly_if_every_element_is(
    case: tuple[tuple[int, ...], list[Box], list[Box]], lost: int
) -> None:
    shape, before, after = case
    stored = before[: lost % (len(before) + 1)]
    has = numpy.zeros(shape, dtype=bool)
    for box in stored:
        has[box.within(whole(shape))] = True
    for box in after:
        missing = uncovered(box, stored)
        assert (missing is None) == has[box.within(whole(shape))].all()
        if missing is not None:
            assert not has[missing.within(whole(shape))].any()


@st.composite
def worlds(draw: st.DrawFn) -> list[tuple[Extent, int]]:
    """Boxes of a job whose ranks are dealt into groups of holders, as replicas of shards are; with their bytes."""
    world_size = draw(st.integers(1, 8))
    sets = st.sets(st.integers(0, world_size - 1), min_size=1).map(lambda ranks: tuple(sorted(ranks)))
    holders = draw(st.lists(sets, min_size=1, max_size=12))
    return [(Extent(f"w{i}", (), (4,), (0,), who), draw(st.integers(0, 1000))) for i, who in enumerate(holders)]


@given(boxes=worlds())
def test_each_box_is_written_by_exactly_one_of_its_holders_whatever_each_rank_knows(
    boxes: list[tuple[Extent, int]],
) -> None:
    """A rank knows only the boxes that it holds, and asks nobody."""
    written: list[str] = []
    for rank in range(8):
        known = [(extent, size) for extent, size in boxes if rank in extent.holders]
        writers = deal([extent for extent, _ in known], [size for _, size in known])
        written += [extent.name for (extent, _), writer in zip(known, writers, strict=True) if writer == rank]
    assert sorted(written) == sorted(extent.name for extent, _ in boxes)


def test_the_bytes_of_replicas_are_shared_evenly() -> None:
    extents = [Extent(f"w{i}", (), (1,), (0,), (0, 1, 2)) for i in range(9)]
    writers = deal(extents, [10] * 9)
    assert sorted(writers) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_the_order_in_which_a_rank_lists_its_boxes_changes_nothing() -> None:
    extents = [Extent(f"w{i}", (), (1,), (0,), (0, 1)) for i in range(7)]
    sizes = [3, 3, 5, 1, 1, 8, 2]
    forward = dict(zip([e.name for e in extents], deal(extents, sizes), strict=True))
    assert dict(zip([e.name for e in extents[::-1]], deal(extents[::-1], sizes[::-1]), strict=True)) == forward
