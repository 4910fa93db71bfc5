"""The words of a scorecard for people: what each phase and index is called, what it means and where that comes from."""

from __future__ import annotations

from typing import NamedTuple

from dougong.score.accounts import Phase
from dougong.score.scorecard import Scorecard
from dougong.units import format_duration, format_ratio, format_si

NOT_MEASURED = "not measured"

PHASE_WORDS: dict[Phase, str] = {
    "train": "training",
    "between": "between steps",
    "data_wait": "data wait",
    "checkpoint_stall": "checkpoint stall",
    "init": "initialisation",
    "unfinished": "unfinished step",
    "detect": "detect",
    "decide": "decide",
    "restart": "restart",
    "reload": "reload",
    "redo": "redo",
    "shutdown": "shutdown",
    "idle": "stopped by hand",
}

PHASE_MEANINGS: dict[Phase, str] = {
    "train": "inside steps that were finished for the first time",
    "between": "evaluation and the script's own saving; no badput",
    "data_wait": "the training thread waited for data",
    "checkpoint_stall": "the training thread waited for a checkpoint",
    "init": "from the start, or a resume by hand, to the first step",
    "unfinished": "the step under way when a fault came",
    "detect": "from the onset of a fault until it was noticed",
    "decide": "until it was decided what to do",
    "restart": "back-off, starting ranks, joining, up to the first step",
    "reload": "loading the state",
    "redo": "steps finished before, lost, and made again",
    "shutdown": "from the last step to the end",
    "idle": "outside the wall time",
}


class Row(NamedTuple):
    """One index in a table: what it is called, its value in words, and what stands behind it."""

    name: str
    value: str
    note: str = ""


class Definition(NamedTuple):
    """How an index is computed and whose definition that is."""

    name: str
    text: str
    source: str


DEFINITIONS: tuple[Definition, ...] = (
    Definition(
        "ETTR",
        "Time in training steps, waiting for data or between steps, over the wall time. The wall time runs from the "
        "start of the job to its last event; time in which it was stopped by hand is left out.",
        "Effective training time ratio: Kokolis et al., HPCA'25, arXiv 2410.21680",
    ),
    Definition(
        "Goodput",
        "ETTR with data wait counted as lost: 1 - badput / wall time. The badput categories and the useful time add up "
        "to the wall time exactly.",
        "Google Cloud, ML Productivity Goodput, 2024; badput categories after ml-goodput-measurement",
    ),
    Definition(
        "Interruption",
        "One fault that stopped training, however many ranks it took along. A fault that strikes during a recovery is "
        "an interruption of its own.",
        "Incidents, not alarms: GB/T 46346 annex C; Llama 3, arXiv 2407.21783, section 3.3.4",
    ),
    Definition(
        "MTBF",
        "Wall time without downtime (detect, decide, restart, reload) over the number of interruptions. Interval: "
        "chi-square, two-sided 95 %; it assumes a constant failure rate.",
        "IEC 60050-192; IEC 60605-4",
    ),
    Definition(
        "MTTF",
        "The same operating time over the interruptions that the script itself did not cause (all classes but "
        "exception).",
        "IEC 60050-192; Kokolis et al., HPCA'25",
    ),
    Definition(
        "MTTD",
        "From the onset of a fault to its detection: mean and 95th percentile. The onset is the injection where there "
        "was one, else what the detector could tell; interruptions without a known onset are left out.",
        "IEC 60050-192 (fault detection time)",
    ),
    Definition(
        "MTTR",
        "From the onset until the lost steps are made good: detect + decide + restart + reload + redo. An interruption "
        "that the next one cut short ends with it.",
        "IEC 60050-192, split as a training job needs it",
    ),
    Definition(
        "Checkpoint stall ratio",
        "Time in which the training thread waited for a checkpoint, over the wall time. Writing beside training does "
        "not count.",
        "ml-goodput-measurement (checkpoint save)",
    ),
    Definition(
        "MFU",
        "Tokens per second in steady steps x model FLOP per token / peak of all accelerators. The first range of steps "
        "after a start is warm-up and left out.",
        "Chowdhery et al., PaLM, arXiv 2204.02311, appendix B",
    ),
    Definition(
        "HFU",
        "As MFU, with the FLOP that are executed, recomputation included. Never compare it with an MFU.",
        "Korthikanti et al., arXiv 2205.05198",
    ),
    Definition(
        "Samples",
        "On the final trajectory, step by step over all ranks, against the undisturbed run: lost = expected and not "
        "seen, repeated = seen more often than expected, skipped = passed over on purpose.",
        "The sample ledger of the run",
    ),
)


