"""When the controller announces another rhythm, and that it begins where no rank has been."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dougong.event.kinds import CheckpointSaved, SaveRhythmChosen
from dougong.run.history import JobHistory
from dougong.run.save_desk import SaveDesk
from dougong.run.save_rhythm import JobStep
from dougong.run.settings import SaveRule
from tests.run.made_settings import settings_at

AUTO = SaveRule(memory_every_steps=0, durable_every_steps=0, mtbf_s=3600.0)


def desk(root: Path, rule: SaveRule, history: JobHistory | None = None) -> SaveDesk:
    settings = msgspec.structs.replace(settings_at(root), save=rule)
    return SaveDesk(settings, history or JobHistory(), now_s=100.0)


def steps(first: int, last: int, *, stall_s: float = 0.001) -> tuple[JobStep, ...]:
    """Saved every 5 steps."""
    return tuple(
        JobStep(step=step, cycle_s=0.1 + stalled, stall_s=stalled)
        for step in range(first, last + 1)
        for stalled in [stall_s if step % 5 == 1 else 0.0]
    )


def durable(write_s: float) -> CheckpointSaved:
    return CheckpointSaved(step=50, generation=1, tier="durable", num_bytes=1, stall_s=0.0, write_s=write_s)


def test_a_rhythm_told_by_the_user_is_never_changed(tmp_path: Path) -> None:
    saves = desk(tmp_path, SaveRule())
    saves.note_steps(steps(2, 500, stall_s=1.0))
    assert saves.advise(now_s=200.0, generation=1, highest_step=500) is None
    assert (saves.rhythm.memory_every_steps, saves.rhythm.durable_every_steps) == (5, 50)


def test_a_new_rhythm_begins_some_seconds_ahead_of_the_fastest_rank(tmp_path: Path) -> None:
    saves = desk(tmp_path, AUTO)
    saves.note_steps(steps(2, 300))
    saves.note_saved((durable(0.5),))
    advice = saves.advise(now_s=200.0, generation=3, highest_step=302)
    assert advice is not None
    order, event = advice
    assert order.from_step >= 302 + 30
    assert (event.generation, event.from_step) == (3, order.from_step)
    assert order.memory_every_steps == saves.rhythm.memory_every_steps == event.memory_every_steps != 5
    assert saves.advise(now_s=201.0, generation=3, highest_step=303) is None


def test_steps_before_the_new_rhythm_say_nothing_of_it(tmp_path: Path) -> None:
    saves = desk(tmp_path, AUTO)
    saves.note_steps(steps(2, 300))
    advice = saves.advise(now_s=200.0, generation=1, highest_step=300)
    assert advice is not None
    saves.note_steps(steps(301, advice[0].from_step - 1))
    assert saves.advise(now_s=300.0, generation=1, highest_step=400) is None


def test_dearer_saves_and_more_interruptions_change_it(tmp_path: Path) -> None:
    def memory_every(stall_s: float, num_losses: int) -> int:
        saves = desk(tmp_path, AUTO, JobHistory(num_losses=num_losses, operating_s=3600.0))
        saves.note_steps(steps(2, 300, stall_s=stall_s))
        saves.advise(now_s=200.0, generation=1, highest_step=300)
        return saves.rhythm.memory_every_steps

    assert memory_every(0.5, 0) > memory_every(0.005, 0)
    assert memory_every(0.05, 50) < memory_every(0.05, 0)


def test_a_controller_that_comes_back_goes_on_in_the_rhythm_that_was_announced(tmp_path: Path) -> None:
    told = SaveRhythmChosen(
        generation=1, from_step=9, memory_every_steps=7, durable_every_steps=70, mtbf_s=1.0, reason="measured"
    )
    saves = desk(tmp_path, AUTO, JobHistory(save_rhythm=told))
    assert (saves.rhythm.memory_every_steps, saves.rhythm.durable_every_steps) == (7, 70)
    assert desk(tmp_path, SaveRule(), JobHistory(save_rhythm=told)).rhythm.memory_every_steps == 5
