"""The measurement: its order, and what is kept of it.

Owns: which batch runs when, and the figures made of its times. Must not: print.

For each case the ways take turns, round after round, so that whatever else the machine does meets all of them. Figures are the
median round's; percentiles are over the rooms of all rounds.
"""

from __future__ import annotations

import asyncio
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import pdxfer
from pdxfer.engine.settings import EngineSettings

from . import plain, rooms
from .case import Batch, Case, rooms_each
from .child import BenchError, Child
from .sidecars import Sidecars

WAYS = ("pdxfer", "one descriptor", "per page", "per page, spinning")
ONE_PAGE_ROOMS = 200
START = 60.0  # seconds for a process to be ready
PATIENCE = 300.0  # seconds for a batch
COUNTERS_LATE = 1.3  # seconds after which an engine has told its totals


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    page_bytes: tuple[int, ...] = (16384,)
    planes: int = 32
    room_bytes: tuple[int, ...] = (32 << 20,)
    concurrency: tuple[int, ...] = (1, 80)
    rooms: int = 0  # for each batch; 0: as many as make batch_bytes
    batch_bytes: int = 1 << 30
    rounds: int = 3
    tls: str = "tcp"

    def cases(self) -> list[Case]:
        lanes = max(self.concurrency)
        return [
            Case(page, self.planes, max(1, round(size / (page * self.planes))), lanes)
            for page in self.page_bytes
            for size in self.room_bytes
        ]


@dataclass
class Figures:
    """One way at one concurrency."""

    way: str
    concurrency: int
    rooms: int  # of all rounds
    gigabytes_per_second: float
    rooms_per_second: float
    p50_ms: float
    p99_ms: float
    rounds: list[float]  # GB/s of each
    parents: float = 0.0  # processor seconds for each GB, both nodes together
    engines: float = 0.0


@dataclass
class Outcome:
    """One case: figures by way and concurrency, and the latency of rooms with one page, one at a time."""

    page_bytes: int
    planes: int
    pages: int
    room_bytes: int
    figures: list[Figures] = field(default_factory=list)
    one_page: Figures | None = None
    parts: dict[str, float] = field(default_factory=dict)  # GB/s of each part of the engines' work, where it runs
    rooms_checked_whole: int = 0
    cells_checked: int = 0
    transfers_checked: int = 0  # of plain NIXL

    def of(self, way: str, concurrency: int) -> Figures:
        return next(f for f in self.figures if (f.way, f.concurrency) == (way, concurrency))


@dataclass
class Result:
    """Everything, as it goes into the JSON file."""

    options: dict[str, Any]
    machine: dict[str, Any]
    outcomes: list[Outcome] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Rounds:
    """What was seen of one way at one concurrency, round by round."""

    seconds: list[float] = field(default_factory=list)
    each: list[float] = field(default_factory=list)
    parents: float = 0.0
    engines: float = 0.0

    def add(self, seconds: float, each: Sequence[float]) -> None:
        self.seconds.append(seconds)
        self.each.extend(each)

    def figures(self, way: str, concurrency: int, count: int, room_bytes: int) -> Figures:
        rates = [count / s for s in self.seconds]
        p50, p99 = (float(np.percentile(self.each, p)) * 1e3 for p in (50, 99))
        rate = statistics.median(rates)
        return Figures(
            way,
            concurrency,
            len(self.each),
            rate * room_bytes / 1e9,
            rate,
            p50,
            p99,
            [r * room_bytes / 1e9 for r in rates],
            self.parents / (len(self.each) * room_bytes / 1e9),
            self.engines / (len(self.each) * room_bytes / 1e9),
        )


async def run(options: Options, say: Callable[[str], None]) -> Result:
    """Measure. Raises BenchError or DemoError with what went wrong; nothing stays behind in any case."""
    result = Result(asdict(options), machine(options.tls))
    sidecars = Sidecars(options.tls)
    try:
        say("two sidecars start")
        await sidecars.start()
        result.machine["nixl"] = (await sidecars.status("p"))["engine"]["nixl"]
        result.machine["slot_bytes"] = (await sidecars.status("p"))["engine"]["slot_bytes"]
        for number, case in enumerate(options.cases()):
            result.outcomes.append(await _Measurement(options, case, number, sidecars, say).run())
    finally:
        problems = await sidecars.close()
    if problems:
        raise BenchError("; ".join(problems))
    return result


