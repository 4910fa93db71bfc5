from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dougong.event.kinds import Placed
from dougong.run.decide import (
    Finish,
    GiveUp,
    Interrupt,
    JobView,
    LoseNode,
    Loss,
    NodeView,
    Place,
    ProbeNodes,
    Quarantine,
    RestartAgent,
    Stop,
    Wait,
    backoff_s,
    choose_placement,
    choose_restore,
    decide,
    first_loss,
)
from dougong.run.hang import Finding, FindingKind
from dougong.run.settings import Policy
from dougong.run.wire import SnapshotStatus

POLICY = Policy()
A, B, SPARE = "node-a", "node-b", "node-c"
PLACEMENT = (Placed(rank=0, local_rank=0, component=A), Placed(rank=1, local_rank=0, component=B))


def node(component: str, *, is_connected: bool = True, is_lost: bool = False, **rest: Any) -> NodeView:
    return NodeView(component=component, is_connected=is_connected, is_lost=is_lost, **rest)


def gone(component: str) -> NodeView:
    return node(component, is_connected=False, is_lost=True)


ALL = (node(A), node(B), node(SPARE))


def view(status: Any, **changes: Any) -> JobView:
    base: dict[str, Any] = {
        "status": status,
        "generation": 0 if status == "gathering" else 1,
        "procs_per_node": 1,
        "num_nodes": 2,
        "placement": () if status == "gathering" else PLACEMENT,
        "nodes": ALL,
    }
    return JobView(**{**base, **changes})


def loss(rank: int, *, order: tuple[int, int] = (0, 1), **rest: Any) -> Loss:
    return Loss(
        rank=rank, component=PLACEMENT[rank].component, cause_class="crash", detail="signal 9", order=order, **rest
    )


def finding(kind: FindingKind, rank: int = 1) -> Finding:
    return Finding(rank=rank, kind=kind, idle_s=4.0, reason="no progress")


# --- nodes ---


@pytest.mark.parametrize("status", ["gathering", "running", "tearing-down", "backing-off"])
def test_an_absent_agent_is_asked_for_once(status: str) -> None:
    absent = node(B, is_connected=False)
    assert decide(view(status, nodes=(node(A), absent)), POLICY) == RestartAgent(
        component=B, reason="its agent is not there"
    )
    asked = node(B, is_connected=False, is_agent_asked=True, silent_s=POLICY.node_grace_s)
    assert not isinstance(decide(view(status, nodes=(node(A), asked)), POLICY), RestartAgent | LoseNode)


def test_a_node_silent_beyond_its_grace_is_lost() -> None:
    silent = node(B, is_connected=False, is_agent_asked=True, silent_s=POLICY.node_grace_s + 0.1)
    decision = decide(view("running", nodes=(node(A), silent)), POLICY)
    assert isinstance(decision, LoseNode) and decision.component == B and "10.1 s" in decision.reason


def test_nothing_is_done_about_nodes_once_the_job_has_ended() -> None:
    assert isinstance(decide(view("ended", nodes=(node(A, is_connected=False),)), POLICY), Wait)


# --- gathering ---


def test_the_first_start_takes_the_chosen_nodes_and_leaves_the_spare() -> None:
    decision = decide(view("gathering"), POLICY)
    assert isinstance(decision, Place)
    assert decision.placement == PLACEMENT and decision.rung == "first" and decision.backoff_s == 0


def test_the_first_start_waits_for_a_chosen_node_rather_than_take_the_spare() -> None:
    absent = node(B, is_connected=False, is_agent_asked=True)
    nodes = (node(A), absent, node(SPARE))
    assert isinstance(decide(view("gathering", nodes=nodes), POLICY), Wait)
    late = decide(view("gathering", nodes=nodes, gathering_s=POLICY.gather_s), POLICY)
    assert isinstance(late, Place) and [placed.component for placed in late.placement] == [A, SPARE]


def test_the_first_start_takes_the_spare_at_once_when_a_chosen_node_is_lost() -> None:
    decision = decide(view("gathering", nodes=(node(A), gone(B), node(SPARE))), POLICY)
    assert isinstance(decision, Place) and [placed.component for placed in decision.placement] == [A, SPARE]


