# pyright: standard
"""The whole tensors of a durable checkpoint, put together from the boxes that the ranks wrote."""

from __future__ import annotations

import io
import math
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from dougong.errors import CheckpointDamaged
from dougong.run.dcp_read import read_metadata
from dougong.run.manifest import Place
from dougong.run.safetensors import TensorEntry


class WholeTensors:
    """The tensors of a verified checkpoint by their DCP names. `part` = only those of one branch (`model`), without
    its name."""

    def __init__(self, place: Place, directory: str, *, part: str | None) -> None:
        self._place = place
        self._directory = directory
        self._prefix = "" if part is None else f"{part}."
        self._metadata = read_metadata(place=place, directory=directory)
        self._open: dict[str, Any] = {}
        self._tensors: dict[str, TensorStorageMetadata] = {
            name.removeprefix(self._prefix): described
            for name, described in self._metadata.state_dict_metadata.items()
            if isinstance(described, TensorStorageMetadata) and name.startswith(self._prefix)
        }

    @property
    def parts(self) -> tuple[str, ...]:
        """The branches there are."""
        return tuple(sorted({name.split(".", 1)[0] for name in self._metadata.state_dict_metadata}))

    def entries(self) -> tuple[TensorEntry, ...]:
        return tuple(
            TensorEntry(
                name=name,
                dtype=str(described.properties.dtype).removeprefix("torch."),
                shape=tuple(described.size),
                num_bytes=math.prod(described.size) * described.properties.dtype.itemsize,
            )
            for name, described in sorted(self._tensors.items())
        )

    def content_of(self, name: str) -> memoryview:
        """The bytes of a whole tensor, row by row. Raises CheckpointDamaged if its boxes do not cover it."""
        described = self._tensors[name]
        whole = torch.empty(described.size, dtype=described.properties.dtype)
        num_covered = 0
        for chunk in described.chunks:
            box = self._box(f"{self._prefix}{name}", chunk.offsets)
            if box.shape != chunk.sizes or box.dtype != whole.dtype:
                raise CheckpointDamaged(self._directory, reason=f"{name}: a box is not of the shape that is told")
            target = whole
            for dimension, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                target = target.narrow(dimension, offset, size)
            target.copy_(box)
            num_covered += box.numel()
        if num_covered != whole.numel():
            raise CheckpointDamaged(self._directory, reason=f"{name}: its boxes do not cover it")
        return memoryview(cast("Any", whole.reshape(-1).view(torch.uint8).numpy()))

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _box(self, name: str, offsets: torch.Size) -> torch.Tensor:
        info = self._metadata.storage_data.get(MetadataIndex(name, offsets))
        if info is None or "/" in info.relative_path or info.relative_path.startswith("."):
            raise CheckpointDamaged(self._directory, reason=f"{name}: it is not told where a box of it lies")
        if info.relative_path not in self._open:
            self._open[info.relative_path] = self._place.open_read(f"{self._directory}/{info.relative_path}")
        file = self._open[info.relative_path]
        file.seek(info.offset)
        try:
            return torch.load(io.BytesIO(file.read(info.length)), map_location="cpu", weights_only=True)
        except (RuntimeError, ValueError, EOFError, AttributeError, LookupError, TypeError) as error:
            raise CheckpointDamaged(self._directory, reason=f"{name} cannot be read: {error}") from error
