"""One controller with 256 agents on one machine: what it costs at rest, how soon it knows, how a storm goes.

    python bench/scale_agents.py [--nodes 256] [--rounds 10] [--out bench/results/scale_agents.json]

Real: the controller (its own process, its entry point, event log and samples on disk), 256 agents with their sockets,
handshakes, status and step messages, 256 worker processes with heartbeat pages, watched by pidfd and /proc, forked by
the runtime's fork service, with memory checkpoints of 4 KiB that are verified. Not real: the agents share four
processes, since 256 interpreters would need 10 GB; the workers do not train (no torch; a step is a sleep), so nothing
is written durably or copied to other nodes, and no stacks are taken.

Detection is from the signal to the event in the log. The storm is a restart of all ranks: from the loss to every rank
forked and restored, and to the first new step.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from _launch import INTERRUPT_S, print_table, spread, write_result

import dougong
from dougong.backend.local import process
from dougong.event.describe import describe
from dougong.event.kinds import (
    AgentLost,
    AgentReturned,
    AnyEvent,
    Event,
    JobResumed,
    StateRestored,
    StepFinished,
    WorkerLost,
)
from dougong.event.store import read
from dougong.run.layout import RunDirectory, forget_memory, node_directory
from dougong.run.page import Page
from dougong.run.settings import FORMAT_VERSION, HangRule, Policy, RunSettings, SaveRule, save_settings

REST_LIMIT_RATIO = 0.2
DETECT_LIMIT_S = 1.0
STORM_LIMIT_S = 5.0
NUM_HOSTS = 4
STEP_S = 1.0
WAIT_S = 60.0
HOST = Path(__file__).resolve().parent / "_agent_host.py"


class Fleet:
    """The processes of a running fleet, and its event log as far as it was read."""

    def __init__(self, root: Path, *, num_nodes: int, stack: ExitStack) -> None:
        self.run = RunDirectory(root / "run")
        self.settings = _settings(root, num_nodes=num_nodes)
        self.run.events.mkdir(parents=True)
        self.run.logs.mkdir(parents=True)
        self.run.token.write_bytes(secrets.token_bytes(32))
        save_settings(self.run, self.settings)
        stack.callback(forget_memory, self.settings.run_id, memory_root=Path(self.settings.memory_root))
        self._events: list[tuple[int, AnyEvent]] = []
        self._last_seq = 0
        self.begin_ns = time.time_ns()
        self.controller = stack.enter_context(_process("dougong.cli.controller", self.run, is_module=True))
        self.hosts = [
            stack.enter_context(_process(str(HOST), self.run, str(STEP_S), *self.settings.nodes[index::NUM_HOSTS]))
            for index in range(NUM_HOSTS)
        ]

    def tell_host(self, order: str, component: str) -> None:
        stdin = self.hosts[self.settings.nodes.index(component) % NUM_HOSTS].stdin
        assert stdin is not None
        stdin.write(f"{order} {component}\n".encode())
        stdin.flush()

    def page(self, rank: int) -> Page:
        component = self.settings.nodes[rank]
        node = node_directory(self.settings.run_id, component, memory_root=Path(self.settings.memory_root))
        return Page.open(node.page(rank))

    def pid(self, rank: int) -> int:
        page = self.page(rank)
        try:
            return page.pid
        finally:
            page.close()

    def wait_for(self, kind: type[Event], *, after_ns: int, is_it: Callable[[Any], bool] = lambda _: True) -> int:
        """The time of the first such event after a moment, in ns."""
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            for record in read(self.run.events, after={"job": self._last_seq}):
                self._events.append((record.time_ns, record.event))  # pyright: ignore[reportArgumentType]
                self._last_seq = record.seq
            for time_ns, event in reversed(self._events):
                if time_ns <= after_ns:
                    break
                if isinstance(event, kind) and is_it(event):
                    return next(t for t, e in self._events if t > after_ns and isinstance(e, kind) and is_it(e))
            time.sleep(0.02)
        last = "\n".join(describe(event) for _, event in self._events[-10:])
        raise RuntimeError(f"no {kind.__name__} within {WAIT_S:g} s; the last events:\n{last}")

    def cpu_s(self, processes: list[subprocess.Popen[bytes]]) -> float:
        ticks = os.sysconf("SC_CLK_TCK")
        readings = [process.read(one.pid) for one in processes]
        return sum(reading.cpu_ticks for reading in readings if reading is not None) / ticks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=10, help="faults of each kind")
    parser.add_argument("--rest-s", type=float, default=20.0, help="how long the fleet is watched at rest")
    parser.add_argument("--out", type=Path, default=Path("bench/results/scale_agents.json"))
    options = parser.parse_args()
    load = round(os.getloadavg()[0], 2)
    with tempfile.TemporaryDirectory(prefix="dougong-bench-") as folder, ExitStack() as stack:
        fleet = Fleet(Path(folder), num_nodes=options.nodes, stack=stack)
        rows = measure(fleet, rounds=options.rounds, rest_s=options.rest_s)
    print_table(
        ("what", "median", "p95", "limit", "ok"),
        [
            (
                row["name"],
                f"{row['ours']:.3g} {row['unit']}",
                _p95(row),
                f"{row['limit']:g}",
                "yes" if row["ok"] else "no",
            )
            for row in rows
        ],
    )
    result = {"benchmark": "scale_agents", "num_nodes": options.nodes, "step_s": STEP_S, "load_average_at_start": load}
    write_result(options.out, {**result, "rows": rows, "is_reached": all(row["ok"] for row in rows)})


def measure(fleet: Fleet, *, rounds: int, rest_s: float) -> list[dict[str, Any]]:
    """All rows, one kind of fault after the other."""
    restored_ns = fleet.wait_for(StateRestored, after_ns=fleet.begin_ns)
    fleet.wait_for(StepFinished, after_ns=restored_ns)
    gathered_s = (restored_ns - fleet.begin_ns) / 1e9
    time.sleep(3.0)
    rest_ratio, agents_ratio = _rest(fleet, rest_s)
    chance = random.Random(1)
    ranks = range(len(fleet.settings.nodes))
    killed, stopped, agents, storms, resumes, storm_cpu_s = [], [], [], [], [], []
    for number in range(rounds):
        for signal_number, found in ((signal.SIGKILL, killed), (signal.SIGSTOP, stopped)):
            if signal_number == signal.SIGSTOP and number % 2:
                continue
            cpu_s = fleet.cpu_s([fleet.controller])
            begin_ns = time.time_ns()
            process.kill(fleet.pid(chance.choice(ranks)), signal_number)
            lost_ns = fleet.wait_for(WorkerLost, after_ns=begin_ns)
            restored_ns = fleet.wait_for(StateRestored, after_ns=lost_ns)
            resumed_ns = fleet.wait_for(JobResumed, after_ns=lost_ns)
            found.append((lost_ns - begin_ns) / 1e9)
            storms.append((restored_ns - lost_ns) / 1e9)
            resumes.append((resumed_ns - lost_ns) / 1e9 - STEP_S)
            storm_cpu_s.append(fleet.cpu_s([fleet.controller]) - cpu_s)
            time.sleep(0.5 + chance.random())
        component = fleet.settings.nodes[chance.choice(ranks)]
        begin_ns = time.time_ns()
        fleet.tell_host("kill", component)
        lost_ns = fleet.wait_for(AgentLost, after_ns=begin_ns)
        agents.append((lost_ns - begin_ns) / 1e9)
        fleet.tell_host("start", component)
        fleet.wait_for(AgentReturned, after_ns=lost_ns)
    memory_bytes = _memory_bytes(fleet.controller.pid)
    return [
        _row("command → every rank started and restored", [gathered_s], limit=30.0, unit="s"),
        _row("controller at rest, share of a core", [rest_ratio], limit=REST_LIMIT_RATIO, unit=""),
        _row("an agent at rest, share of a core", [agents_ratio / len(ranks)], limit=0.02, unit=""),
        _row("killed worker → found", killed, limit=DETECT_LIMIT_S, unit="s"),
        _row("killed agent → found", agents, limit=DETECT_LIMIT_S, unit="s"),
        _row("stopped worker → found (rule: stopped for 1 s)", stopped, limit=3.0, unit="s"),
        _row("storm: loss → every rank started and restored", storms, limit=STORM_LIMIT_S, unit="s"),
        _row("storm: loss → first step, the step not counted", resumes, limit=STORM_LIMIT_S, unit="s"),
        _row("storm: CPU time of the controller", storm_cpu_s, limit=STORM_LIMIT_S, unit="s"),
        _row("memory of the controller", [memory_bytes / 1e6], limit=300.0, unit="MB"),
    ]


def _rest(fleet: Fleet, rest_s: float) -> tuple[float, float]:
    """CPU seconds a second: of the controller, and of all the agents."""
    before, begin_s = (fleet.cpu_s([fleet.controller]), fleet.cpu_s(fleet.hosts)), time.monotonic()
    time.sleep(rest_s)
    waited_s = time.monotonic() - begin_s
    after = (fleet.cpu_s([fleet.controller]), fleet.cpu_s(fleet.hosts))
    return (after[0] - before[0]) / waited_s, (after[1] - before[1]) / waited_s


def _row(name: str, values: list[float], *, limit: float, unit: str) -> dict[str, Any]:
    ordered = sorted(values)
    p95 = ordered[min(len(ordered) - 1, round(0.95 * len(ordered)))]
    return {
        "name": name,
        "ours": round(statistics.median(values), 4),
        "p95": round(p95, 4),
        "range": spread(values),
        "num": len(values),
        "unit": unit,
        "peer": None,
        "floor": None,
        "limit": limit,
        "ok": statistics.median(values) <= limit,
    }


def _p95(row: dict[str, Any]) -> str:
    return f"{row['p95']:.3g}" if row["num"] > 1 else "–"


def _memory_bytes(pid: int) -> int:
    """The most it ever held. Source: proc(5), VmHWM."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _settings(root: Path, *, num_nodes: int) -> RunSettings:
    return RunSettings(
        format_version=FORMAT_VERSION,
        run_id=f"scale{secrets.token_hex(3)}",
        version=dougong.__version__,
        command=("light-worker",),
        working_directory=str(root),
        backend="joined",
        cluster_name="scale",
        nodes=tuple(f"hall-a/rack-{index // 8:03d}/node-{index:05d}" for index in range(num_nodes)),
        spares=(),
        num_accelerators=num_nodes,
        procs_per_node=1,
        policy=Policy(max_fruitless=1000, backoff_first_s=0.0),
        hang=HangRule(),
        save=SaveRule(memory_every_steps=1, peer_copies=0),
        checkpoint_url=str(root / "run" / "checkpoints"),
        memory_root="/dev/shm",
        threads_per_worker=1,
        peak_flop_per_s=1.0,
        peak_source="none",
    )


@contextmanager
def _process(
    what: str, run: RunDirectory, *arguments: str, is_module: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """A part of the fleet, ended with all that it has started."""
    log: IO[bytes] = (run.logs / f"{Path(what).stem.rsplit('.', 1)[-1]}-{secrets.token_hex(2)}.log").open("wb")
    command = [sys.executable, *(("-m",) if is_module else ()), what, str(run.root), *arguments]
    with log:
        one = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
    try:
        yield one
    finally:
        if one.stdin is not None:
            one.stdin.close()  # the controller then stops the job, and sends the agents away
        with suppress(subprocess.TimeoutExpired):
            one.wait(timeout=INTERRUPT_S if is_module else 2.0)
        for pid in (one.pid, *process.descendants(one.pid)):
            process.kill(pid)
        one.wait()


if __name__ == "__main__":
    main()
