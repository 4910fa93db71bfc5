"""Random faults, sequence by sequence, each compared with an undisturbed run of the same training.

    python bench/campaign.py [--sequences 20] [--first-seed 1] [--keep] [--out bench/results/campaign.json]

A seed decides the faults, when they strike and how many spare nodes there are. After each sequence: the run has
finished, was interrupted by nothing but its faults, every rank's loss of every step is bitwise that of the undisturbed
run, so is the sample ledger, no process of the run is left, and nothing of it is left in shared memory. A sequence that
fails keeps its run directory, and says the command that repeats it.
"""

from __future__ import annotations

import argparse
import random
import shutil
import struct
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import yaml
from _launch import (
    DOUGONG,
    SCRIPTS,
    events_of,
    machine,
    of_kind,
    processes_of,
    running,
    shared_memory_of,
    sweep,
    wait,
    write_result,
)

from dougong import telemetry
from dougong.event.kinds import (
    FaultInjected,
    GenerationStarted,
    JobFailed,
    JobFinished,
    Recorded,
    StepFinished,
    WorkerLost,
)
from dougong.score.ledger import count_run
from dougong.spec.chaos import Fault, FaultKind

NUM_STEPS = 300
NUM_RANKS = 2
MEMORY_EVERY, DURABLE_EVERY = 5, 20
LIMIT_S = 150.0
GONE_WITHIN_S = 2.0
# What ends or stops a rank; the others must pass without an interruption.
INTERRUPTING: tuple[FaultKind, ...] = (
    "kill-worker",
    "stop-worker",
    "hang-worker",
    "raise-worker",
    "kill-node",
    "tear-checkpoint",
)
KINDS: tuple[FaultKind, ...] = (*INTERRUPTING, "kill-agent", "kill-controller", "corrupt-checkpoint")
NOT_DONE = "could not be done"


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """The faults of one seed."""

    seed: int
    num_spares: int
    faults: tuple[Fault, ...]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """How one sequence went. No problem = it passed.

    `num_without_loss`: faults of a rank or node that made no loss of their own, because two fell together, the process
    stopped only for a moment, or a fault that was asked for never arrived.
    """

    seed: int
    num_spares: int
    faults: tuple[str, ...]
    injected: tuple[str, ...]
    num_interruptions: int
    num_without_loss: int
    num_redone_steps: int
    duration_s: float
    problems: tuple[str, ...]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--directory", type=Path, default=Path("runs/campaign"), help="where run directories are made")
    parser.add_argument("--keep", action="store_true", help="keep the run directories of what passed, too")
    parser.add_argument("--out", type=Path, default=Path("bench/results/campaign.json"))
    options = parser.parse_args()
    found = machine()
    options.directory.mkdir(parents=True, exist_ok=True)
    reference = options.directory / "undisturbed"
    make_reference(reference)
    verdicts: list[Verdict] = []
    for seed in range(options.first_seed, options.first_seed + options.sequences):
        verdict = play(draw(seed), directory=options.directory, reference=reference)
        verdicts.append(verdict)
        _print(verdict, directory=options.directory)
        if not verdict.problems and not options.keep:
            _remove(options.directory, seed)
        write_result(options.out, _result(found, verdicts))
    num_failed = sum(bool(verdict.problems) for verdict in verdicts)
    print(f"{len(verdicts) - num_failed} of {len(verdicts)} sequences passed")
    return 1 if num_failed else 0


