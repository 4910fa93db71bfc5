from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from dougong.cli import run_options
from dougong.cli.run import run
from dougong.cli.run_options import Membership, RunOptions, Shape, endpoint, membership, mtbf_s, shape, slurm_hosts
from dougong.errors import UserError


def options(**given: Any) -> RunOptions:
    return RunOptions(command=("train.py",), **given)


def parsed(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> RunOptions:
    """What the command line makes of these arguments."""
    from dougong.cli import run_start

    seen: list[RunOptions] = []

    def keep(options: RunOptions) -> int:
        seen.append(options)
        return 0

    monkeypatch.setattr(run_start, "start", keep)
    monkeypatch.setattr(run_start, "go_on", keep)
    result = CliRunner().invoke(run, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return seen[0]


# --- the shape ---


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Shape(num_nodes=1, procs_per_node=1)),
        ({"nodes": 3, "procs_per_node": 2}, Shape(num_nodes=3, procs_per_node=2)),
        ({"nnodes": "2", "nproc_per_node": "4"}, Shape(num_nodes=2, procs_per_node=4)),
        ({"nnodes": "1:4"}, Shape(num_nodes=4, procs_per_node=1, min_nodes=1)),
        ({"nodes": 4, "min_nodes": 3}, Shape(num_nodes=4, procs_per_node=1, min_nodes=3)),
        ({"nnodes": "2:2", "nodes": 2}, Shape(num_nodes=2, procs_per_node=1)),
        ({"nproc_per_node": "cpu"}, Shape(num_nodes=1, procs_per_node=6)),
        ({"nproc_per_node": "3", "procs_per_node": 3}, Shape(num_nodes=1, procs_per_node=3)),
    ],
)
def test_torchruns_flags_and_ours_are_one_thing(given: dict[str, Any], expected: Shape) -> None:
    assert shape(options(**given), num_cpus=6) == expected


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"nodes": 2, "nnodes": "3"}, "--nnodes 3"),
        ({"nodes": 2, "nnodes": "2:4"}, "--nnodes 2:4"),
        ({"procs_per_node": 2, "nproc_per_node": "4"}, "--nproc-per-node 4"),
    ],
)
def test_two_flags_that_contradict_each_other_are_both_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as caught:
        shape(options(**given), num_cpus=1)
    assert named in caught.value.what and "contradict" in caught.value.what


@pytest.mark.parametrize("text", ["0", "4:2", "two", "", ":2", "-1", "1:", "1:2:3"])
def test_a_number_of_nodes_that_is_none_is_a_mistake(text: str) -> None:
    if text == "1:":
        assert shape(options(nnodes=text), num_cpus=1).num_nodes == 1
        return
    with pytest.raises(UserError) as caught:
        shape(options(nnodes=text), num_cpus=1)
    assert caught.value.where == "--nnodes"


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5", ""])
def test_a_number_of_ranks_that_is_none_is_a_mistake(text: str) -> None:
    with pytest.raises(UserError):
        shape(options(nproc_per_node=text), num_cpus=1)


@pytest.mark.parametrize(
    ("num_accelerators", "text", "ranks"), [(8, "auto", 8), (8, "gpu", 8), (8, "cpu", 6), (0, "auto", 6)]
)
def test_auto_takes_the_accelerators_if_there_are_any(
    num_accelerators: int, text: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_options, "_num_accelerators", lambda: num_accelerators)
    assert shape(options(nproc_per_node=text), num_cpus=6).procs_per_node == ranks


def test_gpus_where_there_are_none_are_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_options, "_num_accelerators", lambda: 0)
    with pytest.raises(UserError, match="no GPU"):
        shape(options(nproc_per_node="gpu"), num_cpus=6)


# --- the command line ---


def test_a_torchrun_command_line_is_understood_in_both_spellings(monkeypatch: pytest.MonkeyPatch) -> None:
    for dash in ("-", "_"):
        got = parsed(
            "--nnodes=1:2",
            f"--nproc{dash}per{dash}node=2",
            f"--rdzv{dash}endpoint=host:29500",
            f"--rdzv{dash}backend=c10d",
            f"--rdzv{dash}id=7",
            f"--max{dash}restarts=3",
            f"--node{dash}rank=1",
            f"--master{dash}addr=host",
            f"--master{dash}port=2000",
            f"--monitor{dash}interval=1",
            f"--log{dash}dir=logs",
            "--standalone",
            "train.py",
            "--lr",
            "3e-4",
            "--nodes",
            monkeypatch=monkeypatch,
        )
        assert got.command == ("train.py", "--lr", "3e-4", "--nodes")
        assert (got.nnodes, got.nproc_per_node, got.rdzv_endpoint, got.rdzv_id) == ("1:2", "2", "host:29500", "7")
        assert (got.max_restarts, got.node_rank, got.master_port, got.standalone) == (3, 1, 2000, True)
        assert got.without_effect == ("--rdzv-backend", "--monitor-interval", "--log-dir")


def test_two_dashes_may_stand_before_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    got = parsed("--nodes", "2", "--", "train.py", "--", "x", monkeypatch=monkeypatch)
    assert (got.nodes, got.command) == (2, ("train.py", "--", "x"))


def test_m_runs_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    got = parsed("-m", "package.train", "--lr", "1", monkeypatch=monkeypatch)
    assert got.module and got.command == ("package.train", "--lr", "1")


