"""Restarts of the bootstrap thread that something gets in the way of: traffic, a thief of the port, the end of the node."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from bootstraps import Nodes

from pdxfer.bootstrap import generation


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    found = Nodes()
    yield found
    found.close()


def test_restarts_under_traffic_lose_no_message_that_is_repeated(nodes: Nodes) -> None:
    a, b = nodes.pair()
    stop = threading.Event()

    def disturb() -> None:
        while not stop.wait(0.15):
            a.thread.restart()

    disturber = threading.Thread(target=disturb)
    disturber.start()
    try:
        for revision in range(10, 60):
            a.talks_to(b, revision)
            b.talks_to(a, revision)
    finally:
        stop.set()
        disturber.join()
    assert a.deaths == []


def test_the_port_is_taken_during_a_restart(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "BIND_PATIENCE", 0.2)
    a, b = nodes.pair()
    a.thread.kill()
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        thief.bind(("127.0.0.1", a.port))
        thief.listen()
        with pytest.raises(OSError, match="Address already in use"):
            a.thread.restart()
    a.thread.restart()
    b.talks_to(a, 2)


def test_an_address_that_is_not_this_machines(nodes: Nodes) -> None:
    a = nodes("a", start=False, listen="tcp://192.0.2.1:7971")
    with pytest.raises(OSError, match=r"port 7971 of 192\.0\.2\.1: Cannot assign requested address"):
        a.thread.start()


def test_sending_after_the_end_is_no_error(nodes: Nodes) -> None:
    a, b = nodes.pair()
    a.thread.stop()
    a.send(b, 2)
    a.thread.close()
    a.send(b, 3)
    a.thread.forget("b")
    a.thread.close()