def test_a_start_without_enough_nodes_gives_up_when_nobody_can_still_come() -> None:
    decision = decide(view("gathering", nodes=(node(A), gone(B), gone(SPARE))), POLICY)
    assert isinstance(decision, GiveUp) and f"lost {B}, {SPARE}" in decision.reason


def test_a_start_without_enough_nodes_waits_only_so_long_for_one_that_may_come() -> None:
    nodes = (node(A), node(B, is_connected=False, is_agent_asked=True))
    waiting = view("gathering", nodes=nodes, gathering_s=POLICY.gather_s + 1)
    assert isinstance(decide(waiting, POLICY), Wait)
    late = view("gathering", nodes=nodes, gathering_s=POLICY.spare_wait_s + 1)
    assert isinstance(decide(late, POLICY), GiveUp)


def test_a_stop_before_the_start_stops() -> None:
    assert isinstance(decide(view("gathering", is_stop_wanted=True), POLICY), Stop)


# --- running ---


def test_a_job_that_runs_well_is_left_alone() -> None:
    assert decide(view("running"), POLICY) == Wait(reason="running")


def test_a_crash_interrupts_at_once_with_the_rank_and_the_detail() -> None:
    decision = decide(view("running", losses=(loss(1),)), POLICY)
    assert isinstance(decision, Interrupt) and decision.loss.rank == 1
    assert decision.reason == "rank 1: signal 9" and not decision.wants_stacks


def test_a_broken_collective_alone_waits_a_moment_for_its_cause() -> None:
    broken = loss(0, order=(1, 5))
    assert isinstance(decide(view("running", losses=(broken,), loss_settle_s=0.1), POLICY), Wait)
    late = decide(view("running", losses=(broken,), loss_settle_s=0.3), POLICY)
    assert isinstance(late, Interrupt) and late.loss == broken


def test_the_cause_goes_before_what_it_took_along_however_they_arrive() -> None:
    broken, crash = loss(0, order=(1, 5)), loss(1, order=(0, 9))
    for losses in ((broken, crash), (crash, broken)):
        decision = decide(view("running", losses=losses), POLICY)
        assert isinstance(decision, Interrupt) and decision.loss == crash


def test_a_lost_node_goes_before_the_losses_of_its_ranks() -> None:
    decision = decide(view("running", nodes=(node(A), gone(B), node(SPARE)), losses=(loss(0),)), POLICY)
    assert isinstance(decision, Interrupt)
    assert (decision.loss.cause_class, decision.loss.rank, decision.loss.component) == ("node", 1, B)


def test_the_loss_of_a_spare_does_not_interrupt() -> None:
    assert isinstance(decide(view("running", nodes=(node(A), node(B), gone(SPARE))), POLICY), Wait)


@pytest.mark.parametrize(("kind", "cause"), [("stopped", "stopped"), ("hang", "hang")])
def test_a_hang_interrupts_and_wants_stacks(kind: FindingKind, cause: str) -> None:
    decision = decide(view("running", finding=finding(kind)), POLICY)
    assert isinstance(decision, Interrupt) and decision.wants_stacks
    assert (decision.loss.cause_class, decision.loss.component) == (cause, B)


def test_the_job_finishes_when_every_rank_has_and_not_before() -> None:
    assert isinstance(decide(view("running", finished_ranks=(0,)), POLICY), Wait)
    assert isinstance(decide(view("running", finished_ranks=(0, 1)), POLICY), Finish)


def test_a_complete_stop_stops_also_while_ranks_look_idle() -> None:
    decision = decide(view("running", is_stop_wanted=True, is_stop_complete=True, finding=finding("hang")), POLICY)
    assert isinstance(decision, Stop)


def test_a_stop_that_is_not_complete_waits() -> None:
    assert isinstance(decide(view("running", is_stop_wanted=True), POLICY), Wait)


# --- tearing down ---


