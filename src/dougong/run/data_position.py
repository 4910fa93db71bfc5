"""Where in the data the job is, so that it can go on at the very next sample.

A loader that speaks the StatefulDataLoader protocol (`state_dict()` and `load_state_dict()`) is asked itself. Any other
iterable is counted: the epoch, the batch in it, and the random state at the epoch's begin, that of the loader's own
generators included; on resume the epoch is begun again with that random state and its first batches are passed over,
which costs their loading time but trains on no sample twice.

Such a position counts the batches of one rank, so it means nothing at another world size. A loader or sampler with a
true `counts_global_batches` (`dougong.GlobalBatches`) has one that all ranks share: it is kept across world sizes, and
gone to at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dougong.errors import UserError
from dougong.run.state import restore_rng, rng_state


class DataPosition:
    """Batches from `loader`, epoch after epoch, with a position that can be saved between two of them."""

    def __init__(self, loader: Any, *, rank: int = 0, world_size: int = 1) -> None:
        self._loader = loader
        self._rank = rank
        self._world_size = world_size
        self._global = _global_batches(loader)
        self._speaks_protocol = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._iterator: Iterator[Any] | None = None
        self._epoch = 0
        self._batch = 0
        self._at_begin: dict[str, Any] | None = None
        """Random state when this epoch began."""

    def next_batch(self) -> Any:
        """The next batch of this epoch. Raises StopIteration at its end."""
        if self._iterator is None:
            self._begin_epoch()
        assert self._iterator is not None
        batch = next(self._iterator)
        self._batch += 1
        return batch

    def end_epoch(self) -> None:
        """The next batch begins a new epoch."""
        self._iterator = None
        self._epoch += 1
        self._batch = 0

    @property
    def has_read_this_epoch(self) -> bool:
        return self._batch > 0

    def state(self) -> dict[str, Any]:
        """The position, as plain values and tensors."""
        inner = self._loader.state_dict() if self._speaks_protocol else None
        return {
            "epoch": self._epoch,
            "batch": self._batch,
            "at_begin": self._at_begin,
            "generators": [generator.get_state() for generator in _own_generators(self._loader)],
            "loader": inner,
            "global_batches": None if self._global is None else self._global.state_dict(),
            "rank": self._rank,
            "world_size": self._world_size,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go to a saved position. Changes the random state; the caller restores it afterwards.

        Raises UserError if the data ends before that position, or if it is one of another world size and counts the
        batches of one rank.
        """
        self._check_world(state)
        self._epoch = state["epoch"]
        self._batch = state["batch"]
        self._iterator = None
        self._at_begin = state["at_begin"]
        if self._speaks_protocol:
            self._loader.load_state_dict(state["loader"])
            if self._batch:
                self._tell_epoch()
                self._iterator = iter(self._loader)
            return
        if self._global is not None:
            self._go_to(state)
        elif self._batch and self._at_begin is not None:
            self._pass_over(self._batch, at_begin=self._at_begin)
        _set_generators(self._loader, state["generators"])

    def _check_world(self, state: dict[str, Any]) -> None:
        saved = state.get("world_size", self._world_size)
        if saved != self._world_size and not _counts_global_batches(self._loader):
            raise UserError(
                f"the position in the data counts the batches of rank {state['rank']} at world size {saved}; "
                f"it means nothing at world size {self._world_size}",
                where="attach(data=…)",
                mend="use batch_sampler=dougong.GlobalBatches(…), or go on with as many ranks as before",
            )

    def _go_to(self, state: dict[str, Any]) -> None:
        assert self._global is not None
        saved = state.get("global_batches")
        if saved is None:
            raise UserError(
                "the checkpoint was written with data that has no global batches",
                where="attach(data=…)",
                mend="give the same data as the run that wrote it, or start a new run",
            )
        # the loader may have asked for batches ahead; what counts is what was trained on
        self._global.load_state_dict({**saved, "epoch": self._epoch, "batch": self._batch})
        if self._batch:
            self._iterator = iter(self._loader)

    def _pass_over(self, num_batches: int, *, at_begin: dict[str, Any]) -> None:
        restore_rng(at_begin["rng"])
        _set_generators(self._loader, at_begin["generators"])
        self._begin_epoch()
        assert self._iterator is not None
        for batch in range(num_batches):
            if next(self._iterator, _END) is _END:
                raise UserError(
                    f"the data has {batch} batches in epoch {self._epoch}, the checkpoint is {num_batches} into it",
                    where="attach(data=…)",
                    mend="give the same data with the same batch size as the run that wrote it, or start a new run",
                )
        self._batch = num_batches
        self._at_begin = at_begin

    def _begin_epoch(self) -> None:
        if self._global is not None:
            self._global.seek(epoch=self._epoch, batch=0)
        elif not self._speaks_protocol:
            generators = [generator.get_state() for generator in _own_generators(self._loader)]
            self._at_begin = {"rng": rng_state(), "generators": generators}
        self._tell_epoch()
        self._iterator = iter(self._loader)
        self._batch = 0

    def _tell_epoch(self) -> None:
        sampler: Any = getattr(self._loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self._epoch)


_END = object()


def _global_batches(loader: Any) -> Any:
    """The sampler of global batches in a DataLoader that has no position of its own."""
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return None
    sampler = getattr(loader, "batch_sampler", None)
    return sampler if getattr(sampler, "counts_global_batches", False) else None


def _counts_global_batches(loader: Any) -> bool:
    """Is a position in it the same for all ranks, at every world size?"""
    counting = (loader, getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None))
    return any(getattr(one, "counts_global_batches", False) for one in counting)


def _own_generators(loader: Any) -> list[torch.Generator]:
    """The generators that a DataLoader and its samplers were given, each once."""
    holders = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    found: list[torch.Generator] = []
    for holder in holders:
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator) and generator not in found:
            found.append(generator)
    return found


def _set_generators(loader: Any, states: list[torch.Tensor]) -> None:
    for generator, state in zip(_own_generators(loader), states, strict=False):
        generator.set_state(state)
