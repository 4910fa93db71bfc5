"""Compares the checksum of what a new process will be restored from while its script still builds the model."""

from __future__ import annotations

import contextlib
from pathlib import Path

from dougong.errors import CheckpointDamaged
from dougong.run.place import WorkerPlace
from dougong.run.snapshot import SnapshotFiles

_begun: dict[Path, SnapshotFiles] = {}


def read_ahead(place: WorkerPlace) -> None:
    """Begin, in a thread, if this rank goes on from its memory checkpoint."""
    if place.restore_source not in ("memory", "peer"):
        return
    prefix = place.node.snapshot(place.rank)
    files = SnapshotFiles(prefix)
    with contextlib.suppress(CheckpointDamaged):  # said again, and acted on, when it is restored
        files.compare_ahead(files.find(step=place.restore_step, generation=place.restore_generation))
        _begun[prefix] = files


def snapshot_files(prefix: Path) -> SnapshotFiles:
    """This rank's buffers, of which one may have been read ahead."""
    return _begun.pop(prefix, None) or SnapshotFiles(prefix)
