"""Where in the data the job is, so that it can go on at the very next sample.

A loader that speaks the StatefulDataLoader protocol (`state_dict()` and `load_state_dict()`) is asked itself. Any other iterable
is counted: the epoch, the batch in it, and the random state at the epoch's begin; on resume the epoch is begun again with that
random state and its first batches are passed over, which costs their loading time but reads no sample twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


class DataPosition:
    """Batches from `loader`, epoch after epoch, with a position that can be saved between two of them."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._speaks_protocol = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._iterator: Iterator[Any] | None = None
        self._epoch = 0
        self._batch = 0
        self._epoch_rng: torch.Tensor | None = None

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
        return {"epoch": self._epoch, "batch": self._batch, "epoch_rng": self._epoch_rng, "loader": inner}

    def load(self, state: dict[str, Any]) -> None:
        """Go to a saved position. Changes the random state; the caller restores it afterwards."""
        self._epoch = state["epoch"]
        self._batch = state["batch"]
        self._iterator = None
        if self._speaks_protocol:
            self._loader.load_state_dict(state["loader"])
            self._iterator = iter(self._loader) if self._batch else None
            self._epoch_rng = state["epoch_rng"]
            return
        if self._batch == 0:
            self._epoch_rng = None
            return
        torch.set_rng_state(state["epoch_rng"].clone())
        wanted = self._batch
        self._begin_epoch()
        assert self._iterator is not None
        for _ in range(wanted):
            next(self._iterator)
        self._batch = wanted

    def _begin_epoch(self) -> None:
        self._epoch_rng = torch.get_rng_state()
        sampler = getattr(self._loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self._epoch)
        self._iterator = iter(self._loader)
        self._batch = 0
