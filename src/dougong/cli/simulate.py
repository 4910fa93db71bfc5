"""`dougong simulate`: play a scenario on the simulated backend. The one door to the simulator.

The scenario says what is played; each part of it that a verb brings (today: jobs with faults) becomes actors of
`backend.sim.play`, and all of them write ordinary events, so that every other command works on the result.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dougong.clock import Clock, SystemClock

if TYPE_CHECKING:
    from dougong.backend.sim.play import PlayedJob
    from dougong.spec.scenario import Scenario

_NS = 1_000_000_000
_MAX_NAP_S = 0.2


@click.command()
@click.argument("scenario_path", metavar="SCENARIO.yaml", type=click.Path(path_type=Path))
@click.option("--run-dir", type=click.Path(path_type=Path), metavar="DIR", help="Where to write; new or empty.")
@click.option(
    "--speed",
    type=click.FloatRange(min=0, min_open=True),
    metavar="X",
    help="Simulated seconds for each real one; default: the scenario's, else as fast as the machine can.",
)
@click.option("--json", "is_json", is_flag=True, help="Print the scorecards as JSON.")
def simulate(scenario_path: Path, run_dir: Path | None, speed: float | None, is_json: bool) -> None:
    """Play SCENARIO.yaml, write its events to a run directory, and score them."""
    from dougong.backend.sim.play import play
    from dougong.spec.scenario import load_scenario

    scenario = load_scenario(scenario_path, warn=lambda text: click.echo(f"warning: {text}", err=True))
    clock = SystemClock()
    directory = run_dir or _default_run_dir(scenario.name, clock=clock)
    click.echo(f"run: {directory}", err=True)
    pace = Pace(speed or scenario.speed, duration_s=scenario.duration_s, clock=clock)
    jobs = play(scenario, run_dir=directory, before_each=pace, is_live=pace.speed is not None)
    pace.finish()
    _print(scenario, jobs, is_json=is_json)


class Pace:
    """Keeps simulated time at `speed` simulated seconds a real one (`None`: as fast as can be), and tells progress on
    a terminal."""

    def __init__(self, speed: float | None, *, duration_s: float, clock: Clock) -> None:
        self.speed = speed
        self._duration_s = duration_s
        self._clock = clock
        self._begin_ns = clock.monotonic_ns()
        self._told_ns = 0
        self._is_telling = sys.stderr.isatty()

    def __call__(self, simulated_ns: int, jobs: Sequence[PlayedJob]) -> None:
        if self.speed is None:
            self._tell(simulated_ns, jobs)
            return
        due_ns = self._begin_ns + round(simulated_ns / self.speed)
        while (left_ns := due_ns - self._clock.monotonic_ns()) > 0:
            self._tell(simulated_ns - round(left_ns * self.speed), jobs)
            time.sleep(min(left_ns / _NS, _MAX_NAP_S))

    def finish(self) -> None:
        """Leave the terminal's line."""
        if self._told_ns:
            click.echo(err=True)

    def _tell(self, simulated_ns: int, jobs: Sequence[PlayedJob]) -> None:
        now_ns = self._clock.monotonic_ns()
        if not self._is_telling or now_ns - max(self._told_ns, self._begin_ns) < _NS // 4:
            return
        self._told_ns = now_ns
        from dougong.units import format_duration

        states = ", ".join(f"{job.name}: step {job.step:,}, {job.phase}" for job in jobs[:3])
        at, whole = format_duration(simulated_ns / _NS), format_duration(self._duration_s)
        click.echo(f"\r{at} of {whole}  {states}\x1b[K", nl=False, err=True)


def _default_run_dir(name: str, *, clock: Clock) -> Path:
    stamp = datetime.fromtimestamp(clock.wall_ns() / _NS, tz=UTC).strftime("%Y%m%dT%H%M%SZ")
    return Path("runs") / f"{name}-{stamp}"


def _print(scenario: Scenario, jobs: Sequence[PlayedJob], *, is_json: bool) -> None:
    import msgspec

    from dougong.score.evidence import score_run, write_report

    scored = [(job, *score_run(job.run_dir)) for job in jobs]
    reports = [write_report(job.run_dir) for job in jobs]
    if is_json:
        document = {
            "scenario": scenario.name,
            "seed": scenario.seed,
            "jobs": [{"job": job.name, "run_dir": str(job.run_dir), "scorecard": card} for job, card, _ in scored],
        }
        click.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
        return
    from dougong.cli.scorecard_table import print_tables

    for _, card, timeline in scored:
        print_tables(card, timeline)
    for report in reports:
        click.echo(f"report: {report}", err=True)
