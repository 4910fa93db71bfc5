"""Nodes with networks of their own reach each other until they are cut, and again when they are healed."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dougong.backend.local import networks
from dougong.backend.local.networks import CONTROLLER, EVERYTHING, NodeNetworks, check_networks
from dougong.errors import UserError

A, B = "local/rack-01/node-01", "local/rack-01/node-02"
LISTEN = """
import socket
server = socket.create_server(("", 0))
print(server.getsockname()[1], flush=True)
while True:
    server.accept()[0].close()
"""
CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=1.0)
except OSError as error:
    sys.exit(f"{type(error).__name__}")
"""


@pytest.fixture
def made() -> Iterator[NodeNetworks]:
    try:
        check_networks()
    except UserError as error:
        pytest.skip(error.what)
    found = NodeNetworks(secrets.token_hex(4), (A, B))
    found.set_up()
    yield found
    found.tear_down()


def reaches(found: NodeNetworks, component: str, address: str, port: int) -> bool:
    command = (*found.command_prefix(component), sys.executable, "-c", CONNECT, address, str(port))
    return subprocess.run(command, capture_output=True, timeout=20, check=False).returncode == 0


def test_packets_of_a_cut_link_vanish_until_it_is_healed(made: NodeNetworks) -> None:
    listener = subprocess.Popen(
        (*made.command_prefix(B), sys.executable, "-c", LISTEN), stdout=subprocess.PIPE, text=True
    )
    try:
        assert listener.stdout is not None
        port = int(listener.stdout.readline())
        address = made.address(B)
        assert reaches(made, A, address, port)
        for peer in (B, EVERYTHING):
            made.cut(A, peer)
            assert not reaches(made, A, address, port)
            made.heal(A, peer)
            assert reaches(made, A, address, port)
        made.cut(A, CONTROLLER)
        assert reaches(made, A, address, port), "only the controller is cut off"
    finally:
        listener.kill()
        listener.communicate()


def test_nothing_is_left_when_they_are_removed_and_that_may_be_done_twice(made: NodeNetworks) -> None:
    made.tear_down()
    made.tear_down()
    links = subprocess.run(("ip", "link"), capture_output=True, text=True, check=True).stdout
    assert f"dg{made._short}" not in links  # pyright: ignore[reportPrivateUsage]
    assert not list(Path("/run/netns").glob(f"dougong-{made._short}-*"))  # pyright: ignore[reportPrivateUsage]


def test_addresses_differ_between_the_nodes_of_a_run() -> None:
    found = NodeNetworks("0123abcd", tuple(f"local/node-{index}" for index in range(200)))
    addresses = {found.address(f"local/node-{index}") for index in range(200)} | {found.controller_address}
    assert len(addresses) == 201


def test_a_machine_that_cannot_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks.os, "geteuid", lambda: 1000)
    with pytest.raises(UserError, match="not root"):
        check_networks()
    monkeypatch.setattr(networks.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="'ip' is not here"):
        check_networks()
