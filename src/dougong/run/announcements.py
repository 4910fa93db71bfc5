"""Events that need word from several ranks, or are written once: the model, the peak, the restored state, memory
checkpoints."""

from __future__ import annotations

from collections.abc import Iterable

from dougong.event.kinds import AnyEvent, CheckpointSaved, ModelDescribed, PeakDescribed, StateRestored
from dougong.run import letters, wire
from dougong.run.history import JobHistory
from dougong.run.progress import range_s
from dougong.run.settings import RunSettings

_LOOK_RATIO = 0.2  # agents tell what their memory holds five times a second


class Announcements:
    """Takes what the ranks say, one after the other; returns the events that are due."""

    def __init__(self, settings: RunSettings, history: JobHistory) -> None:
        self._settings = settings
        self.is_model_described = history.is_model_described
        self._is_peak_described = history.is_peak_described
        self.is_restored = history.is_restored
        self._world_size = len(history.placement) or settings.world_size
        self._reason = ""
        self._restored: dict[int, letters.Restored] = {}
        self._peaks: dict[int, letters.PeakMeasured] = {}
        self.last_memory_step = 0
        self._last_memory_s = 0.0
        self._looked_s = 0.0

    def begin_generation(self, *, world_size: int, reason: str) -> None:
        """Every rank restores anew, for this reason."""
        self._world_size = world_size
        self._reason = reason
        self.is_restored = False
        self._restored.clear()
        self._peaks.clear()
        self.last_memory_step = 0

    def model(self, letter: letters.ModelFound) -> tuple[AnyEvent, ...]:
        if self.is_model_described:
            return ()
        self.is_model_described = True
        described = ModelDescribed(
            num_parameters=letter.num_parameters,
            model_flop_per_token=letter.model_flop_per_token,
            hardware_flop_per_token=letter.hardware_flop_per_token,
            source=letter.source,
        )
        if self._settings.peak_flop_per_s is None:
            return (described,)
        self._is_peak_described = True
        total = self._settings.peak_flop_per_s * self._settings.world_size
        return described, PeakDescribed(peak_flop_per_s=total, source=self._settings.peak_source)

    def peak(self, letter: letters.PeakMeasured) -> tuple[AnyEvent, ...]:
        """All ranks measure at once, since they share the machine's clock, power and memory."""
        self._peaks[letter.rank] = letter
        if self._is_peak_described or len(self._peaks) < self._world_size:
            return ()
        self._is_peak_described = True
        total = sum(peak.flop_per_s for peak in self._peaks.values())
        source = f"{letter.source}, all {len(self._peaks)} ranks at once"
        return (PeakDescribed(peak_flop_per_s=total, source=source),)

    def restored(self, letter: letters.Restored) -> tuple[AnyEvent, ...]:
        self._restored[letter.rank] = letter
        if self.is_restored or len(self._restored) < self._world_size:
            return ()
        self.is_restored = True
        slowest = max(self._restored.values(), key=lambda restored: restored.reload_s)
        return (
            StateRestored(
                generation=letter.generation,
                step=slowest.step,
                source=slowest.source,
                reload_s=slowest.reload_s,
                reason=self._reason,
            ),
        )

    def memory(
        self, snapshots: Iterable[wire.SnapshotStatus], *, generation: int, stall_s: float, now_s: float
    ) -> tuple[AnyEvent, ...]:
        """The newest step that all ranks hold in memory, at most once a second."""
        span_s = range_s(self._world_size)
        if now_s - self._last_memory_s < span_s or now_s - self._looked_s < span_s * _LOOK_RATIO:
            return ()
        self._looked_s = now_s
        held: dict[int, list[wire.SnapshotStatus]] = {}
        for snapshot in snapshots:
            if snapshot.generation == generation:
                held.setdefault(snapshot.step, []).append(snapshot)
        step = max((step for step, parts in held.items() if len(parts) == self._world_size), default=0)
        if step <= self.last_memory_step:
            return ()
        self.last_memory_step, self._last_memory_s = step, now_s
        return (
            CheckpointSaved(
                step=step,
                generation=generation,
                tier="memory",
                num_bytes=sum(part.num_bytes for part in held[step]),
                stall_s=stall_s,
                write_s=0.0,
            ),
        )
