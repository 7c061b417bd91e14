"""The two workers: rooms through their sidecars, by the client that engines use.

Owns: one loop for each side, its times and the check of its bytes. Must not: know how sidecars are started.

A room's time begins when the later of the two workers has asked for it, and ends when the decode worker is told of its end: from then
on its pages could be decoded from.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt

from pdxfer.client import Client, Disconnected, Ended, Rejected
from pdxfer.pools import SharedPool

from .case import Batch, Case, Cells, Memory, Table, content
from .child import BenchError

PREFILL, DECODE = "bench-prefill", "bench-decode"
SPOTS = 4  # cells that are checked in every room, beside the whole of each lane's last room
SILENCE = 60.0  # seconds without any event: a defect, since every room has shorter deadlines

Times = npt.NDArray[np.float64]  # [lane, number]: time.monotonic, one clock for all processes of the machine


class Sent:
    """What the prefill worker saw."""

    def __init__(self, asked: Times) -> None:
        self.asked = asked


class Received:
    """What the decode worker saw."""

    def __init__(self, asked: Times, ended: Times, cells: int) -> None:
        self.asked = asked
        self.ended = ended
        self.cells = cells  # compared with what the prefill worker holds


def prefill(pipe: Connection, case: Case, socket: str) -> None:
    """The prefill worker's process."""
    pool = SharedPool.allocate(case.layout(), case.source_pages)
    every = np.arange(case.source_pages)
    for plane, view in enumerate(pool.pages()):
        for part in np.array_split(every, max(1, view.size >> 24)):
            view[part] = content(plane, part, case.page_bytes)
    client = Client(socket, engine_id=PREFILL, role="prefill", pools=[pool])
    pipe.send(Memory.of(pool))
    while True:
        pipe.send(_send_all(client, case, _order(pipe, client)))


def _send_all(client: Client, case: Case, batch: Batch) -> Sent:
    asked = np.zeros((batch.lanes, batch.rooms_each))

    def begin(lane: int, number: int) -> None:
        table = case.source_table(lane, number, batch.pages)
        asked[lane, number] = time.monotonic()
        room = client.open(batch.room(lane, number))
        room.push(table)
        room.finish()

    _run(client, batch, begin, lambda lane, number: None)
    return Sent(asked)


def decode(pipe: Connection, case: Case, socket: str) -> None:
    """The decode worker's process."""
    pool = SharedPool.allocate(case.layout(), case.target_pages)
    client = Client(socket, engine_id=DECODE, role="decode", pools=[pool])
    pipe.send(Memory.of(pool))
    while True:
        batch = _order(pipe, client)
        for view in pool.pages():
            view[:] = 0
        pipe.send(_receive_all(client, case, batch, pool.pages()))


def _receive_all(client: Client, case: Case, batch: Batch, views: list[Cells]) -> Received:
    asked, ended = np.zeros((2, batch.lanes, batch.rooms_each))
    random = np.random.default_rng(5)
    checked = 0

    def begin(lane: int, number: int) -> None:
        table = case.target_table(lane, batch.pages)
        asked[lane, number] = time.monotonic()
        client.receive(batch.room(lane, number), source=PREFILL, pages=table)

    def over(lane: int, number: int) -> None:
        ended[lane, number] = time.monotonic()
        for plane, page in random.integers(0, (case.planes, batch.pages), (SPOTS, 2)):
            check(lane, number, int(plane), np.array([page]))

    def check(lane: int, number: int, plane: int, logical: Table) -> None:
        nonlocal checked
        found = views[plane][case.target_table(lane, batch.pages)[logical]]
        sources = case.source_table(lane, number, batch.pages)[logical]
        wrong = (found != content(plane, sources, case.page_bytes)).any(axis=1)
        if wrong.any():
            raise BenchError(
                f"wrong bytes: room {batch.room(lane, number)}, plane {plane}, logical pages"
                f" {logical[wrong].tolist()}: they are not what the prefill worker holds"
            )
        checked += len(logical)

    _run(client, batch, begin, over)
    for lane in range(batch.lanes):  # after the clock has stopped
        client.poll(0.0)
        for plane in range(case.planes):
            check(lane, batch.rooms_each - 1, plane, np.arange(batch.pages))
    return Received(asked, ended, checked)


def _order(pipe: Connection, client: Client) -> Batch:
    """Wait for the next batch, polling the client: a worker gives signs of life."""
    while not pipe.poll(0.2):
        client.poll(0.0)
    batch: Batch = pipe.recv()
    return batch


def _run(client: Client, batch: Batch, begin: Callable[[int, int], None], over: Callable[[int, int], None]) -> None:
    """Every lane's rooms one after the other, the lanes side by side. Raises BenchError when a room is not DONE."""
    at = {batch.room(lane, number): (lane, number) for lane in range(batch.lanes) for number in range(batch.rooms_each)}
    for lane in range(batch.lanes):
        begin(lane, 0)
    heard = time.monotonic()
    while at:
        events = client.poll(0.5)
        if events:
            heard = time.monotonic()
        elif time.monotonic() - heard > SILENCE:
            raise BenchError(
                f"{len(at)} rooms of batch {batch.name} have not ended within {SILENCE:g} s of the last event"
            )
        for event in events:
            if isinstance(event, Ended):
                end = event.end
                if not end.done:
                    raise BenchError(f"room {end.room} ended {end.state} ({end.reason}): {end.detail}")
                lane, number = at.pop(end.room)
                over(lane, number)
                if number + 1 < batch.rooms_each:
                    begin(lane, number + 1)
            elif isinstance(event, Rejected | Disconnected):
                raise BenchError(f"the sidecar: {event}")
