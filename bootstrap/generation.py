"""The sockets of one life of the bootstrap thread: one ROUTER that hears every peer, and who may connect to it (ZAP).

Owns: the ZeroMQ context, authentication, decoding of what arrives. Must not: outlive its thread, or hold anything that a
restart would lose (see ``thread``). All of it runs in the bootstrap thread.

A frame that does not decode is counted and dropped, and never raises past itself. Everything that a round does is bounded
in number and in bytes, so that a flood from one peer keeps neither the others nor this node's own frames waiting.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from typing import TYPE_CHECKING, Final

import zmq
from zmq.utils import z85

from pdxfer.core import messages
from pdxfer.core.events import Event, PeerSaid
from pdxfer.core.messages import Envelope, Hello
from pdxfer.core.reasons import Refused

from .flow import Flow, Load
from .links import Links, Monitor, tune

if TYPE_CHECKING:
    from .thread import Bootstrap

POLL_MS: Final = 100
FRAMES_AT_ONCE: Final = 256  # of the ROUTER in one round
BYTES_AT_ONCE: Final = 16 << 20
ASKED_AT_ONCE: Final = 256  # connections that ask to be let in, in one round
SWEEP: Final = 0.5  # seconds between looks at what nothing else would wake
BIND_PATIENCE: Final = 2.0  # seconds for the last life's port to come free
MOST_REFUSED: Final = 1000  # sources of refused frames that are told apart, between two reports to the main loop
HANG: Final = 60.0  # seconds, of the debug hook
ZAP: Final = "inproc://zeromq.zap.01"
DOMAIN: Final = "pdxfer"
_UNPROVEN: Final = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_ACCEPT_FAILED


class ServiceStopped(BaseException):
    """Raised inside a thread that hangs, to end it."""


class Tally:
    """Refused frames of one source, for one reason, that the main loop has not heard of yet."""

    __slots__ = ("count", "detail")

    def __init__(self, detail: str) -> None:
        self.count = 0
        self.detail = detail  # of the first


class Generation:
    def __init__(self, owner: Bootstrap, flow: Flow) -> None:
        self._owner = owner
        self._flow = flow
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._poller = zmq.Poller()
        self._refusals: dict[tuple[str, str], Tally] = {}
        self._swept = 0.0
        self._shown_out = 0  # connections whose key was refused and whose end is still to come

    def bind(self) -> None:
        """Make the sockets. Raises zmq.ZMQError when the address cannot be had."""
        owner = self._owner
        self._context.set(zmq.MAX_SOCKETS, 65_000)
        self._zap = self._context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind(ZAP)
        router = self._router = self._context.socket(zmq.ROUTER)
        tune(router, owner.settings.handshake_seconds)
        router.curve_server = True
        router.curve_secretkey = owner.keys.secret.encode()
        router.setsockopt_string(zmq.ZAP_DOMAIN, DOMAIN)
        # What is a little too long is refused by name, what is far too long by a closed connection.
        router.setsockopt(zmq.MAXMSGSIZE, 2 * messages.MAX_FRAME)
        router.setsockopt(zmq.RCVHWM, FRAMES_AT_ONCE)  # of each peer
        router.setsockopt(zmq.BACKLOG, 1024)
        if "[" in owner.endpoint:
            router.setsockopt(zmq.IPV6, 1)
        self._monitor = Monitor(self._context, router, _UNPROVEN)
        deadline = time.monotonic() + BIND_PATIENCE
        while True:
            try:
                router.bind(owner.endpoint)
                break
            except zmq.ZMQError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
        owner.endpoint = router.get_string(zmq.LAST_ENDPOINT)
        for socket in (self._zap, router, self._monitor.socket):
            self._poller.register(socket, zmq.POLLIN)
        self._poller.register(owner.wake_fd, zmq.POLLIN)
        self._links = Links(owner, self._context, self._poller, self.refuse)
        owner.outboxes.touch(owner.outboxes.waiting())

    def close(self, linger: float) -> None:
        """Once it has begun it comes to its end: a socket that stayed open would keep the port."""
        try:
            self._context.destroy(linger=int(linger * 1000))
        except ServiceStopped:
            self._context.destroy(linger=0)
            raise

    def round(self) -> None:
        owner = self._owner
        ready = dict(self._poller.poll(POLL_MS))
        if owner.wake_fd in ready:
            try:
                os.eventfd_read(owner.wake_fd)
            except BlockingIOError:
                owner.note(logging.DEBUG, "woken for nothing")
        self._faults()
        if self._zap in ready:
            self._authenticate()
        batch: list[Event] = []
        loads = self._hear(batch) if self._router in ready else {}
        if self._monitor.socket in ready:
            self._unproven()
        self._links.watch(ready, batch)
        if batch:
            owner.hand_over(self._flow, batch, loads)
        now = time.monotonic()
        if now - self._swept >= SWEEP:
            self._swept = now
            self._links.sweep(now)
        self._links.flush(now)
        if self._refusals and not self._flow.reporting:
            refusals, self._refusals = self._refusals, {}
            owner.report(self._flow, refusals)

    def _faults(self) -> None:
        """The debug hook."""
        fault, self._owner.fault = self._owner.fault, ""
        if fault == "exception":
            raise RuntimeError("injected by the debug hook")
        if fault == "hang":
            time.sleep(HANG)
        while fault == "loop":
            fault = fault[:]

    # who -----------------------------------------------------------------------------------------------------------

    def _authenticate(self) -> None:
        """ZAP (ZeroMQ RFC 27): one question for each new connection, answered from the directory."""
        directory = self._owner.directory
        for _ in range(ASKED_AT_ONCE):
            try:
                frames = self._zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            version, request = [*frames, b"", b""][:2]
            key = ""
            if len(frames) >= 7 and frames[5] == b"CURVE" and len(frames[6]) == 32:
                key = z85.encode(frames[6]).decode()
            if key and directory.authorised(key):
                self._zap.send_multipart([version, request, b"200", b"OK", key.encode(), b""])
                continue
            self._zap.send_multipart([version, request, b"400", b"this key is not authorised here", b"", b""])
            self._shown_out += 1
            where = frames[3].decode(errors="replace") if len(frames) > 3 else "?"
            if directory.own(key):
                why = "it uses this node's own key; give every node its own (pdxfer keygen)"
            else:
                why = f"its public key {key or 'is missing'} is in neither registry.nodes nor bootstrap.authorized_keys"
            self.refuse(where, "stranger", why)

    def _unproven(self) -> None:
        """Connections that ended before they had proven a key, and those that could not be accepted."""
        for event in self._monitor.events():
            if event == zmq.EVENT_ACCEPT_FAILED:
                self.refuse(
                    "bootstrap.listen", "overloaded", "a connection could not be accepted: out of file descriptors?"
                )
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self.refuse(
                    "bootstrap.listen", "stranger", "a connection that does not speak as a sidecar, or to another key"
                )
            elif self._shown_out:
                self._shown_out -= 1  # counted where its key was seen
            else:
                self.refuse("bootstrap.listen", "stranger", "a connection that ended before it had proven a key")

    # in ------------------------------------------------------------------------------------------------------------

    def _hear(self, batch: list[Event]) -> dict[str, Load]:
        """Take what has arrived. Returns what of it goes to the main loop, for each peer's key."""
        flow = self._flow
        loads: dict[str, Load] = {}
        seen = 0
        for _ in range(FRAMES_AT_ONCE):
            if seen >= BYTES_AT_ONCE:
                break
            try:
                parts = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            length = sum(len(part) for part in parts[1:])
            seen += length
            key = _user_id(parts[-1])
            try:
                if len(parts) != 2:
                    raise Refused("bad_frame", f"{len(parts) - 1} parts, expected 1")
                if full := flow.full(key, length, self._owner.settings.inbox):
                    raise Refused("overloaded", full)
                envelope = self._understand(parts[1].bytes, key)
            except Refused as refused:
                self.refuse(self._owner.directory.name_of(key), refused.code, refused.detail)
                continue
            batch.append(PeerSaid(envelope.source, envelope.incarnation, envelope.to_incarnation, envelope.body))
            load = Load(len(envelope.body), length)
            flow.hand(key, load)
            loads[key] = loads.get(key, Load()).plus(load)
        return loads

    def _understand(self, frame: bytes, key: str) -> Envelope:
        """Decode a frame of the peer that has proven this key, and check that it may say so. Raises Refused."""
        owner = self._owner
        envelope = messages.decode(frame)
        if not messages.good_name(envelope.source) or not 0 < envelope.incarnation < 2**63:
            raise Refused("bad_frame", f"source {envelope.source[:40]!r}, incarnation {envelope.incarnation}")
        if envelope.target != owner.node:
            raise Refused("wrong_source", f"a frame for node {envelope.target[:40]!r}, this is {owner.node!r}")
        if not owner.directory.identify(key, envelope.source):
            belongs = owner.directory.name_of(key)
            whose = f"belongs to node {belongs!r}" if belongs != key else "may not take that name"
            raise Refused("wrong_source", f"a frame of node {envelope.source[:40]!r}, but its key {key} {whose}")
        for message in envelope.body:
            if isinstance(message, Hello) and not owner.directory.learn(envelope.source, message.address):
                raise Refused("bad_frame", f"Hello: no peer can connect to address {message.address[:100]!r}")
        return envelope

    def refuse(self, who: str, code: str, detail: str) -> None:
        """Count it; the main loop hears of it at the end of the round."""
        who = who[:128]
        if (who, code) not in self._refusals and len(self._refusals) >= MOST_REFUSED:
            who = "others"
        self._refusals.setdefault((who, code), Tally(detail)).count += 1


def _user_id(part: zmq.Frame) -> str:
    """The key that the connection has proven, as ZAP has named it."""
    try:
        return str(part.get("User-Id"))
    except (zmq.ZMQError, KeyError):
        return ""
