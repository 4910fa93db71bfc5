"""The controller's side of how often to save: gathers what saves cost and what interrupted, announces a new rhythm."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from dougong.event.kinds import AnyEvent, CheckpointSaved, SaveRhythmChosen
from dougong.run import save_rhythm as rules
from dougong.run import wire
from dougong.run.history import JobHistory
from dougong.run.settings import RunSettings

_LOOK_S = 5.0
_NUM_STEPS = 512
_MANY_STEPS = 30


class SaveDesk:
    """Holds the rhythm that is in force. One that was told on the command line never changes."""

    def __init__(self, settings: RunSettings, history: JobHistory, *, now_s: float) -> None:
        rule = settings.save
        self._rule = rule
        self._is_chosen = rules.is_chosen(rule)
        self._began_s = now_s - history.operating_s
        self._prior = rules.prior_belief(rule, num_nodes=len(settings.nodes))
        self._num_losses = history.num_losses
        self._num_memory_losses = history.num_memory_losses
        self._is_after_loss = history.is_broken
        self._steps: deque[rules.JobStep] = deque(maxlen=_NUM_STEPS)
        self._write_s = 0.0
        self._looked_s = now_s
        self._from_step = 0
        self.rhythm = rules.first_rhythm(rule)
        if self._is_chosen and history.save_rhythm is not None:
            told = history.save_rhythm
            self.rhythm = rules.Rhythm(
                memory_every_steps=told.memory_every_steps,
                durable_every_steps=told.durable_every_steps,
                reason=told.reason,
            )

    def begin_generation(self, restore_source: str) -> None:
        """The ranks start again, from there, all of them in the present rhythm."""
        self._steps.clear()
        self._from_step = 0
        if restore_source in ("durable", "none"):
            self._num_memory_losses += self._is_after_loss
        self._is_after_loss = False

    def note_loss(self) -> None:
        """The job was interrupted."""
        self._num_losses += 1
        self._is_after_loss = True

    def note_steps(self, steps: Sequence[rules.JobStep]) -> None:
        """Steps that all ranks have finished; those before the rhythm began say nothing of it."""
        if self._is_chosen:
            self._steps.extend(step for step in steps if step.step >= self._from_step)

    def note_saved(self, events: Sequence[AnyEvent]) -> None:
        """How long the newest durable save took to write."""
        for event in events:
            if isinstance(event, CheckpointSaved) and event.tier == "durable":
                self._write_s = event.write_s

    def is_due(self, *, now_s: float) -> bool:
        """Is it time to ask for advice, and is there a choice?"""
        return self._is_chosen and now_s - self._looked_s >= _LOOK_S and len(self._steps) >= _MANY_STEPS

    def advise(
        self, *, now_s: float, generation: int, highest_step: int
    ) -> tuple[wire.SaveEvery, SaveRhythmChosen] | None:
        """What to tell all agents and the log, if another rhythm is better by now."""
        if not self.is_due(now_s=now_s):
            return None
        self._looked_s = now_s
        steps, before = tuple(self._steps), self.rhythm
        step_s = rules.undisturbed_s(steps, every_steps=before.memory_every_steps)
        if step_s is None:
            return None
        any_loss, memory_loss = self._beliefs(now_s)
        chosen = rules.choose_rhythm(
            before,
            self._rule,
            step_s=step_s,
            memory=rules.measured_cost(
                steps,
                every_steps=before.memory_every_steps,
                but_not_every_steps=before.durable_every_steps,
                busy_s=0.0,
            ),
            durable=rules.measured_cost(
                steps, every_steps=before.durable_every_steps, but_not_every_steps=0, busy_s=self._write_s
            ),
            any_loss=any_loss,
            memory_loss=memory_loss,
        )
        if chosen.is_like(before):
            return None
        self.rhythm = chosen
        self._from_step = highest_step + rules.notice_steps(step_s=step_s)
        self._steps.clear()
        order = wire.SaveEvery(
            from_step=self._from_step,
            memory_every_steps=chosen.memory_every_steps,
            durable_every_steps=chosen.durable_every_steps,
        )
        event = SaveRhythmChosen(
            generation=generation,
            from_step=order.from_step,
            memory_every_steps=order.memory_every_steps,
            durable_every_steps=order.durable_every_steps,
            mtbf_s=any_loss.mtbf_s,
            reason=chosen.reason,
        )
        return order, event

    def _beliefs(self, now_s: float) -> tuple[rules.FailureBelief, rules.FailureBelief]:
        """Of any interruption, and of those that took the memory of a rank along."""
        seen_s = max(0.0, now_s - self._began_s)
        return (
            self._prior.after(num_failures=self._num_losses, duration_s=seen_s),
            self._prior.after(num_failures=self._num_memory_losses, duration_s=seen_s),
        )
