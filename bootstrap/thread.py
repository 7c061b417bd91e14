"""The bootstrap thread: one ROUTER that hears every peer, one DEALER to each, CURVE on all of them.

Owns: the sockets, their authentication and the frames' decoding. Must not: hold anything that a restart would lose. What
waits to be sent, who is authorised and where the peers are lives in the objects around it, so the thread can be replaced
between any two frames (``restart``); a frame that is lost is said again by its sender.

A frame that does not decode is counted and dropped, and never raises past itself. A dead or slow peer has a queue of its
own, which drops its oldest frames; nobody else waits for it.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from pdxfer.core import messages
from pdxfer.core.events import Event, PeerCut, PeerSaid
from pdxfer.core.messages import Envelope, Hello
from pdxfer.core.reasons import Refused

from .directory import Directory, Place
from .keys import KeyPair
from .settings import BootstrapSettings

log = logging.getLogger(__name__)

POLL_MS: Final = 100
FRAMES_AT_ONCE: Final = 256  # of the ROUTER in one round, so that a flood does not keep the rest waiting
BIND_PATIENCE: Final = 2.0  # seconds for the last generation's port to come free
MAX_DOMAIN: Final = "pdxfer"
REFUSED_PAUSE: Final = 1.0  # seconds before a peer that refused this node's key is tried again
_WATCHED: Final = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class ServiceStopped(BaseException):
    """Raised inside a thread that hangs, to end it."""


class Unstoppable(Exception):
    """The thread hangs where Python cannot reach it: only a new process helps."""


class Deliver(Protocol):
    def __call__(self, batch: list[Event]) -> None: ...


class Refusals(Protocol):
    def __call__(self, origin: str, who: str, code: str, detail: str) -> None: ...


class Bootstrap:
    """The thread and what outlives it. ``deliver``, ``refused`` and ``died`` are called in ``loop``'s thread."""

    def __init__(
        self,
        node: str,
        settings: BootstrapSettings,
        keys: KeyPair,
        directory: Directory,
        loop: asyncio.AbstractEventLoop,
        deliver: Deliver,
        refused: Refusals,
        died: Callable[[str], None],
        *,
        debug_hooks: bool = False,
    ) -> None:
        self.node = node
        self.settings = settings
        self.keys = keys
        self.directory = directory
        self.heartbeat = 0  # one for each round that came to its end
        self.dropped = 0  # frames that waited too long for a peer
        self._loop = loop
        self._deliver_batch = deliver
        self._refused = refused
        self._died = died
        self._debug_hooks = debug_hooks
        self._endpoint = settings.listen.replace(":*", ":0") if settings.listen.endswith(":*") else settings.listen
        self._out: dict[str, deque[bytes]] = {}
        self._closing: deque[str] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._undelivered = 0
        self._fault = ""
        self._stopping = False
        self._thread: threading.Thread | None = None

    # from the main loop --------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """What peers connect to; with a port of its own choice only after ``start``."""
        return self.settings.advertise or self._endpoint

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Bind and serve. Raises OSError when the address cannot be had."""
        assert not self.alive
        self._stopping, self._fault = False, ""
        outcome: list[BaseException | None] = []
        bound = threading.Event()
        self._thread = threading.Thread(target=self._main, args=(outcome, bound), name="pdxfer-bootstrap", daemon=True)
        self._thread.start()
        if not bound.wait(BIND_PATIENCE + 3.0):
            raise OSError(f"the bootstrap thread did not bind {self._endpoint} in time")
        if outcome and outcome[0] is not None:
            self._thread.join()
            raise OSError(f"{self._endpoint}: {outcome[0]}") from outcome[0]

    def kill(self, patience: float = 1.0) -> None:
        """End the thread, also one that runs in circles. Raises Unstoppable when it hangs outside of Python."""
        thread = self._thread
        if thread is None or not thread.is_alive():
            return
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        thread.join(0.3)
        if thread.is_alive() and thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(ServiceStopped))
            thread.join(patience)
        if thread.is_alive():
            raise Unstoppable("the bootstrap thread hangs in native code and cannot be replaced")

    def restart(self) -> None:
        """Replace the thread in place: same port, same keys, same queues. Raises Unstoppable or OSError."""
        self.kill()
        self.start()

    def stop(self) -> None:
        """The end. What waits to be sent has a moment to leave."""
        deadline = time.monotonic() + 0.5
        while self.alive and any(self._out.values()) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.kill()

    def close(self) -> None:
        if self._wake >= 0 and not self.alive:
            os.close(self._wake)
            self._wake = -1

    def send(self, envelope: Envelope) -> None:
        """Never blocks. A frame to a peer that is unknown, unreachable or slow is dropped: everything is said again."""
        queue = self._out.get(envelope.target)
        if queue is None:
            queue = self._out.setdefault(envelope.target, deque())
        if len(queue) >= self.settings.outbox:
            queue.popleft()
            self.dropped += 1
        queue.append(messages.encode(envelope))
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def forget(self, node: str) -> None:
        """Close the connection to a peer."""
        self._closing.append(node)
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def inject(self, fault: str) -> None:
        """Debug hook: "exception", "loop" (endless, in Python) or "hang" (outside of Python, for a minute)."""
        if not self._debug_hooks:
            raise LookupError("debug hooks are off")
        if fault not in ("exception", "loop", "hang"):
            raise ValueError(f"fault {fault!r}, expected exception, loop or hang")
        self._fault = fault
        os.eventfd_write(self._wake, 1)

    # delivery, in the main loop's thread ---------------------------------------------------------------------------

    def _take(self, batch: list[Event], frames: int) -> None:
        self._undelivered -= frames
        self._deliver_batch(batch)

    # the thread ----------------------------------------------------------------------------------------------------

    def _main(self, outcome: list[BaseException | None], bound: threading.Event) -> None:
        why = "it was stopped"
        try:
            generation = _Generation(self)
            try:
                generation.bind()
                outcome.append(None)
                bound.set()
                while not self._stopping:
                    generation.round()
                    self.heartbeat += 1
            finally:
                generation.close()
        except ServiceStopped:
            why = "it was hung and was ended"
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            if bound.is_set():
                log.exception("the bootstrap thread died")
            else:
                outcome.append(error)
        finally:
            bound.set()
            if not self._stopping:
                self._call(self._died, why)

    def _call(self, function: Callable[..., None], *args: object) -> None:
        """In the main loop; once that is closed nobody is there to hear it."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            log.debug("the main loop is closed")

    def _bound_to(self, endpoint: str) -> None:
        self._endpoint = endpoint


