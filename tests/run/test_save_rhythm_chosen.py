"""A real run whose intervals of saving are left open: a rhythm is chosen, all ranks take it up, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dougong.event.kinds import CheckpointSaved, GenerationStarted, SaveRhythmChosen, WarningRaised
from tests.run import runs

pytest.importorskip("torch", reason="torch is not installed (extra: train)")
pytestmark = pytest.mark.processes


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "run"
    yield path
    runs.end_all(path)


def test_a_rhythm_is_chosen_while_it_runs_and_all_ranks_keep_to_it(run_dir: Path) -> None:
    chaos = runs.write_chaos(run_dir.parent / "chaos.yaml", "kind: kill-worker, at_step: 420, rank: 1")
    options = ("--memory-every", "0", "--durable-every", "0", "--mtbf", "2min", "--chaos", str(chaos))
    done = runs.run(run_dir, *options, arguments=("--steps", "500", "--step-s", "0.03"))
    assert done.code == 0, done.report
    chosen = done.events(SaveRhythmChosen)
    assert chosen, done.report
    assert not [event.text for event in done.events(WarningRaised) if "was not written" in event.text]
    saved = [event for event in done.events(CheckpointSaved) if event.tier == "durable"]
    in_force = {1: 50}  # by the step from which on it holds
    in_force |= {event.from_step: event.durable_every_steps for event in chosen if event.generation == 1}
    for event in saved:
        if event.generation == 1:
            every = in_force[max(step for step in in_force if step <= event.step)]
            assert event.step % every == 0
    assert len(done.events(GenerationStarted)) == 2
    assert sorted({step for step, _ in done.samples()}) == list(range(1, 501))
