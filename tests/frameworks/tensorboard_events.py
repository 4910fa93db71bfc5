# pyright: reportMissingImports=false
"""What TensorBoard itself would show."""

from __future__ import annotations

from pathlib import Path


def scalars(directory: Path, tag: str) -> list[tuple[int, float]]:
    """The points of a curve, read by TensorBoard's own reader from the one folder below `directory` that has events."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = {path.parent for path in directory.rglob("events.out.tfevents.*")}
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}, purge_orphaned_data=True)
    events.Reload()
    return [(point.step, point.value) for point in events.Scalars(tag)]