class _Link:
    """One DEALER to one peer."""

    def __init__(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes], place: Place) -> None:
        self.socket = socket
        self.monitor = monitor
        self.place = place
        self.waiting = False  # for the socket to take more
        self.refused_at: float | None = None  # the peer does not authorise this node's key


class _Generation:
    """The sockets of one life of the thread; all of it runs in that thread."""

    def __init__(self, owner: Bootstrap) -> None:
        self._owner = owner
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, 16_384)
        self._poller = zmq.Poller()
        self._links: dict[str, _Link] = {}
        self._monitors: dict[zmq.Socket[bytes], str] = {}
        self._zap = self._context.socket(zmq.REP)
        self._router = self._context.socket(zmq.ROUTER)

    def bind(self) -> None:
        owner = self._owner
        self._zap.linger = 0
        self._zap.bind("inproc://zeromq.zap.01")
        router = self._router
        router.linger = 0
        router.curve_server = True
        router.curve_secretkey = owner.keys.secret.encode()
        router.setsockopt_string(zmq.ZAP_DOMAIN, MAX_DOMAIN)
        router.setsockopt(zmq.HANDSHAKE_IVL, int(owner.settings.handshake_seconds * 1000))
        router.setsockopt(zmq.MAXMSGSIZE, 2 * messages.MAX_FRAME)  # what is a little too long is refused by name, the rest by a closed connection
        router.setsockopt(zmq.RCVHWM, 4096)
        router.setsockopt(zmq.BACKLOG, 1024)
        if "[" in owner._endpoint:
            router.setsockopt(zmq.IPV6, 1)
        deadline = time.monotonic() + BIND_PATIENCE
        while True:
            try:
                router.bind(owner._endpoint)
                break
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
        owner._bound_to(router.get_string(zmq.LAST_ENDPOINT))
        for socket in (self._zap, router):
            self._poller.register(socket, zmq.POLLIN)
        self._poller.register(owner._wake, zmq.POLLIN)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def round(self) -> None:
        owner = self._owner
        ready = dict(self._poller.poll(POLL_MS))
        if owner._wake in ready:
            try:
                os.eventfd_read(owner._wake)
            except BlockingIOError:
                log.debug("woken for nothing")
        self._faults()
        batch: list[Event] = []
        if self._zap in ready:
            self._authenticate()
        frames = self._hear(batch) if self._router in ready else 0
        for socket in ready:
            if socket in self._monitors:
                self._watch(self._monitors[socket], batch)
        if batch:
            owner._call(owner._take, batch, frames)
        while owner._closing:
            self._disconnect(owner._closing.popleft())
        for node in [n for n, queue in list(owner._out.items()) if queue]:
            self._flush(node)

    def _faults(self) -> None:
        """Debug hooks."""
        fault, self._owner._fault = self._owner._fault, ""
        if fault == "exception":
            raise RuntimeError("injected by the debug hook")
        if fault == "hang":
            time.sleep(60)
        while fault == "loop":
            fault = fault[:]

    # who ---------------------------------------------------------------------------------------------------------------

    def _authenticate(self) -> None:
        """ZAP (ZeroMQ RFC 27): one question for each new connection, answered from the directory."""
        while True:
            try:
                frames = self._zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            version, request = frames[0], frames[1] if len(frames) > 1 else b""
            key = ""
            if len(frames) >= 7 and frames[5] == b"CURVE" and len(frames[6]) == 32:
                key = z85.encode(frames[6]).decode()
            if key and self._owner.directory.authorised(key):
                self._zap.send_multipart([version, request, b"200", b"OK", key.encode(), b""])
                continue
            self._zap.send_multipart([version, request, b"400", b"this key is not authorised here", b"", b""])
            where = frames[3].decode(errors="replace") if len(frames) > 3 else "?"
            self._refuse(where, "stranger", f"public key {key or 'missing'} is in neither registry.nodes nor bootstrap.authorized_keys")

    # in ----------------------------------------------------------------------------------------------------------------

    def _hear(self, batch: list[Event]) -> int:
        """Take what has arrived. Returns how many frames go to the main loop."""
        owner = self._owner
        taken = 0
        for _ in range(FRAMES_AT_ONCE):
            try:
                parts = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            try:
                key = str(parts[-1].get("User-Id"))
            except (zmq.ZMQError, KeyError):
                key = ""
            if len(parts) != 2:
                self._refuse(key, "bad_frame", f"{len(parts) - 1} parts, expected 1")
                continue
            try:
                envelope = messages.decode(parts[1].bytes)
                self._check(envelope, key)
            except Refused as refused:
                self._refuse(key, refused.code, refused.detail)
                continue
            if owner._undelivered + taken >= owner.settings.inbox:
                self._refuse(envelope.source, "overloaded", f"{owner.settings.inbox} frames wait for the main loop")
                continue
            for message in envelope.body:
                if isinstance(message, Hello):
                    owner.directory.learn(envelope.source, message.address)
            batch.append(PeerSaid(envelope.source, envelope.incarnation, envelope.to_incarnation, envelope.body))
            taken += 1
        owner._undelivered += taken
        return taken

    def _check(self, envelope: Envelope, key: str) -> None:
        if not messages.good_name(envelope.source) or envelope.incarnation <= 0:
            raise Refused("bad_frame", f"source {envelope.source[:40]!r}, incarnation {envelope.incarnation}")
        if envelope.target != self._owner.node:
            raise Refused("wrong_source", f"a frame for node {envelope.target[:40]!r}, this is {self._owner.node!r}")
        if not self._owner.directory.identify(key, envelope.source):
            raise Refused("wrong_source", f"public key {key} does not belong to node {envelope.source[:40]!r}")

    def _refuse(self, who: str, code: str, detail: str) -> None:
        self._owner._call(self._owner._refused, "peer", who, code, detail)

    # out ---------------------------------------------------------------------------------------------------------------

    def _flush(self, node: str) -> None:
        """Send what waits for this peer, as far as its socket takes it."""
        owner = self._owner
        queue = owner._out[node]
        place = owner.directory.place(node)
        link = self._links.get(node)
        # ZeroMQ does not connect again by itself after a refusal; the peer may have learned our key by now.
        again = link is not None and link.refused_at is not None and time.monotonic() - link.refused_at >= REFUSED_PAUSE
        if link is not None and place is not None and (link.place != place or again):
            self._disconnect(node)
            link = None
        if link is None:
            if place is None:
                owner.dropped += len(queue)
                queue.clear()
                return
            link = self._connect(node, place)
            if link is None:
                owner.dropped += len(queue)
                queue.clear()
                return
        while queue:
            try:
                frame = queue.popleft()
            except IndexError:  # the main loop dropped the oldest
                break
            try:
                link.socket.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                queue.appendleft(frame)
                self._await(link, True)
                return
        self._await(link, False)

    def _await(self, link: _Link, waiting: bool) -> None:
        if waiting != link.waiting:
            link.waiting = waiting
            if waiting:
                self._poller.register(link.socket, zmq.POLLOUT)
            else:
                self._poller.unregister(link.socket)

    def _connect(self, node: str, place: Place) -> _Link | None:
        owner = self._owner
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.setsockopt(zmq.IMMEDIATE, 1)  # no frames for a peer that is not there
        socket.setsockopt(zmq.SNDHWM, 1000)
        socket.setsockopt(zmq.RCVHWM, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, 1024)  # nothing is said this way
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(owner.settings.handshake_seconds * 1000))
        if "[" in place.address:
            socket.setsockopt(zmq.IPV6, 1)
        socket.curve_serverkey = place.public_key.encode()
        socket.curve_publickey = owner.keys.public.encode()
        socket.curve_secretkey = owner.keys.secret.encode()
        monitor = socket.get_monitor_socket(_WATCHED)
        try:
            socket.connect(place.address)
        except zmq.ZMQError as error:
            log.warning("node %s: cannot connect to %r: %s", node, place.address, error)
            socket.disable_monitor()
            monitor.close(0)
            socket.close(0)
            return None
        self._monitors[monitor] = node
        self._poller.register(monitor, zmq.POLLIN)
        link = self._links[node] = _Link(socket, monitor, place)
        return link

    def _disconnect(self, node: str) -> None:
        link = self._links.pop(node, None)
        if link is None:
            return
        self._await(link, False)
        self._poller.unregister(link.monitor)
        del self._monitors[link.monitor]
        link.socket.disable_monitor()
        link.monitor.close(0)
        link.socket.close(0)

    def _watch(self, node: str, batch: list[Event]) -> None:
        """The connection to a peer closed, or was refused."""
        monitor = self._links[node].monitor
        while True:
            try:
                event = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return
            if event == zmq.EVENT_DISCONNECTED:
                batch.append(PeerCut(node))
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._links[node].refused_at = time.monotonic()
                self._refuse(node, "stranger", f"node {node!r} refuses this node's key: add {self._owner.keys.public} to its configuration")
