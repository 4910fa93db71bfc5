"""Workers without torch, for a fleet on one machine: the real fork service, and a script that only keeps its page.

A light worker is a process of its own with a real heartbeat page. It finishes a step every so often, saves a few bytes
to memory as an attached rank would, and tells that it has restored. Started by `bench/_agent_host.py`.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from typing import NoReturn

from dougong.run import zygote
from dougong.run.letters import Restored, post
from dougong.run.page import Page, Phase, StepRecord
from dougong.run.place import WorkerPlace, worker_place
from dougong.run.snapshot import SnapshotFiles

STATE_BYTES = 4096


def main() -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    step_s = float(sys.argv[1])
    gc.freeze()
    request = zygote._serve()  # pyright: ignore[reportPrivateUsage]
    if request is not None:
        place = worker_place()
        assert place is not None
        train(place, step_s=step_s)
    os._exit(0)


def train(place: WorkerPlace, *, step_s: float) -> None:
    """Steps until the end, all ranks in time with the clock of the machine."""
    page = Page.open(place.node.page(place.rank))
    page.begin(pid=os.getpid(), now_ns=time.monotonic_ns())
    page.mark_attached()
    files = SnapshotFiles(place.node.snapshot(place.rank))
    files.reserve(STATE_BYTES)
    page.mark_restored(step=place.restore_step)
    restored = Restored(
        generation=place.generation, rank=place.rank, step=place.restore_step, source=place.restore_source, reload_s=0.0
    )
    post(place.node.outbox(place.rank), restored)
    step = place.restore_step
    while True:
        step += 1
        begin_ns = time.monotonic_ns()
        page.enter(Phase.STEP, now_ns=begin_ns)
        time.sleep(step_s)
        end_ns = time.monotonic_ns()
        page.finish_step(StepRecord(step, begin_ns, end_ns, 0, 1.0, 1, 0, 0))
        page.enter(Phase.BETWEEN, now_ns=end_ns)
        if step % place.memory_every_steps == 0:
            index = files.next_index()
            files.void(index)
            files.publish(
                index, step=step, generation=place.generation, world_size=place.world_size, num_bytes=STATE_BYTES
            )
        if page.stop_at_step and step >= page.stop_at_step:
            return


if __name__ == "__main__":
    main()
