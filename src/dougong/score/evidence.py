"""A run directory's evidence (events, telemetry, sample ledger), and the scorecard and the report made of it."""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec

from dougong import telemetry
from dougong.errors import UserError
from dougong.event.segment import stream_names
from dougong.event.store import read
from dougong.score.curve import thinned
from dougong.score.ledger import count_run
from dougong.score.report import render_html
from dougong.score.scorecard import MAX_LOSSES, Scorecard, Timeline, score_with_timeline

REPORT_NAME = "report.html"
REFERENCE_NAME = "reference"

_STEP_SERIES = "step_s/rank-"
_LOSS_PREFIX = "loss/rank-"
_LOSS_SERIES = "loss/rank-0"


def score_run(run_dir: Path, *, reference_dir: Path | None = None) -> tuple[Scorecard, Timeline]:
    """The scorecard and timeline of `run_dir`. With `reference_dir`, samples are compared with that undisturbed run's.

    Raises UserError: there are no events. StoreDamaged: a stored line that no crash explains.
    """
    directory = run_dir / "events"
    if not stream_names(directory):
        raise UserError(
            "it has no events" if run_dir.is_dir() else "there is no such run directory",
            where=str(run_dir),
            mend="name the directory that `dougong run --run-dir` or `dougong simulate --run-dir` was given",
        )
    samples = run_dir / "telemetry"
    reference_dir = reference_dir or named_reference(run_dir)
    card, timeline = score_with_timeline(
        read(directory), ledger=count_run(run_dir, reference_dir=reference_dir), step_times_s=_step_times_s(samples)
    )
    if reference_dir is not None:
        compared, differing = _compare_losses(samples, reference_dir / "telemetry")
        card = msgspec.structs.replace(card, losses_compared=compared, losses_differing=differing)
    losses = _last_by_step(samples, _LOSS_SERIES)
    if losses:
        timeline = msgspec.structs.replace(timeline, losses=thinned(sorted(losses.items()), max_points=MAX_LOSSES))
    return card, timeline


def write_report(run_dir: Path, *, path: Path | None = None, reference_dir: Path | None = None) -> Path:
    """Write the one-page report of `run_dir`, by default beside its events; returns where. Raises as `score_run`,
    and UserError: it cannot be written."""
    card, timeline = score_run(run_dir, reference_dir=reference_dir)
    target = path or run_dir / REPORT_NAME
    try:
        target.write_text(render_html(card, timeline), encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"the report cannot be written: {error.strerror or error}",
            where=str(target),
            mend="give a file in a directory that exists and can be written",
        ) from error
    return target


def named_reference(run_dir: Path) -> Path | None:
    """The undisturbed run that `dougong run --reference` named for this one; None if it named none."""
    try:
        return Path((run_dir / REFERENCE_NAME).read_text().strip())
    except FileNotFoundError:
        return None


def _compare_losses(directory: Path, reference: Path) -> tuple[int | None, int | None]:
    """(steps compared, steps that differ in any bit of any rank's loss); (None, None) without losses in both."""
    compared: set[int] = set()
    differing: set[int] = set()
    for name in telemetry.series(directory):
        if not name.startswith(_LOSS_PREFIX):
            continue
        own, other = _last_by_step(directory, name), _last_by_step(reference, name)
        common = own.keys() & other.keys()
        compared |= common
        # packed, since a NaN is the same as itself here
        differing |= {step for step in common if struct.pack("<d", own[step]) != struct.pack("<d", other[step])}
    return (len(compared), len(differing)) if compared else (None, None)


def _step_times_s(directory: Path) -> tuple[float, ...] | None:
    slowest_s: dict[int, float] = {}
    for name in telemetry.series(directory):
        if name.startswith(_STEP_SERIES):
            for step, step_s in _last_by_step(directory, name).items():
                slowest_s[step] = max(step_s, slowest_s.get(step, 0.0))
    return tuple(slowest_s.values()) or None


def _last_by_step(directory: Path, series: str) -> dict[int, float]:
    # A redone step has a sample of each try; the last one is of the final trajectory.
    samples = telemetry.read(directory, series)
    return dict(zip(samples.indices, samples.values, strict=True))
