"""Batches of the whole job, dealt to however many ranks there are.

The global batch of a step is a function of the seed, the epoch and its number in it alone; each rank takes its slice.
So when the job goes on with another number of ranks, no sample is lost or repeated, and the batch is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import xxhash

from dougong.errors import UserError
from dougong.run.place import rank_and_world_size

_NUM_ROUNDS = 6


class GlobalBatches:
    """The indices of this rank's samples, batch by batch: a `batch_sampler` of a `DataLoader`.

    ```python
    batches = dougong.GlobalBatches(num_samples=len(dataset), global_batch_size=256, seed=1)
    job = dougong.attach(model=model, optimizer=optimizer, data=DataLoader(dataset, batch_sampler=batches))
    ```

    Rank r of n has the samples r·B/n to (r+1)·B/n of a global batch of B, so the sizes of slices differ by at most one.
    Where they differ, the mean over ranks of the ranks' mean losses is not the mean over the samples, unless each rank
    multiplies its loss by `loss_weight` before `backward()`.

    `rank` and `world_size` are those of `RANK` and `WORLD_SIZE`; where only a part of the ranks reads different data
    (beside tensor or pipeline parallelism), give the data-parallel ones. The samples of an epoch that do not fill a
    global batch are left out with `drop_last`; without it they are a last, smaller one. An order takes no memory: it is
    a Feistel network over the numbers of the samples, walked until it stays within them (Black and Rogaway, "Ciphers
    with arbitrary finite domains", 2002, section 3), with xxh3 as its round function.

    Raises UserError if a rank would have no sample of a batch.
    """

    counts_global_batches = True
    """A position in it is the same for every rank and at every world size. See `dougong.run.data_position`."""

    def __init__(
        self,
        *,
        num_samples: int,
        global_batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        own_rank, own_world_size = rank_and_world_size()
        self.num_samples = num_samples
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.rank = own_rank if rank is None else rank
        self.world_size = own_world_size if world_size is None else world_size
        self.epoch = 0
        self.batch = 0
        self._check()

    def __len__(self) -> int:
        """Batches in an epoch."""
        whole, rest = divmod(self.num_samples, self.global_batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        """The rest of this epoch, from the position on; the next call begins the next epoch."""
        while self.batch < len(self):
            self.batch += 1
            yield self.own(self.epoch, self.batch - 1)
        self.epoch, self.batch = self.epoch + 1, 0

    @property
    def loss_weight(self) -> float:
        """What this rank multiplies the mean loss of its slice by, so that the mean over ranks is that over samples."""
        first, last = self._slice(self.global_batch_size)
        return (last - first) * self.world_size / self.global_batch_size

    def seek(self, *, epoch: int, batch: int) -> None:
        """The next batch is number `batch` of `epoch`, both from 0."""
        self.epoch, self.batch = epoch, batch

    def set_epoch(self, epoch: int) -> None:
        """As `DistributedSampler.set_epoch`: go to the begin of an epoch, unless it is this one."""
        if epoch != self.epoch:
            self.seek(epoch=epoch, batch=0)

    def whole(self, epoch: int, batch: int) -> list[int]:
        """The indices of a global batch, of all ranks."""
        return self._indices(epoch, batch, 0, self._size(batch))

    def own(self, epoch: int, batch: int) -> list[int]:
        """The indices of this rank's slice of a global batch."""
        return self._indices(epoch, batch, *self._slice(self._size(batch)))

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "num_samples": self.num_samples,
            "global_batch_size": self.global_batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position, of whatever world size. Raises UserError if it counts other batches."""
        for name in ("num_samples", "global_batch_size", "seed", "shuffle"):
            if state[name] != getattr(self, name):
                raise UserError(
                    f"{name} was {state[name]} and is {getattr(self, name)}, so step numbers name other samples",
                    where="GlobalBatches",
                    mend=f"give {name}={state[name]}, as the run that wrote the checkpoint, or start a new run",
                )
        self.seek(epoch=state["epoch"], batch=state["batch"])

    def _indices(self, epoch: int, batch: int, first: int, last: int) -> list[int]:
        begin = batch * self.global_batch_size
        numbers = range(begin + first, begin + last)
        if not self.shuffle:
            return list(numbers)
        keys = [f"{self.seed}:{epoch}:{turn}:".encode() for turn in range(_NUM_ROUNDS)]
        return [_shuffled(number, num_samples=self.num_samples, keys=keys) for number in numbers]

    def _size(self, batch: int) -> int:
        return min(self.global_batch_size, self.num_samples - batch * self.global_batch_size)

    def _slice(self, size: int) -> tuple[int, int]:
        return self.rank * size // self.world_size, (self.rank + 1) * size // self.world_size

    def _check(self) -> None:
        rest = self.num_samples % self.global_batch_size if self.global_batch_size > 0 else 0
        smallest = rest if rest and not self.drop_last else self.global_batch_size
        if smallest < self.world_size or self.num_samples < self.global_batch_size:
            raise UserError(
                f"{self.num_samples} samples in global batches of {self.global_batch_size}: one has only "
                f"{min(smallest, self.num_samples)} samples for {self.world_size} ranks",
                where="GlobalBatches",
                mend="give a larger global batch, or drop_last=True, or more samples",
            )


def _shuffled(number: int, *, num_samples: int, keys: list[bytes]) -> int:
    """Where a permutation of range(num_samples) sends a number."""
    half_bits = max(1, (num_samples - 1).bit_length() + 1 >> 1)
    mask = (1 << half_bits) - 1
    while True:
        left, right = number >> half_bits, number & mask
        for key in keys:
            left, right = right, left ^ (xxhash.xxh3_64_intdigest(key + right.to_bytes(8, "little")) & mask)
        number = left << half_bits | right
        if number < num_samples:
            return number
