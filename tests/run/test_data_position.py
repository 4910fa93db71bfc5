from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from dougong.errors import UserError
from dougong.run.data_position import DataPosition
from dougong.run.state import restore_rng, rng_state

NUM_SAMPLES = 10
BATCH = 3  # four batches in an epoch, the last one short


class Augmented(Dataset[torch.Tensor]):
    """A sample is its number and three random figures, from the generators of torch, NumPy and Python."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()).item(), numpy.random.rand(), random.random()], dtype=torch.float64)


class ShuffledByPython(Sampler[int]):
    """Draws its order from Python's generator, as hand-written samplers do."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Iterator[int]:
        order = list(range(NUM_SAMPLES))
        random.shuffle(order)
        yield from order


class Counting:
    """Speaks the StatefulDataLoader protocol; an epoch has four batches."""

    def __init__(self) -> None:
        self._next = 0
        self._is_loaded = False

    def __iter__(self) -> Iterator[int]:
        if not self._is_loaded:
            self._next = 0
        self._is_loaded = False
        while self._next < 4:
            self._next += 1
            yield self._next

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]
        self._is_loaded = True


def shuffled() -> DataLoader[torch.Tensor]:
    return DataLoader(Augmented(), batch_size=BATCH, shuffle=True)


def with_own_generator() -> DataLoader[torch.Tensor]:
    return DataLoader(Augmented(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(5))


def with_python_sampler() -> DataLoader[torch.Tensor]:
    return DataLoader(Augmented(), batch_size=BATCH, sampler=ShuffledByPython())


def distributed() -> DataLoader[torch.Tensor]:
    sampler = DistributedSampler(Augmented(), num_replicas=1, rank=0, shuffle=True, seed=3)
    return DataLoader(Augmented(), batch_size=BATCH, sampler=sampler)


def take(position: DataPosition, count: int) -> list[Any]:
    """The next batches as the training loop takes them, with something random done in between."""
    batches: list[Any] = []
    while len(batches) < count:
        try:
            batches.append(position.next_batch())
        except StopIteration:
            position.end_epoch()
            continue
        torch.rand(2)
    return batches


def seed(number: int) -> None:
    torch.manual_seed(number)
    numpy.random.seed(number)
    random.seed(number)


def are_equal(left: list[Any], right: list[Any]) -> bool:
    return all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(left, right, strict=True))


MAKERS = [shuffled, with_own_generator, with_python_sampler, distributed, Counting]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("stop", [1, 3, 4, 5, 8, 9])
def test_a_resumed_position_gives_the_very_next_batches(make: Any, stop: int) -> None:
    """4 and 8 are the ends of epochs."""
    seed(1)
    undisturbed = DataPosition(make())
    take(undisturbed, stop)
    state, rng = undisturbed.state(), rng_state()
    expected = take(undisturbed, 9)

    seed(99)
    resumed = DataPosition(make())
    resumed.load(state)
    restore_rng(rng)
    assert are_equal(take(resumed, 9), expected)


@given(stops=st.lists(st.integers(1, 7), min_size=1, max_size=4))
@settings(max_examples=25)
def test_any_row_of_interruptions_changes_nothing(stops: list[int]) -> None:
    seed(7)
    expected = take(DataPosition(with_own_generator()), sum(stops))

    seed(7)
    position = DataPosition(with_own_generator())
    got: list[Any] = []
    for count in stops:
        got += take(position, count)
        state, rng = position.state(), rng_state()
        seed(1234)
        position = DataPosition(with_own_generator())
        position.load(state)
        restore_rng(rng)
    assert are_equal(got, expected)


def test_a_position_before_the_first_batch_can_be_saved_and_loaded() -> None:
    seed(2)
    position = DataPosition(with_own_generator())
    state, rng = position.state(), rng_state()
    expected = take(position, 5)
    seed(3)
    resumed = DataPosition(with_own_generator())
    resumed.load(state)
    restore_rng(rng)
    assert are_equal(take(resumed, 5), expected)


def test_no_sample_of_an_epoch_is_lost_or_repeated_by_a_resume() -> None:
    seed(4)
    position = DataPosition(shuffled())
    seen = take(position, 2)
    state, rng = position.state(), rng_state()
    resumed = DataPosition(shuffled())
    resumed.load(state)
    restore_rng(rng)
    seen += take(resumed, 2)
    assert sorted(int(sample[0]) for batch in seen for sample in batch) == list(range(NUM_SAMPLES))


def test_each_epoch_of_a_distributed_sampler_has_its_own_order() -> None:
    position = DataPosition(distributed())
    first, second = take(position, 4), take(position, 4)
    order = [[int(sample[0]) for batch in epoch for sample in batch] for epoch in (first, second)]
    assert sorted(order[0]) == sorted(order[1]) == list(range(NUM_SAMPLES))
    assert order[0] != order[1]


def test_data_that_became_shorter_is_the_users_mistake() -> None:
    position = DataPosition([1, 2, 3])
    take(position, 3)
    shorter = DataPosition([1, 2])
    with pytest.raises(UserError) as caught:
        shorter.load(position.state())
    assert "2 batches" in caught.value.what
