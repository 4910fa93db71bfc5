"""A fleet of agents that exist in virtual time only, for rehearsing the controller with thousands of them.

The controller is the real one, and so are its connections from the frame on: what both sides say is encoded, cut into
frames and decoded. Only the sockets, the token and the processes of the nodes are missing. The agents keep to the rules
of `status_rhythm`, so what is learnt here of detection holds for them; what a fork, a kill or a reading of /proc takes
is given by `NodeTimes`, measured elsewhere.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import msgspec

from dougong.clock import Clock
from dougong.run import letters, wire
from dougong.run.agent import Address
from dougong.run.page import Phase, StepRecord
from dougong.run.reception import Reception
from dougong.run.settings import RunSettings
from dougong.run.status_rhythm import SUSPICION_S, fleet_rhythm, is_news


class NodeTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What things take on a node, and on the way."""

    latency_s: float = 0.001
    exit_s: float = 0.01
    """From the death of a process to its agent's knowing."""
    reading_s: float = 0.25
    """From a stop to the reading of /proc that shows it, at most."""
    kill_s: float = 0.02
    fork_s: float = 0.05
    restore_s: float = 0.1
    agent_s: float = 0.5
    """From the order to start an agent to its connection."""


class RehearsedReception(Reception):
    """Agents come in by `admit` alone."""

    async def open(self, settings: RunSettings) -> Address:
        return Address(host="nowhere", port=0)


