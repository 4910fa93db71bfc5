"""The scorecard: every index of a job, computed from its events. `None` = not measured, which is not 0."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from dougong.cost.reliability import failures_per_1000_node_days, mtbf_interval_s
from dougong.event.kinds import CauseClass, Recorded
from dougong.score.accounts import BADPUT_PHASES, DOWN_PHASES, PHASES, REPAIR_PHASES, Band
from dougong.score.curve import thinned
from dougong.score.fold import JobFold, ettr_of
from dougong.score.interruption import Interruption
from dougong.score.ledger import LedgerCounts
from dougong.score.step_range import StepRanges

MAX_LOSSES = 2000

_NS = 1e9
# The script's own mistake says nothing about the infrastructure.
_NOT_INFRASTRUCTURE = ("exception",)


class TimeSpent(msgspec.Struct, frozen=True, kw_only=True):
    """Nanoseconds in each phase (`accounts.Phase`). All but `idle_ns` add up to the wall time, exactly."""

    train_ns: int = 0
    between_ns: int = 0
    data_wait_ns: int = 0
    checkpoint_stall_ns: int = 0
    init_ns: int = 0
    unfinished_ns: int = 0
    detect_ns: int = 0
    decide_ns: int = 0
    restart_ns: int = 0
    reload_ns: int = 0
    redo_ns: int = 0
    shutdown_ns: int = 0
    idle_ns: int = 0


class BadputSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of the wall time in which no step was finished for the first time, by what took them."""

    init: float
    unfinished: float
    detect: float
    decide: float
    restart: float
    reload: float
    redo: float
    checkpoint_stall: float
    data_wait: float
    shutdown: float


class RepairSplit(msgspec.Struct, frozen=True, kw_only=True):
    """Mean seconds of an interruption's repair; the parts add up to `mttr_s`."""

    detect: float
    decide: float
    restart: float
    reload: float
    redo: float


class DetectTimes(msgspec.Struct, frozen=True, kw_only=True):
    """How long faults of one class, whose onset is known, stayed unnoticed."""

    cause_class: CauseClass
    num: int
    mean_s: float
    p95_s: float


class Availability(msgspec.Struct, frozen=True, kw_only=True):
    """Three availabilities. `inventory`: usable over installed accelerator-time of the job's nodes and spares;
    `schedulable`: in a pool that a scheduler accepts; `job`: the ETTR."""

    inventory: float | None
    schedulable: float | None
    job: float | None


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles of the step time, of the slowest rank. `source` says whether each step was measured on its own."""

    num: int
    p50_s: float
    p90_s: float
    p99_s: float
    max_s: float
    source: str


class UtilisationTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What MFU and HFU were computed from: tokens/s in steady steps x FLOP/token / peak of all accelerators."""

    steady_tokens_per_s: float | None
    model_flop_per_token: float | None
    hardware_flop_per_token: float | None
    flop_source: str
    peak_flop_per_s: float | None
    peak_source: str


class Scorecard(msgspec.Struct, frozen=True, kw_only=True):
    """The indices of one job up to its last event. Definitions: docs/reference/score.md."""

    job: str | None
    outcome: str
    ettr: float | None
    goodput_ratio: float | None
    wall_s: float
    productive_s: float
    between_steps_s: float
    idle_s: float
    badput_s: BadputSeconds
    time_spent: TimeSpent
    interruptions: int
    interruptions_by_cause: dict[str, int]
    interruptions_unresolved: int
    availability: Availability
    mttf_s: float | None
    mtbf_s: float | None
    mtbf_ci95_s: tuple[float | None, float | None]
    mtbf_per_10000_accelerators_s: float | None
    failures_per_1000_node_days: float | None
    mttd_s: float | None
    mttd_p95_s: float | None
    mttd_by_class: tuple[DetectTimes, ...]
    mttr_s: float | None
    mttr_split_s: RepairSplit | None
    node_repair_s: float | None
    checkpoint_stall_ratio: float | None
    checkpoints: dict[str, int]
    checkpoints_rejected: int
    steps: int | None
    steps_redone: int
    tokens: int | None
    tokens_per_s: float | None
    steady_tokens_per_s: float | None
    step_times: StepTimes | None
    mfu: float | None
    hfu: float | None
    mfu_of_wall: float | None
    utilisation_terms: UtilisationTerms
    samples_lost: int | None
    samples_repeated: int | None
    samples_skipped: int | None
    world_size: int | None
    num_accelerators: int | None
    num_nodes: int | None
    unknown_kinds: dict[str, int]
    losses_compared: int | None = None
    """Steps of the final trajectory whose loss, of every rank, was compared with the undisturbed run's."""
    losses_differing: int | None = None
    """Of those, the ones that are not the same bit for bit."""


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """What a drawing of the job needs beside its scorecard. `losses` are (step, loss) pairs of rank 0, at most
    `MAX_LOSSES`."""

    bands: tuple[Band, ...]
    interruptions: tuple[Interruption, ...]
    losses: tuple[tuple[int, float], ...]


