"""Random numbers by purpose: each name has a stream of its own, so that one more draw here shifts nothing there."""

from __future__ import annotations

import hashlib
import random


class Chance:
    """Streams of random numbers under one seed. The same seed and name give the same numbers on every machine."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._streams: dict[str, random.Random] = {}

    def of(self, name: str) -> random.Random:
        """The stream called `name`, where it was left."""
        stream = self._streams.get(name)
        if stream is None:
            digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
            stream = self._streams[name] = random.Random(int.from_bytes(digest, "big"))
        return stream
