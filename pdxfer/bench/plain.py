"""Plain NIXL: one WRITE with one descriptor, which is the limit, or one with a descriptor per page, which is what engines do today.

Owns: an initiator and a target process, and their times. Must not: use any of pdxfer's data path.

It moves the same bytes as the rooms do, from the same pages to the same pages: it maps the workers' own pools.

Pages are prepared once (prep_xfer_dlist), as engines do. An agent makes progress in one of two ways: by NIXL's own progress thread, which
is the default of its Python API and what engines run (DEFAULT); or, the best that can be had of two cores, by both sides polling without
pause while a batch runs, but for giving way to whoever waits for the core (SPINNING). A transfer's time begins before its handle is made and
ends when the initiator sees DONE.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pdxfer.engine.nixl import load

from .case import Batch, Case, Memory
from .child import BenchError

Array = npt.NDArray[Any]

DEADLINE: Final = 120.0  # seconds for a batch
IDLE: Final = 0.02  # seconds between two looks of a target that nobody writes to


SPINNING: Final = False  # for _agent's progress_thread
DEFAULT: Final = True


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


def target(pipe: Connection, case: Case, progress_thread: bool, source: Memory, mine: Memory) -> None:
    """The target's process. Raises BenchError with what NIXL says."""
    with _in_words():
        _serve(pipe, case, progress_thread, source, mine)


def initiator(pipe: Connection, case: Case, progress_thread: bool, mine: Memory, theirs: Memory, hello: Hello) -> None:
    """The initiator's process. Raises BenchError with what NIXL says."""
    with _in_words():
        _initiate(pipe, case, progress_thread, mine, theirs, hello)


@contextmanager
def _in_words() -> Iterator[None]:
    """NIXL's exceptions have a class for each status and no base but Exception: what they say, and what can be done."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith("nixl"):
            raise
        if "DISCONNECT" in str(error):
            advice = (
                "initiator and target lost their connection, as when one of them gets no processor for seconds: run it again"
                " on a quieter machine, with fewer rooms at a time (--concurrency), or with another transport (--tls)"
            )
        else:
            advice = "run it again with another transport (--tls); `pdxfer doctor` says whether NIXL works here"
        raise BenchError(f"NIXL raises {type(error).__name__}: {' '.join(str(error).split())}; {advice}") from error


def _serve(pipe: Connection, case: Case, progress_thread: bool, source: Memory, mine: Memory) -> None:
    """Without a progress thread it polls, or NIXL over tcp makes no progress; not on another way's turn, which would pay for it."""
    agent, memory = _agent("target", mine, progress_thread)
    compared = _map(source)
    pipe.send(Hello(agent.get_agent_metadata(), memory.ctypes.data))
    busy = False
    while True:
        agent.get_new_notifs()
        spins = busy and not progress_thread
        if spins:
            os.sched_yield()
        if not pipe.poll(0 if spins else IDLE):
            continue
        order = pipe.recv()
        if isinstance(order, Check):
            busy = False
            pipe.send(_wrong(case, order.order, compared, source, memory, mine))
        else:
            busy = True
            memory[:] = 0
            pipe.send("ready")


def _initiate(pipe: Connection, case: Case, progress_thread: bool, mine: Memory, theirs: Memory, hello: Hello) -> None:
    agent, memory = _agent("initiator", mine, progress_thread)
    agent.add_remote_agent(hello.metadata)
    here, there = memory.ctypes.data, hello.address
    sides: dict[bool, tuple[Any, Any]] = {}
    for per_page in (False, True):
        sides[per_page] = (
            agent.prep_xfer_dlist("NIXL_INIT_AGENT", _descriptors(case, mine, here, per_page), "DRAM"),
            agent.prep_xfer_dlist("target", _descriptors(case, theirs, there, per_page), "DRAM"),
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


def _map(memory: Memory) -> Array:
    fd = os.open(memory.path, os.O_RDWR)
    try:
        return np.frombuffer(mmap.mmap(fd, memory.size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), np.uint8)
    finally:
        os.close(fd)


def _agent(name: str, memory: Memory, progress_thread: bool) -> tuple[Any, Array]:
    nixl = load()
    agent = nixl.api.nixl_agent(name, nixl.api.nixl_agent_config(enable_prog_thread=progress_thread, backends=[]))
    agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
    mapped = _map(memory)
    agent.register_memory([(mapped.ctypes.data, mapped.size, 0, "")], "DRAM")
    return agent, mapped


def _descriptors(case: Case, memory: Memory, base: int, per_page: bool) -> Array:
    """Every page of every plane, plane by plane; or for each lane one run of a room's bytes."""
    if per_page:
        pages = np.arange(memory.pages, dtype=np.uint64) * np.uint64(case.page_bytes)
        starts = (np.array(memory.planes, np.uint64)[:, None] + pages[None, :]).ravel()
    else:
        starts = np.arange(case.lanes, dtype=np.uint64) * np.uint64(case.room_bytes)
    found = np.zeros((len(starts), 3), np.uint64)
    found[:, 0] = np.uint64(base) + starts
    found[:, 1] = case.page_bytes if per_page else case.room_bytes
    return found


def _cells(case: Case, order: Order, lane: int) -> tuple[Array, Array]:
    """Indices of a lane's descriptors at the source and at the target."""
    if not order.per_page:
        return np.array([lane], np.int32), np.array([lane], np.int32)
    planes = np.arange(case.planes)[:, None]
    here = planes * case.source_pages + case.source_table(lane, 0, order.batch.pages)
    there = planes * case.target_pages + case.target_table(lane, order.batch.pages)
    return here.ravel().astype(np.int32), there.ravel().astype(np.int32)


def _wrong(case: Case, order: Order, source: Array, source_at: Memory, target: Array, target_at: Memory) -> int:
    """How many of the transfers that were the last of their lanes are not at the target as they are at the source."""
    wrong = 0
    for lane in range(order.batch.lanes):
        here, there = _cells(case, order, lane)
        size = int(_descriptors(case, source_at, 0, order.per_page)[0, 1])
        froms = _descriptors(case, source_at, 0, order.per_page)[here, 0].tolist()
        tos = _descriptors(case, target_at, 0, order.per_page)[there, 0].tolist()
        pairs = zip(froms, tos, strict=True)
        wrong += any((source[a : a + size] != target[b : b + size]).any() for a, b in pairs)
    return wrong
