from __future__ import annotations

from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from dougong.event.codec import KINDS
from dougong.event.describe import describe
from dougong.event.kinds import StepFinished, Unknown, WarningRaised, WorkerLost


def example(kind: type[Any]) -> Any:
    values: dict[Any, Any] = {str: "text\nwith\x1b[31m break", int: 3, float: 0.5, bool: True}

    def value(hint: Any) -> Any:
        if hint in values:
            return values[hint]
        if get_origin(hint) is Literal:
            return get_args(hint)[0]
        return () if get_origin(hint) is tuple else value(get_args(hint)[0])

    return kind(**{name: value(get_type_hints(kind)[name]) for name in kind.__struct_fields__})


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_is_one_printable_line(kind: str) -> None:
    sentence = describe(example(KINDS[kind]))
    assert sentence
    assert sentence.isprintable()


def test_an_unknown_kind_is_shown_as_it_was_read() -> None:
    assert "meteor" in describe(Unknown(kind="Struck", fields_json='{"kind":"Struck","by":"meteor"}'))


def test_a_lost_worker_is_told_with_rank_step_and_cause() -> None:
    event = WorkerLost(generation=1, rank=3, component="n", cause_class="crash", detail="signal 9", last_step=41)
    assert describe(event) == "rank 3 lost after step 41 (crash): signal 9"


def test_a_range_of_steps_tells_the_time_of_one() -> None:
    event = StepFinished(
        generation=1,
        first_step=11,
        last_step=20,
        begin_ns=0,
        end_ns=1,
        is_redo=True,
        step_s=5.0,
        between_s=0.0,
        data_wait_s=0.0,
        checkpoint_stall_s=0.0,
        max_step_s=1.0,
        loss=2.5,
    )
    assert describe(event) == "steps 11-20 again, 500 ms each, loss 2.5000"


def test_escape_sequences_of_a_log_do_not_reach_the_terminal() -> None:
    assert "\x1b" not in describe(WarningRaised(component="n", text="\x1b[2Jboo\a"))
