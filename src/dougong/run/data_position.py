"""Where in the data the job is, so that it can go on at the very next sample.

A loader that speaks the StatefulDataLoader protocol (`state_dict()` and `load_state_dict()`) is asked itself. Any other
iterable is counted: the epoch, the batch in it, and the random state at the epoch's begin, that of the loader's own
generators included; on resume the epoch is begun again with that random state and its first batches are passed over,
which costs their loading time but trains on no sample twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dougong.errors import UserError
from dougong.run.state import restore_rng, rng_state


class DataPosition:
    """Batches from `loader`, epoch after epoch, with a position that can be saved between two of them."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
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
            "at_begin": None if self._speaks_protocol else self._at_begin,
            "generators": [generator.get_state() for generator in _own_generators(self._loader)],
            "loader": inner,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go to a saved position. Changes the random state; the caller restores it afterwards.

        Raises UserError if the data ends before that position.
        """
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
        if self._batch and self._at_begin is not None:
            self._pass_over(self._batch, at_begin=self._at_begin)
        _set_generators(self._loader, state["generators"])

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
        if not self._speaks_protocol:
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
