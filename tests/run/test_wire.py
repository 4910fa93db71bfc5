from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings

from dougong.run import wire
from dougong.run.wire import AgentMessage, Connection, ControllerMessage, Launched, Welcome, WireBroken
from tests.run.made_messages import values

TOKEN = b"t" * 32
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def with_controller(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[Any]],
    ask: Callable[[int], Awaitable[Any]],
) -> tuple[Any, Any]:
    """What `ask` returned or raised on a port that `serve` answers once, and what `serve` returned or raised."""

    async def both() -> tuple[Any, Any]:
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            answered.set_result((await asyncio.gather(serve(reader, writer), return_exceptions=True))[0])
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            (asked,) = await asyncio.gather(ask(port), return_exceptions=True)
            return asked, await asyncio.wait_for(answered, 10)

    return asyncio.run(both())


async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Connection:
    return await wire.accept(reader, writer, token=TOKEN)


async def connect(port: int) -> Connection:
    return await wire.connect("127.0.0.1", port, token=TOKEN)


async def opened(port: int) -> Streams:
    return await asyncio.open_connection("127.0.0.1", port)


def test_both_sides_prove_the_token_and_speak() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Any:
        connection = await accept(reader, writer)
        heard = await connection.receive_for_controller()
        connection.send(Welcome(generation=7))
        await connection.flush()
        return heard

    async def ask(port: int) -> Any:
        connection = await connect(port)
        connection.send(Launched(generation=3))
        heard = await connection.receive_for_agent()
        connection.close()
        return heard

    assert with_controller(serve, ask) == (Welcome(generation=7), Launched(generation=3))


@pytest.mark.parametrize("wrong", [b"u" * 32, b"", b"t" * 31])
def test_a_wrong_token_is_refused_by_both_sides(wrong: bytes) -> None:
    async def ask(port: int) -> Any:
        return await wire.connect("127.0.0.1", port, token=wrong)

    asked, answered = with_controller(accept, ask)
    assert isinstance(answered, WireBroken) and "does not know this run's token" in str(answered)
    assert isinstance(asked, WireBroken)


def test_an_agent_refuses_a_controller_that_does_not_know_the_token() -> None:
    """It may have opened the port of a controller that died."""

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"n" * 32)
        await reader.readexactly(32 + 32)
        writer.write(b"p" * 32)
        await writer.drain()

    asked, _ = with_controller(impostor, connect)
    assert isinstance(asked, WireBroken) and "does not know this run's token" in str(asked)


def test_sending_back_what_the_other_side_said_proves_nothing() -> None:
    async def mirror(port: int) -> bytes:
        reader, writer = await opened(port)
        nonce = await reader.readexactly(32)
        writer.write(nonce)
        writer.write(await reader.readexactly(32))
        rest = await reader.read()
        writer.close()
        return rest

    asked, answered = with_controller(accept, mirror)
    assert asked == b""
    assert isinstance(answered, WireBroken) and "token" in str(answered)


def test_the_token_itself_does_not_travel() -> None:
    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"n" * 32)
        return await reader.readexactly(64)

    _, heard = with_controller(listen, connect)
    assert TOKEN not in heard


@pytest.mark.parametrize("half", [b"", b"n" * 5, b"n" * 32, b"n" * 60])
def test_half_a_handshake_is_given_up(half: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the other side falls silent or leaves."""
    monkeypatch.setattr(wire, "_HANDSHAKE_TIMEOUT_S", 0.05)

    async def silent(port: int) -> None:
        _, writer = await opened(port)
        writer.write(half)
        await asyncio.sleep(0.2)
        writer.close()

    async def leaving(port: int) -> None:
        _, writer = await opened(port)
        writer.write(half)
        writer.close()

    for other in (silent, leaving):
        _, answered = with_controller(accept, other)
        assert isinstance(answered, WireBroken) and "not finished" in str(answered)


def test_nobody_there_is_an_error_of_the_wire() -> None:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        with pytest.raises(WireBroken, match=r"127\.0\.0\.1"):
            asyncio.run(connect(port))


def receive_after(raw: bytes) -> Any:
    """What the controller makes of these bytes from an agent that has proved its token and then leaves."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Any:
        connection = await accept(reader, writer)
        return await connection.receive_for_controller()

    async def ask(port: int) -> None:
        reader, writer = await opened(port)
        await wire._handshake(reader, writer, token=TOKEN, own_role=b"agent", other_role=b"controller")  # pyright: ignore[reportPrivateUsage]
        writer.write(raw)
        await writer.drain()
        writer.close()

    return with_controller(serve, ask)[1]


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"\xff\xff\xff\xff", "a frame of 4294967295 bytes"),
        ((64 * 2**20 + 1).to_bytes(4, "big"), "the limit is"),
        (b"\0\0\0\x05hello", "cannot be read"),
        (b"\0\0\0\0", "cannot be read"),
        (b"\0\0\0\x01\xc0", "cannot be read"),
        (b"\0\0\0\x0f\x81\xa4type\xa8NoSuch!!", "cannot be read"),
        (b"\0\0\0\x10short", "closed the connection"),
        (b"\0\0", "closed the connection"),
        (b"", "closed the connection"),
    ],
)
def test_a_frame_that_is_too_long_garbage_or_cut_breaks_the_connection(raw: bytes, reason: str) -> None:
    answered = receive_after(raw)
    assert isinstance(answered, WireBroken) and reason in str(answered)


def test_a_message_of_the_wrong_direction_is_not_understood() -> None:
    import msgspec

    body = msgspec.msgpack.encode(Welcome(generation=1))
    assert isinstance(receive_after(len(body).to_bytes(4, "big") + body), WireBroken)


class _Pipe:
    """A writer that feeds a reader."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader

    def is_closing(self) -> bool:
        return False

    def write(self, content: bytes) -> None:
        self._reader.feed_data(content)


def through_the_wire(message: Any) -> Any:
    async def send_and_receive() -> Any:
        reader = asyncio.StreamReader()
        connection = Connection(reader, _Pipe(reader))  # type: ignore[arg-type]
        connection.send(message)
        if isinstance(message, wire.ToAgent):
            return await connection.receive_for_agent()
        return await connection.receive_for_controller()

    return asyncio.run(send_and_receive())


@given(values(AgentMessage))
@settings(max_examples=150)
def test_every_message_of_an_agent_arrives_as_it_was(message: AgentMessage) -> None:
    assert through_the_wire(message) == message


@given(values(ControllerMessage))
@settings(max_examples=150)
def test_every_message_of_a_controller_arrives_as_it_was(message: ControllerMessage) -> None:
    assert through_the_wire(message) == message


def test_a_large_message_arrives_whole() -> None:
    evidence = wire.RankEvidence(rank=0, stack="x" * 5_000_000, threads="", flight="")
    message = wire.StacksTaken(generation=1, ranks=(evidence,))
    assert through_the_wire(message) == message


def test_what_is_sent_into_a_closed_connection_is_dropped() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = await accept(reader, writer)
        connection.close()
        connection.send(Welcome(generation=1))

    async def ask(port: int) -> Any:
        connection = await connect(port)
        with pytest.raises(WireBroken, match="closed the connection"):
            await connection.receive_for_agent()
        connection.close()

    assert with_controller(serve, ask) == (None, None)
