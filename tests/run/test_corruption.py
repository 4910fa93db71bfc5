from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dougong.event.kinds import CorruptionSuspected, ReplicasCompared
from dougong.run.corruption import Distrust, FingerprintDesk, compare, is_trusted
from dougong.run.letters import Fingerprinted


def printed(desk: FingerprintDesk, step: int, *digests: str, generation: int = 2):
    """The events once all ranks have told."""
    return [
        event
        for rank, digest in enumerate(digests)
        for event in desk.hear(Fingerprinted(generation=generation, rank=rank, step=step, digest=digest))
    ]


def desk_of(world_size: int) -> FingerprintDesk:
    desk = FingerprintDesk()
    desk.begin_generation(world_size=world_size)
    return desk


@given(st.integers(1, 8))
def test_equal_ranks_are_no_suspects(world_size: int) -> None:
    assert compare(dict.fromkeys(range(world_size), "a")) == ((), True)


@given(st.integers(3, 9), st.data())
def test_the_majority_names_the_one_that_differs(world_size: int, data: st.DataObject) -> None:
    odd = data.draw(st.integers(0, world_size - 1))
    digests = {rank: "b" if rank == odd else "a" for rank in range(world_size)}
    assert compare(digests) == ((odd,), True)


def test_without_a_majority_all_are_suspects() -> None:
    assert compare({0: "a", 1: "b"}) == ((0, 1), False)
    assert compare({0: "a", 1: "a", 2: "b", 3: "b"}) == ((0, 1, 2, 3), False)
    assert compare({0: "a", 1: "b", 2: "c"}) == ((0, 1, 2), False)


def test_an_agreement_is_an_event_once_all_ranks_have_told() -> None:
    desk = desk_of(2)
    assert desk.hear(Fingerprinted(generation=2, rank=1, step=20, digest="a")) == ()
    (event,) = desk.hear(Fingerprinted(generation=2, rank=0, step=20, digest="a"))
    assert event == ReplicasCompared(generation=2, step=20)


def test_a_difference_names_the_rank_and_the_last_agreement() -> None:
    desk = desk_of(3)
    printed(desk, 20, "a", "a", "a")
    (event,) = printed(desk, 40, "b", "c", "b")
    assert isinstance(event, CorruptionSuspected)
    assert (event.ranks, event.agreed_generation, event.agreed_step) == ((1,), 2, 20)
    assert "against 2 that agree" in event.detail
    assert desk.suspicion is not None and desk.suspicion.is_certain


def test_of_two_ranks_it_is_said_that_either_may_be_wrong() -> None:
    desk = desk_of(2)
    (event,) = printed(desk, 20, "a", "b")
    assert isinstance(event, CorruptionSuspected) and event.ranks == (0, 1)
    assert "no majority" in event.detail
    assert "never compared" in event.detail


def test_a_generation_is_suspected_once() -> None:
    desk = desk_of(2)
    assert len(printed(desk, 20, "a", "b")) == 1
    assert printed(desk, 40, "a", "b") == []
    desk.begin_generation(world_size=2)
    assert len(printed(desk, 20, "a", "b", generation=3)) == 1


def test_only_what_was_saved_up_to_the_last_agreement_is_trusted() -> None:
    distrust = Distrust(generation=3, agreed_generation=2, agreed_step=40)
    trusted = [(2, 40), (2, 20), (1, 40)]
    refused = [(2, 45), (3, 41), (3, 30), (1, 45)]
    assert all(is_trusted(*saved, [distrust]) for saved in trusted)
    assert not any(is_trusted(*saved, [distrust]) for saved in refused)
    assert is_trusted(4, 50, [distrust]), "what came after it starts from a trusted state"


@given(st.integers(1, 5), st.integers(1, 500))
def test_without_a_suspicion_everything_is_trusted(generation: int, step: int) -> None:
    assert is_trusted(generation, step, [])
