"""The controller in virtual time with agents that exist there only: no process, no socket, no sleep."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from dougong.clock import ManualClock
from dougong.event import kinds
from dougong.event.log import EventLog
from dougong.event.store import read
from dougong.run.controller import Controller
from dougong.run.history import JobHistory
from dougong.run.layout import RunDirectory
from dougong.run.rehearsal import Fleet, NodeTimes, RehearsedReception
from dougong.sim.virtual_loop import VirtualTimeLoop
from tests.run.made_settings import settings_at


class Nowhere:
    """Keeps no samples."""

    def append(self, series: str, times_ns: object, indices: object, values: object) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


KindT = TypeVar("KindT", bound=kinds.Event)
STEP_S = 0.5


def rehearsed(
    root: Path, play: Callable[[Fleet], Coroutine[Any, Any, None]], *, num_nodes: int, num_spares: int = 0
) -> tuple[kinds.Recorded, ...]:
    """The events of a run during which `play` happens, and which is then stopped."""
    clock = ManualClock(start_ns=10**18)
    names = tuple(f"hall/node-{index:03d}" for index in range(num_nodes + num_spares))
    settings = msgspec.structs.replace(
        settings_at(root), nodes=names[:num_nodes], spares=names[num_nodes:], procs_per_node=1, peak_flop_per_s=1.0
    )
    run = RunDirectory(root)
    fleet = Fleet(settings, times=NodeTimes(), step_s=STEP_S, clock=clock)

    async def main() -> str:
        controller = Controller(
            run,
            settings,
            token=b"",
            log=EventLog.open(run.events, stream="job", clock=clock, fsync=False),
            samples=Nowhere(),
            backend=fleet,
            clock=clock,
            history=JobHistory(),
            is_resume=False,
            reception_of=RehearsedReception,
        )
        fleet.begin(controller._reception)
        running = asyncio.create_task(controller.run())
        await play(fleet)
        controller.ask_stop()
        return await running

    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(clock)) as runner:
        assert runner.run(main()) == "stopped"
    return tuple(read(run.events))


def times_s(events: tuple[kinds.Recorded, ...], kind: type[KindT]) -> list[tuple[float, KindT]]:
    """(seconds since the begin, event)."""
    return [((e.time_ns - 10**18) / 1e9, e.event) for e in events if isinstance(e.event, kind)]


@pytest.mark.parametrize("num_nodes", [2, 300])
def test_a_killed_rank_is_found_and_all_go_on_from_memory(tmp_path: Path, num_nodes: int) -> None:
    async def play(fleet: Fleet) -> None:
        await asyncio.sleep(20)
        fleet.kill_rank(1)
        await asyncio.sleep(10)

    events = rehearsed(tmp_path, play, num_nodes=num_nodes)
    ((lost_s, lost),) = times_s(events, kinds.WorkerLost)
    assert lost.rank == 1 and 20 < lost_s < 20.5
    ((_, decided),) = times_s(events, kinds.RecoveryDecided)
    assert decided.restore_source == "memory" and decided.restore_step > 20
    ((resumed_s, _),) = times_s(events, kinds.JobResumed)
    assert resumed_s < lost_s + 2.5


@pytest.mark.parametrize("num_nodes", [2, 300])
def test_a_stop_is_found_after_the_rules_second_whatever_the_size_of_the_fleet(tmp_path: Path, num_nodes: int) -> None:
    async def play(fleet: Fleet) -> None:
        await asyncio.sleep(20)
        fleet.stop_rank(1)
        await asyncio.sleep(12)

    ((lost_s, lost),) = times_s(rehearsed(tmp_path, play, num_nodes=num_nodes), kinds.WorkerLost)
    assert (lost.cause_class, lost.rank) == ("stopped", 1)
    assert 21 <= lost_s < 21.8


@pytest.mark.parametrize("num_nodes", [2, 300])
def test_a_hang_is_found_by_the_same_limit_whatever_the_size_of_the_fleet(tmp_path: Path, num_nodes: int) -> None:
    async def play(fleet: Fleet) -> None:
        await asyncio.sleep(20)
        fleet.hang_rank(1)
        await asyncio.sleep(15)

    ((lost_s, lost),) = times_s(rehearsed(tmp_path, play, num_nodes=num_nodes), kinds.WorkerLost)
    assert lost.cause_class == "hang"
    assert 22.2 <= lost_s < 23.5


def test_a_lost_node_is_replaced_by_a_spare(tmp_path: Path) -> None:
    async def play(fleet: Fleet) -> None:
        await asyncio.sleep(20)
        fleet.kill_node("hall/node-001")
        await asyncio.sleep(30)

    events = rehearsed(tmp_path, play, num_nodes=3, num_spares=1)
    assert [event.component for _, event in times_s(events, kinds.NodeLost)] == ["hall/node-001"]
    last = times_s(events, kinds.GenerationStarted)[-1][1]
    assert last.rung == "replaced-node" and {placed.component for placed in last.placement} == {
        "hall/node-000",
        "hall/node-002",
        "hall/node-003",
    }


def test_a_fleet_at_rest_is_left_alone(tmp_path: Path) -> None:
    async def play(fleet: Fleet) -> None:
        await asyncio.sleep(300)

    events = rehearsed(tmp_path, play, num_nodes=2)
    assert times_s(events, kinds.WorkerLost) == [] and times_s(events, kinds.AgentLost) == []
    assert times_s(events, kinds.StepFinished)[-1][1].last_step > 590
