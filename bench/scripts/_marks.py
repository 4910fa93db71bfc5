"""When a rank finished its steps, written down by the script itself and alike under any launcher."""

from __future__ import annotations

import os
import time
from pathlib import Path


class Marks:
    """Appends `step pid monotonic_ns wall_ns` to `directory/rank-R.marks`. Without a directory it writes nothing."""

    def __init__(self, directory: Path | None, *, rank: int) -> None:
        self._fd = -1
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(directory / f"rank-{rank}.marks", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, step: int) -> None:
        if self._fd >= 0:
            os.write(self._fd, f"{step} {os.getpid()} {time.monotonic_ns()} {time.time_ns()}\n".encode())
