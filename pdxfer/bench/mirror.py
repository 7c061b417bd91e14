"""The measurement of the host mirror: stores and loads through a real sidecar against one memcpy of the same bytes, lookups, and
what the index takes for each entry.

Owns: which batch runs when, and its figures. Must not: print.

All three take turns over the same pages, round after round. A batch's blocks are new to the mirror when they are stored, and after
each batch every byte of each lane's last load is compared.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pdxfer.client import AsyncClient, MirrorEnd, PdxferError
from pdxfer.core.mirror import MirrorIndex, prefix_keys
from pdxfer.core.reasons import Refused
from pdxfer.engine.copy import digest
from pdxfer.pools import PoolLayout, SharedPool

from .child import BenchError
from .run import COUNTERS_LATE, machine
from .sidecars import Sidecars

BLOCK = 64  # tokens, and of a page: a block is one page of each plane
LOOKUP_TOKENS = 128 * 1024
LOOKUPS = 50
MODEL = "bench"
WAYS = ("store", "load", "memcpy")


@dataclass(frozen=True)
class Options:
    """What the command line says. Sizes are bytes."""

    page_bytes: tuple[int, ...] = (8 << 10, 72 << 10)
    planes: int = 32
    operation_bytes: int = 8 << 20
    concurrency: tuple[int, ...] = (1, 80)
    operations: int = 0  # of a batch; 0: as many as make batch_bytes
    batch_bytes: int = 512 << 20
    rounds: int = 3
    index_entries: int = 1_000_000

    def cases(self) -> list[_Case]:
        found = []
        for page_bytes in self.page_bytes:
            blocks = max(1, round(self.operation_bytes / (page_bytes * self.planes)))
            size = blocks * page_bytes * self.planes
            operations = max(2, *self.concurrency, self.operations or round(self.batch_bytes / size))
            found.append(_Case(page_bytes, self.planes, blocks, operations))
        return found


@dataclass
class Figures:
    """One way at one concurrency: the median round's rate, percentiles over the operations of all rounds."""

    way: str  # store, load or memcpy
    concurrency: int
    gigabytes_per_second: float
    p50_ms: float
    p99_ms: float
    of_memcpy: float  # of the same concurrency


@dataclass
class Outcome:
    page_bytes: int
    planes: int
    blocks: int  # of an operation
    entry_bytes: int
    figures: list[Figures] = field(default_factory=list)
    digest_gigabytes_per_second: float = 0.0
    engine: dict[str, float] = field(
        default_factory=dict
    )  # GB/s of stores and loads in the engine alone, where they run
    blocks_checked: int = 0


