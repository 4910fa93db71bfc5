"""Links that are cut between nodes with networks of their own; with real processes and real packets."""

from __future__ import annotations

from pathlib import Path

import pytest

from dougong.backend.local.networks import check_networks
from dougong.errors import UserError
from dougong.event.kinds import (
    GenerationStarted,
    JobFailed,
    LinkCut,
    LinkHealed,
    NodeLost,
    NodeRepaired,
    WorkerLost,
)
from tests.run import runs
from tests.run.made_disturbance import assert_same, disturbed

pytest.importorskip("torch", reason="torch is not installed (extra: train)")
try:
    check_networks()
except UserError as error:
    pytest.skip(error.what, allow_module_level=True)
pytestmark = pytest.mark.processes
FIRST, SECOND, THIRD = (f"local/rack-01/node-0{number}" for number in (1, 2, 3))


def networks_left(run: Path) -> list[str]:
    directory = Path("/run/netns")
    run_id = run_id_of(run)
    return [path.name for path in directory.glob(f"dougong-{run_id[:8]}-*")] if directory.exists() else []


def run_id_of(run: Path) -> str:
    from dougong.run.settings import load_settings, run_directory

    return load_settings(run_directory(run)).run_id


def test_a_link_that_is_cut_is_named_and_the_two_nodes_are_not_used_together(
    new_run: Path, quiet_run: runs.Finished
) -> None:
    done = disturbed(
        new_run, f"kind: cut-network, at_step: 20, node: {SECOND}, peer: {FIRST}", options=("--spares", "1")
    )
    assert_same(done, quiet_run)
    assert [(event.component, event.peer) for event in done.events(LinkCut)] == [(FIRST, SECOND)]
    used = {placed.component for placed in done.events(GenerationStarted)[-1].placement}
    assert THIRD in used and not {FIRST, SECOND} <= used
    assert networks_left(new_run) == []


def test_without_a_spare_a_cut_link_is_waited_for(new_run: Path, quiet_run: runs.Finished) -> None:
    done = disturbed(new_run, f"kind: cut-network, at_step: 20, node: {SECOND}, peer: {FIRST}, for_s: 8")
    assert_same(done, quiet_run)
    assert [event.cause_class for event in done.events(WorkerLost)][:1] in (["hang"], ["network"])
    assert done.events(JobFailed) == []
    assert [event.component for event in done.events(LinkHealed)] == [FIRST]


def test_a_node_cut_off_from_all_is_replaced_and_a_spare_again_once_it_is_healed(
    new_run: Path, quiet_run: runs.Finished
) -> None:
    done = disturbed(
        new_run,
        f"kind: cut-network, at_step: 20, node: {SECOND}, for_s: 12",
        options=("--spares", "1", "--set", "policy.node_grace_s=4"),
        arguments=("--step-s", "0.3"),
    )
    assert_same(done, quiet_run)
    assert SECOND in {event.component for event in done.events(NodeLost)} | {
        name for event in done.events(LinkCut) for name in (event.component, event.peer)
    }
    if done.events(NodeLost):
        assert [event.component for event in done.events(NodeRepaired)] == [SECOND]
    assert networks_left(new_run) == []


def test_a_node_that_loses_only_the_controller_for_a_while_trains_on(new_run: Path, quiet_run: runs.Finished) -> None:
    done = disturbed(new_run, f"kind: cut-network, at_step: 20, node: {SECOND}, peer: controller, for_s: 3")
    assert_same(done, quiet_run)
    assert done.events(WorkerLost) == []
    assert len(done.events(GenerationStarted)) == 1, "no rank was started again"
