"""Random faults, sequence by sequence, each compared with an undisturbed run of the same training.

    python bench/campaign.py [--sequences 200] [--first-seed 1] [--at-once 2] [--keep]

A seed decides the faults, when they strike and how many spare nodes there are. A run that its faults made leave is
resumed. After each sequence: the run has finished, was interrupted by nothing but its faults, every durable checkpoint
that was said to be saved is whole or was deleted by retention, every rank's loss of every step is bitwise that of the
undisturbed run, so is the sample ledger, and no process, shared memory or network of the run is left. A sequence that
fails keeps its run directory, and says the command that repeats it.
"""

from __future__ import annotations

import argparse
import queue
import shutil
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path

import msgspec
from _launch import (
    DOUGONG,
    SCRIPTS,
    events_of,
    machine,
    of_kind,
    processes_of,
    run_id_of,
    running,
    shared_memory_of,
    sweep,
    wait,
    write_result,
)
from _sequence import ENDING, INTERRUPTING, KINDS, NUM_RANKS, NUM_STEPS, Schedule, draw, said
from _slot import Slot, impossible, slot

from dougong import telemetry
from dougong.backend.local.networks import NodeNetworks
from dougong.errors import CheckpointDamaged
from dougong.event.kinds import (
    CheckpointDeleted,
    CheckpointSaved,
    FaultInjected,
    GenerationStarted,
    JobFailed,
    JobFinished,
    JobStopped,
    Recorded,
    StepFinished,
    WorkerLost,
)
from dougong.run.manifest import verify
from dougong.run.settings import load_settings, run_directory
from dougong.score.ledger import count_run
from dougong.spec.chaos import FaultKind

MEMORY_EVERY, DURABLE_EVERY = 5, 20
LIMIT_S = 120.0
GONE_WITHIN_S = 3.0
STEP_S = 0.01
BALLAST_BYTES = 1 << 20
_FRUITLESS = "failures in a row"


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
    num_resumes: int
    duration_s: float
    problems: tuple[str, ...]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=2, help="how many sequences run beside each other")
    parser.add_argument("--directory", type=Path, default=Path("runs/campaign"), help="where run directories are made")
    parser.add_argument("--keep", action="store_true", help="keep the run directories of what passed, too")
    parser.add_argument("--out", type=Path, default=Path("bench/results/campaign.json"))
    options = parser.parse_args()
    found, began_s = machine(), time.monotonic()
    options.directory.mkdir(parents=True, exist_ok=True)
    lacking = impossible()
    for kind, reason in lacking.items():
        print(f"left out: {kind} ({reason})", flush=True)
    reference = options.directory / "undisturbed"
    make_reference(reference)
    print(f"undisturbed run {time.monotonic() - began_s:.1f} s; {options.sequences} sequences", flush=True)
    verdicts: list[Verdict] = []
    seeds = range(options.first_seed, options.first_seed + options.sequences)
    schedules = [draw(seed, without=tuple(lacking)) for seed in seeds]
    began_s = time.monotonic()
    for verdict in _played(schedules, options.directory, reference, at_once=options.at_once):
        verdicts.append(verdict)
        _print(verdict, directory=options.directory, place=_place(len(verdicts), len(schedules), began_s))
        if not verdict.problems and not options.keep:
            _remove(options.directory, verdict.seed)
        write_result(options.out, _result(found, verdicts, duration_s=time.monotonic() - began_s, lacking=lacking))
    num_failed = sum(bool(verdict.problems) for verdict in verdicts)
    print(f"{len(verdicts) - num_failed} of {len(verdicts)} sequences passed")
    return 1 if num_failed else 0


def make_reference(run_dir: Path) -> None:
    """The undisturbed run, made anew each time: the code may have changed."""
    shutil.rmtree(run_dir, ignore_errors=True)
    code = _start(Schedule(seed=0, num_spares=0, faults=()), run_dir, Slot(), chaos=None)
    if code != 0:
        sweep(run_dir)
        raise SystemExit(f"the undisturbed run ended with {code}\n{run_dir.with_suffix('.log').read_text()}")


