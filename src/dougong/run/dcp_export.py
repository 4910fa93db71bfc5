"""The whole tensors of a durable checkpoint, put together from the boxes that the ranks wrote."""

from __future__ import annotations

import math
from typing import Any, cast

import torch

from dougong.run.dcp_read import DurableState
from dougong.run.extent import whole
from dougong.run.safetensors import TensorEntry


class WholeTensors:
    """The tensors of a verified checkpoint by their DCP names. `part` = only those of one branch (`model`), without
    its name."""

    def __init__(self, saved: DurableState, *, part: str | None) -> None:
        self._saved = saved
        self._prefix = "" if part is None else f"{part}."

    @property
    def parts(self) -> tuple[str, ...]:
        """The branches there are."""
        return tuple(sorted({name.split(".", 1)[0] for name in self._saved.names}))

    def entries(self) -> tuple[TensorEntry, ...]:
        """Raises CheckpointDamaged."""
        found: list[TensorEntry] = []
        for name in sorted(self._saved.names):
            tensor = self._saved.tensor(name) if name.startswith(self._prefix) else None
            if tensor is not None:
                found.append(
                    TensorEntry(
                        name=name.removeprefix(self._prefix),
                        dtype=str(tensor.dtype).removeprefix("torch."),
                        shape=tensor.shape,
                        num_bytes=math.prod(tensor.shape) * tensor.dtype.itemsize,
                    )
                )
        return tuple(found)

    def content_of(self, entry: TensorEntry) -> memoryview:
        """The bytes of a whole tensor, row by row. Raises CheckpointDamaged if its boxes do not cover it."""
        tensor = self._saved.read(f"{self._prefix}{entry.name}", whole(entry.shape)).contiguous()
        return memoryview(cast("Any", tensor.reshape(-1).view(torch.uint8).numpy()))
