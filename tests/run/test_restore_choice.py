from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from dougong.event.kinds import Placed
from dougong.run.restore_choice import BadCopy, Copy, choose_restore, must_travel
from dougong.run.wire import CourierAddress, Restore, SnapshotStatus

NODES = ("r1/a", "r1/b", "r2/c", "r2/d")
HOMES = {0: "r1/a", 1: "r1/b", 2: "r2/c"}


def held(rank: int, step: int, *, generation: int = 1, world_size: int = 3) -> SnapshotStatus:
    return SnapshotStatus(rank=rank, step=step, generation=generation, world_size=world_size, num_bytes=1)


def copy(rank: int, step: int, *, on: str, owner: str = "r2/gone", generation: int = 1) -> Copy:
    return Copy(
        courier=CourierAddress(component=on, host="127.0.0.1", port=1),
        owner=owner,
        snapshot=held(rank, step, generation=generation),
    )


def choose(snapshots: list[SnapshotStatus], copies: list[Copy], **others: Any) -> Restore:
    known: dict[str, Any] = {"durable": None, "world_size": 3, "is_attached": True, "homes": HOMES}
    return choose_restore(snapshots, copies=copies, **{**known, **others})


def test_a_rank_whose_node_is_gone_takes_the_copy_of_a_peer_and_the_reason_says_from_where() -> None:
    chosen = choose([held(0, 40), held(1, 40)], [copy(2, 40, on="r2/d"), copy(2, 20, on="r2/d")])
    assert (chosen.source, chosen.step, chosen.generation) == ("peer", 40, 1)
    assert [(origin.rank, origin.courier.component) for origin in chosen.origins] == [(2, "r2/d")]
    assert chosen.reason == "step 40: ranks 0, 1 from own memory, rank 2 from the copy on r2/d"


def test_survivors_go_back_to_what_they_kept_of_that_step() -> None:
    """Their own memory has moved on since the copies were made."""
    kept = [copy(rank, 40, on=HOMES[rank], owner=HOMES[rank]) for rank in (0, 1)]
    chosen = choose([held(0, 50), held(1, 50)], [*kept, copy(2, 40, on="r2/d")])
    assert (chosen.source, chosen.step) == ("peer", 40)
    assert {origin.rank: origin.courier.component for origin in chosen.origins} == {0: "r1/a", 1: "r1/b", 2: "r2/d"}
    assert chosen.reason == "step 40: ranks 0, 1 from own memory, rank 2 from the copy on r2/d"


def test_what_every_node_kept_itself_is_own_memory() -> None:
    chosen = choose([], [copy(rank, 40, on=home, owner=home) for rank, home in HOMES.items()])
    assert (chosen.source, len(chosen.origins)) == ("memory", 3)


def test_a_copy_that_lies_on_the_new_node_already_goes_before_those_of_others() -> None:
    chosen = choose([held(0, 40), held(1, 40)], [copy(2, 40, on="r1/a"), copy(2, 40, on="r2/c")])
    assert chosen.origins[0].courier.component == "r2/c"
    assert chosen.source == "peer"


def test_a_copy_whose_courier_is_not_up_serves_only_a_rank_of_its_own_node() -> None:
    def silent(found: Copy) -> Copy:
        return msgspec.structs.replace(found, courier=msgspec.structs.replace(found.courier, port=0))

    snapshots = [held(0, 40), held(1, 40)]
    assert choose(snapshots, [silent(copy(2, 40, on="r2/d"))]).source == "none"
    assert choose(snapshots, [silent(copy(2, 40, on="r2/c"))]).source == "peer"


def test_several_ranks_are_fetched_from_different_nodes() -> None:
    copies = [copy(rank, 40, on=node) for rank in (1, 2) for node in ("r1/a", "r2/d")]
    chosen = choose([held(0, 40)], copies)
    assert {origin.courier.component for origin in chosen.origins} == {"r1/a", "r2/d"}


def test_own_memory_goes_before_copies_and_both_before_durable_of_the_same_step() -> None:
    everywhere = [copy(rank, 40, on="r2/d") for rank in range(3)]
    chosen = choose([held(rank, 40) for rank in range(3)], everywhere, durable=(40, "d"))
    assert (chosen.source, chosen.origins) == ("memory", ())
    assert choose([], everywhere, durable=(40, "d")).source == "peer"
    assert choose([], everywhere, durable=(50, "d")).source == "durable"


def test_ranks_never_mix_generations() -> None:
    snapshots = [held(0, 40, generation=2), held(1, 40, generation=2)]
    assert choose(snapshots, [copy(2, 40, on="r2/d")]).source == "none"
    assert choose(snapshots, [copy(2, 40, on="r2/d", generation=2)]).generation == 2


def test_without_the_copy_of_one_rank_the_durable_checkpoint_is_used_and_the_reason_says_so() -> None:
    chosen = choose([held(0, 40)], [copy(1, 40, on="r2/d")], durable=(20, "d"))
    assert (chosen.source, chosen.step) == ("durable", 20)
    assert chosen.reason == ("memory holds step 40 but not of rank(s) 2, and no living node has a copy; newest durable")


