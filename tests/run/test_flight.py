from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dougong.run.flight import Flight, answer_asks, last_collective, who_is_behind
from dougong.run.page import Page
from dougong.run.stacks import name_culprit
from tests.run import runs


def flight(seq: int, *, group: str = "0 default_pg", is_open: bool = True) -> Flight:
    return Flight(group=group, seq=seq, name="gloo:all_reduce", is_open=is_open)


def entry(record_id: int, seq: int, **changes: object) -> dict[str, object]:
    base: dict[str, object] = {
        "record_id": record_id,
        "collective_seq_id": seq,
        "profiling_name": "gloo:all_reduce",
        "process_group": ["0", "default_pg"],
        "is_p2p": False,
        "retired": False,
        "state": "scheduled",
    }
    return {**base, **changes}


def test_the_last_collective_is_the_newest_record_that_is_none_between_two_ranks() -> None:
    record = {"entries": [entry(4, 41), entry(5, 42, retired=True), entry(6, 0, is_p2p=True)], "version": "2.10"}
    assert last_collective(json.dumps(record)) == flight(42, is_open=False)


@pytest.mark.parametrize("record", ["", "no record", "{}", '{"entries": []}', '{"entries": [{}]}'])
def test_what_is_no_record_tells_nothing(record: str) -> None:
    assert last_collective(record) is None


def test_the_rank_that_has_entered_fewer_collectives_is_behind() -> None:
    behind, why = who_is_behind({0: flight(42), 1: flight(41), 2: flight(42)}, num_ranks=3)
    assert behind == (1,)
    assert why == "rank 1 has entered 41 collectives, others 42 and wait in gloo:all_reduce"


@pytest.mark.parametrize(
    "flights",
    [{}, {0: flight(42)}, {0: flight(42), 1: flight(42)}, {0: flight(42), 1: flight(3, group="1 tensor_parallel")}],
)
def test_nobody_is_behind_where_the_records_cannot_be_compared(flights: dict[int, Flight]) -> None:
    assert who_is_behind(flights, num_ranks=2) == ((), "")


def test_the_count_of_collectives_names_the_culprit_before_the_stacks_do() -> None:
    stacks = {0: "Error: Permission denied", 1: "Error: Permission denied"}
    rank, verdict = name_culprit(stacks, suspect=0, flights={0: flight(42), 1: flight(41)})
    assert rank == 1
    assert "41 collectives" in verdict


def test_with_equal_counts_the_stacks_decide() -> None:
    assert name_culprit({0: "", 1: ""}, suspect=0, flights={0: flight(42), 1: flight(42)})[0] == 0


RECORDER = """
import os, sys, time
import torch, torch.distributed as dist
from pathlib import Path
from dougong.run.flight import answer_asks
from dougong.run.page import Page
answer_asks(Page.open(Path(sys.argv[1])), Path(sys.argv[2]))
store = dist.FileStore(sys.argv[3], 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
for _ in range(3):
    dist.all_reduce(torch.ones(4))
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.processes
def test_a_worker_tells_its_collectives_while_its_main_thread_sleeps(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed (extra: train)")
    page, answer = Page.create(tmp_path / "page", generation=1), tmp_path / "flight.json"
    arguments = [str(tmp_path / "page"), str(answer), str(tmp_path / "store")]
    process = subprocess.Popen(
        [sys.executable, "-c", RECORDER, *arguments],
        stdout=subprocess.PIPE,
        env={**os.environ, "TORCH_FR_BUFFER_SIZE": "100", "GLOO_SOCKET_IFNAME": "lo"},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        page.ask_flight()
        runs.wait_for(answer.exists)
        found = last_collective(answer.read_text())
        assert found is not None
        assert (found.seq, "reduce" in found.name) == (3, True)
    finally:
        process.kill()
        process.communicate()


def test_asking_twice_is_answered_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, answer = Page.create(tmp_path / "page", generation=1), tmp_path / "flight.json"
    monkeypatch.setattr("dougong.run.flight.dump_record", lambda: "a record")
    answer_asks(page, answer)
    for _ in range(2):
        page.ask_flight()
        runs.wait_for(answer.exists)
        assert answer.read_text() == "a record"
        answer.unlink()
