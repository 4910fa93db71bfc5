"""The phases that a script tells itself, seen on the heartbeat page."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra: train)")

from dougong.run.attach import Job, attach  # noqa: E402
from dougong.run.layout import NodeDirectory  # noqa: E402
from dougong.run.page import Page, Phase  # noqa: E402
from dougong.run.place import WorkerPlace, worker_variables  # noqa: E402


@pytest.fixture
def attached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Job, Page]:
    """A job in this process, as in a worker, and its page."""
    node = NodeDirectory(tmp_path / "node")
    node.root.mkdir()
    page = Page.create(node.page(0), generation=1)
    place = WorkerPlace(
        run_id="test",
        run_root=str(tmp_path),
        node_root=str(node.root),
        checkpoint_url=str(tmp_path / "checkpoints"),
        generation=1,
        rank=0,
        local_rank=0,
        world_size=1,
        restore_source="none",
        restore_step=0,
        restore_directory="",
        memory_every_steps=5,
        durable_every_steps=1000,
        commit_timeout_s=0.5,
        wants_peak=False,
        is_chaos=False,
    )
    for name, value in worker_variables(place).items():
        monkeypatch.setenv(name, value)
    return attach(model=torch.nn.Linear(2, 2)), page


def test_an_evaluation_and_a_compilation_are_phases_and_end_where_they_began(attached: tuple[Job, Page]) -> None:
    job, page = attached
    before = page.phase
    with job.evaluating():
        assert page.phase is Phase.EVALUATION
        with job.compiling():
            assert page.phase is Phase.COMPILE
        assert page.phase is Phase.EVALUATION
    assert page.phase is before


def test_a_phase_ends_with_an_exception_too(attached: tuple[Job, Page]) -> None:
    job, page = attached
    before = page.phase
    with pytest.raises(KeyError), job.compiling():
        raise KeyError("it did not compile")
    assert page.phase is before


def test_outside_of_a_run_the_phases_do_nothing() -> None:
    job = attach(model=torch.nn.Linear(2, 2))
    with job.evaluating(), job.compiling():
        pass