def headline(card: Scorecard) -> tuple[Row, ...]:
    """The figures that come first."""
    return (
        Row("ETTR", ratio(card.ettr), f"of {format_duration(card.wall_s)} wall time"),
        Row("Goodput", ratio(card.goodput_ratio)),
        Row("Interruptions", str(card.interruptions), causes(card)),
        Row("MTBF", duration(card.mtbf_s), mtbf_note(card)),
        Row("MTTD", duration(card.mttd_s), f"p95 {duration(card.mttd_p95_s)}" if card.mttd_p95_s is not None else ""),
        Row("MTTR", duration(card.mttr_s), repair_note(card)),
        Row("MFU", ratio(card.mfu), mfu_note(card)),
        Row("Tokens/s", rate(card.tokens_per_s), _steady_note(card)),
    )


def details(card: Scorecard) -> tuple[Row, ...]:
    """All other figures."""
    return (
        Row("HFU", ratio(card.hfu), "executed FLOP, recomputation included"),
        Row("MFU of the wall time", ratio(card.mfu_of_wall), "all stalls and faults included"),
        Row("MTTF", duration(card.mttf_s), "without exceptions of the script"),
        Row("MTBF per 10,000 accelerators", duration(card.mtbf_per_10000_accelerators_s)),
        Row("Failures per 1,000 node-days", number(card.failures_per_1000_node_days)),
        Row("Availability, inventory", ratio(card.availability.inventory), "usable / installed accelerator-time"),
        Row("Availability, schedulable", ratio(card.availability.schedulable), "in a pool that a scheduler accepts"),
        Row("Availability, job", ratio(card.availability.job), "ETTR"),
        Row("Node repair time", duration(card.node_repair_s), "from the loss until it is usable"),
        Row("Checkpoint stall ratio", ratio(card.checkpoint_stall_ratio), _checkpoints_note(card)),
        Row("Step time p50 / p90 / p99 / max", _step_times(card), card.step_times.source if card.step_times else ""),
        Row("Steps", NOT_MEASURED if card.steps is None else f"{card.steps:,}", f"{card.steps_redone:,} redone"),
        Row("Samples lost / repeated / skipped", _samples(card), "final trajectory against the undisturbed run"),
        Row("Loss curve", _loss_curve(card), "against the undisturbed run, every rank, every step"),
        Row("Accelerators", NOT_MEASURED if card.num_accelerators is None else f"{card.num_accelerators:,}"),
    )


def duration(duration_s: float | None) -> str:
    return NOT_MEASURED if duration_s is None else format_duration(duration_s)


def ratio(value: float | None) -> str:
    return NOT_MEASURED if value is None else format_ratio(value)


def rate(value: float | None) -> str:
    return NOT_MEASURED if value is None else format_si(value, "token/s")


def number(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.3g}"


def causes(card: Scorecard) -> str:
    """`3 crash, 1 hang`."""
    return ", ".join(f"{num} {cause}" for cause, num in card.interruptions_by_cause.items())


def mtbf_note(card: Scorecard) -> str:
    lower_s, upper_s = card.mtbf_ci95_s
    if lower_s is None:
        return ""
    if upper_s is None:
        return f"no failure seen: at least {format_duration(lower_s)} (95 %)"
    return f"95 %: {format_duration(lower_s)} to {format_duration(upper_s)}"


def repair_note(card: Scorecard) -> str:
    split = card.mttr_split_s
    if split is None:
        return ""
    names = type(split).__struct_fields__
    return " + ".join(f"{name} {format_duration(getattr(split, name))}" for name in names)


def mfu_note(card: Scorecard) -> str:
    """The terms of the MFU, or what is missing of them."""
    terms = card.utilisation_terms
    if terms.model_flop_per_token is None:
        return "FLOP per token not told"
    if terms.peak_flop_per_s is None:
        return "peak of the accelerators not known"
    return (
        f"{rate(terms.steady_tokens_per_s)} x {format_si(terms.model_flop_per_token, 'FLOP/token')} / "
        f"{format_si(terms.peak_flop_per_s, 'FLOP/s')} ({terms.peak_source})"
    )


def _steady_note(card: Scorecard) -> str:
    if card.steady_tokens_per_s is None:
        return ""
    return f"stalls included; {rate(card.steady_tokens_per_s)} in steady steps"


def _checkpoints_note(card: Scorecard) -> str:
    saved = ", ".join(f"{num:,} {tier}" for tier, num in card.checkpoints.items()) or "none"
    rejected = f"; {card.checkpoints_rejected} rejected" if card.checkpoints_rejected else ""
    return f"checkpoints saved: {saved}{rejected}"


def _step_times(card: Scorecard) -> str:
    times = card.step_times
    if times is None:
        return NOT_MEASURED
    return " / ".join(format_duration(value) for value in (times.p50_s, times.p90_s, times.p99_s, times.max_s))


def _loss_curve(card: Scorecard) -> str:
    if card.losses_compared is None:
        return NOT_MEASURED
    if card.losses_differing:
        return f"{card.losses_differing} of {card.losses_compared} steps differ"
    return f"identical, bit for bit, in {card.losses_compared} steps"


def _samples(card: Scorecard) -> str:
    if card.samples_lost is None:
        return NOT_MEASURED
    return f"{card.samples_lost} / {card.samples_repeated} / {card.samples_skipped}"
