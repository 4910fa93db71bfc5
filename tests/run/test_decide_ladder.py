"""Which ranks stay, when the next rung is taken, and when the world changes its size."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dougong.event.kinds import Placed
from dougong.run.decide import (
    EndStaying,
    Grow,
    Interrupt,
    JobView,
    Loss,
    NodeView,
    Place,
    Regroup,
    Wait,
    choose_placement,
    choose_size,
    decide,
)
from dougong.run.hang import Finding
from dougong.run.settings import Policy

POLICY = Policy()
NAMES = ("node-a", "node-b", "node-c", "node-d")


def nodes(*lost: str, names: tuple[str, ...] = NAMES) -> tuple[NodeView, ...]:
    return tuple(NodeView(component=name, is_connected=name not in lost, is_lost=name in lost) for name in names)


def placed(*names: str) -> tuple[Placed, ...]:
    return tuple(Placed(rank=index, local_rank=0, component=name) for index, name in enumerate(names))


def view(status: Any = "running", **changes: Any) -> JobView:
    base: dict[str, Any] = {
        "status": status,
        "generation": 1,
        "procs_per_node": 1,
        "num_nodes": 3,
        "placement": placed(*NAMES[:3]),
        "nodes": nodes(),
        "can_stay": (0, 1, 2),
        "is_attached": True,
    }
    return JobView(**{**base, **changes})


def loss(rank: int, order: tuple[int, int] = (0, 1)) -> Loss:
    return Loss(rank=rank, component=NAMES[rank], cause_class="crash", detail="signal 9", order=order)


def staying(decision: object) -> tuple[int, ...]:
    assert isinstance(decision, Interrupt)
    return decision.staying


# --- who stays ---


def test_all_ranks_but_the_lost_one_stay() -> None:
    assert staying(decide(view(losses=(loss(1),)), POLICY)) == (0, 2)


def test_ranks_of_other_nodes_stay_when_a_node_is_lost() -> None:
    assert staying(decide(view(nodes=nodes("node-c")), POLICY)) == (0, 1)


def test_two_at_once_leave_the_third() -> None:
    assert staying(decide(view(losses=(loss(0), loss(2))), POLICY)) == (1,)


def test_a_rank_that_hangs_is_ended_and_a_broken_link_ends_nobody() -> None:
    hang = Finding(rank=1, kind="hang", idle_s=3.0, reason="no progress")
    assert staying(decide(view(finding=hang), POLICY)) == (0, 2)
    cut = Finding(rank=1, kind="unwound", idle_s=2.0, reason="a collective broke")
    decision = decide(view(finding=cut), POLICY)
    assert staying(decision) == (0, 1, 2) and isinstance(decision, Interrupt) and not decision.wants_stacks


@pytest.mark.parametrize(
    "why",
    [
        {"can_stay": (0,)},
        {"num_fruitless": 1},
        {"is_stop_wanted": True},
        {"finished_ranks": (2,)},
    ],
)
def test_nobody_stays(why: dict[str, Any]) -> None:
    assert staying(decide(view(losses=(loss(1),), **why), POLICY)) == ()


def test_nobody_stays_if_it_was_switched_off() -> None:
    assert staying(decide(view(losses=(loss(1),)), Policy(is_in_process=False))) == ()


# --- from the broken step to the new group ---


def tearing_down(**changes: Any) -> JobView:
    base: dict[str, Any] = {"staying": (0, 2), "killed_nodes": NAMES[:3], "num_fruitless": 1}
    return view("tearing-down", **{**base, **changes})


def test_the_others_are_waited_for_until_they_have_left_their_step() -> None:
    assert isinstance(decide(tearing_down(unwound=(0,)), POLICY), Wait)
    decision = decide(tearing_down(unwound=(0, 2)), POLICY)
    assert isinstance(decision, Place)
    assert decision.rung == "in-process" and decision.staying == (0, 2) and decision.placement == placed(*NAMES[:3])
    assert decision.reason == "rank(s) 1 start again, the others stay"


def test_one_that_does_not_leave_its_step_costs_all_of_them_their_processes() -> None:
    late = tearing_down(unwound=(0,), teardown_s=POLICY.unwind_s + 0.1)
    assert isinstance(decide(late, POLICY), EndStaying)
    slow_steps = tearing_down(unwound=(0,), teardown_s=POLICY.unwind_s + 0.1, slow_step_s=POLICY.unwind_s)
    assert isinstance(decide(slow_steps, POLICY), Wait)


def test_a_second_node_lost_meanwhile_ends_the_staying() -> None:
    assert isinstance(decide(tearing_down(unwound=(0,), nodes=nodes("node-c")), POLICY), EndStaying)


def test_a_lost_node_s_rank_moves_while_the_others_stay() -> None:
    decision = decide(tearing_down(unwound=(0, 2), nodes=nodes("node-b")), POLICY)
    assert isinstance(decision, Place) and decision.rung == "in-process"
    assert decision.placement == placed("node-a", "node-d", "node-c")


def test_the_rungs_in_a_row() -> None:
    assert isinstance(first := decide(tearing_down(staying=()), POLICY), Place) and first.rung == "standby"
    after_in_process = decide(tearing_down(staying=(), num_fruitless=2, rung="in-process"), POLICY)
    assert isinstance(after_in_process, Place)
    assert after_in_process.rung == "standby" and after_in_process.backoff_s == 0.0
    after_standby = decide(tearing_down(staying=(), num_fruitless=2, rung="standby"), POLICY)
    assert isinstance(after_standby, Place) and after_standby.rung == "cold"


def test_a_recovery_in_the_process_that_does_not_finish_is_interrupted() -> None:
    late = view(rung="in-process", is_restored=False, running_s=POLICY.rejoin_s + 1)
    decision = decide(late, POLICY)
    assert staying(decision) == () and isinstance(decision, Interrupt) and "did not finish" in decision.reason


# --- the size of the world ---


def test_without_a_spare_the_job_goes_on_with_fewer_nodes_if_it_may() -> None:
    three = NAMES[:3]
    lost = view("tearing-down", nodes=nodes("node-b", names=three), killed_nodes=three, min_nodes=2, num_fruitless=1)
    decision = decide(lost, POLICY)
    assert isinstance(decision, Place) and decision.rung == "resized"
    assert decision.placement == placed("node-a", "node-c")


def test_ranks_that_stay_cannot_change_the_size_of_their_world() -> None:
    three = NAMES[:3]
    lost = tearing_down(unwound=(0, 2), nodes=nodes("node-b", names=three), min_nodes=2)
    assert isinstance(decide(lost, POLICY), EndStaying)


def test_a_node_that_may_come_back_is_waited_for_before_the_world_shrinks() -> None:
    away = NodeView(component="node-b", is_connected=False, is_lost=False, is_agent_asked=True)
    three = (nodes()[0], away, nodes()[2])
    waiting = view("tearing-down", nodes=three, killed_nodes=NAMES[:3], min_nodes=2)
    assert choose_size(waiting, POLICY) == 3
    late = view("tearing-down", nodes=three, min_nodes=2, gathering_s=POLICY.shrink_wait_s + 1)
    assert choose_size(late, POLICY) == 2


def test_a_smaller_world_grows_once_a_node_is_free_for_a_while() -> None:
    small = {"placement": placed("node-a", "node-c"), "can_stay": (0, 1)}
    assert isinstance(decide(view(**small, running_s=1.0), POLICY), Wait)
    decision = decide(view(**small, running_s=POLICY.grow_wait_s + 1), POLICY)
    assert isinstance(decision, Grow) and "node-b" in decision.reason
    asked = view(**small, running_s=POLICY.grow_wait_s + 1, is_growing=True)
    assert isinstance(decide(asked, POLICY), Wait)
    left = view(**small, is_growing=True, has_left=True, finished_ranks=(0, 1))
    assert isinstance(decide(left, POLICY), Regroup)
    # the controller that asked them has died meanwhile: the next one must not take a half-trained job for finished
    assert isinstance(decide(view(**small, has_left=True, finished_ranks=(0, 1)), POLICY), Regroup)


@pytest.mark.parametrize("why", [{"is_attached": False}, {"is_restored": False}, {"is_stop_wanted": True}])
def test_it_does_not_grow(why: dict[str, Any]) -> None:
    small = view(placement=placed("node-a", "node-c"), running_s=POLICY.grow_wait_s + 1, **why)
    assert isinstance(decide(small, POLICY), Wait)


def test_it_does_not_grow_on_its_last_restart_nor_by_nodes_that_are_not_tested_yet() -> None:
    small: dict[str, Any] = {"placement": placed("node-a", "node-c"), "running_s": POLICY.grow_wait_s + 1}
    assert isinstance(decide(view(**small, num_restarts=2), Policy(max_restarts=2)), Wait)
    assert isinstance(decide(view(**small, num_restarts=1), Policy(max_restarts=2)), Grow)
    assert isinstance(decide(view(**small, untested=("node-b", "node-d")), POLICY), Wait)


@given(
    lost=st.sets(st.sampled_from(NAMES)),
    count=st.integers(1, 4),
    before=st.lists(st.sampled_from(NAMES), unique=True, max_size=4),
)
def test_a_placement_of_any_size_uses_living_nodes_once_and_numbers_ranks_without_a_gap(
    lost: set[str], count: int, before: list[str]
) -> None:
    placement = choose_placement(view(nodes=nodes(*lost), placement=placed(*before)), num_nodes=count)
    if placement is None:
        assert len(NAMES) - len(lost) < count
        return
    used = [item.component for item in placement]
    assert len(set(used)) == len(used) == count and not lost & set(used)
    assert [item.rank for item in placement] == list(range(count))