@dataclass
class Result:
    machine: dict[str, Any]
    outcomes: list[Outcome] = field(default_factory=list)
    lookup: dict[str, float] = field(default_factory=dict)
    index: dict[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class _Case:
    page_bytes: int
    planes: int
    blocks: int
    operations: int  # of a batch

    @property
    def entry_bytes(self) -> int:
        return self.page_bytes * self.planes


async def run(options: Options, say: Callable[[str], None]) -> Result:
    """Raises BenchError or DemoError."""
    result = Result(await asyncio.to_thread(machine, ""))
    try:
        for case in options.cases():
            result.outcomes.append(await _measure(case, options, say))
    except (PdxferError, Refused) as error:
        raise BenchError(f"{error}; a smaller --operation-bytes or --concurrency takes less memory") from None
    say("lookups")
    result.lookup = await asyncio.to_thread(_lookups, options.index_entries)
    say(f"an index of {options.index_entries} entries")
    result.index = await asyncio.to_thread(_index, options.index_entries)
    return result


async def _measure(case: _Case, options: Options, say: Callable[[str], None]) -> Outcome:
    stride = -(-case.entry_bytes // 4096) * 4096
    sidecars = Sidecars("")
    outcome = Outcome(case.page_bytes, case.planes, case.blocks, case.entry_bytes)
    lanes = max(options.concurrency)
    layout = PoolLayout("kv", "uint8", (case.page_bytes,), BLOCK, case.planes)
    pool = SharedPool.allocate(layout, (lanes + 1) * case.blocks)
    try:
        say(f"starting a sidecar for pages of {case.page_bytes} bytes")
        mirror = case.operations * case.blocks * stride
        await sidecars.alone("--mirror-bytes", str(mirror), "--mirror-block-tokens", str(BLOCK))
        async with await AsyncClient.connect(sidecars.socket("p"), "bench", "both", [pool], wait=True) as client:
            bench = _Bench(client, pool, case, lanes)
            bench.fill()
            for concurrency in options.concurrency:
                say(f"pages of {case.page_bytes} bytes, {concurrency} at a time")
                outcome.figures += await bench.measure(concurrency, options.rounds)
            outcome.blocks_checked = bench.checked
        await asyncio.sleep(COUNTERS_LATE)
        counted = await asyncio.to_thread(sidecars.counters, "p")
        for kind, past in (("store", "stored"), ("load", "loaded")):
            outcome.engine[kind] = counted[f"mirror_bytes_{past}"] / counted[f"mirror_{kind}_seconds"] / 1e9
        outcome.digest_gigabytes_per_second = _digest_rate(case)
    finally:
        await sidecars.close()
    return outcome


class _Bench:
    """``source``: the pages that are stored; each lane loads into pages of its own."""

    def __init__(self, client: AsyncClient, pool: SharedPool, case: _Case, lanes: int) -> None:
        self.client, self.pool, self.case = client, pool, case
        self.round = 0
        self.checked = 0
        order = np.random.default_rng(7).permutation(pool.num_pages).reshape(lanes + 1, case.blocks)
        self.source, self.targets = order[0], order[1:]
        self._from = np.ones(case.blocks * case.entry_bytes, np.uint8)
        self._to = np.zeros((case.operations, self._from.size), np.uint8)

    def fill(self) -> None:
        rng = np.random.default_rng(8)
        for view in self.pool.pages():
            view[:] = rng.integers(0, 256, view.shape, dtype=np.uint8)

    async def measure(self, concurrency: int, rounds: int) -> list[Figures]:
        rates: dict[str, list[float]] = {way: [] for way in WAYS}
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            self.round += 1
            await self.client.evict(MODEL)
            for way, one in (("store", self._store), ("load", self._load)):
                began = time.perf_counter()
                times[way] += await self._batch(one, concurrency)
                rates[way].append(self._to.size / (time.perf_counter() - began))
            self._check(concurrency)
            began = time.perf_counter()
            times["memcpy"] += self._memcpy()
            rates["memcpy"].append(self._to.size / (time.perf_counter() - began))
        plain = statistics.median(rates["memcpy"])
        return [
            Figures(
                way, concurrency, statistics.median(rates[way]) / 1e9, 1000 * float(np.percentile(times[way], 50)),
                1000 * float(np.percentile(times[way], 99)), statistics.median(rates[way]) / plain,
            )
            for way in WAYS
        ]  # fmt: skip

    async def _batch(self, one: Callable[[int, int], Awaitable[None]], concurrency: int) -> list[float]:
        """All operations of a batch, so many at a time."""
        numbers = iter(range(self.case.operations))
        times: list[float] = []

        async def run_lane(lane: int) -> None:
            for number in numbers:
                began = time.perf_counter()
                await one(lane, number)
                times.append(time.perf_counter() - began)

        await asyncio.gather(*(run_lane(lane) for lane in range(concurrency)))
        return times

    def _tokens(self, number: int) -> Any:
        """Of a prompt that is like no other of this run."""
        return np.repeat(np.arange(self.case.blocks) + (self.round * self.case.operations + number) * 10_000, BLOCK)

    async def _store(self, lane: int, number: int) -> None:
        self._must(await (await self.client.store(MODEL, self._tokens(number), self.source)).ended())

    async def _load(self, lane: int, number: int) -> None:
        held = await self.client.lookup(MODEL, self._tokens(number))
        if held.blocks != self.case.blocks:
            raise BenchError(f"the mirror holds {held.blocks} of {self.case.blocks} blocks that were stored")
        end = await (await self.client.load(held.lease, self.targets[lane], held.blocks)).ended()
        await self.client.unpin(held.lease)
        self._must(end)

    def _must(self, end: MirrorEnd) -> None:
        if not end.done or end.blocks != self.case.blocks:
            kind = "load" if end.loading else "store"
            raise BenchError(f"a {kind} ended {end.reason} with {end.blocks} blocks: {end.detail}")

    def _check(self, concurrency: int) -> None:
        """Every byte of every lane's last load; then the pages are made different again."""
        for target in self.targets[:concurrency]:
            for view in self.pool.pages():
                if not np.array_equal(view[target], view[self.source]):
                    raise BenchError("a load brought other bytes than were stored")
                view[target] = 0
            self.checked += len(target)

    def _memcpy(self) -> list[float]:
        """As many bytes, each operation's in one piece."""
        times = []
        for place in self._to:
            began = time.perf_counter()
            np.copyto(place, self._from)
            times.append(time.perf_counter() - began)
        return times


def _digest_rate(case: _Case) -> float:
    """GB/s of an entry's digest, its bytes being in no cache before."""
    data = np.random.default_rng(9).integers(
        0, 256, (max(2, (256 << 20) // case.entry_bytes), case.entry_bytes), np.uint8
    )
    began = time.perf_counter()
    for entry in data:
        digest(entry)
    return float(data.size / (time.perf_counter() - began) / 1e9)


def _lookups(entries: int) -> dict[str, float]:
    """Of a prompt that is there from its beginning to its end, in an index with others. Milliseconds."""
    index = MirrorIndex(entries)
    prompt = np.arange(LOOKUP_TOKENS, dtype="<u4").tobytes()
    _fill(index, prefix_keys(prompt, BLOCK))
    _fill(index, [n.to_bytes(16, "little") for n in range(entries // 2)])
    hashed, found = [], []
    for _ in range(LOOKUPS):
        began = time.perf_counter()
        keys = prefix_keys(prompt, BLOCK)
        between = time.perf_counter()
        held = index.find("", keys)
        index.touch(held)
        hashed.append(between - began)
        found.append(time.perf_counter() - between)
    if len(held) != LOOKUP_TOKENS // BLOCK:
        raise BenchError(f"a lookup found {len(held)} of {LOOKUP_TOKENS // BLOCK} blocks")
    whole = [a + b for a, b in zip(hashed, found, strict=True)]
    return {
        "tokens": LOOKUP_TOKENS, "blocks": len(held), "hash_p50_ms": _ms(hashed, 50), "find_p50_ms": _ms(found, 50),
        "p50_ms": _ms(whole, 50), "p99_ms": _ms(whole, 99),
    }  # fmt: skip


def _index(entries: int) -> dict[str, float]:
    """What the books of a full index take, and after as many evictions again. Bytes for each entry."""
    gc.collect()
    before = _resident()
    index = MirrorIndex(entries)
    _fill(index, [n.to_bytes(16, "big") for n in range(entries)])
    full = _resident()
    _fill(index, [n.to_bytes(16, "big") for n in range(entries, 2 * entries)])
    churned = _resident()
    if index.counts[2] != entries or index.dropped["evicted"] != entries:
        raise BenchError(f"the index holds {index.counts[2]} of {entries} entries")
    return {
        "entries": entries,
        "bytes_per_entry": (full - before) / entries,
        "bytes_per_entry_after_churn": (churned - before) / entries,
    }


def _fill(index: MirrorIndex, keys: list[bytes]) -> None:
    for start in range(0, len(keys), 64):
        for _, entry in index.begin("", keys[start : start + 64]):
            index.filled(entry, 1)


def _resident() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


def _ms(seconds: list[float], percent: float) -> float:
    return 1000 * float(np.percentile(seconds, percent))
