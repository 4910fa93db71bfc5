"""The controller with 10,000 agents in virtual time: what it costs at rest, how soon it knows, how a storm goes.

    python bench/scale_sim.py [--nodes 10000] [--procs-per-node 8] [--out bench/results/scale_sim.json]

The controller is the real one, with its connections, rules, event log and samples; agents and sockets exist in virtual
time only (`dougong.run.rehearsal`), so the CPU time of sockets and of the kernel is not in these figures: 256 real
agents are measured by `bench/scale_agents.py`. What a fork, a kill or a reading of /proc takes on a node is given.
Virtual time stands still while the controller computes, so the CPU time of a storm is told beside it and counts on top.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _launch import print_table, spread, write_result

import dougong
from dougong.clock import ManualClock
from dougong.event.kinds import Event, JobResumed, NodeLost, StateRestored, WorkerLost
from dougong.event.log import EventLog
from dougong.event.store import read
from dougong.run.controller import Controller
from dougong.run.history import JobHistory
from dougong.run.layout import RunDirectory
from dougong.run.rehearsal import Fleet, NodeTimes, RehearsedReception
from dougong.run.settings import FORMAT_VERSION, HangRule, Policy, RunSettings, SaveRule
from dougong.sim.virtual_loop import VirtualTimeLoop
from dougong.telemetry.embedded import SampleWriter

EPOCH_NS = 1_767_225_600 * 10**9
STEP_S = 6.0
REST_LIMIT_RATIO = 1.0
DETECT_LIMIT_S = 1.0
STORM_LIMIT_S = 30.0
REST_S = 60.0


class Rehearsal:
    """A fleet in training, and the measurements that are made of it."""

    def __init__(self, root: Path, *, num_nodes: int, num_spares: int, procs_per_node: int) -> None:
        self.clock = ManualClock(start_ns=EPOCH_NS)
        self.settings = _settings(root, num_nodes=num_nodes, num_spares=num_spares, procs_per_node=procs_per_node)
        self.run = RunDirectory(root)
        self.fleet = Fleet(self.settings, times=NodeTimes(), step_s=STEP_S, clock=self.clock)
        self.chance = random.Random(1)
        self.rows: list[dict[str, Any]] = []

    async def play(self, rounds: int) -> None:
        controller = Controller(
            self.run,
            self.settings,
            token=b"",
            log=EventLog.open(self.run.events, stream="job", clock=self.clock),
            samples=SampleWriter.open(self.run.telemetry, self.clock),
            backend=self.fleet,
            clock=self.clock,
            history=JobHistory(),
            is_resume=False,
            reception_of=RehearsedReception,
        )
        self.fleet.begin(controller._reception)  # pyright: ignore[reportPrivateUsage]
        begin = self._mark()
        running = asyncio.create_task(controller.run())
        await asyncio.sleep(5 * STEP_S)
        self._cost("storm: all agents come and all ranks start, CPU time", begin, limit=STORM_LIMIT_S)
        await self._rest()
        await self._faults("killed worker → found", lambda rank: self.fleet.kill_rank(rank), rounds, DETECT_LIMIT_S)
        await self._faults("stopped worker → found (rule: 1 s)", lambda rank: self.fleet.stop_rank(rank), rounds, 3.0)
        # a step of 6 s is given 4.5 times as long before its silence is a hang
        hang_limit_s = HangRule().attached_p99_factor * STEP_S + STEP_S + DETECT_LIMIT_S
        await self._faults("hang → found (rule: 4.5 x step)", lambda rank: self.fleet.hang_rank(rank), 1, hang_limit_s)
        await self._lose_a_rack()
        controller.ask_stop()
        await running

    async def _rest(self) -> None:
        before, told = self._mark(), self.fleet.num_told
        await asyncio.sleep(REST_S)
        self._row("controller at rest, share of a core", [self._cpu_s(before) / REST_S], REST_LIMIT_RATIO, "")
        self._row("messages a second at rest", [(self.fleet.num_told - told) / REST_S], 10_000.0, "/s")

    async def _faults(self, name: str, fault: Callable[[int], None], rounds: int, limit_s: float) -> None:
        found: list[float] = []
        storms: list[float] = []
        cpu_s: list[float] = []
        for _ in range(rounds):
            await asyncio.sleep(2 * STEP_S + self.chance.random() * STEP_S)
            before, begin_ns = self._mark(), self.clock.wall_ns()
            fault(self.chance.randrange(self.settings.world_size))
            await asyncio.sleep(limit_s + 3 * STEP_S)
            lost_ns, restored_ns = self._first(WorkerLost, begin_ns), self._first(StateRestored, begin_ns)
            self._first(JobResumed, begin_ns)
            found.append((lost_ns - begin_ns) / 1e9)
            storms.append((restored_ns - lost_ns) / 1e9)
            cpu_s.append(self._cpu_s(before))
        self._row(name, found, limit_s, "s")
        if rounds > 1:
            self._row(f"{name.split(' →')[0]}: loss → every rank restored, virtual", storms, STORM_LIMIT_S, "s")
            self._row(f"{name.split(' →')[0]}: CPU time of the controller until then", cpu_s, STORM_LIMIT_S, "s")

    async def _lose_a_rack(self) -> None:
        """As many nodes at once as there are spares."""
        before, begin_ns = self._mark(), self.clock.wall_ns()
        for component in self.settings.nodes[: len(self.settings.spares)]:
            self.fleet.kill_node(component)
        await asyncio.sleep(60)
        lost_ns, resumed_ns = self._first(NodeLost, begin_ns), self._first(JobResumed, begin_ns)
        num = len(self.settings.spares)
        self._row(f"{num} nodes at once → the first counts as lost", [(lost_ns - begin_ns) / 1e9], 15.0, "s")
        self._row(f"{num} nodes at once → first new step, on spares", [(resumed_ns - begin_ns) / 1e9], 60.0, "s")
        self._cost(f"{num} nodes at once: CPU time until then", before, limit=STORM_LIMIT_S)

    def _first(self, kind: type[Event], after_ns: int) -> int:
        """When the first such event after a moment happened."""
        return next(r.time_ns for r in read(self.run.events) if r.time_ns > after_ns and isinstance(r.event, kind))

    def _mark(self) -> float:
        return time.thread_time() - self.fleet.agents_cpu_s

    def _cpu_s(self, mark: float) -> float:
        """CPU time on the controller's side since a mark, the virtual loop's own included."""
        return self._mark() - mark

    def _cost(self, name: str, mark: float, *, limit: float) -> None:
        self._row(name, [self._cpu_s(mark)], limit, "s")

    def _row(self, name: str, values: list[float], limit: float, unit: str) -> None:
        ordered = sorted(values)
        self.rows.append(
            {
                "name": name,
                "ours": round(statistics.median(values), 4),
                "p95": round(ordered[min(len(ordered) - 1, round(0.95 * len(ordered)))], 4),
                "range": spread(values),
                "num": len(values),
                "unit": unit,
                "peer": None,
                "floor": None,
                "limit": limit,
                "ok": statistics.median(values) <= limit,
            }
        )
        print(f"{name}: {self.rows[-1]['ours']:g} {unit}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--spares", type=int, default=32)
    parser.add_argument("--procs-per-node", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3, help="faults of each kind")
    parser.add_argument("--out", type=Path, default=Path("bench/results/scale_sim.json"))
    options = parser.parse_args()
    load, begin_s = round(os.getloadavg()[0], 2), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dougong-bench-") as folder:
        rehearsal = Rehearsal(
            Path(folder),
            num_nodes=options.nodes,
            num_spares=options.spares,
            procs_per_node=options.procs_per_node,
        )
        with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(rehearsal.clock)) as runner:
            runner.run(rehearsal.play(options.rounds))
    rows = rehearsal.rows
    print_table(
        ("what", "median", "p95", "limit", "ok"),
        [
            (row["name"], f"{row['ours']:.3g} {row['unit']}", f"{row['p95']:.3g}", f"{row['limit']:g}", str(row["ok"]))
            for row in rows
        ],
    )
    result = {
        "benchmark": "scale_sim",
        "num_nodes": options.nodes,
        "procs_per_node": options.procs_per_node,
        "step_s": STEP_S,
        "load_average_at_start": load,
        "virtual_s": round((rehearsal.clock.wall_ns() - EPOCH_NS) / 1e9, 1),
        "took_s": round(time.monotonic() - begin_s, 1),
        "rows": rows,
        "is_reached": all(row["ok"] for row in rows),
    }
    write_result(options.out, result)


def _settings(root: Path, *, num_nodes: int, num_spares: int, procs_per_node: int) -> RunSettings:
    names = tuple(f"hall-a/rack-{index // 8:04d}/node-{index:05d}" for index in range(num_nodes + num_spares))
    return RunSettings(
        format_version=FORMAT_VERSION,
        run_id="scale",
        version=dougong.__version__,
        command=("train.py",),
        working_directory=str(root),
        backend="sim",
        cluster_name="scale",
        nodes=names[:num_nodes],
        spares=names[num_nodes:],
        num_accelerators=num_nodes * procs_per_node,
        procs_per_node=procs_per_node,
        policy=Policy(max_fruitless=1000, backoff_first_s=0.0),
        hang=HangRule(),
        save=SaveRule(memory_every_steps=1, peer_copies=0),
        checkpoint_url=str(root / "checkpoints"),
        memory_root=str(root),
        threads_per_worker=1,
        peak_flop_per_s=1.0,
        peak_source="none",
    )


if __name__ == "__main__":
    main()
