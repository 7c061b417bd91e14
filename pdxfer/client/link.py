"""Attached, and attached again: the client's side of a sidecar's life.

Owns: the connection, the attach, pings, and what happens between two sidecars. Must not: wait. ``step`` does what is
due and returns; the sync and the asyncio client call it, and ``due`` says when it must be called again.

UP ──lost──► HELD ──nobody holds the pools──► DOWN ──connected──► ATTACHING ──Attached──► UP
 HELD is why a page is never reused too early: a sidecar's engine dies with it, but not in the same instant, and it
 may be killed in the middle of a copy into these pages. Rooms end once nobody holds the pools any more (see
 pools.memory.held), at the latest after HOLD_LIMIT, since every room must end; but then the end says that the pages are
 not safe yet, and the client stays away until they are.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from pdxfer.core import worker
from pdxfer.core.messages import good_name
from pdxfer.pools import SharedPool

from .connection import Connection
from .errors import AttachRefused, ConnectionLost, PdxferRefused, SidecarUnavailable
from .events import Disconnected, Event, Reconnected
from .rooms import Rooms

UP: Final = "up"
HELD: Final = "held"
DOWN: Final = "down"
ATTACHING: Final = "attaching"
CLOSED: Final = "closed"

PING_INTERVAL: Final = 0.5  # seconds; the sidecar expects a sign of life each second
BACKOFF_FIRST: Final = 0.05
BACKOFF_MOST: Final = 0.5
HOLD_FIRST: Final = 0.002
HOLD_MOST: Final = 0.02
HOLD_LIMIT: Final = 4.0
MAX_POOLS: Final = 253  # descriptors of one SCM_RIGHTS message; a pool has one

PASSING: Final = frozenset(("engine_id_taken", "draining", "overloaded", "attach_timeout"))  # refusals that may pass

SocketHook = Callable[[int, bool], None]  # (descriptor, it is open now)


class Link:
    """``on_socket`` is told when a socket comes and goes, so that its owner can watch it."""

    def __init__(
        self,
        path: str,
        engine_id: str,
        role: str,
        pools: Sequence[SharedPool],
        *,
        attach_timeout: float,
        on_socket: SocketHook,
    ) -> None:
        if not good_name(engine_id):
            raise AttachRefused("bad_engine_id", f"{engine_id[:40]!r}")
        if not 0 < len(pools) <= MAX_POOLS:
            raise AttachRefused("bad_layout", f"{len(pools)} pools, expected 1 … {MAX_POOLS}")
        names = [pool.name for pool in pools]
        if len(set(names)) != len(names):
            raise AttachRefused("bad_layout", f"pool names {names}, expected different ones")
        closed = [pool.name for pool in pools if not pool.fds]
        if closed:
            raise AttachRefused("bad_layout", f"pools {closed} are closed")
        self.path = os.fspath(path)
        self.engine_id = engine_id
        self.role = role
        self.rooms = Rooms(pools)
        self.events: deque[Event] = deque()
        self.state = DOWN
        self.node = ""
        self.incarnation = 0
        self.problem = ""  # why it is not attached now, for people
        self.refusal: AttachRefused | None = None  # the answer to the last attach, if it was no
        self.stall_deadline = 10.0
        self.attach_timeout = attach_timeout
        self.attachments = 0
        self._on_socket = on_socket
        self._connection: Connection | None = None
        self._attach_req = 0
        self._until = 0.0  # of the state: when to try, give up or stop holding
        self._pause = BACKOFF_FIRST
        self._next_check = 0.0
        self._next_ping = 0.0
        self._unanswered: float | None = None  # since when the sidecar owes an answer to a ping
        self._lost = ""
        self._in_doubt = False  # rooms have ended while an engine still had the pools

    @property
    def wants_write(self) -> bool:
        return self._connection is not None and self._connection.unsent > 0

    def request(self, frame: worker.WorkerRequest) -> None:
        """Send a request. Raises SidecarUnavailable or PdxferRefused, and then it is as if it was never asked for."""
        if self.state != UP or self._connection is None:
            self.rooms.withdraw(frame.req)
            raise SidecarUnavailable(self.path, self.problem or "the client is closed")
        try:
            self._connection.send(frame)
        except PdxferRefused:
            self.rooms.withdraw(frame.req)
            raise
        except (OverflowError, TypeError) as error:  # a number that no frame can hold, or no number
            self.rooms.withdraw(frame.req)
            raise PdxferRefused("bad_frame", f"{type(frame).__name__}: {error}") from None
        except ConnectionLost as lost:
            self.rooms.withdraw(frame.req)
            self._next_check = 0.0
            self._lose(str(lost), None)
            raise SidecarUnavailable(self.path, str(lost)) from lost

    def step(self, now: float) -> None:
        """Do everything that is due; what the engine must know is appended to ``events``."""
        if self.state == UP:
            self._serve(now)
        if self.state == HELD:
            self._hold(now)
        if self.state == DOWN and now >= self._until:
            self._connect(now)
        if self.state == ATTACHING:
            self._await_attached(now)

    def due(self, now: float) -> float:
        """Seconds until ``step`` has something to do even if nothing arrives."""
        match self.state:
            case "up":
                at = self._next_ping
            case "held":
                at = self._next_check
            case "closed":
                return 60.0
            case _:
                at = self._until
        return max(0.0, at - now)

    def close(self) -> None:
        """The sidecar sees the connection close, and ends what is open; here it ends at once."""
        if self.state == CLOSED:
            return
        self._drop_connection()
        self.state = CLOSED
        self.problem = "the client is closed"
        self.rooms.fail_requests(SidecarUnavailable(self.path, self.problem))
        if self.rooms.busy:
            self.events.extend(self.rooms.end_all("the client was closed", pages_safe=not self._held_pools()))

    # states --------------------------------------------------------------------------------------------------------

    def _serve(self, now: float) -> None:
        assert self._connection is not None
        try:
            frames = self._connection.receive()
            for frame in frames:
                event = self.rooms.take(frame)
                if event is not None:
                    self.events.append(event)
                elif isinstance(frame, worker.Rejected) and frame.req == 0:
                    self.problem = f"{frame.code}: {frame.detail}"  # of the whole connection: it will be closed
            if frames:
                self._unanswered = None
            self._connection.flush()
            if now >= self._next_ping:
                self._next_ping = now + PING_INTERVAL
                if self._unanswered is None:
                    self._unanswered = now
                if not self._connection.unsent:
                    self._connection.send(worker.Ping())
        except ConnectionLost as lost:
            self._lose(f"{lost}{': ' if self.problem else ''}{self.problem}", now)
            return
        # Judged only after reading: a client that was itself stopped finds the answers waiting.
        if self._unanswered is not None and now - self._unanswered > self.stall_deadline:
            self._lose(f"the sidecar has not answered for {now - self._unanswered:.1f} s: it is stopped or stuck", now)

    def _lose(self, detail: str, now: float | None) -> None:
        self._drop_connection()
        self._lost = f"node {self.node}: {detail}"
        self.problem = detail
        self.state = HELD
        self._until = 0.0 if now is None else now + HOLD_LIMIT
        self._pause = HOLD_FIRST
        self._next_check = 0.0
        self.events.append(Disconnected(self._lost))
        self.rooms.fail_requests(SidecarUnavailable(self.path, detail))

    def _hold(self, now: float) -> None:
        if now < self._next_check:
            return
        if not self._until:  # lost in a request, where there was no clock
            self._until = now + HOLD_LIMIT
        held = self._held_pools() if self.rooms.busy or self._in_doubt else []
        if held:
            self._next_check = now + self._pause
            self._pause = min(2 * self._pause, HOLD_MOST)
            if now >= self._until and not self._in_doubt:
                self._in_doubt = True
                still = f"its engine still has pools {held} mapped after {HOLD_LIMIT:g} s"
                self.problem = f"{self.problem}; {still}: it is frozen, kill it or let it run"
                self.events.extend(self.rooms.end_all(f"{self._lost}; {still}", pages_safe=False))
            return
        self._in_doubt = False
        self.events.extend(self.rooms.end_all(self._lost))
        self.state = DOWN
        self._pause = BACKOFF_FIRST
        self._until = now

    def _held_pools(self) -> list[str]:
        return [pool.name for pool in self.rooms.pools if pool.held()]

    def _connect(self, now: float) -> None:
        try:
            self._connection = Connection(self.path)
        except SidecarUnavailable as error:
            self._retry(error.found, now)
            return
        self._on_socket(self._connection.fileno(), True)
        self._attach_req = self.rooms.number()
        pools: list[worker.PoolAt] = []
        fds: list[int] = []
        sizes: list[int] = []
        for pool in self.rooms.pools:
            pools.append(pool.at(len(fds)))
            fds.extend(pool.fds)
            sizes.extend(pool.fd_bytes)
        frame = worker.Attach(
            self._attach_req, worker.WORKER_PROTOCOL, self.engine_id, self.role, os.getpid(), tuple(pools), tuple(sizes)
        )  # fmt: skip
        self.state = ATTACHING
        self._until = now + self.attach_timeout
        try:
            self._connection.send(frame, fds)
        except ConnectionLost as lost:
            self._retry(str(lost), now)

    def _await_attached(self, now: float) -> None:
        assert self._connection is not None
        try:
            frames = self._connection.receive()
            self._connection.flush()
        except ConnectionLost as lost:
            self._retry(str(lost), now)
            return
        for i, frame in enumerate(frames):
            match frame:
                case worker.Attached() if frame.req == self._attach_req:
                    self._attached(frame, now)
                    self.events.extend(e for f in frames[i + 1 :] if (e := self.rooms.take(f)) is not None)
                    return
                case worker.Rejected():
                    self.refusal = AttachRefused(frame.code, frame.detail)
                    self._retry(f"it refuses the attach: {frame.code}: {frame.detail}", now)
                    return
        if now >= self._until:
            self._retry(f"it took the connection and did not answer within {self.attach_timeout:g} s", now)

    def _attached(self, frame: worker.Attached, now: float) -> None:
        self.state = UP
        self.node, self.incarnation, self.stall_deadline = frame.node, frame.incarnation, frame.stall_deadline
        self.problem = ""
        self.refusal = None
        self._pause = BACKOFF_FIRST
        self._next_ping = now
        self._unanswered = None
        self.attachments += 1
        if self.attachments > 1:
            self.events.append(Reconnected(self.node, self.incarnation))

    def _retry(self, problem: str, now: float) -> None:
        self._drop_connection()
        self.problem = problem
        self.state = DOWN
        self._until = now + self._pause
        self._pause = min(2 * self._pause, BACKOFF_MOST)

    def _drop_connection(self) -> None:
        if self._connection is not None:
            self._on_socket(self._connection.fileno(), False)
            self._connection.close()
            self._connection = None