def score(
    records: Iterable[Recorded], *, ledger: LedgerCounts | None = None, step_times_s: Sequence[float] | None = None
) -> Scorecard:
    """The scorecard of a job's events, in the order of the log.

    `step_times_s`: the time of each step on its slowest rank, where telemetry has it; else the ranges' means are used.
    """
    card, _ = score_with_timeline(records, ledger=ledger, step_times_s=step_times_s)
    return card


def score_with_timeline(
    records: Iterable[Recorded], *, ledger: LedgerCounts | None = None, step_times_s: Sequence[float] | None = None
) -> tuple[Scorecard, Timeline]:
    """The scorecard, and the timeline it was computed from."""
    state = JobFold()
    for recorded in records:
        state.advance(recorded)
    state.close()
    timeline = Timeline(
        bands=state.accounts.bands(),
        interruptions=tuple(state.interruptions),
        losses=thinned(state.losses(), max_points=MAX_LOSSES),
    )
    return _scorecard(state, ledger=ledger, step_times_s=step_times_s), timeline


def _scorecard(state: JobFold, *, ledger: LedgerCounts | None, step_times_s: Sequence[float] | None) -> Scorecard:
    spent = state.accounts.spent_ns
    wall_s = state.accounts.wall_ns / _NS
    operating_s = wall_s - sum(spent[phase] for phase in DOWN_PHASES) / _NS
    num_failures = len(state.interruptions)
    num_infrastructure = sum(item.cause_class not in _NOT_INFRASTRUCTURE for item in state.interruptions)
    mtbf_s = _per(operating_s, num_failures)
    created = state.created
    num_accelerators = created.num_accelerators if created is not None else None
    num_nodes = len(created.nodes) if created is not None and created.nodes else None
    has_steps = len(state.ranges) > 0 or state.num_redone_steps > 0
    ettr = ettr_of(spent)
    detected = [item for item in state.interruptions if item.is_onset_known]
    repair = _repair_split([item for item in state.interruptions if item.is_closed])
    terms = _utilisation_terms(state)
    tokens_per_s = _per(state.tokens, wall_s) if state.has_tokens else None
    return Scorecard(
        job=created.job if created is not None else None,
        outcome=state.outcome,
        ettr=ettr,
        goodput_ratio=_per((spent["train"] + spent["between"]) / _NS, wall_s),
        wall_s=wall_s,
        productive_s=spent["train"] / _NS,
        between_steps_s=spent["between"] / _NS,
        idle_s=spent["idle"] / _NS,
        badput_s=BadputSeconds(**{phase: spent[phase] / _NS for phase in BADPUT_PHASES}),
        time_spent=TimeSpent(**{f"{phase}_ns": spent[phase] for phase in PHASES}),
        interruptions=num_failures,
        interruptions_by_cause=_counted(item.cause_class for item in state.interruptions),
        interruptions_unresolved=sum(not item.is_closed for item in state.interruptions),
        availability=Availability(
            inventory=state.inventory.usable_ratio(until_ns=state.last_time_ns), schedulable=None, job=ettr
        ),
        mttf_s=_per(operating_s, num_infrastructure),
        mtbf_s=mtbf_s,
        mtbf_ci95_s=_mtbf_interval(operating_s, num_failures=num_failures),
        mtbf_per_10000_accelerators_s=(
            mtbf_s * num_accelerators / 10_000 if mtbf_s is not None and num_accelerators else None
        ),
        failures_per_1000_node_days=(
            failures_per_1000_node_days(num_failures, num_nodes=num_nodes, observed_s=wall_s)
            if num_nodes and wall_s > 0
            else None
        ),
        mttd_s=_mean([_detect_s(item) for item in detected]),
        mttd_p95_s=percentile([_detect_s(item) for item in detected], 0.95),
        mttd_by_class=_detect_times(detected),
        mttr_s=sum(msgspec.structs.astuple(repair)) if repair is not None else None,
        mttr_split_s=repair,
        node_repair_s=state.inventory.mean_repair_s,
        checkpoint_stall_ratio=_per(spent["checkpoint_stall"] / _NS, wall_s) if has_steps else None,
        checkpoints=dict(sorted(state.num_checkpoints.items())),
        checkpoints_rejected=state.num_rejected_checkpoints,
        steps=state.last_step,
        steps_redone=state.num_redone_steps,
        tokens=state.tokens if state.has_tokens else None,
        tokens_per_s=tokens_per_s,
        steady_tokens_per_s=terms.steady_tokens_per_s,
        step_times=_step_times(state.ranges, step_times_s=step_times_s),
        mfu=_utilisation(terms.steady_tokens_per_s, terms.model_flop_per_token, terms.peak_flop_per_s),
        hfu=_utilisation(terms.steady_tokens_per_s, terms.hardware_flop_per_token, terms.peak_flop_per_s),
        mfu_of_wall=_utilisation(tokens_per_s, terms.model_flop_per_token, terms.peak_flop_per_s),
        utilisation_terms=terms,
        samples_lost=ledger.lost if ledger is not None else None,
        samples_repeated=ledger.repeated if ledger is not None else None,
        samples_skipped=ledger.skipped if ledger is not None else None,
        world_size=created.world_size if created is not None else None,
        num_accelerators=num_accelerators,
        num_nodes=num_nodes,
        unknown_kinds=dict(sorted(state.unknown_kinds.items())),
    )


