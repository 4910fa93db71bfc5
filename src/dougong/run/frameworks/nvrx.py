# pyright: standard
"""Scripts written to the heartbeat client of NVIDIA's resiliency extension (NVRx): the same calls, onto the page.

Signatures: nvidia-resiliency-ext 0.4, `nvidia_resiliency_ext.fault_tolerance.RankMonitorClient`. A script changes the
head of its import to `dougong.compat.nvidia_resiliency_ext`. Times are seconds, as there.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from dougong.run.page import Page, Phase
from dougong.run.place import worker_place

_SAFETY_FACTOR = 5.0
"""Of NVRx: a calculated timeout is this many times the longest time seen."""
_PHASES = {
    "setup": Phase.STARTING,
    "init": Phase.STARTING,
    "step": Phase.STEP,
    "train": Phase.STEP,
    "checkpointing": Phase.CHECKPOINT,
    "checkpoint": Phase.CHECKPOINT,
    "save": Phase.CHECKPOINT,
}


class RankMonitorClientError(Exception):
    """A call at the wrong time."""


@dataclass
class HeartbeatTimeouts:
    initial: float | None = None
    subsequent: float | None = None
    were_calculated: bool | None = None

    @property
    def are_valid(self) -> bool:
        return self.initial is not None and self.subsequent is not None


@dataclass
class SectionTimeouts:
    section: Mapping[str, float | None] = field(default_factory=dict)
    out_of_section: float | None = None
    calculated_sections: set[str] = field(default_factory=set)
    is_out_of_section_calculated: bool = False

    def __post_init__(self) -> None:
        self.calculated_sections = set(self.calculated_sections)


class RankMonitorClient:
    """Signs of life for the rank's heartbeat page.

    A heartbeat counts as progress. A section says what the rank is doing: names like "setup", "step" and
    "checkpointing" are the phases of the same meaning, any other is time between two steps. The timeouts that a script
    has calculated and saves are kept for it, but it is Dougong's own rule, which learns by itself, that finds a hang.
    Without `dougong run` the calls do nothing.
    """

    CURRENT_TIMEOUTS_STATE_KEY = "current_timeouts"

    def __init__(self) -> None:
        self.is_initialized = False
        self.hb_timeouts = HeartbeatTimeouts(were_calculated=False)
        self.section_timeouts = SectionTimeouts()
        self._page: Page | None = None
        self._open: dict[str, float] = {}
        self._longest: dict[str, float] = {}
        self._last = 0.0
        self._num_heartbeats = 0

    def init_workload_monitoring(self) -> None:
        if self.is_initialized:
            raise RankMonitorClientError("RankMonitorClient is already initialized")
        place = worker_place()
        self._page = None if place is None else Page.open(place.node.page(place.rank))
        self._last = time.monotonic()
        self.is_initialized = True

    def shutdown_workload_monitoring(self) -> None:
        if self._page is not None:
            self._page.close()
            self._page = None
        self.is_initialized = False

    def send_heartbeat(self) -> None:
        self._check_ready()
        now = time.monotonic()
        self._see("initial" if self._num_heartbeats == 0 else "subsequent", now - self._last)
        self._last = now
        self._num_heartbeats += 1
        if self._page is not None:
            self._enter(Phase.STEP if self._page.phase is Phase.STARTING else self._page.phase)

    def start_section(self, section: str) -> None:
        self._check_ready()
        if section in self._open:
            raise RankMonitorClientError(f"section {section!r} is open already")
        if not self._open:
            self._see("out of section", time.monotonic() - self._last)
        self._open[section] = time.monotonic()
        self._enter(_PHASES.get(section, Phase.BETWEEN))

    def end_section(self, section: str) -> None:
        self._check_ready()
        if section not in self._open:
            raise RankMonitorClientError(f"section {section!r} is not open")
        now = time.monotonic()
        self._see(f"section {section}", now - self._open.pop(section))
        self._last = now
        self._enter(_PHASES.get(next(reversed(self._open), ""), Phase.BETWEEN))

    def end_all_sections(self) -> None:
        for section in tuple(self._open):
            self.end_section(section)

    def calculate_and_set_hb_timeouts(self, skip_if_not_ready: bool = False) -> bool:
        """Timeouts from the heartbeats so far, the same on all ranks; False if there were too few.

        Raises RankMonitorClientError for too few, unless `skip_if_not_ready`.
        """
        self._check_ready()
        initial, subsequent = self._longest_of_all(("initial", "subsequent"))
        if not self._is_known((initial, subsequent), is_skipped=skip_if_not_ready):
            return False
        self.hb_timeouts = HeartbeatTimeouts(_SAFETY_FACTOR * initial, _SAFETY_FACTOR * subsequent, True)
        return True

    def calculate_and_set_section_timeouts(
        self,
        selected_sections: Collection[str] | None = None,
        calc_out_of_section: bool = True,
        skip_if_not_ready: bool = False,
    ) -> bool:
        """The same for sections. Every rank must have had the same ones."""
        self._check_ready()
        seen = [name.removeprefix("section ") for name in self._longest if name.startswith("section ")]
        selected = sorted(seen if selected_sections is None else selected_sections)
        names = [f"section {name}" for name in selected] + (["out of section"] if calc_out_of_section else [])
        longest = self._longest_of_all(tuple(names))
        if not self._is_known(longest, is_skipped=skip_if_not_ready):
            return False
        found = {name: _SAFETY_FACTOR * value for name, value in zip(names, longest, strict=True)}
        out_of_section = found.pop("out of section", self.section_timeouts.out_of_section)
        self.section_timeouts = SectionTimeouts(
            section={**self.section_timeouts.section, **{name: found[f"section {name}"] for name in selected}},
            out_of_section=out_of_section,
            calculated_sections=self.section_timeouts.calculated_sections | set(selected),
            is_out_of_section_calculated=calc_out_of_section or self.section_timeouts.is_out_of_section_calculated,
        )
        return True

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        if self.hb_timeouts.are_valid and self.hb_timeouts.were_calculated:
            state["heartbeat"] = asdict(self.hb_timeouts)
        if self.section_timeouts.calculated_sections or self.section_timeouts.is_out_of_section_calculated:
            sections = asdict(self.section_timeouts)
            state["section"] = {**sections, "calculated_sections": sorted(sections["calculated_sections"])}
        return {self.CURRENT_TIMEOUTS_STATE_KEY: state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        found = state.get(self.CURRENT_TIMEOUTS_STATE_KEY, {})
        if "heartbeat" in found:
            self.hb_timeouts = HeartbeatTimeouts(**found["heartbeat"])
        if "section" in found:
            self.section_timeouts = SectionTimeouts(**found["section"])

    def _check_ready(self) -> None:
        if not self.is_initialized:
            raise RankMonitorClientError("RankMonitorClient is not initialized")

    def _enter(self, phase: Phase) -> None:
        if self._page is not None:
            # a script that attaches tells its phases itself
            self._page.enter(self._page.phase if self._page.is_attached else phase, now_ns=time.monotonic_ns())

    def _see(self, name: str, duration: float) -> None:
        self._longest[name] = max(duration, self._longest.get(name, 0.0))

    def _longest_of_all(self, names: tuple[str, ...]) -> tuple[float, ...]:
        values = torch.tensor([self._longest.get(name, 0.0) for name in names], dtype=torch.float64)
        if dist.is_initialized() and names:
            values = values.cuda() if dist.get_backend() == "nccl" else values
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return tuple(values.tolist())

    def _is_known(self, longest: tuple[float, ...], *, is_skipped: bool) -> bool:
        if all(value > 0 for value in longest):
            return True
        if is_skipped:
            return False
        raise RankMonitorClientError("Not enough data to compute timeouts.")
