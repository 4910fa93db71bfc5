from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from dougong.event.kinds import WorkerLost
from dougong.run import webhook
from dougong.run.webhook import send_webhook

EVENT = WorkerLost(
    generation=2, rank=1, component="hall/rack-01/node-02", cause_class="hang", detail="no progress", last_step=41
)


class Server(HTTPServer):
    """Answers each POST with `status`, and keeps what was posted."""

    status = 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.posted: list[tuple[str | None, dict[str, Any]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/hook"


class Answer(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Server)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posted.append((self.headers["Content-Type"], json.loads(body)))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def send(url: str) -> tuple[int, str]:
    return send_webhook(url, run_id="ab12", event=EVENT)


def test_the_interruption_is_posted_as_json_for_people_and_programs(server: Server) -> None:
    assert send(server.url) == (200, "sent")
    ((content_type, body),) = server.posted
    assert content_type == "application/json"
    assert body["text"] == "Dougong run ab12 interrupted: rank 1 on hall/rack-01/node-02: no progress"
    assert (body["run"], body["rank"], body["cause_class"], body["last_step"]) == ("ab12", 1, "hang", 41)


@pytest.mark.parametrize("status", [404, 500])
def test_a_refusal_is_told_with_its_status(status: int, server: Server) -> None:
    server.status = status
    assert send(server.url)[0] == status


def test_nobody_there_is_status_0_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        status, detail = send(f"http://127.0.0.1:{probe.getsockname()[1]}/")
    assert status == 0 and detail.startswith("not reached: ")


@pytest.mark.parametrize("reply", [b"", b"garbage\r\n\r\n", b"HTTP/9.9 nonsense\r\n\r\n"])
def test_a_server_that_does_not_speak_http_hurts_nobody(reply: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        status, detail = send(f"http://127.0.0.1:{listener.getsockname()[1]}/")
        thread.join()
    assert status == 0 and detail.startswith("not reached")


def test_a_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(webhook, "_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert send(f"http://127.0.0.1:{listener.getsockname()[1]}/")[0] == 0


@pytest.mark.parametrize(
    "url", ["", "hooks", "file:///etc/hostname", "data:,x", "ftp://127.0.0.1/", "http://", "http://[::1"]
)
def test_an_address_that_is_none_is_told_and_hurts_nobody(url: str) -> None:
    status, detail = send(url)
    assert status == 0 and detail.startswith("not reached")
