"""The connections to peers: one DEALER to each, which only sends.

Owns: connecting, reconnecting, sending what waits, noticing that a connection is cut. Must not: outlive its thread, or
wait for anything: a peer that is dead, slow or does not resolve has its own socket and its own outbox.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from pdxfer.core.events import Event, PeerCut

from .directory import Place

if TYPE_CHECKING:
    from .thread import Bootstrap

SEND_HWM: Final = 128  # frames in a socket; the rest waits in the outbox, where it goes stale
PING_MS: Final = 2_000
SILENT_MS: Final = 10_000  # a connection without an answer to its pings is cut, so that a healed link is used at once
CONNECT_MS: Final = 2_000  # then a new SYN is sent, without TCP's growing pauses
DOWN_PAUSE: Final = 1.0  # seconds before a refused link, or one at another address of the peer's, is tried anew
EVENTS_AT_ONCE: Final = 1000
_WATCHED: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH

_numbers = itertools.count(1)


def tune(socket: zmq.Socket[bytes], handshake_seconds: float) -> None:
    """What holds for both directions."""
    socket.linger = 0
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(handshake_seconds * 1000))
    socket.setsockopt(zmq.HEARTBEAT_IVL, PING_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)


class Monitor:
    """What happens to a socket's connections."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], watched: zmq.Socket[bytes], events: int) -> None:
        self._watched = watched
        name = f"inproc://pdxfer.monitor.{next(_numbers)}"
        watched.monitor(name, events)
        self.socket = context.socket(zmq.PAIR)
        self.socket.linger = 0
        self.socket.setsockopt(zmq.RCVHWM, 0)  # a full one would block the thread that moves everybody's bytes
        self.socket.connect(name)

    def events(self) -> Iterator[int]:
        for _ in range(EVENTS_AT_ONCE):
            try:
                yield int(parse_monitor_message(self.socket.recv_multipart(zmq.NOBLOCK))["event"])
            except zmq.Again:
                return

    def close(self) -> None:
        self._watched.disable_monitor()
        self.socket.close(0)


class _Link:
    """One DEALER to one peer."""

    def __init__(
        self, place: Place, endpoint: str, turn: int, socket: zmq.Socket[bytes], monitor: Monitor, now: float
    ) -> None:
        self.place = place
        self.endpoint = endpoint  # the place's address in numbers
        self.turn = turn  # which of the peer's addresses that is
        self.socket = socket
        self.monitor = monitor
        self.since = now  # it has been up, or down, or refused
        self.up = False
        self.refused = False  # the peer does not authorise this node's key; ZeroMQ does not try again by itself
        self.waiting = False  # for the socket to take more