def test_the_next_start_waits_until_every_node_has_ended_its_workers() -> None:
    decision = decide(view("tearing-down", killed_nodes=(A,)), POLICY)
    assert isinstance(decision, Wait) and B in decision.reason
    assert isinstance(decide(view("tearing-down", killed_nodes=(A, B)), POLICY), Place)


def test_nobody_waits_for_a_lost_node_to_end_its_workers() -> None:
    decision = decide(view("tearing-down", nodes=(node(A), gone(B), node(SPARE)), killed_nodes=(A,)), POLICY)
    assert isinstance(decision, Place) and decision.rung == "replaced-node"
    assert [placed.component for placed in decision.placement] == [A, SPARE]
    assert decision.reason == f"rank(s) 1 move to {SPARE}"


def test_a_node_whose_workers_do_not_die_is_lost() -> None:
    decision = decide(view("tearing-down", killed_nodes=(A,), teardown_s=POLICY.teardown_s + 2.1), POLICY)
    assert isinstance(decision, LoseNode) and decision.component == B


def test_a_restart_on_the_same_nodes_is_from_standbys() -> None:
    decision = decide(view("tearing-down", killed_nodes=(A, B), num_fruitless=1), POLICY)
    assert isinstance(decision, Place) and decision.rung == "standby" and decision.backoff_s == 0


def test_fruitless_failures_back_off_then_give_up() -> None:
    second = decide(view("tearing-down", killed_nodes=(A, B), num_fruitless=2), POLICY)
    assert isinstance(second, Place) and second.backoff_s == POLICY.backoff_first_s
    third = decide(view("tearing-down", killed_nodes=(A, B), num_fruitless=3), POLICY)
    assert isinstance(third, GiveUp) and "3 failures in a row" in third.reason


@pytest.mark.parametrize(("num_restarts", "is_given_up"), [(1, False), (2, True)])
def test_max_restarts_is_the_number_of_restarts(num_restarts: int, is_given_up: bool) -> None:
    job = view("tearing-down", killed_nodes=(A, B), num_restarts=num_restarts)
    assert isinstance(decide(job, Policy(max_restarts=2)), GiveUp) is is_given_up


def test_without_a_limit_progress_between_failures_keeps_the_job_going() -> None:
    job = view("tearing-down", killed_nodes=(A, B), num_restarts=1000, num_fruitless=1)
    assert isinstance(decide(job, POLICY), Place)


def test_a_stop_while_tearing_down_does_not_start_again() -> None:
    assert isinstance(decide(view("tearing-down", killed_nodes=(A, B), is_stop_wanted=True), POLICY), Stop)


def test_no_node_left_for_a_restart_gives_up_with_the_lost_ones_named() -> None:
    job = view("tearing-down", nodes=(node(A), gone(B), gone(SPARE)), killed_nodes=(A,))
    decision = decide(job, POLICY)
    assert isinstance(decision, GiveUp) and B in decision.reason and "2 needed" in decision.reason


# --- backing off ---


def test_back_off_waits_then_starts_without_a_second_one() -> None:
    assert isinstance(decide(view("backing-off", backoff_left_s=0.5, num_fruitless=2), POLICY), Wait)
    decision = decide(view("backing-off", backoff_left_s=0.0, num_fruitless=2), POLICY)
    assert isinstance(decision, Place) and decision.backoff_s == 0


def test_a_stop_while_backing_off_stops() -> None:
    assert isinstance(decide(view("backing-off", backoff_left_s=5.0, is_stop_wanted=True), POLICY), Stop)


def test_a_node_lost_while_backing_off_is_replaced() -> None:
    decision = decide(view("backing-off", nodes=(gone(A), node(B), node(SPARE))), POLICY)
    assert isinstance(decision, Place) and [placed.component for placed in decision.placement] == [SPARE, B]


@given(st.integers(0, 60))
def test_back_off_never_shrinks_and_has_a_ceiling(num_fruitless: int) -> None:
    now, then = backoff_s(num_fruitless, POLICY), backoff_s(num_fruitless + 1, POLICY)
    assert 0 <= now <= then <= POLICY.backoff_max_s


# --- laws ---


