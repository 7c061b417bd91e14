"""Real bootstrap threads in one process, for live tests: nodes with keys of their own on a loop that runs beside the test.

Owns: starting them, introducing them to each other, and raw sockets for what a defective or hostile peer sends.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import zmq
from sidecars import until

from pdxfer.bootstrap import keys
from pdxfer.bootstrap.directory import Directory
from pdxfer.bootstrap.settings import BootstrapSettings, NodeEntry
from pdxfer.bootstrap.thread import Bootstrap
from pdxfer.core import messages
from pdxfer.core.events import Event, PeerCut, PeerSaid


class Loop:
    """The main loop of all nodes of a test, in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="main-loop", daemon=True)
        self._thread.start()

    def ask(self, function: Callable[[], Any], timeout: float = 10.0) -> Any:
        """Run it in the loop's thread and return what it returns."""

        async def call() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(timeout)

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """The loop does nothing meanwhile."""
        entered, leave = threading.Event(), threading.Event()
        self.loop.call_soon_threadsafe(lambda: (entered.set(), leave.wait(30)))
        assert entered.wait(10)
        try:
            yield
        finally:
            leave.set()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


class Node:
    """One bootstrap thread and what it reported."""

    def __init__(self, loop: Loop, name: str, **settings: Any) -> None:
        self.name = name
        self.incarnation = 1000 + ord(name[0])
        self.keys = keys.generate()
        self.directory = Directory(name, self.keys.public)
        self.said: list[PeerSaid] = []
        self.cuts: list[str] = []
        self.refusals: Counter[str] = Counter()  # by code
        self.details: list[tuple[str, str, str]] = []  # (who, code, detail)
        self.deaths: list[str] = []
        settings.setdefault("listen", "tcp://127.0.0.1:*")
        self.bootstrap = Bootstrap(
            name, BootstrapSettings(**settings), self.keys, self.directory, loop.loop, self._deliver, self._refused,
            self.deaths.append, debug_hooks=True,
        )  # fmt: skip

    def _deliver(self, batch: list[Event]) -> None:
        for event in batch:
            if isinstance(event, PeerSaid):
                self.said.append(event)
            elif isinstance(event, PeerCut):
                self.cuts.append(event.node)

    def _refused(self, origin: str, who: str, code: str, detail: str, count: int = 1) -> None:
        assert origin == "peer"
        self.refusals[code] += count
        self.details.append((who, code, detail))

    @property
    def entry(self) -> NodeEntry:
        return NodeEntry(self.name, self.bootstrap.address, self.keys.public)

    def envelope(self, target: str, *rooms: str, source: str = "", version: int = messages.PROTOCOL) -> messages.Envelope:
        body = tuple(messages.Accept(room, 0) for room in rooms)
        return messages.Envelope(version, source or self.name, self.incarnation, target, 0, body)

    def tell(self, target: str, *rooms: str) -> None:
        self.bootstrap.send(self.envelope(target, *rooms))

    def heard(self, source: str | None = None) -> list[str]:
        """Every room named to this node, in order."""
        found = [event for event in self.said if source in (None, event.node)]
        return [message.room for event in found for message in event.body if isinstance(message, messages.Accept)]


def meet(*nodes: Node) -> None:
    """Each is configured with all others."""
    for node in nodes:
        node.directory.configure([other.entry for other in nodes if other is not node], [])


def talk(a: Node, b: Node, word: str, timeout: float = 5.0) -> None:
    """What a says reaches b within that time; it is said again like all that the core says."""

    def arrived() -> bool:
        if word in b.heard(a.name):
            return True
        a.tell(b.name, word)
        return False

    until(arrived, timeout, f"{a.name} says {word!r} to {b.name}")


class Raw:
    """A DEALER with any key that sends any bytes to a node."""

    def __init__(self, node: Node, pair: keys.KeyPair) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.curve_serverkey = node.keys.public.encode()
        self.socket.curve_publickey = pair.public.encode()
        self.socket.curve_secretkey = pair.secret.encode()
        self.socket.setsockopt(zmq.SNDTIMEO, 5000)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.connect(node.bootstrap.address)

    def send(self, *parts: bytes) -> None:
        self.socket.send_multipart(parts)

    def close(self) -> None:
        self._context.destroy(linger=0)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))
