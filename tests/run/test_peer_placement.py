from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dougong.run.peer_placement import PeerPlan, choose_peers, rack_of


@st.composite
def halls(draw: st.DrawFn) -> list[str]:
    """The nodes of a few racks of different sizes, in any order."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    nodes = [f"hall/rack-{rack}/node-{index}" for rack, size in enumerate(sizes) for index in range(size)]
    return draw(st.permutations(nodes))


def racks(count: int, size: int) -> list[str]:
    return [f"hall/rack-{rack}/node-{index}" for rack in range(count) for index in range(size)]


def plan_of(nodes: list[str], *, num_copies: int = 1, previous: PeerPlan | None = None) -> PeerPlan:
    known = dict(previous.keepers) if previous is not None else None
    return choose_peers(nodes, owners=nodes, num_copies=num_copies, previous=known)


@given(halls(), st.integers(1, 3))
def test_every_owner_has_as_many_other_nodes_as_wanted_and_there_are(nodes: list[str], num_copies: int) -> None:
    plan = plan_of(nodes, num_copies=num_copies)
    if len(nodes) == 1:
        assert plan.keepers == () and "no other node" in plan.reason
        return
    assert {owner for owner, _ in plan.keepers} == set(nodes)
    for owner, keepers in plan.keepers:
        assert len(set(keepers)) == len(keepers) == min(num_copies, len(nodes) - 1)
        assert owner not in keepers
    assert plan.reason


@given(halls())
def test_a_copy_lies_in_another_rack_as_long_as_there_is_one_else_a_warning_says_so(nodes: list[str]) -> None:
    plan = plan_of(nodes)
    is_one_rack = len({rack_of(node) for node in nodes}) == 1
    for owner, keepers in plan.keepers:
        assert is_one_rack or rack_of(owner) not in map(rack_of, keepers)
    assert bool(plan.warning) == (is_one_rack and len(nodes) > 1)


@given(halls(), st.integers(1, 2))
def test_the_same_question_has_the_same_answer(nodes: list[str], num_copies: int) -> None:
    assert plan_of(nodes, num_copies=num_copies) == plan_of(list(nodes), num_copies=num_copies)


@given(st.integers(2, 6), st.integers(1, 6))
def test_in_racks_of_one_size_every_node_keeps_one(num_racks: int, size: int) -> None:
    loads = Counter(keeper for _, keepers in plan_of(racks(num_racks, size)).keepers for keeper in keepers)
    assert set(loads.values()) == {1} and len(loads) == num_racks * size


@given(halls(), st.data())
def test_when_a_node_is_lost_only_the_copies_that_it_kept_move(nodes: list[str], data: st.DataObject) -> None:
    before = plan_of(nodes)
    lost = data.draw(st.sampled_from(nodes))
    left = [node for node in nodes if node != lost]
    after = plan_of(left, previous=before)
    for owner, keepers in before.keepers:
        has_moved = lost in keepers or (
            # a copy that had to lie in the owner's rack moves out of it once it can
            rack_of(owner) in map(rack_of, keepers) and len({rack_of(node) for node in left}) > 1
        )
        if owner != lost and not has_moved:
            assert dict(after.keepers)[owner] == keepers


def test_the_work_of_a_crowded_rack_is_shared_out_among_the_few_others() -> None:
    nodes = [f"hall/rack-0/node-{index}" for index in range(10)] + [f"hall/rack-{rack}/node-0" for rack in (1, 2)]
    loads = Counter(keeper for _, keepers in plan_of(nodes).keepers for keeper in keepers)
    assert sorted((loads["hall/rack-1/node-0"], loads["hall/rack-2/node-0"])) == [5, 6]


def test_a_spare_whose_memory_is_empty_keeps_copies_first() -> None:
    nodes = racks(1, 3)
    plan = choose_peers(nodes, owners=nodes[:2], num_copies=1)
    assert plan.keepers == ((nodes[0], (nodes[2],)), (nodes[1], (nodes[2],)))


def test_other_failure_groups_than_racks_can_be_told() -> None:
    nodes = racks(2, 2)
    row = {node: node.rpartition("-")[2] for node in nodes}
    plan = choose_peers(nodes, owners=nodes, num_copies=1, failure_group_of=row.__getitem__)
    assert all(row[owner] != row[keeper] for owner, keepers in plan.keepers for keeper in keepers)


def test_switched_off_there_are_none_and_the_reason_names_the_setting() -> None:
    plan = plan_of(racks(2, 2), num_copies=0)
    assert plan.keepers == () and "save.peer_copies=0" in plan.reason and not plan.warning


def test_too_few_nodes_for_all_copies_are_said() -> None:
    plan = plan_of(racks(2, 1), num_copies=2)
    assert all(len(keepers) == 1 for _, keepers in plan.keepers)
    assert "fewer than 2" in plan.reason
