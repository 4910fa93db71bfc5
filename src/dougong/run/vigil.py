"""What is watched besides life and progress: losses that turn bad, stragglers, and state that differs between ranks.

The controller hands in what it hears and does what the news say; nothing here touches the world but the ledger, which
is read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from dougong.event.kinds import AnyEvent, Placed, StragglerNamed
from dougong.run.bad_loss import BadLossDesk
from dougong.run.corruption import FingerprintDesk, Suspicion, is_trusted
from dougong.run.decide import Loss
from dougong.run.history import JobHistory
from dougong.run.letters import Fingerprinted, LossFoundBad, SaveRefused
from dougong.run.page import StepRecord
from dougong.run.save_rhythm import first_rhythm
from dougong.run.settings import RunSettings
from dougong.run.straggler import Straggler, StragglerWatch, is_replaced
from dougong.run.wire import Restore

_HELD_INTERVALS = 2


class News(msgspec.Struct, frozen=True, kw_only=True):
    """What follows: events to write, losses to act on, and what is to be done with nodes and checkpoints."""

    events: tuple[AnyEvent, ...] = ()
    losses: tuple[Loss, ...] = ()
    cordoned: tuple[tuple[str, str], ...] = ()
    """(component, reason): give them no more work."""
    doubted: tuple[str, ...] = ()
    """Components that must pass a test before they are used again."""
    hold_saves_until: int = 0
    give_up: str = ""
    """The policy wants the job to be given up once its workers are gone; why."""


class Vigil:
    """One run's watch."""

    def __init__(self, settings: RunSettings, history: JobHistory, *, ledger: Path) -> None:
        self._settings = settings
        self._ledger = ledger
        self._losses = BadLossDesk(settings.policy, skips=history.skips)
        self._stragglers = StragglerWatch(settings.policy)
        self._prints = FingerprintDesk(agreed=history.agreed, distrusts=history.distrusts)
        self._placement: Mapping[int, str] = {}
        self._waiting: Straggler | None = None
        """Named, and to be replaced once there is a checkpoint and a spare."""

    def begin_generation(self, placement: Sequence[Placed]) -> None:
        """The ranks start (again): here."""
        self._placement = {placed.rank: placed.component for placed in placement}
        self._losses.begin_generation()
        self._stragglers.begin_generation(world_size=len(placement))
        self._prints.begin_generation(world_size=len(placement))
        self._waiting = None

    def trusts(self, generation: int, step: int) -> bool:
        """May a checkpoint of this generation and step be restored?"""
        bad = self._losses.bad
        is_after_bad = bad is not None and generation == bad.generation and step >= bad.step
        return not is_after_bad and is_trusted(generation, step, self._prints.distrusts)

    def hear(
        self,
        letter: LossFoundBad | SaveRefused | Fingerprinted,
        *,
        saved_step: int,
        spares: Collection[str],
        now_s: float,
    ) -> News:
        """What a rank tells. `saved_step`: the newest checkpoint that all ranks have; `spares`: nodes free for use."""
        match letter:
            case LossFoundBad():
                self._losses.hear_bad(letter, now_s=now_s)
                return News(hold_saves_until=self._held_after(letter.step))
            case SaveRefused():
                events = self._losses.hear_refused(letter, saved_step=saved_step)
                return News(events=events, hold_saves_until=self._held_after(letter.step))
            case Fingerprinted():
                events = self._prints.hear(letter)
                suspicion = self._prints.suspicion
                if not events or suspicion is None:
                    return News(events=events)
                return self._after_suspicion(suspicion, events, spares=spares)

    def add_steps(self, rank: int, records: Sequence[StepRecord], *, generation: int) -> News:
        """A rank's finished steps."""
        named = self._stragglers.add(rank, records)
        if named:
            self._waiting = named[0]
        return News(
            events=tuple(
                StragglerNamed(
                    generation=generation,
                    rank=one.rank,
                    component=self._placement.get(one.rank, ""),
                    step=one.step,
                    compute_s=one.compute_s,
                    usual_s=one.usual_s,
                    z=one.z,
                    detail=one.reason,
                )
                for one in named
            )
        )

    def look(self, *, last_step: int, durable_step: int, spares: Collection[str], now_s: float) -> News:
        """Once a round: is anything due? `last_step` is finished by all ranks."""
        bad = self._losses.due(last_step=last_step, now_s=now_s)
        if bad is not None:
            loss = Loss(
                rank=bad.rank,
                component=self._placement.get(bad.rank, ""),
                cause_class="software",
                detail=f"{bad.reason} (policy.bad_loss={self._settings.policy.bad_loss})",
            )
            give_up = loss.detail if self._settings.policy.bad_loss == "stop" else ""
            return News(losses=(loss,), give_up=give_up)
        return self._replace_straggler(durable_step=durable_step, spares=spares)

    def before_start(self) -> News:
        """The ranks are gone and about to start again: what is said now holds for them."""
        return News(events=self._losses.skip(self._ledger))

    def completed(self, restore: Restore) -> Restore:
        """The state to go on from, with the batches to pass over on the way."""
        reason = restore.reason
        suspicion = self._prints.suspicion
        if suspicion is not None:
            step = self._prints.distrusts[-1].agreed_step
            reason = f"{reason} (what was saved after step {step} is not trusted)"
        return msgspec.structs.replace(restore, reason=reason, skips=self._losses.skips)

    def _held_after(self, step: int) -> int:
        """The others take their checkpoints before they hear of it; two intervals keep the ranks' common one alive."""
        return step + _HELD_INTERVALS * first_rhythm(self._settings.save).memory_every_steps

    def _after_suspicion(self, suspicion: Suspicion, events: Sequence[AnyEvent], *, spares: Collection[str]) -> News:
        components = tuple(dict.fromkeys(self._placement[rank] for rank in suspicion.ranks))
        is_swapped = suspicion.is_certain and len(spares) >= len(components)
        loss = Loss(
            rank=suspicion.ranks[0],
            component=components[0],
            cause_class="silent-corruption",
            detail=suspicion.detail,
        )
        return News(
            events=tuple(events),
            losses=(loss,),
            cordoned=tuple((component, suspicion.detail) for component in components) if is_swapped else (),
            doubted=() if is_swapped else components,
        )

    def _replace_straggler(self, *, durable_step: int, spares: Collection[str]) -> News:
        waiting = self._waiting
        if waiting is None or not is_replaced(
            waiting, policy=self._settings.policy, has_spare=bool(spares), saved_step=durable_step
        ):
            return News()
        self._waiting = None
        component = self._placement[waiting.rank]
        loss = Loss(rank=waiting.rank, component=component, cause_class="straggler", detail=waiting.reason)
        return News(losses=(loss,), cordoned=((component, f"its rank {waiting.rank} is a straggler"),))
