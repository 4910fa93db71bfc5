from __future__ import annotations

import pytest

from dougong.run.place import WorkerPlace, rank_and_world_size, torchrun_variables, worker_place, worker_variables
from dougong.run.settings import HangRule, Policy, RunSettings, SaveRule
from dougong.run.wire import Launch, Restore

PLACE = WorkerPlace(
    run_id="ab12",
    run_root="run",
    node_root="node",
    checkpoint_url="checkpoints",
    generation=3,
    rank=5,
    local_rank=1,
    world_size=8,
    restore_source="durable",
    restore_step=100,
    restore_directory="step-000000100-g002",
    memory_every_steps=5,
    durable_every_steps=50,
    commit_timeout_s=60.0,
    wants_peak=False,
    is_chaos=True,
)


def variables() -> dict[str, str]:
    settings = RunSettings(
        format_version=1,
        run_id="ab12",
        version="0",
        command=("train.py",),
        working_directory="/",
        backend="local",
        cluster_name="local",
        nodes=("a", "b"),
        spares=(),
        num_accelerators=8,
        procs_per_node=4,
        policy=Policy(max_restarts=3),
        hang=HangRule(),
        save=SaveRule(),
        checkpoint_url="checkpoints",
        memory_root="memory",
        threads_per_worker=1,
    )
    launch = Launch(
        generation=3,
        num_restarts=2,
        ranks=((5, 1),),
        world_size=8,
        node_rank=1,
        num_nodes=2,
        master_address="127.0.0.1",
        master_port=2950,
        restore=Restore(source="none"),
    )
    return torchrun_variables(PLACE, settings, launch)


def test_a_worker_finds_its_place_in_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker_place() is None
    for name, value in worker_variables(PLACE).items():
        monkeypatch.setenv(name, value)
    assert worker_place() == PLACE


def test_every_variable_that_torchrun_sets_is_set() -> None:
    """torch.distributed.run of torch 2.13, "Environment Variables"."""
    expected = {
        "LOCAL_RANK": "1",
        "RANK": "5",
        "GROUP_RANK": "1",
        "ROLE_RANK": "5",
        "LOCAL_WORLD_SIZE": "4",
        "WORLD_SIZE": "8",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_WORLD_SIZE": "8",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "2950",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "ab12",
    }
    assert expected.items() <= variables().items()


def test_all_variables_are_text() -> None:
    assert all(isinstance(value, str) for value in {**variables(), **worker_variables(PLACE)}.values())


def test_a_plain_process_is_rank_0_of_1(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_and_world_size() == (0, 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert rank_and_world_size() == (3, 4)
