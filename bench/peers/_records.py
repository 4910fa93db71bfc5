"""What a trained script notes about itself, alike under every launcher. Standard library only.

One line of JSON a record in `DIRECTORY/rank-R.jsonl`. `ns` is monotonic, `wall_ns` since the epoch.

    phase    the process reached `name` (started, imported, group, built, loaded)
    step     step `step` was finished; `begin_ns` when it began
    save     the training thread was held up from `begin_ns` to `ns` by the save of `step`
    durable  the save of `step` is complete, as the script is told
    restore  the state was put back in place, from `begin_ns` to `ns`
    floor    the state was copied into touched shared memory, from `begin_ns` to `ns`
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path


class Records:
    """Appends to the rank's file, one write a record. Safe to call from several threads."""

    def __init__(self, directory: Path, *, rank: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(directory / f"rank-{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def add(self, kind: str, *, name: str = "", step: int = 0, begin_ns: int = 0, ns: int = 0) -> None:
        """`ns` 0 = now."""
        now_ns = time.monotonic_ns()
        at_ns = ns or now_ns
        line = {"kind": kind, "name": name, "step": step, "begin_ns": begin_ns, "ns": at_ns, "pid": os.getpid()}
        line["wall_ns"] = time.time_ns() - (now_ns - at_ns)
        os.write(self._fd, json.dumps(line, separators=(",", ":")).encode() + b"\n")
