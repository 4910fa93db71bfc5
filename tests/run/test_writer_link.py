from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from dougong.backend.local.process import pids_with_variable
from dougong.run.layout import NodeDirectory
from dougong.run.write_order import put_order
from dougong.run.writer_link import WriterLink
from tests.run import made_orders as made
from tests.run.made_settings import settings_at

pytestmark = pytest.mark.processes


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


class Watched:
    """A link and what it spawned, under one mark in the environment."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.node = NodeDirectory(root / "node")
        self.mark = f"{root}"
        monkeypatch.setenv("DOUGONG_TEST_WRITER", self.mark)
        self.tasks: set[asyncio.Task[None]] = set()
        self.link = WriterLink(settings_at(root), node=self.node, log_path=root / "log", spawn=self._spawn)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def pids(self) -> list[int]:
        return [pid for pid in pids_with_variable("DOUGONG_TEST_WRITER", self.mark) if pid != os.getpid()]

    def order(self, step: int, *, rank: int = 0) -> None:
        self.link.pass_on(str(put_order(self.node, made.order_at(self.root, step=step, rank=rank))))

    async def end(self) -> None:
        self.link.end()
        await until(lambda: not self.pids())
        await asyncio.gather(*self.tasks)


def run(root: Path, monkeypatch: pytest.MonkeyPatch, play: Any) -> None:
    async def whole() -> None:
        watched = Watched(root, monkeypatch)
        try:
            await play(watched)
        finally:
            await watched.end()

    asyncio.run(whole())


def test_no_writer_runs_before_the_first_order_and_one_serves_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(watched: Watched) -> None:
        await watched.link.take_over()
        assert watched.pids() == []
        for rank in range(3):
            watched.order(10, rank=rank)
        await until(lambda: all(made.told_rank(tmp_path, rank) for rank in range(3)))
        assert len(watched.pids()) == 1

    run(tmp_path, monkeypatch, play)


def test_a_killed_writer_is_followed_by_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(watched: Watched) -> None:
        watched.order(10)
        await until(lambda: len(made.told_rank(tmp_path)) == 1)
        (first,) = watched.pids()
        os.kill(first, signal.SIGKILL)
        await until(lambda: watched.pids() not in ([], [first]))
        watched.order(20)
        await until(lambda: len(made.told_rank(tmp_path)) == 2)

    run(tmp_path, monkeypatch, play)


def test_orders_that_an_earlier_agent_left_are_carried_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(watched: Watched) -> None:
        put_order(watched.node, made.order_at(tmp_path))
        await watched.link.take_over()
        await until(lambda: made.told_rank(tmp_path))

    run(tmp_path, monkeypatch, play)