@pytest.mark.parametrize(
    "arguments", [["--nodes", "0"], ["--spares", "-1"], ["--keep", "0"], ["--no-such-option", "x"]]
)
def test_an_option_that_is_wrong_or_unknown_ends_with_code_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(run, arguments).exit_code == 2


def test_nothing_given_has_an_effect() -> None:
    assert options().without_effect == ()


# --- one of several launchers ---


SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_NODELIST": "gpu[07-08]",
}


def test_a_task_of_a_slurm_step_is_a_member() -> None:
    assert membership(options(), SLURM, num_nodes=1) == Membership(
        name="slurm-77-0", node_rank=1, num_nodes=2, hosts=("gpu07", "gpu08"), listen_port=0, is_head=False
    )
    head = membership(options(), {**SLURM, "SLURM_PROCID": "0"}, num_nodes=1)
    assert head is not None and head.is_head


def test_a_batch_script_without_srun_is_not_one_of_many() -> None:
    """It has SLURM_PROCID=0 and the tasks of its allocation, which nobody starts."""
    batch = {name: value for name, value in SLURM.items() if not name.startswith("SLURM_STEP")}
    assert membership(options(), {**batch, "SLURM_PROCID": "0"}, num_nodes=1) is None


def test_a_step_smaller_than_its_allocation_counts_its_own_tasks() -> None:
    step = {**SLURM, "SLURM_NTASKS": "8", "SLURM_NODELIST": "gpu[01-08]"}
    found = membership(options(), step, num_nodes=1)
    assert found is not None and (found.num_nodes, found.hosts) == (2, ("gpu07", "gpu08"))


def test_a_step_of_one_task_runs_alone() -> None:
    alone = {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert membership(options(), alone, num_nodes=1) is None


def test_several_tasks_on_one_host_are_members_without_hosts() -> None:
    found = membership(options(), {**SLURM, "SLURM_STEP_NODELIST": "gpu07"}, num_nodes=1)
    assert found is not None and found.hosts == () and found.num_nodes == 2


@pytest.mark.parametrize("given", [{"standalone": True}, {"nodes": 2}])
def test_who_asks_for_nodes_of_this_machine_is_no_member(given: dict[str, Any]) -> None:
    assert membership(options(**given), SLURM, num_nodes=2) is None


def test_an_endpoint_and_a_node_rank_make_a_member() -> None:
    given = options(nnodes="2", rdzv_endpoint="head:2950", node_rank=0, rdzv_id="mine")
    assert membership(given, {}, num_nodes=2) == Membership(
        name="mine", node_rank=0, num_nodes=2, hosts=(), listen_port=2950, is_head=True
    )


def test_an_endpoint_on_another_host_without_a_node_rank_is_a_mistake() -> None:
    """Each host would run both nodes by itself, and nobody would notice."""
    with pytest.raises(UserError) as caught:
        membership(options(nnodes="2", rdzv_endpoint="head:2950"), {}, num_nodes=2)
    assert "--node-rank" in caught.value.mend


@pytest.mark.parametrize("given", [{"rdzv_endpoint": "localhost:0"}, {"rdzv_endpoint": "127.0.0.1:29500"}, {}])
def test_an_endpoint_on_this_machine_means_all_nodes_here(given: dict[str, Any]) -> None:
    assert membership(options(nnodes="2", **given), {}, num_nodes=2) is None


# --- small texts ---


@pytest.mark.parametrize(
    ("text", "expected"), [("head:1", ("head", 1)), ("head", ("head", 29400)), ("[::1]:7", ("[::1]", 7))]
)
def test_an_endpoint_is_host_and_port(text: str, expected: tuple[str, int]) -> None:
    assert endpoint(text) == expected


@pytest.mark.parametrize("text", [":1", "head:", "head:x", "head:70000", ""])
def test_an_endpoint_that_is_none_is_a_mistake(text: str) -> None:
    with pytest.raises(UserError) as caught:
        endpoint(text)
    assert caught.value.where == "--rdzv-endpoint"


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login1", ["login1"]),
        ("a,b", ["a", "b"]),
        ("gpu[01-03,07],login1", ["gpu01", "gpu02", "gpu03", "gpu07", "login1"]),
        ("gpu[098-101]", ["gpu098", "gpu099", "gpu100", "gpu101"]),
        ("n[1-2].site", ["n1.site", "n2.site"]),
        ("rack[1-2]n[01-02]", ["rack1n01", "rack1n02", "rack2n01", "rack2n02"]),
        ("", []),
    ],
)
def test_a_slurm_node_list_names_its_hosts(text: str, hosts: list[str]) -> None:
    assert list(slurm_hosts(text)) == hosts


@pytest.mark.parametrize("text", ["gpu[01-03", "gpu[]", "gpu[a-b]", "gpu[1-]x]", "gpu[,1]", "gpu]1["])
def test_a_node_list_that_cannot_be_read_is_a_mistake_that_shows_it(text: str) -> None:
    with pytest.raises(UserError) as caught:
        slurm_hosts(text)
    assert text in caught.value.what


def test_the_time_between_failures_is_a_duration() -> None:
    assert mtbf_s(options()) == 0.0
    assert mtbf_s(options(mtbf="3h")) == 10_800.0
    for wrong in ("often", "0h", "3 parsecs"):
        with pytest.raises(UserError):
            mtbf_s(options(mtbf=wrong))


def test_the_time_between_failures_has_no_effect_on_intervals_that_were_told() -> None:
    assert options(mtbf="3h").without_effect == ("--mtbf",)
    assert options(mtbf="3h", memory_every=0).without_effect == ()
