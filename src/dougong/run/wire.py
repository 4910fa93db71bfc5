"""What controller and agents say to each other: typed msgpack over TCP, after both have proved the per-run token.

Each frame is a 4-byte big-endian length and a msgpack value of one of the unions below; anything else closes the
connection. The token itself never travels: each side sends a nonce and answers the other's with an HMAC-SHA256.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from typing import Literal, TypeVar

import msgspec

from dougong.errors import WorldError
from dougong.run.letters import AgentLetter, Skip, WorkerLetter
from dougong.run.page import StepRecord

_MAX_FRAME_BYTES = 64 * 2**20
_NONCE_BYTES = 32
_HANDSHAKE_TIMEOUT_S = 5.0
PROTOCOL_VERSION = 1
_T = TypeVar("_T")

Activity = Literal["running", "idle", "lock", "timer", "disk", "stopped", "gone"]
"""`lock`: idle, and waiting for a lock without a time limit."""


class WireBroken(WorldError):
    """The other side is gone, speaks another protocol, or does not know the token."""


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One rank as its agent sees it. `idle_s` = since the last step or change of phase; `quiet_s` = since any process
    of the rank last used the CPU, the disk or a timer."""

    rank: int
    generation: int
    pid: int
    phase: int
    step: int
    idle_s: float
    quiet_s: float
    activity: Activity
    is_attached: bool
    can_stay: bool = False
    """Could it go on in its process when a peer is replaced?"""


class SnapshotStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A memory checkpoint of one rank, complete by its commit page; its bytes are compared when they are read."""

    rank: int
    step: int
    generation: int
    world_size: int
    num_bytes: int


class CopyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A copy that a node keeps of a rank's memory checkpoint, whose checksum was compared when it arrived.

    `owner` is the node where the rank ran: this one or another.
    """

    owner: str
    snapshot: SnapshotStatus


class CourierAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where the courier of a node answers."""

    component: str
    host: str
    port: int


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """From whose memory a rank takes its state, when its own node's own memory lacks it."""

    rank: int
    courier: CourierAddress


class RunningWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that an agent has in its hands."""

    rank: int
    local_rank: int
    generation: int
    pid: int
    start_ticks: int


# --- agent -> controller ---


class ToController(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of what an agent says."""


class Hello(ToController, frozen=True, kw_only=True):
    """The agent introduces itself, with what runs and what its node's memory holds."""

    component: str
    pid: int
    address: str
    free_port: int
    """A port on the node that was free a moment ago, for the store of rank 0."""
    workers: tuple[RunningWorker, ...]
    snapshots: tuple[SnapshotStatus, ...]
    protocol: int = PROTOCOL_VERSION
    courier_port: int = 0
    """Where the node's courier answers; 0 = it is not up (yet)."""
    copies: tuple[CopyStatus, ...] = ()
    link_port: int = 0
    """At which the agents of other nodes may knock; 0 = at none."""


class Status(ToController, frozen=True, kw_only=True):
    """How the ranks of the node do; several times a second."""

    ranks: tuple[RankStatus, ...]
    snapshots: tuple[SnapshotStatus, ...]


class Steps(ToController, frozen=True, kw_only=True):
    """Finished steps of one rank, with times already on the wall clock."""

    rank: int
    generation: int
    records: tuple[StepRecord, ...]


class StepsOfNode(ToController, frozen=True, kw_only=True):
    """The same of several ranks of a node at once."""

    parts: tuple[Steps, ...]


class Received(ToController, frozen=True, kw_only=True):
    """A letter from a worker."""

    letter: WorkerLetter


class WorkerEnded(ToController, frozen=True, kw_only=True):
    """A worker's process ended. `exit_code` None = not known (it ended while its agent was away)."""

    rank: int
    generation: int
    exit_code: int | None
    signal: int | None
    time_ns: int
    log_tail: str


class Launched(ToController, frozen=True, kw_only=True):
    """The node's ranks of this generation have been started."""

    generation: int


class LaunchFailed(ToController, frozen=True, kw_only=True):
    """The ranks were not started. `bad_origin`: its copy could not be had, so another source must be chosen."""

    generation: int
    reason: str
    bad_origin: Origin | None = None


class CopiesHeld(ToController, frozen=True, kw_only=True):
    """The copies that the node keeps by now; said whenever that changes. `problem`: why one could not be made."""

    courier_port: int
    copies: tuple[CopyStatus, ...]
    problem: str = ""


