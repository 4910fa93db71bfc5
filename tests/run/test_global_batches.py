from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dougong.errors import UserError
from dougong.run.data_position import DataPosition
from dougong.run.global_batches import GlobalBatches

torch = pytest.importorskip("torch", reason="torch is not installed (extra: train)")


def batches(rank: int = 0, world_size: int = 1, **options: Any) -> GlobalBatches:
    given = {"num_samples": 103, "global_batch_size": 14, "seed": 5, **options}
    return GlobalBatches(rank=rank, world_size=world_size, **given)


@given(
    num_samples=st.integers(1, 300),
    batch=st.integers(1, 40),
    world_size=st.integers(1, 9),
    seed=st.integers(0, 2**70),
    epoch=st.integers(0, 5),
    is_tail_kept=st.booleans(),
)
def test_the_slices_of_all_ranks_are_the_epoch_each_sample_once(
    num_samples: int, batch: int, world_size: int, seed: int, epoch: int, is_tail_kept: bool
) -> None:
    def of(rank: int) -> GlobalBatches:
        return GlobalBatches(
            num_samples=num_samples,
            global_batch_size=batch,
            seed=seed,
            drop_last=not is_tail_kept,
            rank=rank,
            world_size=world_size,
        )

    try:
        ranks = [of(rank) for rank in range(world_size)]
    except UserError:
        return
    seen: list[int] = []
    for number in range(len(ranks[0])):
        slices = [one.own(epoch, number) for one in ranks]
        assert max(map(len, slices)) - min(map(len, slices)) <= 1 and min(map(len, slices)) > 0
        joined = [index for part in slices for index in part]
        assert joined == ranks[0].whole(epoch, number)
        seen += joined
    assert len(set(seen)) == len(seen) == (num_samples if is_tail_kept else num_samples // batch * batch)
    assert set(seen) <= set(range(num_samples))


@given(sizes=st.lists(st.tuples(st.integers(1, 7), st.integers(1, 12)), min_size=1, max_size=5))
def test_no_sample_is_lost_or_repeated_through_any_row_of_world_sizes(sizes: list[tuple[int, int]]) -> None:
    """Each world takes some steps and leaves its position to the next, over the ends of epochs."""
    num_steps = sum(count for _, count in sizes)
    alone = DataPosition(batches())
    alone_ids = taken([alone], num_steps)
    got: list[list[int]] = []
    state: dict[str, Any] | None = None
    for world_size, count in sizes:
        loaders = [torch_loader(batches(rank, world_size)) for rank in range(world_size)]
        ranks = [DataPosition(one, rank=rank, world_size=world_size) for rank, one in enumerate(loaders)]
        for one in ranks:
            if state is not None:
                one.load(state)
        got += taken(ranks, count)
        state = ranks[-1].state()
    assert got == alone_ids


def torch_loader(sampler: GlobalBatches) -> Any:
    return torch.utils.data.DataLoader(range(103), batch_sampler=sampler)


def taken(ranks: list[DataPosition], num_steps: int) -> list[list[int]]:
    steps: list[list[int]] = []
    for _ in range(num_steps):
        joined: list[int] = []
        for one in ranks:
            try:
                batch = one.next_batch()
            except StopIteration:
                one.end_epoch()
                batch = one.next_batch()
            joined += torch.as_tensor(batch).tolist()
        steps.append(joined)
    return steps


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [batches(seed=seed).whole(epoch, 0) for seed in (1, 2) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert batches(shuffle=False).whole(3, 1) == list(range(14, 28))


def test_the_order_is_the_same_on_every_machine_and_version() -> None:
    assert batches(num_samples=10, global_batch_size=10, seed=1).whole(0, 0) == [7, 0, 6, 5, 8, 4, 1, 3, 2, 9]


def test_a_shuffled_order_looks_random() -> None:
    """Each place is reached from each half of the numbers about equally often."""
    counts = [0] * 8
    for seed in range(400):
        order = batches(num_samples=64, global_batch_size=64, seed=seed).whole(0, 0)
        for place in range(8):
            counts[place] += order[place] < 32
    assert all(150 < count < 250 for count in counts)


def test_the_weighted_mean_over_ranks_is_the_mean_over_samples() -> None:
    losses = {index: float(index) ** 0.5 for index in range(103)}
    ranks = [batches(rank, 4) for rank in range(4)]
    own = [[losses[i] for i in one.own(0, 2)] for one in ranks]
    weighted = [sum(part) / len(part) * one.loss_weight for part, one in zip(own, ranks, strict=True)]
    assert sum(weighted) / 4 == pytest.approx(sum(losses[i] for i in ranks[0].whole(0, 2)) / 14)


def test_its_own_position_goes_to_another_world_too() -> None:
    one = batches(1, 3)
    list(islice(one, 2))
    other = batches(0, 1)
    other.load_state_dict(one.state_dict())
    assert next(iter(other)) == other.whole(0, 2)


def test_another_batch_size_is_a_mistake_that_names_both() -> None:
    with pytest.raises(UserError) as caught:
        batches(global_batch_size=28).load_state_dict(batches().state_dict())
    assert caught.value.what.startswith("global_batch_size was 14 and is 28")


@pytest.mark.parametrize(
    "options",
    [
        {"global_batch_size": 3, "world_size": 4},
        {"num_samples": 10, "global_batch_size": 14},
        {"num_samples": 43, "world_size": 4, "drop_last": False},
        {"global_batch_size": 0},
    ],
)
def test_a_rank_without_a_sample_is_a_mistake(options: dict[str, Any]) -> None:
    with pytest.raises(UserError) as caught:
        batches(**options)
    assert caught.value.where == "GlobalBatches"


def test_a_position_that_counts_one_ranks_batches_is_refused_at_another_world_size() -> None:
    position = DataPosition([1, 2, 3], rank=1, world_size=4)
    position.next_batch()
    state = position.state()
    DataPosition([1, 2, 3], rank=1, world_size=4).load(state)
    with pytest.raises(UserError) as caught:
        DataPosition([1, 2, 3], rank=1, world_size=3).load(state)
    assert "batches of rank 1 at world size 4" in caught.value.what
    assert "GlobalBatches" in caught.value.mend


class FetchingAhead:
    """As a DataLoader with workers: it asks for batches long before they are trained on."""

    def __init__(self, batch_sampler: GlobalBatches) -> None:
        self.batch_sampler = batch_sampler

    def __iter__(self) -> Iterator[list[int]]:
        return iter(list(self.batch_sampler))


def test_what_counts_is_what_was_trained_on_not_what_was_fetched_ahead() -> None:
    position = DataPosition(FetchingAhead(batches()))
    taken([position], 2)
    resumed = DataPosition(FetchingAhead(batches()))
    resumed.load(position.state())
    assert taken([resumed], 7) == [batches().whole(e, k) for e, k in [(0, k) for k in range(2, 7)] + [(1, 0), (1, 1)]]