LOSSES = st.builds(loss, st.integers(0, 1), order=st.tuples(st.integers(0, 1), st.integers(0, 5)))


@given(st.lists(LOSSES, min_size=1, max_size=6), st.randoms())
def test_the_first_loss_does_not_depend_on_the_order_of_arrival(losses: list[Loss], shuffle: Any) -> None:
    shuffled = list(losses)
    shuffle.shuffle(shuffled)
    assert first_loss(shuffled) == first_loss(losses)
    assert first_loss(losses).order[0] == min(item.order[0] for item in losses)


@st.composite
def cluster_views(draw: st.DrawFn) -> JobView:
    """A job on some of the nodes of a cluster, some of which are lost or away."""
    names = [f"n{index}" for index in range(draw(st.integers(1, 6)))]
    num_nodes = draw(st.integers(1, len(names)))
    procs = draw(st.integers(1, 4))
    nodes = tuple(node(name, is_connected=draw(st.booleans()), is_lost=draw(st.booleans())) for name in names)
    placement: tuple[Placed, ...] = ()
    if draw(st.booleans()):
        homes = draw(st.permutations(names))[:num_nodes]
        placement = tuple(
            Placed(rank=index * procs + local, local_rank=local, component=home)
            for index, home in enumerate(homes)
            for local in range(procs)
        )
    return JobView(
        status="tearing-down",
        generation=1 if placement else 0,
        procs_per_node=procs,
        num_nodes=num_nodes,
        placement=placement,
        nodes=nodes,
        keepers=tuple(
            (name, tuple(draw(st.lists(st.sampled_from(names), max_size=2, unique=True))))
            for name in names
            if draw(st.booleans())
        ),
    )


@given(cluster_views())
def test_a_placement_puts_each_rank_once_on_usable_nodes_and_no_node_twice(job: JobView) -> None:
    placement = choose_placement(job)
    usable = {node.component for node in job.nodes if node.is_connected and not node.is_lost}
    if placement is None:
        assert len(usable) < job.num_nodes
        return
    assert [placed.rank for placed in placement] == list(range(job.num_nodes * job.procs_per_node))
    by_node: dict[str, list[int]] = {}
    for placed in placement:
        by_node.setdefault(placed.component, []).append(placed.local_rank)
    assert len(by_node) == job.num_nodes and set(by_node) <= usable
    assert all(local_ranks == list(range(job.procs_per_node)) for local_ranks in by_node.values())


@given(cluster_views())
def test_a_rank_whose_node_is_usable_stays_there(job: JobView) -> None:
    placement = choose_placement(job)
    usable = {node.component for node in job.nodes if node.is_connected and not node.is_lost}
    for old in job.placement if placement is not None else ():
        if old.component in usable:
            assert placement is not None and placement[old.rank] == old


def test_the_ranks_of_a_lost_node_go_where_its_state_is() -> None:
    spare, keeper = "local/rack-02/node-08", "local/rack-02/node-09"
    nodes = (node(A), node(B, is_lost=True), node(spare), node(keeper))
    kept = ((A, (B,)), (B, (A, keeper)))
    for keepers, chosen in (((), spare), (kept, keeper), (((B, (B,)),), spare)):
        placement = choose_placement(view("tearing-down", nodes=nodes, keepers=keepers))
        assert placement is not None
        assert [placed.component for placed in placement] == [A, chosen]
    both = (node(A, is_lost=True), node(B, is_lost=True), node(spare), node(keeper))
    for owner, placed_at in ((A, [spare, keeper]), (B, [keeper, spare])):
        placement = choose_placement(view("tearing-down", nodes=both, keepers=((owner, (placed_at[owner == B],)),)))
        assert placement is not None
        assert [placed.component for placed in placement] == placed_at, "the other rank does not take its place"


@given(cluster_views(), st.sampled_from(["gathering", "running", "tearing-down", "backing-off"]), st.booleans())
def test_every_decision_has_a_reason_and_repeating_the_question_repeats_the_answer(
    job: JobView, status: Any, is_stop_wanted: bool
) -> None:
    import msgspec

    # a job runs only if it was placed
    asked = msgspec.structs.replace(job, status=status if job.placement else "gathering", is_stop_wanted=is_stop_wanted)
    decision = decide(asked, POLICY)
    assert decision.reason
    assert decide(asked, POLICY) == decision


