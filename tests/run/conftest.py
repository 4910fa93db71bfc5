"""The undisturbed run, once for all modules whose tests compare with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.run import made_disturbance, runs


@pytest.fixture(scope="session")
def quiet_run(tmp_path_factory: pytest.TempPathFactory) -> runs.Finished:
    done = runs.run(tmp_path_factory.mktemp("quiet") / "run", *made_disturbance.SAVES)
    assert done.code == 0, done.report
    return done


@pytest.fixture
def new_run(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "run"
    yield path
    runs.end_all(path)
