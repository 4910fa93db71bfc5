"""The phases that a script tells itself, seen on the heartbeat page."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra: train)")

from dougong.run.attach import Job, attach  # noqa: E402
from dougong.run.page import Page, Phase  # noqa: E402
from dougong.run.place import worker_variables  # noqa: E402
from tests.run.made_place import place_in  # noqa: E402


@pytest.fixture
def attached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Job, Page]:
    """A job in this process, as in a worker, and its page."""
    place = place_in(tmp_path)
    page = Page.create(place.node.page(0), generation=1)
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
