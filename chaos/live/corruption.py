"""The original corruption, before and after: requests with shared prefixes through the host mirror of one real sidecar.

Owns: the requests, what counts as wrong, the table. Must not: be a scenario; it is one experiment, at several concurrencies.

"before" is two mutants: a mirror that is sized for fp8 index keys whatever the device holds, and a mirror of the right size without
the ledger. "after" is the product, and "off" the product without a mirror. Each request looks its prompt up, loads what is there,
computes the rest, and is then compared with what the prompt's keys and values truly are: byte for byte, and by the 512 tokens that
sparse attention selects. A build's digest of an entry would notice both bugs; the system that had them had none, so the mutants have none.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
from rich import box
from rich.table import Table

from pdxfer.client import AsyncClient, PdxferRefused
from pdxfer.demo.processes import Manager, Spec
from pdxfer.demo.system import free_ports, short_directory, toml
from pdxfer.pools import PoolLayout, SharedPool
from pdxfer.pools.dsa import Floats, IndexFormat, IndexPlane, index_scores, top_k

from .world import START_DEADLINE

BUILDS = {"off": "", "sized for fp8": "mirror_sized_for_fp8", "no ledger": "mirror_without_ledger", "after": ""}
DTYPES = ("bf16", "fp8")
PAGE = 64  # tokens of a page, and of the mirror's blocks
BLOCKS = 20  # of a prompt: 1280 tokens, of which 512 are selected
SHARED = 15  # blocks that all prompts of a family begin with
FAMILIES, VARIANTS = 12, 3
LAYERS = 2
HEADS = 4
KV_BYTES = 4096  # of a page in one plane
ENTRIES = 240  # of the mirror: two thirds of all blocks that there are, so that it must evict
TOP = 512
MODEL = "corruption"

Bytes = npt.NDArray[np.uint8]


@dataclass
class Outcome:
    """The requests of one build, index-K format and concurrency."""

    build: str
    dtype: str
    concurrency: int
    requests: int = 0
    reused: int = 0  # blocks that were loaded
    wrong_bytes: int = 0  # requests
    wrong_top: int = 0  # requests whose selected tokens differ
    noticed: int = 0  # loads that ended as mirror_corrupt

    @property
    def wrong(self) -> bool:
        return bool(self.wrong_bytes or self.wrong_top)


async def compare(
    builds: Sequence[str], dtypes: Sequence[str], concurrency: Sequence[int], requests: int, found: list[Outcome], say: Callable[[str], None]
) -> None:  # fmt: skip
    """Raises DemoError when a sidecar does not come up."""
    for dtype in dtypes:
        for build in builds:
            for n in concurrency:
                outcome = await one(build, dtype, n, requests)
                found.append(outcome)
                say(
                    f"{build}, {dtype}, C={n}: {outcome.wrong_bytes} of {outcome.requests} requests with wrong bytes,"
                    f" {outcome.wrong_top} with another top-{TOP} set; {outcome.reused} blocks reused"
                )


async def one(build: str, dtype: str, concurrency: int, requests: int) -> Outcome:
    """A sidecar of its own, and so many requests, so many of them at a time."""
    outcome = Outcome(build, dtype, concurrency)
    form = IndexFormat(dtype, PAGE)  # type: ignore[arg-type]
    kv = SharedPool.allocate(PoolLayout("kv", "uint8", (KV_BYTES,), PAGE, LAYERS), concurrency * BLOCKS)
    index = SharedPool.allocate(form.layout(LAYERS), concurrency * BLOCKS)
    directory = short_directory("pdxfer-corruption-")
    manager = Manager(directory)
    try:
        socket = await _sidecar(manager, directory, build, LAYERS * (KV_BYTES + form.page_bytes))
        async with await AsyncClient.connect(socket, "corruption", "both", [kv, index], wait=True) as client:
            run = _Run(client, kv, index, form, outcome, build != "off")
            numbers = iter(range(requests))
            scattered = np.random.default_rng(3).permutation(kv.num_pages).reshape(concurrency, BLOCKS)
            await asyncio.gather(*(run.lane(table, numbers) for table in scattered))
    finally:
        await manager.stop()
        shutil.rmtree(directory)
    return outcome


async def _sidecar(manager: Manager, directory: Path, build: str, entry_bytes: int) -> str:
    (port,) = free_ports(1)
    mirror = 0 if build == "off" else ENTRIES * (-(-entry_bytes // 4096) * 4096)
    tables: dict[str, dict[str, Any]] = {
        "node": {"name": "m", "runtime_dir": str(directory / "m")},
        "worker": {"socket": str(directory / "m.sock")},
        "admin": {"port": port},
        "bootstrap": {"listen": "tcp://127.0.0.1:*"},
        "engine": {"tls": "tcp", "slot_bytes": 64 << 10, "send_slots": 2, "recv_slots": 2, "copy_threads": 2},
        "mirror": {"bytes": mirror, "block_tokens": PAGE},
        "limits": {"local_chunk": 2 * entry_bytes},  # copies of two blocks each, so that operations interleave
    }
    config = directory / "m.toml"
    config.write_text(toml(tables), encoding="utf-8")
    mutant = ("-m", "pdxfer.chaos.mutants", BUILDS[build]) if BUILDS[build] else ("-m", "pdxfer")

    async def ready() -> str:
        try:
            async with httpx.AsyncClient(timeout=2.0) as http:
                answer = await http.get(f"http://127.0.0.1:{port}/readyz")
        except httpx.HTTPError as error:
            return str(error) or type(error).__name__
        return "" if answer.status_code == 200 else answer.text

    spec = Spec("sidecar m", (sys.executable, *mutant, "serve", "--config", str(config)), ready)
    await manager.start(spec)
    await manager.wait_ready([spec.name], START_DEADLINE)
    return str(directory / "m.sock")


class _Run:
    def __init__(
        self, client: AsyncClient, kv: SharedPool, index: SharedPool, form: IndexFormat, outcome: Outcome, mirror: bool
    ) -> None:
        self.client, self.form, self.outcome, self.mirror = client, form, outcome, mirror
        self.kv = kv.pages()
        self.index = index.pages()

    async def lane(self, table: npt.NDArray[np.int64], numbers: Any) -> None:
        """One request after the other, in pages of its own."""
        for number in numbers:
            await self._request(table, number)

    async def _request(self, table: npt.NDArray[np.int64], number: int) -> None:
        draw = np.random.default_rng(number)
        family, variant = int(draw.integers(FAMILIES)), int(draw.integers(VARIANTS))
        tokens = np.repeat([_block(family, variant, i) for i in range(BLOCKS)], PAGE)
        for plane in (*self.kv, *self.index):
            plane[table] = 0xEE  # what another request has left there
        held = await self._load(tokens, table) if self.mirror else 0
        for i in range(held, BLOCKS):
            self._compute(_block(family, variant, i), int(table[i]))
        await asyncio.sleep(0)
        self._judge(family, variant, table)
        if self.mirror:
            await self._store(tokens, table)

    async def _load(self, tokens: Any, table: npt.NDArray[np.int64]) -> int:
        held = await self.client.lookup(MODEL, tokens)
        if not held.blocks:
            return 0
        try:
            end = await (await self.client.load(held.lease, table[: held.blocks], held.blocks)).ended()
        except PdxferRefused as error:
            if error.code != "mirror_miss":
                raise
            return 0
        finally:
            await self.client.unpin(held.lease)
        self.outcome.noticed += end.reason == "mirror_corrupt"
        self.outcome.reused += end.blocks
        return end.blocks

    async def _store(self, tokens: Any, table: npt.NDArray[np.int64]) -> None:
        try:
            await (await self.client.store(MODEL, tokens, table)).ended()
        except PdxferRefused as error:
            if error.code != "mirror_full":
                raise

    def _compute(self, block: int, page: int) -> None:
        """What prefill does."""
        for layer in range(LAYERS):
            kv, keys = _content(block, layer, self.form.dtype)
            self.kv[layer][page] = kv
            self.index[layer][page] = keys

    def _judge(self, family: int, variant: int, table: npt.NDArray[np.int64]) -> None:
        outcome = self.outcome
        outcome.requests += 1
        blocks = [_block(family, variant, i) for i in range(BLOCKS)]
        same = all(
            np.array_equal(self.kv[layer][page], _content(block, layer, self.form.dtype)[0])
            and np.array_equal(self.index[layer][page], _content(block, layer, self.form.dtype)[1])
            for block, page in zip(blocks, table, strict=True)
            for layer in range(LAYERS)
        )
        outcome.wrong_bytes += not same
        chosen = [
            _selected(IndexPlane(self.index[layer], self.form).read(table, BLOCKS * PAGE)) for layer in range(LAYERS)
        ]
        outcome.wrong_top += chosen != _truth(family, variant, self.form.dtype)


def _block(family: int, variant: int, i: int) -> int:
    """What tells one block of one prompt from every other: also its token id."""
    return family * 1000 + (0 if i < SHARED else 100 * (variant + 1)) + i


@cache
def _content(block: int, layer: int, dtype: str) -> tuple[Bytes, Bytes]:
    """KV bytes and stored index keys of a block in one layer."""
    draw = np.random.default_rng((block, layer))
    form = IndexFormat(dtype, PAGE)  # type: ignore[arg-type]
    keys = draw.standard_normal((PAGE, form.dim), np.float32)
    page = np.zeros((1, form.page_bytes), np.uint8)
    IndexPlane(page, form).write(np.zeros(1, np.int64), 0, keys)
    return draw.integers(0, 256, KV_BYTES, np.uint8), page[0]


@lru_cache(maxsize=1)
def _query() -> tuple[Floats, Floats]:
    draw = np.random.default_rng(11)
    return draw.standard_normal((1, HEADS, 128)).astype(np.float32), draw.random((1, HEADS)).astype(np.float32)


def _selected(keys: Floats) -> list[int]:
    with np.errstate(over="ignore", invalid="ignore"):  # what is no key may be any number
        return [int(n) for n in top_k(index_scores(*_query(), keys)[0], TOP)]


@cache
def _truth(family: int, variant: int, dtype: str) -> list[list[int]]:
    form = IndexFormat(dtype, PAGE)  # type: ignore[arg-type]
    found = []
    for layer in range(LAYERS):
        pages = np.stack([_content(_block(family, variant, i), layer, dtype)[1] for i in range(BLOCKS)])
        found.append(_selected(IndexPlane(pages, form).read(np.arange(BLOCKS), BLOCKS * PAGE)))
    return found


def as_expected(found: Sequence[Outcome]) -> bool:
    """The product, with and without a mirror, is never wrong; and each bug shows somewhere where it was run against bf16."""
    right = all(not o.wrong for o in found if not BUILDS[o.build])
    bugs = {o.build for o in found if BUILDS[o.build] and o.dtype == "bf16"}
    return (
        bool(found)
        and right
        and all(any(o.wrong for o in found if o.build == bug and o.dtype == "bf16") for bug in bugs)
    )


def table(found: Sequence[Outcome]) -> Table:
    """A row for each build and format, a column for each concurrency: requests that were wrong."""
    counts = sorted({o.concurrency for o in found})
    result = Table(box=box.SIMPLE_HEAD)
    for name in ("index-K", "mirror"):
        result.add_column(name)
    for n in counts:
        result.add_column(f"C={n}: bytes / top-{TOP}", justify="right")
    result.add_column("blocks reused", justify="right")
    for dtype in DTYPES:
        for build in BUILDS:
            row = {o.concurrency: o for o in found if (o.build, o.dtype) == (build, dtype)}
            if row:
                cells = [
                    f"{100 * o.wrong_bytes / o.requests:.1f} % / {100 * o.wrong_top / o.requests:.1f} %" if (o := row.get(n)) else ""
                    for n in counts
                ]  # fmt: skip
                result.add_row(dtype, build, *cells, str(sum(o.reused for o in row.values())))
    return result


def write_json(path: Path, found: Sequence[Outcome]) -> None:
    text = json.dumps({"as_expected": as_expected(found), "outcomes": [asdict(o) for o in found]}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")
