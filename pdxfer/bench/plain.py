"""Plain NIXL: one WRITE with one descriptor, which is the limit, or one with a descriptor per page, which is what engines do today.

Owns: an initiator and a target process, and their times. Must not: use any of pdxfer's data path.

It is measured at its best. Pages are prepared once (prep_xfer_dlist), as engines do, no progress thread competes for a core, and both sides
poll without pause while a batch runs, but for giving way to whoever waits for the core. A transfer's time begins before its handle is made
and ends when the initiator sees DONE.
"""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pdxfer.engine.nixl import load

from .case import SEED, Batch, Case, content
from .child import BenchError

Array = npt.NDArray[Any]

DEADLINE: Final = 120.0  # seconds for a batch


class Order(NamedTuple):
    """A batch, one way or the other."""

    batch: Batch
    per_page: bool


class Check(NamedTuple):
    """Compare the last transfer of each lane."""

    order: Order


class Measured:
    """What the initiator saw."""

    def __init__(self, seconds: float, each: list[float]) -> None:
        self.seconds = seconds
        self.each = each


class Hello(NamedTuple):
    metadata: bytes
    address: int
    version: str


def target(pipe: Connection, case: Case) -> None:
    """The target's process: it polls, or NIXL over tcp makes no progress."""
    agent, memory = _agent("target", case)
    pipe.send(Hello(agent.get_agent_metadata(), memory.ctypes.data, load().version))
    busy = False
    while True:
        agent.get_new_notifs()
        if busy:
            os.sched_yield()
        if not pipe.poll(0 if busy else 0.0005):
            continue
        order = pipe.recv()
        if isinstance(order, Check):
            busy = False
            pipe.send(_wrong(memory, case, order.order))
        else:
            busy = True
            memory[:] = 0
            pipe.send("ready")


def initiator(pipe: Connection, case: Case, hello: Hello) -> None:
    """The initiator's process."""
    agent, memory = _agent("initiator", case)
    memory.reshape(-1, case.page_bytes)[:] = content(0, np.arange(case.lanes * case.descriptors), case.page_bytes)
    agent.add_remote_agent(hello.metadata)
    sides: dict[bool, tuple[Any, Any]] = {}
    for per_page in (False, True):
        size = case.page_bytes if per_page else case.room_bytes
        sides[per_page] = (
            agent.prep_xfer_dlist("NIXL_INIT_AGENT", _descriptors(memory.ctypes.data, size, memory.size), "DRAM"),
            agent.prep_xfer_dlist("target", _descriptors(hello.address, size, memory.size), "DRAM"),
        )
    pipe.send("ready")
    while True:
        order: Order = pipe.recv()
        pipe.send(_write(agent, case, order, sides[order.per_page]))


def _write(agent: Any, case: Case, order: Order, sides: tuple[Any, Any]) -> Measured:
    batch = order.batch
    each: list[float] = []
    running: dict[int, tuple[Any, float]] = {}
    left = [batch.rooms_each] * batch.lanes
    cells = [_cells(case, order, lane) for lane in range(batch.lanes)]

    def post(lane: int) -> None:
        began = time.monotonic()
        here, there = cells[lane]
        handle = agent.make_prepped_xfer("WRITE", sides[0], here, sides[1], there, b"done")
        if agent.transfer(handle) == "ERR":
            raise BenchError("NIXL answers ERR to a WRITE")
        running[lane] = (handle, began)

    start = time.monotonic()
    for lane in range(batch.lanes):
        post(lane)
    while running:
        os.sched_yield()  # where others want the core too, the target must come to its turn
        for lane, (handle, began) in list(running.items()):
            state = agent.check_xfer_state(handle)
            if state == "PROC":
                if time.monotonic() - start > DEADLINE:
                    raise BenchError(f"a batch of {batch.rooms} WRITEs is not over after {DEADLINE:g} s")
                continue
            if state != "DONE":
                raise BenchError(f"NIXL answers {state} for a WRITE")
            each.append(time.monotonic() - began)
            handle.release()
            del running[lane]
            left[lane] -= 1
            if left[lane]:
                post(lane)
    return Measured(time.monotonic() - start, each)


def _agent(name: str, case: Case) -> tuple[Any, Array]:
    nixl = load()
    agent = nixl.api.nixl_agent(name, nixl.api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
    memory = np.zeros(case.lanes * case.room_bytes, np.uint8)
    memory[::4096] = 0  # every page is there before anything is measured
    agent.register_memory([(memory.ctypes.data, memory.size, 0, "")], "DRAM")
    return agent, memory


def _descriptors(base: int, size: int, total: int) -> Array:
    found = np.zeros((total // size, 3), np.uint64)
    found[:, 0] = base + np.arange(total // size, dtype=np.uint64) * size
    found[:, 1] = size
    return found


def _cells(case: Case, order: Order, lane: int) -> tuple[Array, Array]:
    """Indices of a lane's descriptors at the source and at the target."""
    if not order.per_page:
        return np.array([lane], np.int32), np.array([lane], np.int32)
    total = case.lanes * case.descriptors
    count = case.planes * order.batch.pages
    here, there = (
        np.random.default_rng(SEED + n).permutation(total).reshape(case.lanes, -1)[lane][:count].astype(np.int32)
        for n in (3, 4)
    )
    return here, there


def _wrong(memory: Array, case: Case, order: Order) -> int:
    """How many cells at the target are not those of the source."""
    rows = memory.reshape(-1, case.page_bytes)
    wrong = 0
    for lane in range(order.batch.lanes):
        here, there = _cells(case, order, lane)
        if not order.per_page:
            here = there = np.arange(lane * case.descriptors, (lane + 1) * case.descriptors)
        wrong += int((rows[there] != content(0, here.astype(np.int64), case.page_bytes)).any(axis=1).sum())
    return wrong
