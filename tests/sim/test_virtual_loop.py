from __future__ import annotations

import asyncio

import pytest

from dougong.clock import ManualClock
from dougong.sim.virtual_loop import VirtualTimeLoop


def test_hours_pass_in_the_order_of_their_times() -> None:
    clock = ManualClock()
    seen: list[tuple[str, float]] = []

    async def sleeper(name: str, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        seen.append((name, clock.monotonic_ns() / 1e9))

    async def main() -> None:
        await asyncio.gather(sleeper("late", 7200.0), sleeper("early", 0.25), sleeper("middle", 3600.0))

    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(clock)) as runner:
        runner.run(main())
    assert seen == [("early", 0.25), ("middle", 3600.0), ("late", 7200.0)]


def test_time_outs_and_threads_work_as_ever() -> None:
    clock = ManualClock()

    def fails() -> None:
        raise ValueError("no")

    async def main() -> str:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 30)
        with pytest.raises(ValueError, match="no"):
            await asyncio.to_thread(fails)
        return await asyncio.to_thread(lambda: "done")

    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(clock)) as runner:
        assert runner.run(main()) == "done"
    assert clock.monotonic_ns() == pytest.approx(30e9, abs=10)


def test_waiting_for_ever_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    loop = VirtualTimeLoop(ManualClock())
    with pytest.raises(RuntimeError, match="for ever"):
        loop.run_until_complete(main())
    loop.close()
