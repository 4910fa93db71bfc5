from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dougong.backend.sim.progress import Pace

PACES = st.builds(Pace, step_ns=st.integers(1, 50), stall_ns=st.integers(0, 50), interval_steps=st.integers(1, 7))


def _end_by_hand(pace: Pace, first_step: int, last_step: int) -> int:
    elapsed_ns = 0
    for step in range(first_step, last_step + 1):
        elapsed_ns += pace.step_ns + (pace.stall_ns if step % pace.interval_steps == 0 else 0)
    return elapsed_ns


@given(PACES, st.integers(1, 40), st.integers(0, 40))
def test_the_duration_of_a_range_is_the_sum_of_its_steps_and_stalls(
    pace: Pace, first_step: int, num_steps: int
) -> None:
    last_step = first_step + num_steps - 1
    assert pace.duration_ns(first_step, last_step) == _end_by_hand(pace, first_step, last_step)


@given(PACES, st.integers(1, 40), st.integers(0, 2000))
def test_a_step_is_finished_once_its_checkpoint_is(pace: Pace, first_step: int, elapsed_ns: int) -> None:
    last_step = pace.last_finished(first_step, elapsed_ns=elapsed_ns)
    assert _end_by_hand(pace, first_step, last_step) <= elapsed_ns
    assert _end_by_hand(pace, first_step, last_step + 1) > elapsed_ns


@given(PACES, st.integers(0, 40))
def test_the_last_checkpoint_is_not_newer_than_the_last_step(pace: Pace, last_step: int) -> None:
    saved = pace.last_checkpoint(last_step)
    assert saved % pace.interval_steps == 0
    assert last_step - pace.interval_steps < saved <= last_step
