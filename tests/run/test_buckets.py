"""With three ranks the order of addition shows. It is the same after a restart as without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from dougong.event.kinds import RecoveryDecided
from tests.run import runs

pytest.importorskip("torch", reason="torch is not installed (extra: train)")
pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).parent / "scripts" / "buckets.py"


def trained(run_dir: Path, *options: str, arguments: tuple[str, ...]) -> runs.Finished:
    done = runs.run(run_dir, "--no-score", *options, script=SCRIPT, arguments=arguments, nodes=3)
    assert done.code == 0, done.report
    return done


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> runs.Finished:
    return trained(tmp_path_factory.mktemp("quiet") / "run", arguments=("70",))


@pytest.mark.parametrize(
    ("arguments", "rung"), [(("70",), "standby"), (("70", "--replaceable"), "in-process")], ids=["anew", "staying"]
)
def test_three_ranks_add_up_in_the_same_order_after_a_restart(
    arguments: tuple[str, ...], rung: str, undisturbed: runs.Finished, tmp_path: Path
) -> None:
    chaos = runs.write_chaos(
        tmp_path / "chaos.yaml", "kind: kill-worker, rank: 1, at_step: 23", "kind: kill-worker, rank: 0, at_step: 48"
    )
    done = trained(tmp_path / "run", "--chaos", str(chaos), arguments=arguments)
    assert [event.rung for event in done.events(RecoveryDecided)] == [rung, rung], done.report
    for rank in range(3):
        assert done.losses(rank) == undisturbed.losses(rank)
