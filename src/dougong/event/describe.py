"""One line of words for each kind of event."""

from __future__ import annotations

from typing import assert_never

from dougong.event import kinds
from dougong.units import format_bytes, format_duration, format_si


def describe(event: kinds.AnyEvent | kinds.Unknown) -> str:
    """What happened, as one line for people: no line break, no control character."""
    return "".join(char if char.isprintable() else " " for char in " ".join(_sentence(event).split()))


def _sentence(event: kinds.AnyEvent | kinds.Unknown) -> str:
    match event:
        case kinds.JobCreated():
            spares = f" and {len(event.spares)} spare" if event.spares else ""
            nodes = _count(len(event.nodes), "node")
            return f"job {event.job}: {_count(event.world_size, 'rank')} on {nodes}{spares}: {' '.join(event.command)}"
        case kinds.JobStarted():
            return f"job {event.job} {'goes on after a stop' if event.is_resume else 'starts'}"
        case kinds.ModelDescribed():
            return _model(event)
        case kinds.PeakDescribed():
            return f"peak {format_si(event.peak_flop_per_s, 'FLOP/s')} ({event.source})"
        case kinds.GenerationStarted():
            ranks = _count(len(event.placement), "rank")
            return f"generation {event.generation}: {ranks} started ({event.rung}): {event.reason}"
        case kinds.StateRestored():
            return _restored(event)
        case kinds.StepFinished():
            return _steps(event)
        case kinds.CheckpointSaved():
            size = format_bytes(event.num_bytes)
            stall, write = format_duration(event.stall_s), format_duration(event.write_s)
            return f"step {event.step} saved to {event.tier}: {size}, stall {stall}, write {write}"
        case kinds.CheckpointRejected():
            return f"{event.tier} checkpoint of step {event.step} not used: {event.reason}"
        case kinds.CheckpointDeleted():
            return f"checkpoint of step {event.step} deleted: {event.reason}"
        case kinds.FaultInjected():
            return f"fault {event.fault} injected{_rank(event.rank)}{_colon(event.detail)}"
        case kinds.WorkerLost():
            after = "" if event.last_step is None else f" after step {event.last_step}"
            return f"rank {event.rank} lost{after} ({event.cause_class}){_colon(event.detail)}"
        case kinds.RecoveryDecided():
            return _recovery(event)
        case kinds.JobResumed():
            return f"generation {event.generation} makes progress again: step {event.step}"
        case kinds.JobStopped():
            return f"stopped at step {event.step}: {event.reason}"
        case kinds.JobFinished():
            return f"finished at step {event.step}"
        case kinds.JobFailed():
            return f"given up: {event.reason}"
        case kinds.NodeJoined():
            return f"joined as {event.role} with {_count(event.num_accelerators, 'accelerator')}"
        case kinds.NodeLost():
            return f"node lost ({event.cause_class}): {event.reason}"
        case kinds.LinkCut():
            return f"does not reach {event.peer}; the two are not used together"
        case kinds.LinkHealed():
            return f"reaches {event.peer} again"
        case kinds.NodeRepaired():
            return "node can be used again"
        case kinds.AgentLost():
            return f"agent does not answer: {event.reason}"
        case kinds.AgentReturned():
            return f"agent is back with {_count(event.num_workers, 'running worker')}"
        case kinds.ControllerStarted():
            return f"controller {'restarted' if event.is_restart else 'started'}, pid {event.pid}"
        case kinds.WorldResized():
            return (
                f"goes on with {event.to_world_size} ranks instead of {event.from_world_size}"
                f" from step {event.step}: {event.reason}"
            )
        case kinds.WebhookSent():
            answer = f"answered {event.status}" if event.status else "could not be reached"
            return f"webhook {answer}{_colon(event.detail)}"
        case kinds.PeersChosen():
            return f"copies of {_count(len(event.keepers), 'node')} on others: {event.reason}"
        case kinds.WarningRaised():
            return f"warning: {event.text}"
        case kinds.SaveRhythmChosen():
            memory, durable = event.memory_every_steps, event.durable_every_steps
            return (
                f"saved every {memory} steps, durably every {durable}, from step {event.from_step} on: {event.reason}"
            )
        case kinds.StorageFailing():
            what = "is too slow" if event.cause == "slow" else "fails"
            return f"storage {what} at step {event.step} ({event.cause}): {event.path}: {event.reason}; {event.mend}"
        case kinds.StorageRecovered():
            missed = _count(event.num_missed, "checkpoint")
            return f"storage takes checkpoints again (step {event.step}) after {missed} missed ({event.cause})"
        case kinds.PreflightDone():
            return _preflight(event)
        case kinds.NodeQuarantined():
            return f"node is quarantined: {event.reason}"
        case kinds.LinkSuspected():
            return f"the link between {event.first} and {event.second} is suspect: {event.reason}"
        case kinds.SnapshotRefused():
            return f"no checkpoint from step {event.step} on{_rank(event.rank)}: {event.reason}"
        case kinds.BatchesSkipped():
            samples = sum(len(ids) for _, ids in event.samples)
            told = f", {_count(samples, 'sample')}" if samples else ""
            return f"batches of step {event.step} (generation {event.generation}) are skipped{told}: {event.reason}"
        case kinds.StragglerNamed():
            return f"rank {event.rank} is a straggler at step {event.step}: {event.detail}"
        case kinds.CorruptionSuspected():
            ranks = ", ".join(map(str, event.ranks))
            return f"state of rank(s) {ranks} differs at step {event.step}: {event.detail}"
        case kinds.ReplicasCompared():
            return f"parameters and optimizer state are the same on all ranks after step {event.step}"
        case kinds.Unknown():
            return f"a kind this version does not know: {event.fields_json}"
        case _:
            assert_never(event)


