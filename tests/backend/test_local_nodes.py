from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dougong.backend.local import nodes, process
from dougong.backend.local.nodes import NODE_VARIABLE, LocalNodes
from dougong.errors import NodeUnreachable

A, B = "local/rack-01/node-01", "local/rack-01/node-02"
AGENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)  # worker"], start_new_session=True)
time.sleep(60)
"""


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalNodes]:
    """Nodes whose agent is a small program of the same name, which starts one worker and waits."""
    package = tmp_path / "fake" / "dougong" / "cli"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "agent.py").write_text(AGENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    made = LocalNodes(tmp_path, run_id=tmp_path.name, memory_of=lambda component: tmp_path / "memory" / component)
    yield made
    for component in (A, B):
        for pid in pids_of(component, tmp_path):
            process.kill(pid)
    for child in made._children.values():  # pyright: ignore[reportPrivateUsage]
        child.wait()


def pids_of(component: str, run_root: Path) -> tuple[int, ...]:
    found = process.pids_with_variable(NODE_VARIABLE, f"{run_root.name}:{component}")
    return tuple(pid for pid in found if process.is_alive(pid))


def wait_for(is_true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def agents_of(component: str, run_root: Path) -> tuple[int, ...]:
    return tuple(pid for pid in pids_of(component, run_root) if nodes._is_agent(pid))  # pyright: ignore[reportPrivateUsage]


@pytest.mark.processes
def test_an_agent_is_started_once_with_its_node_in_its_environment(backend: LocalNodes, tmp_path: Path) -> None:
    backend.start_agent(A)
    wait_for(lambda: len(pids_of(A, tmp_path)) == 2 and len(agents_of(A, tmp_path)) == 1)
    backend.start_agent(A)
    assert len(agents_of(A, tmp_path)) == 1
    assert agents_of(B, tmp_path) == ()


@pytest.mark.processes
def test_the_end_of_an_agent_leaves_its_workers_and_another_can_be_started(backend: LocalNodes, tmp_path: Path) -> None:
    backend.start_agent(A)
    wait_for(lambda: len(pids_of(A, tmp_path)) == 2 and len(agents_of(A, tmp_path)) == 1)
    (agent,) = agents_of(A, tmp_path)
    (worker,) = set(pids_of(A, tmp_path)) - {agent}
    backend.kill_agent(A)
    wait_for(lambda: agents_of(A, tmp_path) == ())
    assert process.is_alive(worker)
    backend.start_agent(A)
    wait_for(lambda: len(agents_of(A, tmp_path)) == 1)


@pytest.mark.processes
def test_the_death_of_a_node_takes_agent_workers_and_memory_but_nothing_of_another(
    backend: LocalNodes, tmp_path: Path
) -> None:
    for component in (A, B):
        backend.start_agent(component)
        (tmp_path / "memory" / component).mkdir(parents=True)
    wait_for(lambda: len(pids_of(A, tmp_path)) == len(pids_of(B, tmp_path)) == 2)
    backend.kill_node(A)
    assert pids_of(A, tmp_path) == () and not (tmp_path / "memory" / A).exists()
    assert len(pids_of(B, tmp_path)) == 2 and (tmp_path / "memory" / B).exists()


def test_a_dead_node_cannot_be_reached_also_by_another_controller(backend: LocalNodes, tmp_path: Path) -> None:
    backend.kill_node(A)
    other = LocalNodes(tmp_path, run_id=tmp_path.name, memory_of=lambda component: tmp_path)
    for asked in (backend, other):
        with pytest.raises(NodeUnreachable, match="the node is down"):
            asked.start_agent(A)


@pytest.mark.processes
def test_a_process_of_another_run_with_the_same_node_names_is_left_alone(backend: LocalNodes, tmp_path: Path) -> None:
    environment = {**os.environ, NODE_VARIABLE: f"other-run:{A}"}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment) as bystander:
        wait_for(lambda: process.pids_with_variable(NODE_VARIABLE, f"other-run:{A}") == (bystander.pid,))
        backend.kill_node(A)
        assert process.is_alive(bystander.pid)


def test_a_node_that_was_killed_can_return_and_start_an_agent_again(backend: LocalNodes, tmp_path: Path) -> None:
    for component in (B, A):
        backend.kill_node(component)
    assert backend.killed_nodes() == (B, A), "the first first"
    assert not backend.can_return(A)
    backend.return_node(A)
    assert backend.killed_nodes() == (B,)
    assert backend.can_return(A)
    backend.start_agent(A)
    assert not backend.can_return(A), "while something of it runs, it is not cleared"


def test_the_clocks_of_two_nodes_are_turned_apart(backend: LocalNodes, tmp_path: Path) -> None:
    backend.jump_clock(A, jump_s=60.0)
    backend.jump_clock(A, jump_s=-3600.0)
    backend.jump_clock("controller", jump_s=1.5)
    offsets = {name: nodes.clock_offset_file(tmp_path, name) for name in (A, B, "controller")}
    assert offsets[A].read_text() == str(-3540 * 10**9)
    assert not offsets[B].exists()
    assert offsets["controller"].read_text() == "1500000000"


def test_nodes_that_share_a_network_cannot_be_cut_off(backend: LocalNodes) -> None:
    with pytest.raises(OSError, match="share one network"):
        backend.cut(A, B)
