"""A controller that was killed is replaced by one that reads the log: both must know the same."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from dougong.clock import ManualClock
from dougong.event import store
from dougong.event.kinds import Placed
from dougong.event.log import EventLog
from dougong.run import decide as rules
from dougong.run import letters, wire
from dougong.run.controller import Controller
from dougong.run.history import JobHistory, replay
from dougong.run.layout import RunDirectory
from dougong.run.page import StepRecord
from tests.run.made_settings import settings_at

A, B = "local/rack-01/node-01", "local/rack-01/node-02"
PLACEMENT = tuple(
    Placed(rank=2 * index + local, local_rank=local, component=component)
    for index, component in enumerate((A, B))
    for local in range(2)
)


class NoSamples:
    def append(self, series: str, times_ns: Any, indices: Any, values: Any) -> None:
        return

    def flush(self) -> None:
        return

    def close(self) -> None:
        return


class NoNodes:
    def start_agent(self, component: str) -> None:
        return

    def fence(self, component: str) -> None:
        return

    def end_agent(self, component: str) -> None:
        return

    def can_return(self, component: str) -> bool:
        return False


def known(controller: Any) -> dict[str, Any]:
    """What a controller knows of what the log must tell the next one."""
    return {
        "generation": controller._generation,
        "placement": controller._placement,
        "num_restarts": controller._num_restarts,
        "num_fruitless": controller._num_fruitless,
        "max_step": controller._progress.max_step,
        "is_resumed": controller._is_resumed,
        "is_restored": controller._announcements.is_restored,
        "lost": {node.component for node in controller._nodes.values() if node.is_lost},
        "is_model_described": controller._announcements.is_model_described,
    }


def test_the_log_tells_the_next_controller_what_the_last_one_knew(tmp_path: Path) -> None:
    asyncio.run(_story(tmp_path))


async def _story(root: Path) -> None:
    clock = ManualClock(10**18)
    run, settings = RunDirectory(root), settings_at(root)
    log = EventLog.open(run.events, stream="job", clock=clock)

    def controller(history: JobHistory) -> Any:
        return Controller(
            run, settings, token=b"t", log=log, samples=NoSamples(), backend=NoNodes(), clock=clock,
            history=history, is_resume=False,
        )  # fmt: skip

    def check(live: Any) -> None:
        live._write_ranges(is_forced=True)
        log.commit()
        told = replay(store.read(run.events, streams=("job",)))
        assert known(controller(told)) == known(live)

    def steps(first: int, last: int, generation: int) -> None:
        for rank in range(4):
            records = tuple(StepRecord(s, s * 10**8, s * 10**8 + 10, 1, 1.0, 2, 0, 0) for s in range(first, last + 1))
            live._hear_steps(wire.Steps(rank=rank, generation=generation, records=records))

    def restored(step: int, generation: int) -> None:
        for rank in range(4):
            letter = letters.Restored(generation=generation, rank=rank, step=step, source="memory", reload_s=0.1)
            live._hear_letter(live._nodes[A], letter)

    def place(rung: Any) -> None:
        live._launch(rules.Place(placement=PLACEMENT, rung=rung, backoff_s=0.0, reason="x"))

    live = controller(JobHistory())
    live._begin()
    check(live)
    place("first")
    check(live)
    restored(0, 1)
    found = letters.ModelFound(
        generation=1, rank=0, num_parameters=3, model_flop_per_token=18.0, hardware_flop_per_token=None, source="x"
    )
    live._hear_letter(live._nodes[A], found)
    steps(1, 20, 1)
    check(live)
    for generation in (2, 3):
        loss = rules.Loss(rank=1, component=A, cause_class="crash", detail="signal 9")
        await live._interrupt(rules.Interrupt(loss=loss, reason="x"))
        check(live)
        place("standby")
        check(live)
        restored(15, generation)
        steps(16, 19, generation)
        check(live)
    live._lose_node(B, "gone")
    steps(20, 25, 3)
    check(live)
    log.close()