def test_a_refused_copy_is_not_asked_for_again_but_another_one_is() -> None:
    snapshots, bad = [held(0, 40), held(1, 40)], BadCopy(component="r2/d", rank=2, generation=1, step=40)
    both = [copy(2, 40, on="r2/d"), copy(2, 40, on="r1/a")]
    assert choose(snapshots, both, refused=[bad]).origins[0].courier.component == "r1/a"
    assert choose(snapshots, both[:1], refused=[bad], durable=(20, "d")).source == "durable"


def test_the_ranks_whose_state_lies_on_another_node_are_told() -> None:
    kept = copy(0, 40, on="r1/a", owner="r1/a")
    chosen = choose([held(1, 40)], [kept, copy(2, 40, on="r2/d")])
    placement = [Placed(rank=rank, local_rank=0, component=home) for rank, home in HOMES.items()]
    assert must_travel(chosen, placement, ranks=(0, 1, 2)) == (2,)
    assert must_travel(chosen, placement, ranks=(0, 1)) == ()


def test_a_script_that_is_not_attached_is_never_restored_from_a_copy() -> None:
    assert choose([], [copy(rank, 40, on="r2/d") for rank in range(3)], is_attached=False).source == "none"


STATUSES = st.builds(
    SnapshotStatus,
    rank=st.integers(0, 3),
    step=st.integers(1, 4),
    generation=st.integers(1, 2),
    world_size=st.sampled_from([2, 3, 3, 3]),
    num_bytes=st.just(1),
)
COPIES = st.builds(
    Copy,
    courier=st.sampled_from(NODES).map(lambda name: CourierAddress(component=name, host="h", port=1)),
    owner=st.sampled_from(NODES),
    snapshot=STATUSES,
)
BAD = st.builds(
    BadCopy,
    component=st.sampled_from(NODES),
    rank=st.integers(0, 2),
    generation=st.integers(1, 2),
    step=st.integers(1, 4),
)


@given(
    st.lists(STATUSES, max_size=8),
    st.lists(COPIES, max_size=25),
    st.none() | st.tuples(st.integers(1, 4), st.just("d")),
    st.lists(BAD, max_size=3),
    st.randoms(use_true_random=False),
)
def test_every_rank_can_have_what_is_chosen_nothing_newer_is_left_out_and_the_order_does_not_matter(
    snapshots: list[SnapshotStatus],
    copies: list[Copy],
    durable: tuple[int, str] | None,
    refused: list[BadCopy],
    random: Any,
) -> None:
    chosen = choose(snapshots, copies, durable=durable, refused=refused)
    shuffled, others = list(snapshots), list(copies)
    random.shuffle(shuffled)
    random.shuffle(others)
    assert choose(shuffled, others, durable=durable, refused=refused) == chosen
    assert chosen.reason

    bad = {(item.component, item.rank, item.generation, item.step) for item in refused}
    good = [
        item
        for item in copies
        if (item.courier.component, item.snapshot.rank, item.snapshot.generation, item.snapshot.step) not in bad
    ]
    everything = [*snapshots, *(item.snapshot for item in good)]
    counting = [item for item in everything if item.world_size == 3 and item.rank < 3]
    complete = [
        (generation, step)
        for generation in (1, 2)
        for step in range(1, 5)
        if {item.rank for item in counting if (item.generation, item.step) == (generation, step)} == {0, 1, 2}
    ]
    if chosen.source in ("memory", "peer"):
        assert (chosen.generation, chosen.step) == max(complete)
        assert durable is None or chosen.step >= durable[0]
        assert_each_rank_has_it(chosen, snapshots, good)
    else:
        assert not complete or (durable is not None and durable[0] > max(complete)[1])
        assert chosen.origins == ()


def assert_each_rank_has_it(chosen: Restore, snapshots: list[SnapshotStatus], copies: list[Copy]) -> None:
    """From one place, of this very state; and own memory is not passed over."""
    state = (chosen.generation, chosen.step)
    own = {s.rank for s in snapshots if s.world_size == 3 and (s.generation, s.step) == state}
    fetched = {origin.rank: origin.courier.component for origin in chosen.origins}
    assert len(fetched) == len(chosen.origins)
    assert own.isdisjoint(fetched) and {rank for rank in own if rank < 3} | fetched.keys() == {0, 1, 2}
    for rank, component in fetched.items():
        assert any(
            item.courier.component == component
            and item.snapshot.rank == rank
            and (item.snapshot.generation, item.snapshot.step) == state
            for item in copies
        )
    is_all_own = all(
        any(
            item.courier.component == item.owner == HOMES[rank] == component
            and (item.snapshot.rank, item.snapshot.generation, item.snapshot.step) == (rank, *state)
            for item in copies
        )
        for rank, component in fetched.items()
    )
    assert (chosen.source == "memory") == is_all_own
