"""For the engine's live tests: engine children with real NIXL, and the parent's part of a transfer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from pdxfer.core import jobs
from pdxfer.core.geometry import Piece
from pdxfer.core.messages import EngineInfo, Segment
from pdxfer.engine.child import EngineChild
from pdxfer.engine.settings import EngineSettings
from pdxfer.pools import PoolLayout, SharedPool

SMALL = EngineSettings(slot_bytes=1 << 20, send_slots=4, recv_slots=8)


class Handle:
    """An engine child, everything that it reported, and waiting for a report."""

    def __init__(self, node: str, settings: EngineSettings = SMALL, **options: Any) -> None:
        self.node = node
        self.reports: list[jobs.EngineReport] = []
        self.exits: list[str] = []
        self._event = asyncio.Event()
        self.child = EngineChild(settings, self._on_report, self._on_exit, **options)
        self.info: EngineInfo | None = None
        self.serial = 0

    def _on_report(self, report: jobs.EngineReport) -> None:
        assert not self.exits, f"{report} came after the end"
        self.reports.append(report)
        self._event.set()

    def _on_exit(self, detail: str) -> None:
        self.exits.append(detail)
        self._event.set()

    async def until(self, done: Callable[[], Any], timeout: float = 10.0) -> Any:
        deadline = time.monotonic() + timeout
        while True:
            found = done()
            if found:
                return found
            self._event.clear()
            left = deadline - time.monotonic()
            assert left > 0, (
                f"{self.node}: not within {timeout} s; exits {self.exits}, last reports {self.reports[-5:]}"
            )
            try:
                await asyncio.wait_for(self._event.wait(), min(left, 0.1))
            except TimeoutError:
                continue

    async def report(self, kind: type[Any], timeout: float = 10.0, **fields: Any) -> Any:
        """The newest report of this kind with these fields."""

        def find() -> Any:
            for report in reversed(self.reports):
                if isinstance(report, kind) and all(getattr(report, k) == v for k, v in fields.items()):
                    return report
            return None

        return await self.until(find, timeout)

    async def landed(self, segment: int, timeout: float = 10.0) -> jobs.Landed:
        def find() -> Any:
            return next((r for r in self.reports if isinstance(r, jobs.Landed) and r.segment.segment == segment), None)

        found: jobs.Landed = await self.until(find, timeout)
        return found

    async def start(self, incarnation: int = 1) -> EngineInfo:
        self.exits.clear()
        self.reports.clear()
        await self.child.start(self.node, 1, incarnation)
        self.info = (await self.report(jobs.Ready)).info
        return self.info

    async def ended(self, timeout: float = 10.0) -> str:
        await self.until(lambda: self.exits, timeout)
        return self.exits[0]

    async def map(self, worker: int, *pools: SharedPool) -> str:
        at, fds = [], []
        for pool in pools:
            at.append(pool.at(len(fds)))
            fds += pool.fds
        sizes = tuple(n for pool in pools for n in pool.fd_bytes)
        self.child.send(jobs.MapPools(worker, tuple(at), sizes), fds)
        return (await self.report(jobs.Mapped, worker=worker)).error

    async def add(self, info: EngineInfo) -> str:
        self.reports = [r for r in self.reports if not isinstance(r, jobs.PeerAdded)]
        self.child.send(jobs.AddPeer(info))
        return (await self.report(jobs.PeerAdded, agent=info.agent)).error

    def post(
        self, to: EngineInfo, rows: tuple[jobs.Rows, ...], size: int, *, slot: int = 0, recv: int = 0, worker: int = 1
    ) -> int:
        self.serial += 1
        segment = Segment("room", 0, self.serial, recv, 1, to.incarnation, size, 0, (Piece(0, 0, 1, 0, 1),))
        address = to.slot_base + recv * to.slot_bytes
        self.child.send(jobs.Send(self.serial, worker, rows, slot, size, to.agent, address, segment))
        return self.serial


def pool_of(page_bytes: int, pages: int, planes: int = 1, name: str = "kv", fill: int | None = None) -> SharedPool:
    pool = SharedPool.allocate(PoolLayout(name, "uint8", (page_bytes,), 16, planes=planes), pages)
    if fill is not None:
        rng = np.random.default_rng(fill)
        for view in pool.pages():
            view[:] = rng.integers(0, 256, view.shape, dtype=np.uint8)
    return pool


def table(pages: Any) -> bytes:
    return np.asarray(pages, "<u4").tobytes()


async def pair(settings: EngineSettings = SMALL) -> tuple[Handle, Handle]:
    """Two engines of which the first can send to the second."""
    p, d = Handle("p", settings), Handle("d", settings)
    await asyncio.gather(p.start(), d.start())
    assert p.info is not None and d.info is not None
    assert await p.add(d.info) == ""
    d.child.send(jobs.Expect(1))
    return p, d


async def close(*handles: Handle) -> None:
    for handle in handles:
        await handle.child.close(5.0)