def percentile(values: Sequence[float], ratio: float) -> float | None:
    """The smallest value that at least `ratio` of `values` do not exceed (nearest rank); `None` of none."""
    return weighted_percentile([(value, 1) for value in values], ratio)


def weighted_percentile(values: Sequence[tuple[float, int]], ratio: float) -> float | None:
    """The same of (value, number of times) pairs."""
    due = ratio * sum(num for _, num in values)
    seen = 0
    for value, num in sorted(values):
        seen += num
        if seen >= due - 1e-9:
            return value
    return None


def _mtbf_interval(operating_s: float, *, num_failures: int) -> tuple[float | None, float | None]:
    if operating_s <= 0:
        return None, None
    lower_s, upper_s = mtbf_interval_s(operating_s, num_failures=num_failures)
    return lower_s, upper_s if math.isfinite(upper_s) else None


def _detect_s(item: Interruption) -> float:
    return (item.detected_ns - item.onset_ns) / _NS


def _detect_times(detected: Sequence[Interruption]) -> tuple[DetectTimes, ...]:
    rows: list[DetectTimes] = []
    classes: set[CauseClass] = {item.cause_class for item in detected}
    for cause_class in sorted(classes):
        times_s = [_detect_s(item) for item in detected if item.cause_class == cause_class]
        p95_s = percentile(times_s, 0.95)
        assert p95_s is not None
        rows.append(
            DetectTimes(cause_class=cause_class, num=len(times_s), mean_s=sum(times_s) / len(times_s), p95_s=p95_s)
        )
    return tuple(rows)


def _repair_split(closed: Sequence[Interruption]) -> RepairSplit | None:
    if not closed:
        return None
    return RepairSplit(
        **{phase: sum(getattr(item, f"{phase}_ns") for item in closed) / len(closed) / _NS for phase in REPAIR_PHASES}
    )


def _step_times(ranges: StepRanges, *, step_times_s: Sequence[float] | None) -> StepTimes | None:
    if step_times_s:
        values = [(step_s, 1) for step_s in step_times_s]
        longest_s, source = max(step_times_s), "each step, slowest rank (telemetry)"
    else:
        values = ranges.mean_step_times()
        longest_s = ranges.max_step_s
        source = "means of ranges of steps (events); the tail is flatter than that of single steps"
    p50_s, p90_s, p99_s = (weighted_percentile(values, ratio) for ratio in (0.5, 0.9, 0.99))
    if p50_s is None or p90_s is None or p99_s is None:
        return None
    num = sum(num for _, num in values)
    return StepTimes(num=num, p50_s=p50_s, p90_s=p90_s, p99_s=p99_s, max_s=longest_s, source=source)


def _utilisation_terms(state: JobFold) -> UtilisationTerms:
    model, peak = state.model, state.peak
    return UtilisationTerms(
        steady_tokens_per_s=state.ranges.steady_tokens_per_s,
        model_flop_per_token=model.model_flop_per_token if model is not None else None,
        hardware_flop_per_token=model.hardware_flop_per_token if model is not None else None,
        flop_source=model.source if model is not None else "not told",
        peak_flop_per_s=peak.peak_flop_per_s if peak is not None else None,
        peak_source=peak.source if peak is not None else "not told",
    )


def _utilisation(
    tokens_per_s: float | None, flop_per_token: float | None, peak_flop_per_s: float | None
) -> float | None:
    if tokens_per_s is None or flop_per_token is None or not peak_flop_per_s:
        return None
    return tokens_per_s * flop_per_token / peak_flop_per_s


def _counted(causes: Iterable[str]) -> dict[str, int]:
    return dict(Counter(causes).most_common())


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _per(total: float, count: float) -> float | None:
    return total / count if count > 0 else None
