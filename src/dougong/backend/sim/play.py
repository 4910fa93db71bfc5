"""A whole scenario, played from its begin to its end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from dougong.backend.sim.job import SimulatedJob
from dougong.backend.sim.progress import NS
from dougong.clock import ManualClock
from dougong.errors import UserError
from dougong.event.log import EventLog
from dougong.event.segment import stream_names
from dougong.sim.chance import Chance
from dougong.sim.engine import Engine
from dougong.spec.cluster import Node
from dougong.spec.scenario import Scenario

EPOCH_NS = 1_767_225_600 * NS  # 2026-01-01T00:00:00Z: a fixed begin, so that a seed gives the same bytes every time
STREAM = "controller"

_COMMIT_EVERY = 10_000


class _Actor(NamedTuple):
    job: SimulatedJob
    log: EventLog
    run_dir: Path


class PlayedJob:
    """One job of the scenario while it is played. `run_dir` is a run directory like that of a real run."""

    def __init__(self, actor: _Actor) -> None:
        self.name = actor.job.name
        self.run_dir = actor.run_dir
        self._job = actor.job

    @property
    def step(self) -> int:
        """The last step finished in the trajectory that is held now."""
        return self._job.step

    @property
    def phase(self) -> str:
        """Where it stands: see `SimulatedJob.phase`."""
        return self._job.phase


def play(
    scenario: Scenario,
    *,
    run_dir: Path,
    before_each: Callable[[int, tuple[PlayedJob, ...]], None] | None = None,
    is_live: bool = False,
) -> tuple[PlayedJob, ...]:
    """Play `scenario` and write its events; returns its jobs with their run directories.

    A single job writes to `run_dir`, several to `run_dir/<job>`. `before_each` is called with the nanoseconds since the
    begin before each thing that happens: to keep pace, or to report progress. `is_live`: each event is on disk before
    the next thing happens, for others to follow.
    Raises UserError: the directory holds events already, or the jobs need more nodes than there are.
    """
    engine = Engine(ManualClock(EPOCH_NS))
    end_ns = EPOCH_NS + round(scenario.duration_s * NS)
    with ExitStack() as logs:
        actors = _build(scenario, run_dir=run_dir, engine=engine, logs=logs)
        jobs = tuple(PlayedJob(actor) for actor in actors)
        for actor in actors:
            actor.job.begin()
        num_passed = 0

        def before(time_ns: int) -> None:
            nonlocal num_passed
            num_passed += 1
            if is_live or num_passed % _COMMIT_EVERY == 0:
                for actor in actors:
                    actor.log.commit()
            if before_each is not None:
                before_each(time_ns - EPOCH_NS, jobs)

        engine.run(until_ns=end_ns, before_each=before)
        for actor in actors:
            actor.job.stop()
    return jobs


def run_dirs_of(scenario: Scenario, *, run_dir: Path) -> tuple[Path, ...]:
    """Where each job of `scenario` writes, in its order."""
    if len(scenario.jobs) == 1:
        return (run_dir,)
    return tuple(run_dir / job.name for job in scenario.jobs)


def _build(scenario: Scenario, *, run_dir: Path, engine: Engine, logs: ExitStack) -> tuple[_Actor, ...]:
    chance = Chance(scenario.seed)
    shares = _shares(scenario)
    actors: list[_Actor] = []
    for job, nodes, directory in zip(scenario.jobs, shares, run_dirs_of(scenario, run_dir=run_dir), strict=True):
        log = logs.enter_context(_open_log(directory, clock=engine.clock))
        simulated = SimulatedJob(
            job,
            cluster=scenario.cluster,
            nodes=nodes,
            faults=scenario.faults,
            recovery=scenario.recovery,
            repair_s=scenario.repair_s,
            engine=engine,
            chance=chance,
            log=log,
        )
        actors.append(_Actor(simulated, log, directory))
    return tuple(actors)


def _shares(scenario: Scenario) -> tuple[tuple[Node, ...], ...]:
    nodes = tuple(scenario.cluster.nodes())
    needed = [job.num_nodes + job.num_spares for job in scenario.jobs]
    if sum(needed) > len(nodes):
        raise UserError(
            f"the jobs need {sum(needed)} nodes together, the cluster has {len(nodes)}",
            where=f"scenario {scenario.name}",
            mend="each job keeps its nodes for the whole scenario: lower num_nodes or num_spares, or take a job out",
        )
    shares: list[tuple[Node, ...]] = []
    for num_nodes in needed:
        shares.append(nodes[:num_nodes])
        nodes = nodes[num_nodes:]
    return tuple(shares)


def _open_log(run_dir: Path, *, clock: ManualClock) -> EventLog:
    directory = run_dir / "events"
    if stream_names(directory):
        raise UserError(
            "the directory holds the events of another run",
            where=str(run_dir),
            mend="give --run-dir a directory that is new or empty",
        )
    return EventLog.open(directory, stream=STREAM, clock=clock)