class Killed(ToController, frozen=True, kw_only=True):
    """No worker of a generation up to this one lives on the node, but those that were to stay.

    `snapshots`: the memory checkpoints there; their bytes are verified by the rank that reads them.
    """

    generation: int
    snapshots: tuple[SnapshotStatus, ...]
    free_port: int
    undead: tuple[int, ...] = ()
    """Ranks that SIGKILL has not ended within the time for it, in order with `undead_states`."""
    undead_states: tuple[str, ...] = ()
    """As in /proc: "D" = the kernel waits for a device or a file system, and nothing can interrupt it."""
    copies: tuple[CopyStatus, ...] = ()


class RankEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What could be had of one rank: its Python stacks, its threads as the kernel sees them, its last collectives."""

    rank: int
    stack: str
    threads: str
    flight: str


class PeerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where the agent of a node answers other agents."""

    component: str
    host: str
    port: int


class LinksProbed(ToController, frozen=True, kw_only=True):
    """The nodes that this one did not reach."""

    round: int
    unreachable: tuple[str, ...]


class StacksTaken(ToController, frozen=True, kw_only=True):
    """The evidence of the node's ranks."""

    generation: int
    ranks: tuple[RankEvidence, ...]


class Preflighted(ToController, frozen=True, kw_only=True):
    """How the node did in one stage of a pre-flight: its slowest rank. `failure` "" = it ended well."""

    serial: int
    stage: int
    free_port: int
    flop_per_s: float | None = None
    bytes_per_s: float | None = None
    is_exact: bool = True
    failure: str = ""


AgentMessage = (
    Hello
    | Status
    | Steps
    | StepsOfNode
    | Received
    | WorkerEnded
    | Launched
    | LaunchFailed
    | Killed
    | StacksTaken
    | CopiesHeld
    | Preflighted
    | LinksProbed
)


# --- controller -> agent ---