class _Measurement:
    """One case: four processes beside the sidecars."""

    def __init__(
        self, options: Options, case: Case, number: int, sidecars: Sidecars, say: Callable[[str], None]
    ) -> None:
        self.options = options
        self.case = case
        self.name = f"b{number}"
        self.sidecars = sidecars
        self.say = say
        self.children: list[Child] = []
        self.serial = 0
        self.outcome = Outcome(case.page_bytes, case.planes, case.pages, case.room_bytes)

    async def run(self) -> Outcome:
        try:
            await asyncio.to_thread(self._start)
            await asyncio.to_thread(self._measure)
        finally:
            for child in self.children:
                child.close()
        return self.outcome

    def _start(self) -> None:
        self.say("workers attach, plain NIXL connects")
        environment = EngineSettings(tls=self.options.tls).environment()
        if self.options.tls:
            environment["UCX_TLS"] = self.options.tls
        self.prefill = self._child("the prefill worker", rooms.prefill, self.sidecars.socket("p"))
        self.decode = self._child("the decode worker", rooms.decode, self.sidecars.socket("d"))
        pools = self.prefill.answer(START), self.decode.answer(START)
        self.spinning = self._pair("plain NIXL's {}", plain.SPINNING, pools, environment)
        self.default = self._pair("plain NIXL's {} with a progress thread", plain.DEFAULT, pools, environment)

    def _pair(self, name: str, kind: bool, pools: tuple[Any, Any], environment: dict[str, str]) -> tuple[Child, Child]:
        """Target and initiator, connected and paused."""
        target = self._child(name.format("target"), plain.target, kind, *pools, environment=environment)
        hello = target.answer(START)
        initiator = self._child(name.format("initiator"), plain.initiator, kind, *pools, hello, environment=environment)
        initiator.answer(START)
        target.pause()
        initiator.pause()
        return target, initiator

    def _child(
        self, name: str, entry: Callable[..., None], *arguments: Any, environment: dict[str, str] | None = None
    ) -> Child:
        child = Child(name, entry, self.case, *arguments, environment=environment)
        self.children.append(child)
        return child

    def _measure(self) -> None:
        seen = {(way, c): Rounds() for way in WAYS for c in self.options.concurrency}
        count = self.options.rooms or -(-self.options.batch_bytes // self.case.room_bytes)
        before = {node: self.sidecars.counters(node) for node in "pd"}
        for way, concurrency in seen:  # connections, descriptors and first touches are not the steady state
            self._batch(way, concurrency, concurrency, self.case.pages, Rounds())
        for turn in range(self.options.rounds):
            for (way, concurrency), into in seen.items():
                self.say(f"{self._title()}, round {turn + 1} of {self.options.rounds}: {way}, {concurrency} at a time")
                self._batch(way, concurrency, count, self.case.pages, into)
        for (way, concurrency), found in seen.items():
            per_round = len(found.each) // len(found.seconds)
            self.outcome.figures.append(found.figures(way, concurrency, per_round, self.case.room_bytes))
        one = Rounds()
        self._batch("pdxfer", 1, ONE_PAGE_ROOMS, 1, one)
        self.outcome.one_page = one.figures("pdxfer", 1, len(one.each), self.case.page_bytes * self.case.planes)
        time.sleep(COUNTERS_LATE)
        self.outcome.parts = _parts(before, {node: self.sidecars.counters(node) for node in "pd"})

    def _batch(self, way: str, lanes: int, count: int, pages: int, into: Rounds) -> None:
        """Run one. Raises BenchError that says which it was, and which of its processes live."""
        self.serial += 1
        batch = Batch(f"{self.name}-{self.serial}", lanes, rooms_each(count, lanes), pages)
        plain_pair = self.default if way == WAYS[2] else self.spinning
        pair = (self.prefill, self.decode) if way == WAYS[0] else plain_pair
        try:
            if way == "pdxfer":
                self._rooms(batch, into)
            else:
                self._plain(plain.Order(batch, way != WAYS[1]), *pair, into)
        except BenchError as error:
            what = way if way == "pdxfer" else f"plain NIXL, {way}"
            states = ", ".join(child.state for child in pair)
            raise BenchError(f"{what}, {lanes} at a time, {self._title()}: {error} ({states})") from error

    def _plain(self, order: plain.Order, target: Child, initiator: Child, into: Rounds) -> None:
        target.resume()
        initiator.resume()
        target.ask(order, PATIENCE)
        measured: plain.Measured = initiator.ask(order, PATIENCE)
        wrong = target.ask(plain.Check(order), PATIENCE)
        if wrong:
            raise BenchError(f"{wrong} transfers are not at the target as they are at the source")
        target.pause()  # a progress thread burns a core for as long as it lives
        initiator.pause()
        self.outcome.transfers_checked += order.batch.lanes
        into.add(measured.seconds, measured.each)

    def _rooms(self, batch: Batch, into: Rounds) -> None:
        parents, engines = self.sidecars.processor_seconds()
        self.decode.tell(batch)
        self.prefill.tell(batch)
        received: rooms.Received = self.decode.answer(PATIENCE)
        sent: rooms.Sent = self.prefill.answer(PATIENCE)
        after = self.sidecars.processor_seconds()
        into.parents += after[0] - parents
        into.engines += after[1] - engines
        self.outcome.rooms_checked_whole += batch.lanes
        self.outcome.cells_checked += received.cells
        began = np.maximum(sent.asked, received.asked)  # one side may be ready long before the other
        into.add(float(received.ended.max() - began.min()), (received.ended - began).ravel().tolist())

    def _title(self) -> str:
        return f"pages of {self.case.page_bytes} bytes, rooms of {self.case.room_bytes / 2**20:g} MiB"


def _parts(before: dict[str, dict[str, float]], after: dict[str, dict[str, float]]) -> dict[str, float]:
    """How fast each part of the engines' work was, while it ran, in GB/s."""

    def rate(node: str, moved: str, seconds: str) -> float:
        gained = [after[node].get(name, 0.0) - before[node].get(name, 0.0) for name in (moved, seconds)]
        return gained[0] / 1e9 / gained[1] if gained[1] > 0 else 0.0

    return {
        "gather": rate("p", "bytes_sent", "gather_seconds"),
        "digest": rate("p", "bytes_sent", "digest_seconds"),
        "digest again": rate("d", "bytes_scattered", "digest_seconds"),
        "scatter": rate("d", "bytes_scattered", "scatter_seconds"),
    }


def machine(tls: str) -> dict[str, Any]:
    """What figures depend on. The load before the start tells whether the machine was busy with something else."""
    try:
        models = [
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ]
    except OSError:
        models = []
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "pdxfer": pdxfer.__version__,
        "tls": tls or "chosen by UCX",
        "load_before": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%d"),
    }
