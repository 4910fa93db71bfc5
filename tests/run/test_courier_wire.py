from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from dougong.errors import CheckpointDamaged
from dougong.run import courier_wire
from dougong.run.copy_store import NO_ANCHOR, CopyStore, Found
from dougong.run.courier_wire import CourierConnection, Get, Pace
from dougong.run.layout import NodeDirectory
from dougong.run.wire import WireBroken
from tests.run.made_copies import TOKEN, flip_a_bit, save
from tests.run.made_messages import values


def between(serve: Callable[[socket.socket], Any], ask: Callable[[int], Any]) -> tuple[Any, Any]:
    """What `ask` returned or raised on a port that `serve` answers once, and what `serve` returned or raised."""
    server = socket.create_server(("127.0.0.1", 0))
    answered: list[Any] = []

    def answer() -> None:
        sock, _ = server.accept()
        with sock:
            answered.append(outcome(lambda: serve(sock)))

    thread = threading.Thread(target=answer)
    thread.start()
    asked = outcome(lambda: ask(server.getsockname()[1]))
    thread.join(timeout=30)
    server.close()
    return asked, answered[0]


def outcome(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception as error:
        return error


def proven(serve: Callable[[CourierConnection], Any], ask: Callable[[CourierConnection], Any]) -> tuple[Any, Any]:
    def on_server(sock: socket.socket) -> Any:
        with courier_wire.answer(sock, token=TOKEN) as connection:
            return serve(connection)

    def on_client(port: int) -> Any:
        with courier_wire.call("127.0.0.1", port, token=TOKEN) as connection:
            return ask(connection)

    return between(on_server, on_client)


@pytest.mark.parametrize("wrong", [b"u" * 32, b"", b"t" * 31])
def test_a_wrong_token_is_refused_by_both_sides(wrong: bytes) -> None:
    asked, answered = between(
        lambda sock: courier_wire.answer(sock, token=TOKEN),
        lambda port: courier_wire.call("127.0.0.1", port, token=wrong),
    )
    assert isinstance(answered, WireBroken) and "does not know this run's token" in str(answered)
    assert isinstance(asked, WireBroken)


def test_the_token_itself_does_not_travel() -> None:
    heard: list[bytes] = []

    def listen(sock: socket.socket) -> None:
        sock.sendall(b"n" * 32)
        heard.append(sock.recv(4096))
        heard.append(sock.recv(4096))

    between(listen, lambda port: courier_wire.call("127.0.0.1", port, token=TOKEN))
    assert TOKEN not in b"".join(heard)


def test_nobody_there_is_an_error_of_the_wire() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(WireBroken, match=str(port)):
        courier_wire.call("127.0.0.1", port, token=TOKEN)


@given(values(courier_wire.AnyFrame))
@settings(max_examples=80)
def test_every_frame_arrives_as_it_was(frame: Any) -> None:
    left, right = socket.socketpair()
    with CourierConnection(left) as one, CourierConnection(right) as other:
        one.say(frame)
        assert other.hear() == frame


@pytest.mark.parametrize("raw", [b"\xff\xff\xff\xff", b"\0\0\0\x05hello", b"\0\0\0\x10short", b""])
def test_a_frame_that_is_too_long_garbage_or_cut_breaks_the_connection(raw: bytes) -> None:
    left, right = socket.socketpair()
    left.sendall(raw)
    left.close()
    with CourierConnection(right) as connection, pytest.raises(WireBroken):
        connection.hear()


def give_and_take(root: Path, found: Found, *, num_sent: int | None = None) -> tuple[Any, Any]:
    """One side gives a state, or only its first bytes; the other takes it into a store of its own."""
    store = CopyStore(NodeDirectory(root / "other"))

    def serve(connection: CourierConnection) -> Any:
        with store.deposit("owner/node", 0, found.slot, anchor=NO_ANCHOR) as deposit:
            connection.take(deposit)

    def ask(connection: CourierConnection) -> Any:
        if num_sent is None:
            return connection.give(found, pace=Pace(0.0))
        return connection._socket.sendall(bytes(num_sent))  # pyright: ignore[reportPrivateUsage]

    asked, answered = proven(serve, ask)
    return asked, answered if isinstance(answered, Exception) else store.held()


def state(root: Path, content: bytes) -> Found:
    node = NodeDirectory(root / "node")
    save(node.snapshot(0), content, step=5)
    found = CopyStore(node).find(0, generation=1, step=5)
    assert found is not None
    return found


def test_a_state_of_several_chunks_arrives_whole(tmp_path: Path) -> None:
    content = bytes(range(256)) * 40_000
    asked, held = give_and_take(tmp_path, state(tmp_path, content))
    assert asked is True
    assert [copy.snapshot.step for copy in held] == [5]
    copied = CopyStore(NodeDirectory(tmp_path / "other")).find(0, generation=1, step=5)
    assert copied is not None and copied.is_whole()


def test_a_flipped_bit_is_seen_by_the_giver_and_refused_by_the_taker(tmp_path: Path) -> None:
    found = state(tmp_path, b"x" * 100_000)
    flip_a_bit(found.prefix, found.slot)
    asked, answered = give_and_take(tmp_path, found)
    assert asked is False
    assert isinstance(answered, CheckpointDamaged) and "damaged where it was read" in str(answered)
    assert CopyStore(NodeDirectory(tmp_path / "other")).held() == ()


def test_a_giver_that_dies_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    _, answered = give_and_take(tmp_path, state(tmp_path, b"x" * 100_000), num_sent=30_000)
    assert isinstance(answered, WireBroken)
    assert CopyStore(NodeDirectory(tmp_path / "other")).held() == ()


def test_a_refusal_carries_its_reason() -> None:
    asked, _ = proven(
        lambda connection: (connection.hear(), connection.say(courier_wire.Refused(reason="no room"))),
        lambda connection: (
            connection.say(Get(rank=0, generation=1, step=1)),
            connection.expect(courier_wire.Offer),
        ),
    )
    assert isinstance(asked, WireBroken) and str(asked) == "no room"


def test_a_pace_keeps_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(courier_wire.time, "monotonic", lambda: 0.0)
    monkeypatch.setattr(courier_wire.time, "sleep", slept.append)
    pace = Pace(100.0)
    pace.wait(50)
    pace.wait(50)
    Pace(0.0).wait(10**9)
    assert slept == [0.5, 1.0]
