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
from pdxfer.client import Client, Disconnected, Ended, MirrorEnd, MirrorEvicted, MirrorHeld, Rejected
from pdxfer.pools import SharedPool
from pdxfer.pools.dsa import IndexPlane

from .cases import Plan, Room, Selection, Tables, keys_of, selection, token_ids

MODEL: Final = "probe"
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
        self._told: dict[int, MirrorEnd | MirrorHeld | MirrorEvicted] = {}

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

    def forget(self) -> None:
        """Nothing of an earlier path is left in the mirror."""
        self._wait(self.client.evict(MODEL), MirrorEvicted)

    def store(self) -> None:
        """Every room's whole blocks into the mirror: what rooms have in common is there when the second one comes."""
        for room in self.plan.rooms:
            blocks = room.document.context // self.plan.form.page_tokens
            number = self.client.store(MODEL, token_ids(room), self.tables[room.name][:blocks])
            self._done(room, self._wait(number, MirrorEnd))

    def load(self) -> None:
        """Every room's whole blocks out of the mirror, so many rooms at a time as the plan says; the rest is computed."""
        waiting = deque(self.plan.rooms)
        under_way: dict[int, tuple[Room, int]] = {}
        while waiting or under_way:
            while waiting and len(under_way) < self.plan.concurrency:
                room = waiting.popleft()
                blocks = room.document.context // self.plan.form.page_tokens
                held: MirrorHeld = self._wait(self.client.lookup(MODEL, token_ids(room)), MirrorHeld)
                if held.blocks != blocks:
                    raise BenchError(f"room {room.name}: the mirror holds {held.blocks} of {blocks} blocks")
                number = self.client.load(held.lease, self.tables[room.name][:blocks], blocks)
                under_way[number] = (room, held.lease)
            number = next(iter(under_way))
            room, lease = under_way.pop(number)
            self._done(room, self._wait(number, MirrorEnd))
            self.client.unpin(lease)
            first = room.document.context // self.plan.form.page_tokens * self.plan.form.page_tokens
            for layer, plane in enumerate(self.planes):
                plane.write(self.tables[room.name], first, keys_of(room, layer, self.plan.form.dim)[first:])

    @staticmethod
    def _done(room: Room, end: MirrorEnd) -> None:
        if not end.done:
            kind = "load" if end.loading else "store"
            raise BenchError(f"room {room.name}: its {kind} ended {end.state} ({end.reason}): {end.detail}")

    def _wait(self, number: int, kind: type[Any]) -> Any:
        """What comes of a request for the mirror."""
        end = time.monotonic() + SILENCE
        while time.monotonic() < end:
            if isinstance(self._told.get(number), kind):
                return self._told.pop(number)
            for event in self.client.poll(0.5):
                if isinstance(event, Disconnected) or (isinstance(event, Rejected) and event.number == number):
                    raise BenchError(f"the sidecar: {event}")
                if isinstance(event, MirrorEnd | MirrorHeld | MirrorEvicted):
                    self._told[event.number] = event
        raise BenchError(f"request {number} of the mirror had no {kind.__name__} within {SILENCE:g} s")

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
