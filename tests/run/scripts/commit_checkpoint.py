"""Commits the one checkpoint in a directory, by a manifest that lies beside it; with a third argument, locked."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from dougong.clock import SystemClock
from dougong.run import manifest, retention_lock

root, record, *lock_s = sys.argv[1:]
manifest.commit(
    root,
    msgspec.json.decode(Path(record).read_bytes(), type=manifest.Manifest),
    lock_s=float(lock_s[0]) if lock_s else 0.0,
    since=retention_lock.now(SystemClock()),
)