def _model(event: kinds.ModelDescribed) -> str:
    flop = event.model_flop_per_token
    work = "FLOP per token not known" if flop is None else f"{format_si(flop, 'FLOP')} per token"
    return f"model of {format_si(event.num_parameters, '').strip()} parameters, {work} ({event.source})"


def _restored(event: kinds.StateRestored) -> str:
    if event.source == "none":
        return f"generation {event.generation} starts from scratch: {event.reason}"
    took = format_duration(event.reload_s)
    return f"generation {event.generation} holds step {event.step} from {event.source} in {took}: {event.reason}"


def _steps(event: kinds.StepFinished) -> str:
    num_steps = event.last_step - event.first_step + 1
    steps = f"step {event.last_step}" if num_steps == 1 else f"steps {event.first_step}-{event.last_step}"
    parts = [f"{steps}{' again' if event.is_redo else ''}", f"{format_duration(event.step_s / max(1, num_steps))} each"]
    if event.loss is not None:
        parts.append(f"loss {event.loss:.4f}")
    if event.tokens is not None:
        parts.append(f"{event.tokens} tokens")
    return ", ".join(parts)


def _recovery(event: kinds.RecoveryDecided) -> str:
    source = "from scratch" if event.restore_source == "none" else f"from step {event.restore_step}"
    tier = "" if event.restore_source == "none" else f" ({event.restore_source})"
    wait = f" after {format_duration(event.backoff_s)}" if event.backoff_s else ""
    return f"{event.rung} {source}{tier}{wait}: {event.reason}"


def _preflight(event: kinds.PreflightDone) -> str:
    rates = [node.flop_per_s for node in event.nodes if node.flop_per_s is not None]
    figures = f", {format_si(min(rates), 'FLOP/s')} or more" if rates else ""
    took = format_duration(event.took_s)
    return f"pre-flight of {_count(len(event.nodes), 'node')} in {took}{figures}: {event.reason}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _rank(rank: int | None) -> str:
    return "" if rank is None else f" at rank {rank}"


def _colon(text: str) -> str:
    return f": {text}" if text else ""
