"""Bootstrap threads with real sockets in this process, for tests: a main loop of their own, and what it was told.

Owns: starting nodes, waiting for what they hear, and raw sockets that misbehave. Ends everything that it started.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import zmq

from pdxfer.bootstrap import keys
from pdxfer.bootstrap.directory import Directory
from pdxfer.bootstrap.settings import BootstrapSettings, NodeEntry
from pdxfer.bootstrap.thread import Bootstrap, Unstoppable
from pdxfer.core import messages
from pdxfer.core.events import Event, PeerCut, PeerSaid
from pdxfer.core.messages import Envelope, Heartbeat, Hello


def wait(reached: Callable[[], Any], timeout: float, what: str) -> Any:
    """Poll until it is true, and return that."""
    end = time.monotonic() + timeout
    while True:
        found = reached()
        if found:
            return found
        assert time.monotonic() < end, f"not within {timeout} s: {what}"
        time.sleep(0.005)


class MainLoop:
    """An asyncio loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def hold(self) -> threading.Event:
        """Block it until the event is set."""
        event = threading.Event()
        self.loop.call_soon_threadsafe(event.wait, 30.0)
        return event

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5.0)
        self.loop.close()


class Peer:
    """One node's bootstrap, and what its main loop was told."""

    def __init__(self, main: MainLoop, name: str, pair: keys.KeyPair | None = None, **settings: Any) -> None:
        self.name = name
        self.pair = pair or keys.generate()
        self.directory = Directory(name, self.pair.public)
        self.events: list[Event] = []
        self.refusals: list[tuple[str, str, str]] = []
        self.refused: Counter[str] = Counter()
        self.deaths: list[str] = []
        settings = {"listen": "tcp://127.0.0.1:*"} | settings
        self.thread = Bootstrap(
            name, BootstrapSettings(**settings), self.pair, self.directory, main.loop,
            self.events.extend, self._refuse, self.deaths.append, debug_hooks=True,
        )  # fmt: skip

    def _refuse(self, origin: str, who: str, code: str, detail: str, count: int) -> None:
        assert origin == "peer"
        self.refusals.append((who, code, detail))
        self.refused[code] += count

    @property
    def entry(self) -> NodeEntry:
        return NodeEntry(self.name, self.thread.address, self.pair.public)

    @property
    def port(self) -> int:
        return int(self.thread.endpoint.rpartition(":")[2])

    def knows(self, *others: Peer) -> None:
        self.directory.configure([other.entry for other in others], ())

    def send(self, target: Peer | str, revision: int) -> None:
        name = target if isinstance(target, str) else target.name
        self.thread.send(Envelope(messages.PROTOCOL, self.name, 1, name, 0, (Heartbeat(revision, 0),)))

    def heard(self, source: Peer) -> list[int]:
        """The revisions that have come from a node."""
        said = [e for e in list(self.events) if isinstance(e, PeerSaid) and e.node == source.name]
        return [m.revision for e in said for m in e.body if isinstance(m, Heartbeat)]

    def cuts(self, node: str) -> int:
        return sum(isinstance(e, PeerCut) and e.node == node for e in list(self.events))

    def talks_to(self, other: Peer, revision: int, timeout: float = 5.0) -> float:
        """Say it again and again until it is heard, as the core does. Returns the seconds that it took."""
        began = time.monotonic()
        while revision not in other.heard(self):
            assert time.monotonic() - began < timeout, f"{self.name} does not reach {other.name}: {other.refusals[-3:]}"
            self.send(other, revision)
            time.sleep(0.02)
        return time.monotonic() - began

    def end(self) -> None:
        try:
            self.thread.stop()
        except Unstoppable:
            return  # the test that hung it in native code knows
        self.thread.close()


class Nodes:
    """Nodes that are ended with the test."""

    def __init__(self) -> None:
        self.main = MainLoop()
        self.peers: list[Peer] = []
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def __call__(self, name: str, *, start: bool = True, **settings: Any) -> Peer:
        peer = Peer(self.main, name, **settings)
        self.peers.append(peer)
        if start:
            peer.thread.start()
        return peer

    def pair(self) -> tuple[Peer, Peer]:
        """Two that know each other and have talked."""
        a, b = self("a"), self("b")
        acquaint(a, b)
        a.talks_to(b, 1)
        b.talks_to(a, 1)
        return a, b

    def raw(self, to: Peer, pair: keys.KeyPair, kind: int = zmq.DEALER) -> zmq.Socket[bytes]:
        """A socket that says to a node whatever a test makes it say."""
        socket = self.context.socket(kind)
        socket.linger = 0
        socket.curve_serverkey = to.pair.public.encode()
        socket.curve_publickey = pair.public.encode()
        socket.curve_secretkey = pair.secret.encode()
        socket.connect(to.thread.endpoint)
        return socket

    def close(self) -> None:
        for peer in self.peers:
            peer.end()
        self.context.destroy(linger=0)
        self.main.close()


def acquaint(*peers: Peer) -> None:
    for peer in peers:
        peer.knows(*(other for other in peers if other is not peer))


def frame(source: str, target: str, *body: messages.Message, incarnation: int = 1) -> bytes:
    return messages.encode(Envelope(messages.PROTOCOL, source, incarnation, target, 0, body or (Heartbeat(7, 0),)))


def hello(address: str) -> Hello:
    return Hello(1, 1, address, "0", None)
