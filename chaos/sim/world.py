"""The world: virtual time, random streams, the true contents of every room, and the record of what happened.

Owns: the clock and the queue of what is to happen. Must not: know what a Node is; sidecars, engines, workers and the
network schedule themselves here.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from pdxfer.core.limits import Limits, MirrorSettings

if TYPE_CHECKING:
    from .engine import VirtualEngine
    from .network import Network
    from .sidecar import Sidecar
    from .worker import VirtualWorker

# Deadlines as short as the virtual seconds are cheap; their order is that of the defaults.
LIMITS = Limits(
    open_timeout=5.0, want_timeout=5.0, resolve_timeout=1.5, connect_timeout=1.5, engine_timeout=4.0, push_timeout=5.0,
    credit_timeout=4.0, ack_timeout=4.0, room_timeout=15.0, transfer_deadline=2.0, stall_deadline=2.0, cut_grace=0.6,
    heartbeat_interval=0.3, retry_first=0.1, retry_most=0.6, quarantine_limit=3.0, tombstone_ttl=120.0, room_window=3,
    local_chunk=200, peer_ttl=60.0,
)  # fmt: skip


class Violation(AssertionError):
    """An invariant does not hold: the seed has failed."""


class World:
    """Virtual time. Everything that happens is a call in its queue."""

    def __init__(self, seed: int, limits: Limits = LIMITS, *, trace: bool = False) -> None:
        self.seed = seed
        self.limits = limits
        self.now = 0.0
        self.steps = 0
        self.respawn = 0.1  # seconds from an engine's end to the next one's start
        self.calm = False  # no more faults
        self.pace = 1.0  # how slow engines are in this world
        self.trace = trace
        self.timeline: list[tuple[float, str, object]] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        # One stream for each source of chance: taking away a fault leaves the others' draws as they were.
        self.workload = random.Random(f"{seed} workload")
        self.wire = random.Random(f"{seed} wire")
        self.metal = random.Random(f"{seed} metal")
        self.sidecars: dict[str, Sidecar] = {}
        self.workers: list[VirtualWorker] = []
        self.engines: dict[str, VirtualEngine] = {}  # by agent; the dead stay listed
        self.network: Network
        self.contents: dict[tuple[str, int], list[list[list[int]]]] = {}  # room -> pool, plane, logical page -> token
        self.ends: dict[tuple[str, int, bool], str] = {}  # (room, epoch, sending) -> reason, as workers heard it
        self.end_times: dict[tuple[str, int, bool], float] = {}
        self.clean: set[tuple[str, int]] = set()  # rooms that their workers neither abort nor forget
        self.forgotten: set[tuple[str, int]] = set()  # rooms whose sender never finishes
        self.abort_bound = 0.0  # seconds from the Ok of an abort to the room's end on that side
        self.closed: dict[tuple[str, str, int, bool], str] = {}  # the same with the node, as RoomClosed said it
        self.granted: dict[tuple[str, int, int, int], tuple[str, int, int]] = {}  # see grants.py
        self.struck: Counter[str] = Counter()  # faults that took effect, by kind
        self.refused = False  # an engine has refused a peer's metadata, for as long as both live
        self.mirror: MirrorSettings | None = None
        self.mirror_ends: Counter[str] = Counter()  # of stores and loads
        self.flipped = 0  # entries of mirrors that somebody has changed
        self._prefixes: dict[tuple[object, ...], int] = {}
        self._token = 0

    def token(self) -> int:
        """A page content that was never seen before."""
        self._token += 1
        return self._token

    def prefix_token(self, what: tuple[object, ...]) -> int:
        """The content of a page that is a function of ``what``."""
        found = self._prefixes.get(what)
        if found is None:
            found = self._prefixes[what] = self.token()
        return found

    def at(self, when: float, call: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._queue, (max(when, self.now), self._serial, call))

    def after(self, delay: float, call: Callable[[], None]) -> None:
        self.at(self.now + delay, call)

    def note(self, who: str, what: object) -> None:
        """One line of the timeline: a text, or a frame, event or action with its direction (see show.py)."""
        if self.trace:
            self.timeline.append((self.now, who, what))

    def run(self, until: float) -> None:
        """Let everything happen that is due before ``until``."""
        queue = self._queue
        while queue and queue[0][0] <= until:
            self.now, _, call = heapq.heappop(queue)
            self.steps += 1
            call()
        self.now = max(self.now, until)
