from __future__ import annotations

import asyncio
import os
from pathlib import Path

from dougong.run.evidence import Bundle, flights_of, take_evidence, threads_in_words, write_bundle
from dougong.run.page import Page
from dougong.run.wire import RankEvidence


def test_the_threads_of_a_process_are_told_with_state_time_and_wait() -> None:
    head, main, *_ = threads_in_words(os.getpid()).splitlines()
    assert head.split() == ["thread", "state", "cpu_s", "waits", "in", "name"]
    number, state, cpu_s, *_ = main.split()
    assert int(number) == os.getpid()
    assert state in "RSD"
    assert float(cpu_s) > 0


def test_a_process_that_is_gone_has_no_threads() -> None:
    assert len(threads_in_words(2**22 + 1).splitlines()) == 1


def test_evidence_is_taken_even_if_the_rank_answers_nothing(tmp_path: Path) -> None:
    page = Page.create(tmp_path / "page", generation=1)
    found = asyncio.run(take_evidence(3, pid=os.getpid(), page=page, flight_path=tmp_path / "flight.json"))
    assert (found.rank, found.flight) == (3, "")
    assert page.flights_asked == 1
    assert found.threads


def test_the_bundle_holds_the_verdict_and_all_ranks(tmp_path: Path) -> None:
    ranks = (
        RankEvidence(rank=0, stack="stack of 0", threads="threads of 0", flight='{"entries": []}'),
        RankEvidence(rank=1, stack="stack of 1", threads="threads of 1", flight=""),
    )
    write_bundle(tmp_path / "evidence", Bundle(reason="no progress", verdict="rank 1 it is", ranks=ranks))
    stacks = (tmp_path / "evidence" / "stacks.txt").read_text()
    assert stacks.startswith("no progress\nrank 1 it is\n")
    assert stacks.count("=== rank") == 2
    assert "threads of 1" in (tmp_path / "evidence" / "threads.txt").read_text()
    assert [path.name for path in (tmp_path / "evidence").glob("flight*")] == ["flight-rank-0.json"]
    assert flights_of(ranks) == {}
