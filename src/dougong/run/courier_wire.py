"""What couriers say to each other, over blocking sockets: after both have proved the run's token, one state at a time.

Each frame is a 4-byte big-endian length and a msgpack value; the bytes of a state follow a frame raw. The giver says in
the end whether what it gave was whole, and the taker compares the checksum itself.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import time
from typing import TypeVar

import msgspec
import xxhash

from dougong.errors import CheckpointDamaged
from dougong.run import wire
from dougong.run.copy_store import CHUNK_BYTES, Anchor, Deposit, Found
from dougong.run.snapshot import Slot

_TIMEOUT_S = 15.0
"""A state may take long; but not so long may nothing of it move."""
_MAX_FRAME_BYTES = 64 * 1024
_NONCE_BYTES = 32
_SENDER, _KEEPER = b"courier-sender", b"courier-keeper"
_T = TypeVar("_T")


class Frame(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of what couriers say."""


class Put(Frame, frozen=True, kw_only=True):
    """Keep this copy of a rank's state, but not in place of the anchor's; its bytes follow once the answer is
    `Ready`."""

    owner: str
    rank: int
    slot: Slot
    anchor: Anchor


class Get(Frame, frozen=True, kw_only=True):
    """Give this state; the answer is `Offer` and its bytes."""

    rank: int
    generation: int
    step: int


class Ready(Frame, frozen=True, kw_only=True):
    """Go on."""


class Kept(Frame, frozen=True, kw_only=True):
    """It is there, and its checksum is right."""


class Offer(Frame, frozen=True, kw_only=True):
    """The bytes of this state follow."""

    slot: Slot


class Given(Frame, frozen=True, kw_only=True):
    """All bytes were given. `is_whole`: they were still those that were announced."""

    is_whole: bool


class Refused(Frame, frozen=True, kw_only=True):
    """It cannot be done, and why."""

    reason: str


AnyFrame = Put | Get | Ready | Kept | Offer | Given | Refused


class Pace:
    """Keeps a stream of bytes below a rate; 0 = no limit."""

    def __init__(self, max_bytes_per_s: float) -> None:
        self._max_bytes_per_s = max_bytes_per_s
        self._began_s = time.monotonic()
        self._num_bytes = 0

    def wait(self, num_bytes: int) -> None:
        """After so many bytes more."""
        self._num_bytes += num_bytes
        if self._max_bytes_per_s > 0:
            due_s = self._began_s + self._num_bytes / self._max_bytes_per_s
            time.sleep(max(0.0, due_s - time.monotonic()))


class CourierConnection:
    """A proven connection between two couriers."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def __enter__(self) -> CourierConnection:
        return self

    def __exit__(self, *_error: object) -> None:
        self._socket.close()

    def say(self, frame: Frame) -> None:
        """Raises OSError."""
        body = msgspec.msgpack.encode(frame)
        self._socket.sendall(len(body).to_bytes(4, "big") + body)

    def hear(self) -> AnyFrame:
        """Raises WireBroken, OSError."""
        length = int.from_bytes(self._exactly(4), "big")
        if length > _MAX_FRAME_BYTES:
            raise wire.WireBroken(f"a frame of {length} bytes; the limit is {_MAX_FRAME_BYTES}")
        try:
            return msgspec.msgpack.decode(self._exactly(length), type=AnyFrame)
        except msgspec.MsgspecError as error:
            raise wire.WireBroken(f"a frame that cannot be read: {error}") from error

    def expect(self, kind: type[_T]) -> _T:
        """The next frame, which must be of this kind. Raises WireBroken with the other's reason if it refuses."""
        frame = self.hear()
        if isinstance(frame, kind):
            return frame
        raise _unexpected(frame)

    def is_wanted(self) -> bool:
        """The answer to `Put`: False if the other has that state already. Raises WireBroken if it refuses."""
        frame = self.hear()
        if isinstance(frame, Kept):
            return False
        if isinstance(frame, Ready):
            return True
        raise _unexpected(frame)

    def give(self, found: Found, *, pace: Pace) -> bool:
        """Send the bytes of a state and say whether they were whole. Raises OSError."""
        source, done = found.open(), 0
        digest, chunk = xxhash.xxh3_128(), memoryview(bytearray(CHUNK_BYTES))
        try:
            while done < found.slot.num_bytes:
                num_bytes = os.preadv(source, [chunk[: found.slot.num_bytes - done]], done)
                if num_bytes == 0:
                    raise OSError("the buffer became shorter")
                digest.update(chunk[:num_bytes])
                self._socket.sendall(chunk[:num_bytes])
                done += num_bytes
                pace.wait(num_bytes)
        finally:
            os.close(source)
        is_whole = digest.digest() == found.slot.digest
        self.say(Given(is_whole=is_whole))
        return is_whole

    def take(self, deposit: Deposit) -> None:
        """Fill a deposit and declare it whole. Raises WireBroken, CheckpointDamaged, OSError."""
        chunk = memoryview(bytearray(CHUNK_BYTES))
        while deposit.missing_bytes:
            wanted = min(len(chunk), deposit.missing_bytes)
            num_bytes = self._socket.recv_into(chunk, wanted, socket.MSG_WAITALL)
            if num_bytes == 0:
                raise wire.WireBroken("the other side closed the connection")
            deposit.write(chunk[:num_bytes])
        if not self.expect(Given).is_whole:
            raise CheckpointDamaged("the copy", reason="it was written over or damaged where it was read")
        deposit.finish()

    def _exactly(self, num_bytes: int) -> bytes:
        return _exactly(self._socket, num_bytes)


def call(host: str, port: int, *, token: bytes) -> CourierConnection:
    """A connection to the courier of another node. Raises WireBroken."""
    try:
        sock = socket.create_connection((host, port), timeout=_TIMEOUT_S)
    except OSError as error:
        raise wire.WireBroken(f"{host}:{port}: {error}") from error
    return _proven(sock, token=token, own_role=_SENDER, other_role=_KEEPER)


def answer(sock: socket.socket, *, token: bytes) -> CourierConnection:
    """The other side of the same. Raises WireBroken."""
    sock.settimeout(_TIMEOUT_S)
    return _proven(sock, token=token, own_role=_KEEPER, other_role=_SENDER)


def _proven(sock: socket.socket, *, token: bytes, own_role: bytes, other_role: bytes) -> CourierConnection:
    """Both nonces and both proofs, as between controller and agent."""
    own_nonce = secrets.token_bytes(_NONCE_BYTES)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(own_nonce)
        other_nonce = _exactly(sock, _NONCE_BYTES)
        sock.sendall(wire.proof_of(token, own_role, other_nonce))
        proof = _exactly(sock, hashlib.sha256().digest_size)
    except (OSError, wire.WireBroken) as error:
        sock.close()
        raise wire.WireBroken("the handshake was not finished") from error
    if not hmac.compare_digest(proof, wire.proof_of(token, other_role, own_nonce)):
        sock.close()
        raise wire.WireBroken("the other side does not know this run's token")
    return CourierConnection(sock)


def _unexpected(frame: AnyFrame) -> wire.WireBroken:
    return wire.WireBroken(frame.reason if isinstance(frame, Refused) else f"an unexpected {type(frame).__name__}")


def _exactly(sock: socket.socket, num_bytes: int) -> bytes:
    content = bytearray()
    while len(content) < num_bytes:
        chunk = sock.recv(num_bytes - len(content))
        if not chunk:
            raise wire.WireBroken("the other side closed the connection")
        content += chunk
    return bytes(content)