def play(schedule: Schedule, *, directory: Path, reference: Path, place: Slot) -> Verdict:
    """One sequence and all that is checked after it."""
    _remove(directory, schedule.seed)
    run_dir = directory / f"seed-{schedule.seed:04d}"
    chaos = run_dir.with_suffix(".yaml")
    chaos.write_text(schedule.text)
    began_s = time.monotonic()
    code = _start(schedule, run_dir, place, chaos=chaos)
    problems: list[str] = []
    num_resumes = 0
    if code not in (0, None) and _may_have_left(schedule, code, events_of(run_dir)):
        num_resumes, code = 1, _resume(run_dir)
    elif code not in (0, None):
        problems.append(f"left with exit code {code}, which none of its faults explains: {_ends(events_of(run_dir))}")
    duration_s = time.monotonic() - began_s
    records = events_of(run_dir)
    checks: tuple[Callable[[], list[str]], ...] = (
        lambda: _end_problems(code, records),
        lambda: _interruption_problems(records),
        lambda: _commit_problems(run_dir, records),
        lambda: _loss_problems(run_dir, reference),
        lambda: _ledger_problems(run_dir, reference),
        lambda: _remains(run_dir, place),
    )
    problems += [problem for check in checks for problem in check()]
    if problems and place.disk is not None:
        shutil.copytree(place.disk / "checkpoints", run_dir / "checkpoints", dirs_exist_ok=True)
    sweep(run_dir)
    _drop_networks(run_dir)
    place.clean()
    return Verdict(
        seed=schedule.seed,
        num_spares=schedule.num_spares,
        faults=tuple(said(fault) for fault in schedule.faults),
        injected=tuple(f"{event.fault}: {event.detail}" for _, event in of_kind(records, FaultInjected)),
        num_interruptions=len(of_kind(records, WorkerLost)),
        num_without_loss=_num_without_loss(records),
        num_redone_steps=sum(e.last_step - e.first_step + 1 for _, e in of_kind(records, StepFinished) if e.is_redo),
        num_resumes=num_resumes,
        duration_s=round(duration_s, 1),
        problems=tuple(problems),
    )


def _played(schedules: Sequence[Schedule], directory: Path, reference: Path, *, at_once: int) -> Iterator[Verdict]:
    """The verdicts as they come. Each of those at once has its own small file systems."""
    free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
    with ExitStack() as stack:
        for number in range(at_once):
            free.put(stack.enter_context(slot(directory / f"slot-{number}")))

        def play_one(schedule: Schedule) -> Verdict:
            place = free.get()
            try:
                return play(schedule, directory=directory, reference=reference, place=place)
            finally:
                free.put(place)

        with ThreadPoolExecutor(at_once) as pool:
            for done in as_completed([pool.submit(play_one, schedule) for schedule in schedules]):
                yield done.result()


def _start(schedule: Schedule, run_dir: Path, place: Slot, *, chaos: Path | None) -> int | None:
    """The exit code (None: it had to be ended)."""
    shape = ("--nodes", str(NUM_RANKS), "--spares", str(schedule.num_spares), "--run-dir", str(run_dir))
    saving = ("--memory-every", str(MEMORY_EVERY), "--durable-every", str(DURABLE_EVERY), *place.options)
    faults = () if chaos is None else ("--chaos", str(chaos))
    small = ("--steps", str(NUM_STEPS), "--step-s", str(STEP_S), "--ballast-bytes", str(BALLAST_BYTES))
    script = (str(SCRIPTS / "small_train.py"), *small)
    command = (*DOUGONG, *shape, *saving, *faults, "--no-score", "--", *script)
    return _run(command, log_path=run_dir.with_suffix(".log"))


def _resume(run_dir: Path) -> int | None:
    return _run((*DOUGONG, "--resume", str(run_dir), "--no-score"), log_path=run_dir.with_suffix(".resume.log"))


def _run(command: Sequence[str], *, log_path: Path) -> int | None:
    with running(command, log_path=log_path) as launcher:
        return wait(launcher, limit_s=LIMIT_S)


def _may_have_left(schedule: Schedule, code: int, records: Sequence[Recorded]) -> bool:
    """Do the faults explain that the command left before the job had finished? A job given up says why."""
    injected = {event.fault for _, event in of_kind(records, FaultInjected)}
    failed = [event.reason for _, event in of_kind(records, JobFailed)]
    if injected & set(ENDING) and code in (130, -9):
        return True
    return code == 1 and bool(failed) and (schedule.may_give_up or _FRUITLESS in failed[-1])


def _end_problems(code: int | None, records: Sequence[Recorded]) -> list[str]:
    """Did the job finish, with its last step?"""
    if code is None:
        return [f"did not finish within {LIMIT_S:g} s; {_last_step(records)}"]
    if code != 0:
        return [f"exit code {code}: {_ends(records)}"]
    ends = [event.step for _, event in of_kind(records, JobFinished)]
    return [] if ends == [NUM_STEPS] else [f"JobFinished at steps {ends}, not once at {NUM_STEPS}"]


def _ends(records: Sequence[Recorded]) -> str:
    reasons = [event.reason for kind in (JobFailed, JobStopped) for _, event in of_kind(records, kind)]
    return "; ".join(reasons) or "no reason in the log"


def _last_step(records: Sequence[Recorded]) -> str:
    steps = of_kind(records, StepFinished)
    return f"last finished step {steps[-1][1].last_step}" if steps else "no step was finished"


def _interruption_problems(records: Sequence[Recorded]) -> list[str]:
    """Every loss needs a fault that may cause one; a fault that must not interrupt is no excuse.

    An agent that dies before its first worker runs takes the start with it, so until the first step that is one.
    """
    excuses: dict[str, int] = {**INTERRUPTING}
    num_excuses, is_starting = 0, True
    problems: list[str] = []
    for record in sorted(records, key=lambda record: record.time_ns):
        match record.event:
            case FaultInjected() as event:
                num_excuses += excuses.get(event.fault, 0)
                num_excuses += is_starting and event.fault in ("kill-agent", "kill-agent-and-controller")
            case WorkerLost() as event:
                if num_excuses == 0:
                    problems.append(f"rank {event.rank} lost without a fault (seq {record.seq}): {event.detail[:160]}")
                num_excuses = max(0, num_excuses - 1)
            case GenerationStarted():
                is_starting = True
            case StepFinished():
                is_starting = False
            case _:
                continue
    return problems


