"""The bootstrap thread, as the rest of the sidecar sees it: start, restart in place, send, stop.

Owns: the thread's life and all that outlives it: what waits to be sent, who is authorised, where the peers are, the port.
Must not: touch a ZeroMQ socket (``generation`` does, in the thread) or hold state of rooms or sessions (the core does). So
the thread can be replaced between any two frames; a frame that is lost is said again by its sender.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from pdxfer.core import messages
from pdxfer.core.events import Event
from pdxfer.core.messages import Envelope

from .directory import Directory
from .flow import Flow, Load
from .generation import BIND_PATIENCE, Generation, ServiceStopped, Tally
from .keys import KeyPair
from .peers import Outboxes
from .resolver import Resolver
from .settings import BootstrapSettings, split_endpoint

log = logging.getLogger(__name__)

LAST_WORDS: Final = 0.5  # seconds that frames have to leave at an orderly stop
GENTLE: Final = 0.1  # seconds for a thread to end when asked
PATIENCE: Final = 3.0  # seconds more for one that had to be interrupted; past that, only a new process helps
FAULTS: Final = ("exception", "loop", "hang")


class Unstoppable(Exception):
    """The thread hangs where Python cannot reach it: only a new process helps."""


class Deliver(Protocol):
    def __call__(self, batch: list[Event]) -> None: ...


class Refusals(Protocol):
    """``count`` frames or connections of ``who`` were refused since the last call; ``detail`` is of one of them."""

    def __call__(self, origin: str, who: str, code: str, detail: str, count: int) -> None: ...


class Life:
    """One life of the thread. A thread that comes back from the dead finds its own life over, and not its successor's."""

    def __init__(self) -> None:
        self.stopping = False
        self.linger = 0.0  # seconds that its sockets may take to send what they hold
        self.flow = Flow()
        self.bound = threading.Event()
        self.failure: BaseException | None = None  # that kept it from binding
        self.thread: threading.Thread | None = None


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
        self.outboxes = Outboxes(settings.outbox)
        self.resolver = Resolver(self._resolved)
        self.closing: deque[str] = deque()  # nodes whose connection is to be closed
        self.endpoint = settings.listen.removesuffix("*") + "0" if settings.listen.endswith(":*") else settings.listen
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.fault = ""  # of the debug hook
        self._loop = loop
        self._deliver = deliver
        self._refused = refused
        self._died = died
        self._debug_hooks = debug_hooks
        self._control = threading.Lock()  # starts, restarts and stops come one after the other
        self._life = Life()

    # the thread's life ---------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """What peers connect to; with a port of its own choice only after ``start``."""
        return self.settings.advertise or self.endpoint

    @property
    def alive(self) -> bool:
        return self._life.thread is not None and self._life.thread.is_alive()

    @property
    def dropped(self) -> int:
        """Frames that were given up because a peer was unknown, unreachable or slow."""
        return self.outboxes.dropped

    def start(self) -> None:
        """Bind and serve. Raises OSError when the address cannot be had."""
        with self._control:
            self._start()

    def restart(self) -> None:
        """Replace the thread in place: same port, same keys, same queues. Raises Unstoppable or OSError."""
        with self._control:
            self._kill()
            self._start()

    def kill(self) -> None:
        """End the thread, also one that runs in circles. Raises Unstoppable when it hangs outside of Python."""
        with self._control:
            self._kill()

    def stop(self) -> None:
        """The end. What waits to be sent has a moment to leave. Raises Unstoppable."""
        deadline = time.monotonic() + LAST_WORDS
        while self.alive and self.outboxes.waiting() and time.monotonic() < deadline:
            time.sleep(0.01)
        with self._control:
            self._life.linger = LAST_WORDS
            self._kill()

    def close(self) -> None:
        """After ``stop``."""
        if not self.alive:
            fd, self.wake_fd = self.wake_fd, -1
            if fd >= 0:
                os.close(fd)

    def _start(self) -> None:
        if self.alive:
            raise RuntimeError("the bootstrap thread runs already")
        life = self._life = Life()
        self.fault = ""
        life.thread = threading.Thread(target=self._main, args=(life,), name="pdxfer-bootstrap", daemon=True)
        life.thread.start()
        if not life.bound.wait(BIND_PATIENCE + PATIENCE):
            life.stopping = True
            raise OSError("the bootstrap thread did not come up in time")
        if life.failure is not None:
            life.thread.join(PATIENCE)
            raise OSError(self._why_not(life.failure)) from life.failure

    def _why_not(self, failure: BaseException) -> str:
        parts = split_endpoint(self.endpoint)
        port = f"port {parts[1]} of {parts[0]}" if parts is not None else self.endpoint
        hint = "set bootstrap.listen to another port, or stop the process that has this one (see: ss -ltnp)"
        return f"{port}: {failure}; {hint}"

    def _kill(self) -> None:
        life, thread = self._life, self._life.thread
        life.stopping = True
        if thread is None or not thread.is_alive():
            return
        self.wake()
        thread.join(GENTLE + life.linger)
        if thread.is_alive() and thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(ServiceStopped))
            thread.join(PATIENCE)
        if thread.is_alive():
            raise Unstoppable(
                f"the bootstrap thread hangs in native code: it did not end within {GENTLE + PATIENCE:g} s and cannot be"
                " replaced; only a new process helps"
            )

    # from the main loop --------------------------------------------------------------------------------------------

    def send(self, envelope: Envelope) -> None:
        """Never blocks. A frame to a peer that is unknown, unreachable or slow is dropped: everything is said again."""
        frame = messages.encode(envelope) if len(envelope.body) <= messages.MAX_PER_FRAME else b""
        if frame and len(frame) <= messages.MAX_FRAME:
            self.outboxes.put(envelope.target, frame, time.monotonic())
            self.wake()
            return
        body = envelope.body
        if len(body) > 1:
            for half in (body[: len(body) // 2], body[len(body) // 2 :]):
                self.send(msgspec.structs.replace(envelope, body=half))
            return
        log.error(
            "a %s for node %s has %d bytes, expected at most %d: it is not sent",
            type(body[0]).__name__, envelope.target, len(frame), messages.MAX_FRAME,
        )  # fmt: skip

    def forget(self, node: str) -> None:
        """Close the connection to a peer, after what waits for it has had its chance."""
        self.closing.append(node)
        self.wake()

    def inject(self, fault: str) -> None:
        """Debug hook: "exception", "loop" (endless, in Python) or "hang" (outside of Python, for a minute)."""
        if not self._debug_hooks:
            raise LookupError("debug hooks are off")
        if fault not in FAULTS:
            raise ValueError(f"fault {fault!r}, expected {', '.join(FAULTS)}")
        self.fault = fault
        self.wake()

    def wake(self) -> None:
        """From any thread."""
        if self.wake_fd >= 0:
            os.eventfd_write(self.wake_fd, 1)

    def _resolved(self, host: str, trouble: str) -> None:
        """In a thread of the resolver's: whoever waits for this name is looked at again."""
        if trouble:
            log.warning("host name %r of a peer's address cannot be resolved: %s; it is asked for again", host, trouble)
        nodes = []
        for node in self.outboxes.waiting():
            place = self.directory.place(node)
            parts = split_endpoint(place.address) if place is not None else None
            if parts is not None and parts[0] == host:
                nodes.append(node)
        self.outboxes.touch(nodes)
        self.wake()

    # from the thread, in the main loop -----------------------------------------------------------------------------

    def hand_over(self, flow: Flow, batch: list[Event], loads: dict[str, Load]) -> None:
        """From the thread: these events are the main loop's now."""
        self._call(self._take, flow, batch, loads)

    def _take(self, flow: Flow, batch: list[Event], loads: dict[str, Load]) -> None:
        flow.take(loads)
        self._deliver(batch)

    def report(self, flow: Flow, refusals: dict[tuple[str, str], Tally]) -> None:
        """From the thread: what it refused. It gathers on while the main loop has not taken this."""
        flow.reporting = True
        self._call(self._reported, flow, refusals)

    def _reported(self, flow: Flow, refusals: dict[tuple[str, str], Tally]) -> None:
        flow.reporting = False
        for (who, code), tally in refusals.items():
            self._refused("peer", who, code, tally.detail, tally.count)

    def note(self, level: int, text: str, *args: object) -> None:
        """Log from the thread. In the main loop: a thread that is ended must not hold a log handler's lock."""
        self._call(log.log, level, text, *args)

    def _call(self, function: Callable[..., None], *args: object) -> None:
        """In the main loop; once that is closed nobody is there to hear it."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    # the thread ----------------------------------------------------------------------------------------------------

    def _main(self, life: Life) -> None:
        why = "it was stopped"
        try:
            generation = Generation(self, life.flow)
            try:
                generation.bind()
                life.bound.set()
                while not life.stopping:
                    generation.round()
                    self.heartbeat += 1
            finally:
                generation.close(life.linger)
        except ServiceStopped:
            why = "it hung and was ended"
            life.failure = None if life.bound.is_set() else OSError(why)
        except Exception as error:  # noqa: BLE001 - it is the supervisor's to say what follows
            why = f"{type(error).__name__}: {error}"
            if life.bound.is_set():
                self.note(logging.ERROR, "the bootstrap thread died\n%s", traceback.format_exc().rstrip())
            else:
                life.failure = error
        finally:
            served = life.bound.is_set()
            life.bound.set()
            if served and not life.stopping:
                self._call(self._died, why)
