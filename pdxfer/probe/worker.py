"""A worker of the probe, in a process of its own: it fills pages with keys, moves them, and selects from them.

Owns: its pool, its client, and one method for each order. Must not: know which path the orders make up, or compare.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Final

from pdxfer.bench.child import BenchError
from pdxfer.client import Client, Disconnected, Ended, Rejected
from pdxfer.pools import SharedPool
from pdxfer.pools.dsa import IndexPlane

from .cases import Plan, Room, Selection, Tables, keys_of, selection

POISON: Final = 0xA5  # what pages hold that nobody has filled: no earlier path's bytes can pass for this one's
SILENCE: Final = 60.0  # seconds without any event: a defect, since every room has shorter deadlines


class Worker:
    """What an order can ask of it; every method is one."""

    def __init__(self, plan: Plan, socket: str, engine_id: str, role: str) -> None:
        self.plan = plan
        self.pool = SharedPool.allocate(plan.form.layout(plan.layers), plan.pages())
        self.planes = [IndexPlane(pages, plan.form) for pages in self.pool.pages()]
        self.client = Client(socket, engine_id, role, [self.pool])
        self.tables: Tables = {}

    def place(self, seed: int, sharing: bool) -> None:
        """Give every room its pages, and forget what was in them."""
        self.tables = self.plan.tables(seed, sharing=sharing)
        for plane in self.planes:
            plane.pages[:] = POISON

    def fill(self) -> None:
        """Write every room's keys into its pages, as a prefill does."""
        for room in self.plan.rooms:
            self.client.poll(0.0)
            for layer, plane in enumerate(self.planes):
                plane.write(self.tables[room.name], 0, keys_of(room, layer, self.plan.form.dim))

    def select(self) -> dict[str, Selection]:
        """Of every room."""
        found = {}
        for room in self.plan.rooms:
            self.client.poll(0.0)
            found[room.name] = selection(room, self.planes, self.tables[room.name])
        return found

    def send(self, prefix: str) -> None:
        """Every room goes out, so many at a time as the plan says. Raises BenchError when one is not done."""

        def begin(room: Room) -> None:
            out = self.client.open(f"{prefix}-{room.name}")
            out.push(self.tables[room.name])
            out.finish()

        self._move(prefix, begin)

    def receive(self, prefix: str, source: str) -> None:
        """As ``send``, on the other side."""

        def begin(room: Room) -> None:
            self.client.receive(f"{prefix}-{room.name}", source, self.tables[room.name])

        self._move(prefix, begin)

    def _move(self, prefix: str, begin: Callable[[Room], None]) -> None:
        waiting = deque(self.plan.rooms)
        under_way: set[str] = set()
        heard = time.monotonic()
        while waiting or under_way:
            while waiting and len(under_way) < self.plan.concurrency:
                room = waiting.popleft()
                under_way.add(f"{prefix}-{room.name}")
                begin(room)
            events = self.client.poll(0.5)
            if events:
                heard = time.monotonic()
            elif time.monotonic() - heard > SILENCE:
                raise BenchError(f"{len(under_way)} rooms have not ended within {SILENCE:g} s of the last event")
            for event in events:
                if isinstance(event, Ended):
                    end = event.end
                    if not end.done:
                        raise BenchError(f"room {end.room} ended {end.state} ({end.reason}): {end.detail}")
                    under_way.discard(end.room)
                elif isinstance(event, Rejected | Disconnected):
                    raise BenchError(f"the sidecar: {event}")


def serve(pipe: Connection, plan: Plan, socket: str, engine_id: str, role: str) -> None:
    """The process: an order is (name of a method, its arguments), and its answer what that returns."""
    worker = Worker(plan, socket, engine_id, role)
    pipe.send("attached")
    while True:
        while not pipe.poll(0.2):
            worker.client.poll(0.0)  # a worker gives signs of life
        name, arguments = pipe.recv()
        answer: Any = getattr(worker, name)(*arguments)
        pipe.send(answer)
