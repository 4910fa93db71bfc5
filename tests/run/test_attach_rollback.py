"""A survivor of a broken collective unwinds, rolls back and goes on in the same process. The test plays the agent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dougong.run.agent import free_port
from dougong.run.layout import NodeDirectory
from dougong.run.letters import Rejoin, post
from dougong.run.page import Page, Phase
from dougong.run.place import worker_variables
from tests.run import runs
from tests.run.made_place import place_in

pytest.importorskip("torch", reason="torch is not installed (extra: train)")
pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).parent / "scripts" / "rejoin.py"


def start_rank(root: Path, rank: int, port: int, argument: str) -> subprocess.Popen[str]:
    place = place_in(root, rank=rank, world_size=2)
    Page.create(place.node.page(rank), generation=1).close()
    environment = {
        **os.environ,
        **worker_variables(place),
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), argument],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def losses_of(process: subprocess.Popen[str]) -> dict[str, float]:
    # the last checkpoint waits for a commit that nobody makes here, so the end is not waited for
    assert process.stdout is not None
    stdout, stderr = process.communicate(timeout=90)
    assert process.returncode == 0, stderr
    return json.loads(stdout.splitlines()[-1])


def test_both_survivors_of_a_broken_collective_go_on_in_the_same_process(tmp_path: Path) -> None:
    port = free_port("127.0.0.1")
    quiet = [start_rank(tmp_path / "quiet", rank, port, "undisturbed") for rank in (0, 1)]
    expected = [losses_of(process) for process in quiet]

    root = tmp_path / "disturbed"
    port = free_port("127.0.0.1")
    processes = [start_rank(root, rank, port, "disturbed") for rank in (0, 1)]
    pages = [Page.open(NodeDirectory(root / "node").page(rank)) for rank in (0, 1)]
    runs.wait_for(lambda: all(page.phase is Phase.UNWOUND for page in pages))
    port = free_port("127.0.0.1")
    for rank in (0, 1):
        letter = Rejoin(
            generation=2,
            rank=rank,
            master_address="127.0.0.1",
            master_port=port,
            restore_source="memory",
            restore_step=5,
        )
        post(NodeDirectory(root / "node").inbox(rank), letter)
    assert [losses_of(process) for process in processes] == expected, "steps 6 and 7 were done again, bit for bit"
