from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dougong.event.fold import fold
from dougong.event.kinds import NodeRepaired, Recorded

RECORDS = st.lists(
    st.builds(
        lambda seq, name: Recorded(stream="a", seq=seq, time_ns=0, event=NodeRepaired(component=name)),
        st.integers(1, 1000),
        st.text(max_size=3),
    )
)


def step(state: tuple[str, ...], record: Recorded) -> tuple[str, ...]:
    assert isinstance(record.event, NodeRepaired)
    return (*state[-5:], f"{len(state)}:{record.event.component}:{record.seq}")


@given(RECORDS, st.lists(st.integers(1, 7), min_size=1))
def test_a_fold_does_not_depend_on_the_size_of_the_batches(records: list[Recorded], sizes: list[int]) -> None:
    state: tuple[str, ...] = ()
    rest, index = records, 0
    while rest:
        size = sizes[index % len(sizes)]
        state = fold(rest[:size], initial=state, step=step)
        rest, index = rest[size:], index + 1
    assert state == fold(records, initial=(), step=step)


def test_the_fold_of_nothing_is_the_initial_state() -> None:
    assert fold([], initial=("x",), step=step) == ("x",)
