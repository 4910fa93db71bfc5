"""The clock of the host on which a part of a run lives."""

from __future__ import annotations

from dougong.backend.local.nodes import clock_offset_file
from dougong.clock import Clock, OffClock, SystemClock
from dougong.run.layout import RunDirectory
from dougong.run.settings import RunSettings

CONTROLLER = "controller"


def host_clock(run: RunDirectory, settings: RunSettings, component: str) -> Clock:
    """Of a node, or of the controller; where chaos is at work, one that it can turn."""
    return OffClock(clock_offset_file(run.root, component)) if settings.is_chaos else SystemClock()