class Links:
    def __init__(
        self,
        owner: Bootstrap,
        context: zmq.Context[zmq.Socket[bytes]],
        poller: zmq.Poller,
        refuse: Callable[[str, str, str], None],
    ) -> None:
        self._owner = owner
        self._context = context
        self._poller = poller
        self._refuse = refuse
        self._links: dict[str, _Link] = {}
        self._by_socket: dict[object, str] = {}  # DEALERs that wait, and monitors
        self._failed: dict[str, float] = {}  # nodes for which there was no socket to be had

    # noticing ------------------------------------------------------------------------------------------------------

    def watch(self, ready: Mapping[Any, int], batch: list[Event]) -> None:
        """What the poller found: sockets that take more, and what happened to connections."""
        for socket in ready:
            node = self._by_socket.get(socket)
            if node is None:
                continue
            link = self._links[node]
            if socket is link.socket:
                self._await(node, link, False)
                self._owner.outboxes.touch((node,))
                continue
            for event in link.monitor.events():
                self._happened(node, link, event, batch)

    def _happened(self, node: str, link: _Link, event: int, batch: list[Event]) -> None:
        now = time.monotonic()
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            link.up, link.refused, link.since = True, False, now
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            link.up, link.refused, link.since = False, True, now
            detail = f"node {node!r} refuses this node's key: add {self._owner.keys.public} to its configuration"
            self._refuse(node, "stranger", detail)
        elif link.up:
            link.up, link.since = False, now
            batch.append(PeerCut(node))

    # sending -------------------------------------------------------------------------------------------------------

    def flush(self, now: float) -> None:
        """Send what is new for peers, as far as their sockets take it."""
        owner = self._owner
        for node in owner.outboxes.fresh():
            self._send(node, now)
        for _ in range(len(owner.closing)):
            node = owner.closing.popleft()
            owner.outboxes.clear(node)
            self._disconnect(node)

    def sweep(self, now: float) -> None:
        """What no event would lead to: stale frames, refused links, addresses that do not work."""
        owner = self._owner
        owner.outboxes.expire(now)
        for node in owner.outboxes.waiting():
            link = self._links.get(node)
            if link is not None and not link.up and now - link.since >= DOWN_PAUSE:
                self._try_another(node, link, now)
        owner.outboxes.touch(owner.outboxes.waiting())

    def _try_another(self, node: str, link: _Link, now: float) -> None:
        endpoints = self._owner.resolver.endpoints(link.place.address, now, again=True)
        if link.refused or (endpoints and endpoints[(link.turn + 1) % len(endpoints)] != link.endpoint):
            self._disconnect(node)
            self._connect(node, link.place, link.turn + 1, now)

    def _send(self, node: str, now: float) -> None:
        owner = self._owner
        place = owner.directory.place(node)
        if place is None:
            owner.outboxes.clear(node)
            return
        link = self._links.get(node)
        if link is not None and link.place != place:
            self._disconnect(node)
            link = None
        if link is None:
            link = self._connect(node, place, 0, now)
        while link is not None and not link.waiting:
            taken = owner.outboxes.take(node, now)
            if taken is None:
                return
            try:
                link.socket.send(taken[1], zmq.NOBLOCK)
            except zmq.Again:
                owner.outboxes.put_back(node, taken)
                self._await(node, link, True)

    def _await(self, node: str, link: _Link, waiting: bool) -> None:
        if waiting and not link.waiting:
            self._poller.register(link.socket, zmq.POLLOUT)
            self._by_socket[link.socket] = node
        elif link.waiting and not waiting:
            self._poller.unregister(link.socket)
            del self._by_socket[link.socket]
        link.waiting = waiting

    # connecting ----------------------------------------------------------------------------------------------------

    def _connect(self, node: str, place: Place, turn: int, now: float) -> _Link | None:
        """A new link, or None: then its frames wait for the name to be resolved, or for the next try."""
        owner = self._owner
        endpoints = owner.resolver.endpoints(place.address, now)
        if not endpoints or now - self._failed.get(node, now - DOWN_PAUSE) < DOWN_PAUSE:
            return None
        endpoint = endpoints[turn % len(endpoints)]
        socket = monitor = None
        try:
            socket = self._context.socket(zmq.DEALER)
            tune(socket, owner.settings.handshake_seconds)
            socket.setsockopt(zmq.IMMEDIATE, 1)  # no frames for a peer that is not there
            socket.setsockopt(zmq.SNDHWM, SEND_HWM)
            socket.setsockopt(zmq.RCVHWM, 1)
            socket.setsockopt(zmq.MAXMSGSIZE, 1024)  # nothing is said this way
            socket.setsockopt(zmq.RECONNECT_IVL, 50)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
            socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
            if "[" in endpoint:
                socket.setsockopt(zmq.IPV6, 1)
            socket.curve_serverkey = place.public_key.encode()
            socket.curve_publickey = owner.keys.public.encode()
            socket.curve_secretkey = owner.keys.secret.encode()
            monitor = Monitor(self._context, socket, _WATCHED)
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            owner.note(
                logging.WARNING, "node %s: cannot connect to %s: %s; it is tried again", node, place.address, error
            )
            self._failed[node] = now
            if monitor is not None:
                monitor.close()
            if socket is not None:
                socket.close(0)
            return None
        self._failed.pop(node, None)
        link = self._links[node] = _Link(place, endpoint, turn, socket, monitor, now)
        self._by_socket[monitor.socket] = node
        self._poller.register(monitor.socket, zmq.POLLIN)
        return link

    def _disconnect(self, node: str) -> None:
        link = self._links.pop(node, None)
        if link is None:
            return
        self._await(node, link, False)
        self._poller.unregister(link.monitor.socket)
        del self._by_socket[link.monitor.socket]
        link.monitor.close()
        link.socket.close(0)