def _num_without_loss(records: Sequence[Recorded]) -> int:
    done = [event for _, event in of_kind(records, FaultInjected)]
    return max(0, sum(event.fault in INTERRUPTING for event in done) - len(of_kind(records, WorkerLost)))


def _commit_problems(run_dir: Path, records: Sequence[Recorded]) -> list[str]:
    """A checkpoint that was said to be durable is there and whole, unless retention or a fault took it."""
    if not run_directory(run_dir).settings.exists():
        return []
    url = load_settings(run_directory(run_dir)).checkpoint_url
    gone = {event.path for _, event in of_kind(records, CheckpointDeleted)}
    gone |= {event.component.removeprefix("checkpoints/") for _, event in of_kind(records, FaultInjected)}
    problems: list[str] = []
    saved = [event for _, event in of_kind(records, CheckpointSaved) if event.tier == "durable"]
    for path in sorted({event.path for event in saved} - gone):
        try:
            verify(url, path)
        except (CheckpointDamaged, OSError) as error:
            problems.append(f"the durable checkpoint {path} is lost: {error}")
    return problems if saved or not of_kind(records, JobFinished) else ["no durable checkpoint was ever saved"]


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


def _remains(run_dir: Path, place: Slot) -> list[str]:
    """What the run left behind, after a moment in which the last agents may end."""
    deadline_s = time.monotonic() + GONE_WITHIN_S
    while (left := processes_of(run_dir)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    problems = [f"process {pid} is left: {command[:120]}" for pid, command in left]
    memory = () if place.memory is None else tuple(place.memory.iterdir())
    networks = [f"a network is left: {name}" for name in _networks_of(run_dir)]
    return problems + [f"left in shared memory: {path}" for path in (*shared_memory_of(run_dir), *memory)] + networks


def _networks_of(run_dir: Path) -> list[str]:
    run_id = run_id_of(run_dir)
    return [] if run_id is None else [path.name for path in Path("/run/netns").glob(f"dougong-{run_id[:8]}-*")]


def _drop_networks(run_dir: Path) -> None:
    directory = run_directory(run_dir)
    settings = load_settings(directory) if directory.settings.exists() else None
    if settings is not None and settings.has_networks:
        NodeNetworks(settings.run_id, (*settings.nodes, *settings.spares)).tear_down()


def _ranges(steps: Sequence[int]) -> str:
    """5, 7-9."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and parts[-1][1] == step - 1:
            parts[-1][1] = step
        else:
            parts.append([step, step])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _place(num_done: int, num_all: int, began_s: float) -> str:
    """`  7/200, 11 a minute, 17 min left`."""
    elapsed_s = time.monotonic() - began_s
    left_s = elapsed_s / num_done * (num_all - num_done)
    return f"{num_done:3d}/{num_all}  {num_done / elapsed_s * 60:4.1f} a minute  {left_s / 60:4.1f} min left"


def _print(verdict: Verdict, *, directory: Path, place: str) -> None:
    said = "FAILED" if verdict.problems else "passed"
    print(
        f"{place}  seed {verdict.seed:4d}  {said}  {verdict.duration_s:5.1f} s  {verdict.num_interruptions} interrupted"
        f"  {verdict.num_redone_steps:3d} steps redone  {verdict.num_resumes} resumed  {verdict.num_spares} spare(s)"
        f"  {', '.join(verdict.faults)}",
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
    for suffix in (".yaml", ".log", ".resume.log"):
        run_dir.with_suffix(suffix).unlink(missing_ok=True)


def _result(
    found: dict[str, object], verdicts: Sequence[Verdict], *, duration_s: float, lacking: Mapping[FaultKind, str]
) -> dict[str, object]:
    num_failed = sum(bool(verdict.problems) for verdict in verdicts)
    ordered = sorted(verdicts, key=lambda verdict: verdict.seed)
    injected = [text.partition(":")[0] for verdict in verdicts for text in verdict.injected]
    return {
        "benchmark": "campaign",
        "machine": found,
        "num_sequences": len(verdicts),
        "num_faults": len(injected),
        "num_faults_by_kind": {kind: injected.count(kind) for kind in KINDS},
        "left_out": lacking,
        "num_interruptions": sum(verdict.num_interruptions for verdict in verdicts),
        "num_resumes": sum(verdict.num_resumes for verdict in verdicts),
        "num_failed": num_failed,
        "is_reached": num_failed == 0,
        "duration_s": round(duration_s, 1),
        "sequences": [{**msgspec.to_builtins(verdict), "command": _command(verdict.seed)} for verdict in ordered],
    }


if __name__ == "__main__":
    sys.exit(main())