# --- from where to go on ---


def held(rank: int, step: int, *, generation: int = 1, world_size: int = 2) -> SnapshotStatus:
    return SnapshotStatus(rank=rank, step=step, generation=generation, world_size=world_size, num_bytes=1)


def restore(*snapshots: SnapshotStatus, durable: tuple[int, str] | None = None, is_attached: bool = True) -> Any:
    return choose_restore(snapshots, durable=durable, world_size=2, is_attached=is_attached)


def test_memory_of_every_rank_is_taken_when_it_is_not_older_than_durable() -> None:
    chosen = restore(held(0, 10), held(1, 10), durable=(10, "d"))
    assert (chosen.source, chosen.step) == ("memory", 10)


def test_durable_is_taken_when_it_is_newer_and_the_reason_names_both() -> None:
    chosen = restore(held(0, 10), held(1, 10), durable=(50, "step-50"))
    assert (chosen.source, chosen.step, chosen.directory) == ("durable", 50, "step-50")
    assert chosen.reason == "memory holds step 10; newest durable"


def test_memory_of_some_ranks_only_is_of_no_use_and_the_reason_names_the_missing() -> None:
    chosen = restore(held(0, 10), durable=(5, "d"))
    assert (chosen.source, chosen.step) == ("durable", 5)
    assert "step 10 but not of rank(s) 1" in chosen.reason


def test_the_newest_step_that_every_rank_holds_is_taken() -> None:
    assert restore(held(0, 10), held(0, 15), held(1, 10)).step == 10


def test_ranks_never_mix_generations() -> None:
    assert restore(held(0, 10, generation=1), held(1, 10, generation=2)).source == "none"


def test_a_later_generation_goes_before_a_higher_step_of_an_earlier_one() -> None:
    assert restore(held(0, 30), held(1, 30), held(0, 20, generation=2), held(1, 20, generation=2)).step == 20


@pytest.mark.parametrize("useless", [held(1, 10, generation=2), held(1, 10, world_size=4)])
def test_snapshots_of_another_generation_or_world_do_not_count(useless: SnapshotStatus) -> None:
    assert restore(held(0, 10), useless).source == "none"


def test_without_any_checkpoint_the_job_begins_again() -> None:
    chosen = restore()
    assert chosen.source == "none" and "from the beginning" in chosen.reason


def test_a_script_that_is_not_attached_is_never_restored_behind_its_back() -> None:
    chosen = restore(held(0, 10), held(1, 10), durable=(50, "d"), is_attached=False)
    assert chosen.source == "none" and "its own checkpoint" in chosen.reason


SNAPSHOTS = st.lists(
    st.builds(
        SnapshotStatus,
        rank=st.integers(0, 2),
        step=st.integers(1, 5),
        generation=st.integers(1, 3),
        world_size=st.sampled_from([2, 3]),
        num_bytes=st.just(1),
    ),
    max_size=20,
)


@given(SNAPSHOTS, st.none() | st.tuples(st.integers(1, 5), st.just("d")), st.randoms())
def test_what_is_chosen_every_rank_can_have_and_the_order_of_reports_does_not_matter(
    snapshots: list[SnapshotStatus], durable: tuple[int, str] | None, shuffle: Any
) -> None:
    chosen = choose_restore(snapshots, durable=durable, world_size=3, is_attached=True)
    shuffled = list(snapshots)
    shuffle.shuffle(shuffled)
    assert choose_restore(shuffled, durable=durable, world_size=3, is_attached=True) == chosen
    assert chosen.reason
    if chosen.source == "memory":
        whole = [item for item in snapshots if item.world_size == 3 and item.step == chosen.step]
        assert any(
            {item.rank for item in whole if item.generation == generation} == {0, 1, 2} for generation in (1, 2, 3)
        )
        assert durable is None or chosen.step >= durable[0]
    if durable is not None:
        assert chosen.source != "none" and chosen.step >= durable[0]