class ToAgent(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of what the controller says."""


class Restore(msgspec.Struct, frozen=True, kw_only=True):
    """From where the ranks take their state."""

    source: Literal["none", "memory", "peer", "durable"]
    step: int = 0
    directory: str = ""
    reason: str = ""
    generation: int = 0
    """That wrote a memory checkpoint."""
    world_size: int = 0
    """Of the ranks that saved it; 0 = as many as now, or as the checkpoint says."""
    origins: tuple[Origin, ...] = ()
    """Of the ranks whose state is brought into their node's memory before they start."""
    skips: tuple[Skip, ...] = ()


class Welcome(ToAgent, frozen=True, kw_only=True):
    """The agent is known. It says `Killed` for workers older than `generation` only when asked."""

    generation: int
    wall_ns: int = 0
    """The time of the run now."""


class Launch(ToAgent, frozen=True, kw_only=True):
    """Start these ranks: (rank, local_rank)."""

    generation: int
    num_restarts: int
    ranks: tuple[tuple[int, int], ...]
    world_size: int
    node_rank: int
    num_nodes: int
    master_address: str
    master_port: int
    restore: Restore
    memory_every_steps: int = 0
    durable_every_steps: int = 0
    """The rhythm of saving that holds now; 0 = as the settings say."""
    staying: tuple[int, ...] = ()
    """Those among `ranks` that go on in their processes: they get a `Rejoin` letter instead of a start."""
    has_staying: bool = False
    """Some ranks of the job do, here or on other nodes."""
    is_cold: bool = False
    """Start from a fresh interpreter, not from one that has been there for long."""


class Kill(ToAgent, frozen=True, kw_only=True):
    """End all workers of generations up to this one, at once. With `grace_s`, SIGTERM comes first.

    Ranks in `staying` are not ended; they are told to leave their collectives.
    """

    generation: int
    grace_s: float = 0.0
    staying: tuple[int, ...] = ()


class TakeStacks(ToAgent, frozen=True, kw_only=True):
    generation: int


class ProbeLinks(ToAgent, frozen=True, kw_only=True):
    """Try to reach the agents of these nodes."""

    round: int
    peers: tuple[PeerAddress, ...]


class StopAt(ToAgent, frozen=True, kw_only=True):
    """All ranks save and leave once they have finished this step."""

    step: int


class SaveEvery(ToAgent, frozen=True, kw_only=True):
    """All ranks save in this rhythm for the steps from `from_step` on, which none of them has reached."""

    from_step: int
    memory_every_steps: int
    durable_every_steps: int


class HoldSaves(ToAgent, frozen=True, kw_only=True):
    """No rank takes a checkpoint up to this step: the loss of one of them is bad."""

    until_step: int


class Deliver(ToAgent, frozen=True, kw_only=True):
    """A letter for a worker."""

    rank: int
    letter: AgentLetter


class CopyOrder(ToAgent, frozen=True, kw_only=True):
    """What the courier is to copy, and to whom.

    Of each rank the first memory checkpoint of `generation` at or after `from_step`, one for each `round`; 0 = none.
    All nodes get the same, so that the copies of all ranks are of one step. The copies of the anchor, the newest step
    of which every rank has one, are not written over.
    """

    generation: int
    round: int
    from_step: int
    anchor_generation: int
    anchor_step: int
    peers: tuple[CourierAddress, ...]


class Preflight(ToAgent, frozen=True, kw_only=True):
    """Test this node: stage 0 alone, later stages together with another one. `node_index` 0 holds the store."""

    serial: int
    stage: int
    timeout_s: float
    node_index: int = 0
    master_address: str = ""
    master_port: int = 0


class Dismiss(ToAgent, frozen=True, kw_only=True):
    """The run is over: end all, give the memory back if told, leave."""

    is_memory_kept: bool


ControllerMessage = (
    Welcome
    | Launch
    | Kill
    | TakeStacks
    | StopAt
    | SaveEvery
    | Deliver
    | CopyOrder
    | Dismiss
    | Preflight
    | HoldSaves
    | ProbeLinks
)


class Connection:
    """A proven connection that sends and receives whole messages."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._encoder = msgspec.msgpack.Encoder()
        self._to_agent = msgspec.msgpack.Decoder(ControllerMessage)
        self._to_controller = msgspec.msgpack.Decoder(AgentMessage)

    def send(self, message: ToAgent | ToController) -> None:
        """Queue a message. A dead connection shows at the reading side."""
        if self._writer.is_closing():
            return
        body = self._encoder.encode(message)
        self._writer.write(len(body).to_bytes(4, "big") + body)

    async def receive_for_agent(self) -> ControllerMessage:
        return _decoded(self._to_agent, await self._frame())

    async def receive_for_controller(self) -> AgentMessage:
        return _decoded(self._to_controller, await self._frame())

    @property
    def own_host(self) -> str:
        """The address by which the other side sees this one."""
        return str(self._writer.get_extra_info("sockname")[0])

    def close(self) -> None:
        self._writer.close()

    async def flush(self) -> None:
        try:
            await self._writer.drain()
        except OSError as error:
            raise WireBroken(str(error)) from error

    async def _frame(self) -> bytes:
        try:
            length = int.from_bytes(await self._reader.readexactly(4), "big")
            if length > _MAX_FRAME_BYTES:
                raise WireBroken(f"a frame of {length} bytes; the limit is {_MAX_FRAME_BYTES}")
            return await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise WireBroken("the other side closed the connection") from error


async def connect(host: str, port: int, *, token: bytes) -> Connection:
    """The agent's side: open, prove the token, have it proved."""
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), _HANDSHAKE_TIMEOUT_S)
    except (OSError, TimeoutError) as error:
        raise WireBroken(f"{host}:{port}: {error}") from error
    return await _handshake(reader, writer, token=token, own_role=b"agent", other_role=b"controller")


async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, token: bytes) -> Connection:
    """The controller's side of the same."""
    return await _handshake(reader, writer, token=token, own_role=b"controller", other_role=b"agent")


async def _handshake(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, token: bytes, own_role: bytes, other_role: bytes
) -> Connection:
    own_nonce = secrets.token_bytes(_NONCE_BYTES)
    writer.write(own_nonce)
    try:
        async with asyncio.timeout(_HANDSHAKE_TIMEOUT_S):
            other_nonce = await reader.readexactly(_NONCE_BYTES)
            writer.write(proof_of(token, own_role, other_nonce))
            proof = await reader.readexactly(hashlib.sha256().digest_size)
    except (asyncio.IncompleteReadError, TimeoutError, OSError) as error:
        writer.close()
        raise WireBroken("the handshake was not finished") from error
    except asyncio.CancelledError:
        writer.close()
        raise
    if not hmac.compare_digest(proof, proof_of(token, other_role, own_nonce)):
        writer.close()
        raise WireBroken("the other side does not know this run's token")
    return Connection(reader, writer)


def proof_of(token: bytes, role: bytes, nonce: bytes) -> bytes:
    """The answer to a nonce by who knows the token."""
    return hmac.digest(token, role + b":" + nonce, "sha256")


def _decoded(decoder: msgspec.msgpack.Decoder[_T], body: bytes) -> _T:
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise WireBroken(f"a message that cannot be read: {error}") from error