class Fleet:
    """All nodes of a run: agents for the controller, and a backend that starts them.

    Ranks train in step with each other, as collectives make them: a step of `step_s` is finished by all or by none.
    """

    def __init__(self, settings: RunSettings, *, times: NodeTimes, step_s: float, clock: Clock) -> None:
        self.settings = settings
        self.times = times
        self.clock = clock
        self.agents_cpu_s = 0.0
        """CPU time spent on the fleet's side, for telling it from the controller's."""
        self.num_told = 0
        self._step_s = step_s
        self.rhythm = fleet_rhythm(len(settings.nodes) + len(settings.spares))
        names = (*settings.nodes, *settings.spares)
        self._nodes = {name: _Node(name, self, index=index) for index, name in enumerate(names)}
        self._ranks: dict[int, _Rank] = {}
        self._reception: Reception | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._training: asyncio.TimerHandle | None = None
        self._generation = 0

    def begin(self, reception: Reception) -> None:
        """The controller listens there; agents come when they are asked for."""
        self._reception = reception

    # --- the node backend ---

    def start_agent(self, component: str) -> None:
        self.later(self.times.agent_s, self._nodes[component].come)

    def end_agent(self, component: str) -> None:
        self._nodes[component].leave()

    def fence(self, component: str) -> None:
        self.kill_node(component)

    def can_return(self, component: str) -> bool:
        return False

    # --- faults ---

    def kill_rank(self, rank: int) -> None:
        self._ranks[rank].die()

    def stop_rank(self, rank: int) -> None:
        """Its process is stopped (state T)."""
        self._ranks[rank].stop(is_stopped=True)

    def hang_rank(self, rank: int) -> None:
        """It waits for a lock that is never released, and all others for it."""
        self._ranks[rank].stop(is_stopped=False)

    def kill_node(self, component: str) -> None:
        """Everything on it ends, and its connection with it."""
        self._nodes[component].end()

    # --- called by nodes and ranks ---

    def later(self, delay_s: float, what: Callable[..., None], *arguments: Any) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(delay_s, self._timed, what, arguments)

    def admit(self, connection: wire.Connection) -> None:
        assert self._reception is not None
        task = asyncio.create_task(self._reception.admit(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def place(self, rank: _Rank) -> None:
        """A rank was started; once all are there, training begins."""
        if rank.generation > self._generation:
            self._generation = rank.generation
            self._ranks.clear()
        self._ranks[rank.rank] = rank
        if len(self._ranks) == rank.world_size:
            self._training = self.later(self.times.restore_s + self._step_s, self._finish_step, self._generation)

    def break_up(self) -> None:
        """One rank no longer takes part, so no step is finished any more, and soon all are silent."""
        if self._training is None:
            return
        self._training.cancel()
        self._training = None
        for node in self._nodes.values():
            self.later(SUSPICION_S + self._spread(node.index), node.tell_news)

    @property
    def is_training(self) -> bool:
        return self._training is not None

    def now_s(self) -> float:
        return self.clock.monotonic_ns() / 1e9

    def _finish_step(self, generation: int) -> None:
        if generation != self._generation:
            return
        end_ns = self.clock.wall_ns()
        begin_ns = end_ns - round(self._step_s * 1e9)
        for rank in self._ranks.values():
            rank.finish_step()
        for node in self._nodes.values():
            self.later(0.02 * self._spread(node.index) / 0.2, node.tell_steps, begin_ns, end_ns)
        self._training = self.later(self._step_s, self._finish_step, generation)

    def _spread(self, index: int) -> float:
        """0 to 0.2 s, different for each node: they do not look at the same moment."""
        return (index * 0.6180339887 % 1.0) * 0.2

    def _timed(self, what: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        begin_s = time.thread_time()
        what(*arguments)
        self.agents_cpu_s += time.thread_time() - begin_s


class _Rank:
    """A worker's process."""

    def __init__(self, node: _Node, launch: wire.Launch, *, rank: int, pid: int) -> None:
        self.node = node
        self.generation = launch.generation
        self.world_size = launch.world_size
        self.rank = rank
        self.pid = pid
        self.step = launch.restore.step
        self.saved = node.saved.get(rank, ())
        self.sign_s = node.fleet.now_s()
        self.is_dead = False
        self.state: wire.Activity = "running"

    def finish_step(self) -> None:
        """Each one is saved to memory, over the last but one."""
        self.step += 1
        self.sign_s = self.node.fleet.now_s()
        self.saved = (*self.saved[-1:], (self.generation, self.step))
        self.node.saved[self.rank] = self.saved

    def die(self) -> None:
        self.is_dead = True
        self.node.fleet.later(self.node.fleet.times.exit_s, self.node.tell_end, self)
        self.node.fleet.break_up()

    def stop(self, *, is_stopped: bool) -> None:
        self.state = "stopped" if is_stopped else "lock"
        self.sign_s = self.node.fleet.now_s()
        self.node.fleet.break_up()
        self.node.fleet.later(self.node.fleet.times.reading_s, self.node.tell_news)

    def status(self, *, is_training: bool) -> wire.RankStatus:
        idle_s = self.node.fleet.now_s() - self.sign_s
        return wire.RankStatus(
            rank=self.rank,
            generation=self.generation,
            pid=self.pid,
            phase=Phase.STEP,
            step=self.step,
            idle_s=idle_s,
            quiet_s=0.0 if is_training else idle_s,
            activity=self.state if is_training or self.state != "running" else "idle",
            is_attached=True,
        )


class _Node:
    """An agent and its ranks."""

    def __init__(self, component: str, fleet: Fleet, *, index: int) -> None:
        self.component = component
        self.fleet = fleet
        self.index = index
        self.saved: dict[int, tuple[tuple[int, int], ...]] = {}
        """(generation, step) of what its memory holds of each rank, which outlives the rank."""
        self._ranks: dict[int, _Rank] = {}
        self._line: _Line | None = None
        self._told: tuple[wire.RankStatus, ...] = ()
        self._is_down = False

    def come(self) -> None:
        """The agent connects."""
        if self._line is not None or self._is_down:
            return
        self._line = _Line(self)
        workers = tuple(
            wire.RunningWorker(rank=one.rank, local_rank=0, generation=one.generation, pid=one.pid, start_ticks=0)
            for one in self._ranks.values()
        )
        self._tell(wire.Hello(component=self.component, pid=1, address="x", free_port=1, workers=workers, snapshots=()))
        self.fleet.admit(self._line.connection)
        self._tell_status(self._line)

    def leave(self) -> None:
        """The agent is gone; its ranks run on."""
        if self._line is not None:
            self._line.end()
            self._line = None

    def end(self) -> None:
        self._is_down = True
        for rank in self._ranks.values():
            rank.is_dead = True
        if self._ranks:
            self.fleet.break_up()
        self._ranks.clear()
        self.saved.clear()
        self.leave()

    def obey(self, body: bytes) -> None:
        message = _TO_AGENT.decode(body)
        match message:
            case wire.Launch():
                self.fleet.later(self.fleet.times.fork_s, self._launch, message)
            case wire.Kill():
                for rank in self._ranks.values():
                    rank.is_dead = True
                self.fleet.later(self.fleet.times.kill_s, self._killed, message.generation)
            case wire.TakeStacks():
                evidence = tuple(wire.RankEvidence(rank=rank, stack="", threads="", flight="") for rank in self._ranks)
                self._tell(wire.StacksTaken(generation=message.generation, ranks=evidence))
            case wire.ProbeLinks():
                self._tell(wire.LinksProbed(round=message.round, unreachable=()))
            case wire.StopAt():
                self.fleet.later(0.1, self._stop, message.step)
            case wire.Dismiss():
                self.leave()
            case _:
                return

    # --- what it says ---

    def tell_news(self) -> None:
        """Out of turn, if there is something to tell."""
        if self._line is not None and is_news(self._told, self._statuses()):
            self._tell(self._status())

    def tell_steps(self, begin_ns: int, end_ns: int) -> None:
        parts = tuple(
            wire.Steps(
                rank=one.rank,
                generation=one.generation,
                records=(StepRecord(one.step, begin_ns, end_ns, 0, 1.0, 1, 0, 0),),
            )
            for one in self._ranks.values()
            if not one.is_dead
        )
        if parts:
            self._tell(wire.StepsOfNode(parts=parts))

    def tell_end(self, rank: _Rank) -> None:
        if self._ranks.get(rank.rank) is rank:
            del self._ranks[rank.rank]
            now_ns = self.fleet.clock.wall_ns()
            ended = wire.WorkerEnded(
                rank=rank.rank, generation=rank.generation, exit_code=None, signal=9, time_ns=now_ns, log_tail=""
            )
            self._tell(ended)

    def _launch(self, launch: wire.Launch) -> None:
        self._ranks = {
            rank: _Rank(self, launch, rank=rank, pid=1000 * launch.generation + rank) for rank, _ in launch.ranks
        }
        self._tell(wire.Launched(generation=launch.generation))
        for rank in self._ranks.values():
            self.fleet.place(rank)
        self.fleet.later(self.fleet.times.restore_s, self._tell_restored, launch)

    def _tell_restored(self, launch: wire.Launch) -> None:
        for rank in self._ranks:
            letter = letters.Restored(
                generation=launch.generation,
                rank=rank,
                step=launch.restore.step,
                source=launch.restore.source,
                reload_s=self.fleet.times.restore_s,
            )
            self._tell(wire.Received(letter=letter))

    def _killed(self, generation: int) -> None:
        snapshots = self._snapshots()
        self._ranks.clear()
        self._tell(wire.Killed(generation=generation, snapshots=snapshots, free_port=1))

    def _stop(self, step: int) -> None:
        for rank in tuple(self._ranks.values()):
            letter = letters.Stopped(generation=rank.generation, rank=rank.rank, step=step)
            self._tell(wire.Received(letter=letter))

    def _tell_status(self, line: _Line) -> None:
        """Again and again, as long as this connection lasts."""
        if self._line is line:
            self._tell(self._status())
            self.fleet.later(self.fleet.rhythm.status_s, self._tell_status, line)

    def _status(self) -> wire.Status:
        self._told = self._statuses()
        return wire.Status(ranks=self._told, snapshots=self._snapshots())

    def _statuses(self) -> tuple[wire.RankStatus, ...]:
        is_training = self.fleet.is_training
        return tuple(rank.status(is_training=is_training) for rank in self._ranks.values())

    def _snapshots(self) -> tuple[wire.SnapshotStatus, ...]:
        return tuple(
            wire.SnapshotStatus(
                rank=rank,
                step=step,
                generation=generation,
                world_size=self.fleet.settings.world_size,
                num_bytes=10**9,
            )
            for rank, saved in self.saved.items()
            for generation, step in saved
        )

    def _tell(self, message: wire.ToController) -> None:
        if self._line is not None:
            self._line.tell(message)


class _Line:
    """A connection without sockets: the controller's end is a real one over frames, the agent's is its node."""

    def __init__(self, node: _Node) -> None:
        self._node = node
        self._reader = asyncio.StreamReader()
        self._is_closed = False
        # what is due at one moment may come in any order, what goes over one line may not
        self._to_controller: deque[bytes] = deque()
        self._to_agent: deque[bytes] = deque()
        self.connection = wire.Connection(self._reader, cast("asyncio.StreamWriter", self))

    def tell(self, message: wire.ToController) -> None:
        """From the agent to the controller."""
        body = _ENCODER.encode(message)
        self._node.fleet.num_told += 1
        self._to_controller.append(len(body).to_bytes(4, "big") + body)
        self._node.fleet.later(self._node.fleet.times.latency_s, self._arrive)

    def end(self) -> None:
        """The agent's side closes."""
        if not self._is_closed:
            self._is_closed = True
            self._reader.feed_eof()

    def _arrive(self) -> None:
        frame = self._to_controller.popleft()
        if not self._is_closed:
            self._reader.feed_data(frame)

    def _reach(self) -> None:
        body = self._to_agent.popleft()
        if not self._is_closed:
            self._node.obey(body)

    # --- what the controller's end does with its writer ---

    def write(self, frame: bytes) -> None:
        self._to_agent.append(frame[4:])
        self._node.fleet.later(self._node.fleet.times.latency_s, self._reach)

    def is_closing(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        self._node.leave()

    def get_extra_info(self, name: str) -> tuple[str, int]:
        return ("nowhere", 0)


_ENCODER = msgspec.msgpack.Encoder()
_TO_AGENT = msgspec.msgpack.Decoder(wire.ControllerMessage)