# --- nodes that are not fit, or not known to be ---


def test_untested_nodes_are_tested_together_before_one_of_them_is_given_work() -> None:
    decision = decide(view("gathering", untested=(A, B, SPARE)), POLICY)
    assert isinstance(decision, ProbeNodes) and decision.components == (A, B, SPARE)


def test_an_untested_spare_that_is_not_used_holds_nobody_up() -> None:
    assert isinstance(decide(view("gathering", untested=(SPARE,)), POLICY), Place)


def test_a_test_waits_for_a_spare_that_is_coming_but_not_for_ever() -> None:
    nodes = (node(A), node(B), node(SPARE, is_connected=False, is_agent_asked=True))
    waiting = view("gathering", nodes=nodes, untested=(A, B, SPARE))
    assert isinstance(decide(waiting, POLICY), Wait)
    late = view("gathering", nodes=nodes, untested=(A, B, SPARE), gathering_s=POLICY.gather_s + 1)
    decision = decide(late, POLICY)
    assert isinstance(decision, ProbeNodes) and decision.components == (A, B)


def test_a_node_in_quarantine_is_given_no_work() -> None:
    nodes = (node(A), node(B, is_quarantined=True), node(SPARE))
    decision = decide(view("tearing-down", nodes=nodes, killed_nodes=(A, B)), POLICY)
    assert isinstance(decision, Place) and [placed.component for placed in decision.placement] == [A, SPARE]


def test_without_a_fit_node_left_the_job_is_given_up_and_it_is_said() -> None:
    nodes = (node(A), node(B, is_quarantined=True), gone(SPARE))
    decision = decide(view("tearing-down", nodes=nodes, killed_nodes=(A, B)), POLICY)
    assert isinstance(decision, GiveUp) and B in decision.reason


def test_a_suspect_node_is_tested_after_the_fault_and_before_the_new_start() -> None:
    decision = decide(view("tearing-down", killed_nodes=(A, B), untested=(B,)), POLICY)
    assert isinstance(decision, ProbeNodes) and decision.components == (B,)


def test_a_stop_during_the_tests_is_obeyed() -> None:
    assert isinstance(decide(view("preflight", is_stop_wanted=True), POLICY), Stop)
    assert isinstance(decide(view("preflight"), POLICY), Wait)


# --- workers that SIGKILL does not end ---


def undead(component: str, **rest: Any) -> NodeView:
    return node(component, undead="rank 1 in state D", **rest)


def test_a_node_with_a_worker_that_cannot_be_killed_is_quarantined_with_that_reason() -> None:
    decision = decide(view("tearing-down", nodes=(node(A), undead(B), node(SPARE)), killed_nodes=(A,)), POLICY)
    assert isinstance(decision, Quarantine) and decision.component == B
    assert "rank 1 in state D" in decision.reason
    assert "nothing can interrupt" in decision.reason


def test_once_it_is_quarantined_it_is_not_waited_for_and_a_spare_takes_over() -> None:
    nodes = (node(A), undead(B, is_quarantined=True), node(SPARE))
    decision = decide(view("tearing-down", nodes=nodes, killed_nodes=(A,)), POLICY)
    assert isinstance(decision, Place) and [placed.component for placed in decision.placement] == [A, SPARE]


def test_a_cordoned_node_whose_workers_are_being_ended_is_waited_for() -> None:
    nodes = (node(A), node(B, is_quarantined=True), node(SPARE))
    assert isinstance(decide(view("tearing-down", nodes=nodes, killed_nodes=(A,)), POLICY), Wait)


def test_a_policy_may_give_the_job_up_once_its_workers_are_gone() -> None:
    running = view("tearing-down", killed_nodes=(A,), give_up="the loss is nan")
    assert isinstance(decide(running, POLICY), Wait)
    assert decide(view("tearing-down", killed_nodes=(A, B), give_up="the loss is nan"), POLICY) == GiveUp(
        reason="the loss is nan"
    )
