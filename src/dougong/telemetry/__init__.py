"""High-rate samples (loss and time of every step and rank, temperatures, utilisation), which never enter the event log.

A run keeps them in `RUN_DIR/telemetry`. The embedded store is `SampleWriter` and `read`; another store is another
`SampleSink` and `SampleStore`.
"""

from dougong.telemetry.embedded import EmbeddedStore, SampleWriter, read, series
from dougong.telemetry.samples import Samples, SampleSink, SampleStore

__all__ = ["EmbeddedStore", "SampleSink", "SampleStore", "SampleWriter", "Samples", "read", "series"]
