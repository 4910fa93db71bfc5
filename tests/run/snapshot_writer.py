"""A rank that writes memory checkpoints without end, to be killed at any moment.

Arguments: the prefix of the files, the size of a snapshot. Step s is written as bytes of value s % 251.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from dougong.run.snapshot import SnapshotFiles

files = SnapshotFiles(Path(sys.argv[1]))
num_bytes = int(sys.argv[2])
files.reserve(num_bytes)
print("ready", flush=True)
first = files.slots()[0].step + 1 if files.slots() else 1
for step in itertools.count(first):
    index = files.next_index()
    files.void(index)
    files.buffer(index)[:num_bytes] = bytes([step % 251]) * num_bytes
    files.publish(index, step=step, generation=1, world_size=1, num_bytes=num_bytes)