def draw(seed: int) -> Schedule:
    """One to four faults, as a function of the seed alone. Never more dead nodes than spares, which nothing survives.

    At most two strike at a time instead of a step: they may hit a start, and three failed starts in a row are given up.
    """
    dice = random.Random(f"campaign/{seed}")
    num_spares, num_faults = dice.randint(1, 2), dice.randint(1, 4)
    faults: list[Fault] = []
    steps = sorted(dice.sample(range(10, NUM_STEPS * 3 // 4), num_faults))
    num_dead = num_timed = 0
    for step in steps:
        kind: FaultKind = dice.choice([kind for kind in KINDS if kind != "kill-node" or num_dead < num_spares])
        # before the first steps are known a hang is given a minute, so it strikes later
        is_timed = kind not in ("hang-worker", "tear-checkpoint", "corrupt-checkpoint") and num_timed < 2
        is_timed = is_timed and dice.random() < 0.25
        when_s = round(dice.uniform(0.5, 8.0), 2)
        for_s = 0.3 if kind == "stop-worker" and dice.random() < 0.25 else None
        faults.append(
            Fault(kind=kind, at_step=None if is_timed else step, at_s=when_s if is_timed else None, for_s=for_s)
        )
        num_timed += is_timed
        num_dead += kind == "kill-node"
        if kind == "corrupt-checkpoint" and num_dead < num_spares and dice.random() < 0.5:
            # only a lost node makes the damaged checkpoint the newest one
            faults.append(Fault(kind="kill-node", at_step=step))
            num_dead += 1
    return Schedule(seed=seed, num_spares=num_spares, faults=tuple(faults))


def make_reference(run_dir: Path) -> None:
    """The undisturbed run, made anew each time: the code may have changed."""
    shutil.rmtree(run_dir, ignore_errors=True)
    code, log = _run(run_dir, log_path=run_dir.with_suffix(".log"), num_spares=0, chaos=None)
    if code != 0:
        sweep(run_dir)
        raise SystemExit(f"the undisturbed run ended with {code}\n{log}")


def play(sequence: Schedule, *, directory: Path, reference: Path) -> Verdict:
    """One sequence and all that is checked after it."""
    _remove(directory, sequence.seed)
    run_dir = directory / f"seed-{sequence.seed:04d}"
    chaos = run_dir.with_suffix(".yaml")
    chaos.write_text(_chaos_text(sequence))
    began_s = time.monotonic()
    code, _ = _run(run_dir, log_path=run_dir.with_suffix(".log"), num_spares=sequence.num_spares, chaos=chaos)
    duration_s = time.monotonic() - began_s
    records = events_of(run_dir)
    checks: tuple[Callable[[], list[str]], ...] = (
        lambda: _end_problems(code, records),
        lambda: _interruption_problems(records),
        lambda: _loss_problems(run_dir, reference),
        lambda: _ledger_problems(run_dir, reference),
        lambda: _remains(run_dir),
    )
    problems = [problem for check in checks for problem in check()]
    sweep(run_dir)
    return Verdict(
        seed=sequence.seed,
        num_spares=sequence.num_spares,
        faults=tuple(_said(fault) for fault in sequence.faults),
        injected=tuple(f"{event.fault}: {event.detail}" for _, event in of_kind(records, FaultInjected)),
        num_interruptions=len(of_kind(records, WorkerLost)),
        num_without_loss=_num_without_loss(records),
        num_redone_steps=sum(e.last_step - e.first_step + 1 for _, e in of_kind(records, StepFinished) if e.is_redo),
        duration_s=round(duration_s, 1),
        problems=tuple(problems),
    )


def _run(run_dir: Path, *, log_path: Path, num_spares: int, chaos: Path | None) -> tuple[int | None, str]:
    """The exit code (None: it had to be ended) and what was said."""
    shape = ("--nodes", str(NUM_RANKS), "--spares", str(num_spares), "--run-dir", str(run_dir))
    saving = ("--memory-every", str(MEMORY_EVERY), "--durable-every", str(DURABLE_EVERY))
    faults = () if chaos is None else ("--chaos", str(chaos))
    script = (str(SCRIPTS / "small_train.py"), "--steps", str(NUM_STEPS))
    with running((*DOUGONG, *shape, *saving, *faults, "--", *script), log_path=log_path) as launcher:
        code = wait(launcher, limit_s=LIMIT_S)
    return code, log_path.read_text(errors="replace")


def _end_problems(code: int | None, records: Sequence[Recorded]) -> list[str]:
    """Did the job finish, with its last step?"""
    if code is None:
        return [f"did not finish within {LIMIT_S:g} s; {_last_step(records)}"]
    failed = [event.reason for _, event in of_kind(records, JobFailed)]
    if code != 0 or failed:
        return [f"exit code {code}: {'; '.join(failed) or 'no reason in the log'}"]
    ends = [event.step for _, event in of_kind(records, JobFinished)]
    return [] if ends == [NUM_STEPS] else [f"JobFinished at steps {ends}, not once at {NUM_STEPS}"]


def _last_step(records: Sequence[Recorded]) -> str:
    steps = of_kind(records, StepFinished)
    return f"last finished step {steps[-1][1].last_step}" if steps else "no step was finished"


def _interruption_problems(records: Sequence[Recorded]) -> list[str]:
    """Every loss needs a fault since the loss before it; a fault that must not interrupt is no excuse.

    An agent that dies before its first worker runs takes the start with it, so until the first step that is one.
    """
    is_excused, is_starting = False, True
    problems: list[str] = []
    for record in records:
        match record.event:
            case FaultInjected() as event if not event.detail.startswith(NOT_DONE):
                is_excused = is_excused or event.fault in INTERRUPTING or (event.fault == "kill-agent" and is_starting)
            case WorkerLost() as event:
                if not is_excused:
                    problems.append(f"rank {event.rank} lost without a fault (seq {record.seq}): {event.detail[:160]}")
                is_excused = False
            case GenerationStarted():
                is_starting = True
            case StepFinished():
                is_starting = False
            case _:
                continue
    return problems


def _num_without_loss(records: Sequence[Recorded]) -> int:
    done = [event for _, event in of_kind(records, FaultInjected) if not event.detail.startswith(NOT_DONE)]
    return max(0, sum(event.fault in INTERRUPTING for event in done) - len(of_kind(records, WorkerLost)))


def _loss_problems(run_dir: Path, reference: Path) -> list[str]:
    problems: list[str] = []
    for rank in range(NUM_RANKS):
        wanted, seen = (_losses(directory, rank) for directory in (reference, run_dir))
        missing = sorted(wanted.keys() - seen.keys())
        other = sorted(step for step in wanted.keys() & seen.keys() if wanted[step] != seen[step])
        if missing:
            problems.append(f"rank {rank}: no loss in telemetry for {len(missing)} steps: {_ranges(missing)}")
        if other:
            pair = "{:.17g} instead of {:.17g}".format(*(struct.unpack("<d", x[other[0]])[0] for x in (seen, wanted)))
            problems.append(f"rank {rank}: another loss in {len(other)} steps: {_ranges(other)}; the first: {pair}")
    return problems


def _losses(run_dir: Path, rank: int) -> dict[int, bytes]:
    """The bits of each step's loss; a redone step's last one counts."""
    samples = telemetry.read(run_dir / "telemetry", f"loss/rank-{rank}")
    return {step: struct.pack("<d", loss) for step, loss in zip(samples.indices, samples.values, strict=True)}


def _ledger_problems(run_dir: Path, reference: Path) -> list[str]:
    if not (run_dir / "ledger").is_dir():
        return ["no sample ledger"]
    counts = count_run(run_dir, reference_dir=reference)
    if counts is None:
        return ["the sample ledger is empty"]
    if counts.lost or counts.repeated or counts.skipped:
        return [f"samples: {counts.lost} lost, {counts.repeated} repeated, {counts.skipped} skipped"]
    return []


def _remains(run_dir: Path) -> list[str]:
    """What the run left behind, after a moment in which the last agents may end."""
    deadline_s = time.monotonic() + GONE_WITHIN_S
    while (left := processes_of(run_dir)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    problems = [f"process {pid} is left: {command[:120]}" for pid, command in left]
    return problems + [f"left in shared memory: {path}" for path in shared_memory_of(run_dir)]


def _ranges(steps: Sequence[int]) -> str:
    """5, 7-9."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and parts[-1][1] == step - 1:
            parts[-1][1] = step
        else:
            parts.append([step, step])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _chaos_text(sequence: Schedule) -> str:
    fields = (msgspec.to_builtins(fault) for fault in sequence.faults)
    faults = [{name: value for name, value in fault.items() if value not in (None, "")} for fault in fields]
    return yaml.safe_dump({"seed": sequence.seed, "faults": faults}, sort_keys=False)


def _said(fault: Fault) -> str:
    when = f"at step {fault.at_step}" if fault.at_step is not None else f"at {fault.at_s} s"
    return f"{fault.kind} {when}" + (f" for {fault.for_s} s" if fault.for_s is not None else "")


def _print(verdict: Verdict, *, directory: Path) -> None:
    said = "FAILED" if verdict.problems else "passed"
    print(
        f"seed {verdict.seed:4d}  {said}  {verdict.duration_s:5.1f} s  {verdict.num_interruptions} interruptions  "
        f"{verdict.num_redone_steps:3d} steps redone  {verdict.num_spares} spare(s)  {', '.join(verdict.faults)}",
        flush=True,
    )
    for problem in verdict.problems:
        print(f"           {problem}")
    if verdict.problems:
        print(f"           kept: {directory}/seed-{verdict.seed:04d}  again: {_command(verdict.seed)}", flush=True)


def _command(seed: int) -> str:
    return f"python bench/campaign.py --first-seed {seed} --sequences 1 --keep"


def _remove(directory: Path, seed: int) -> None:
    run_dir = directory / f"seed-{seed:04d}"
    shutil.rmtree(run_dir, ignore_errors=True)
    for suffix in (".yaml", ".log"):
        run_dir.with_suffix(suffix).unlink(missing_ok=True)


def _result(found: dict[str, object], verdicts: Sequence[Verdict]) -> dict[str, object]:
    num_failed = sum(bool(verdict.problems) for verdict in verdicts)
    return {
        "benchmark": "campaign",
        "machine": found,
        "num_sequences": len(verdicts),
        "num_faults": sum(len(verdict.injected) for verdict in verdicts),
        "num_interruptions": sum(verdict.num_interruptions for verdict in verdicts),
        "num_failed": num_failed,
        "is_reached": num_failed == 0,
        "sequences": [{**msgspec.to_builtins(verdict), "command": _command(verdict.seed)} for verdict in verdicts],
    }


if __name__ == "__main__":
    sys.exit(main())
