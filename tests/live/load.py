"""Rooms under load between two real sidecars, every byte checked, for live tests.

Owns: a pair of sidecars that know each other, a worker on each, and sessions that move rooms until they are stopped.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from pathlib import Path

import numpy as np
from sidecars import Sidecar

from pdxfer.bootstrap import keys
from pdxfer.client import AsyncClient, PdxferError, RoomEnd
from pdxfer.pools import PoolLayout, SharedPool

PAGES = 512
PER_ROOM = 24
LAYOUT = PoolLayout("kv", "uint8", (16 << 10,), page_tokens=16, planes=8)
PREFILL, DECODE = "prefill-0", "decode-0"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def pair(directory: Path, **settings: object) -> tuple[Sidecar, Sidecar]:
    """Sidecars p and d, with static entries for each other; not started."""
    made, ports = {n: keys.generate() for n in "pd"}, {n: free_port() for n in "pd"}
    both = []
    for name, other, engine in (("p", "d", DECODE), ("d", "p", PREFILL)):
        path = directory / f"{name}.key"
        keys.save(path, made[name])
        sidecar = Sidecar(directory, name, bootstrap__key_file=path, **settings)
        sidecar.keys["bootstrap.listen"] = f"tcp://127.0.0.1:{ports[name]}"
        sidecar.config = directory / f"{name}.toml"
        sidecar.config.write_text(
            f'[[registry.nodes]]\nnode = "{other}"\naddress = "tcp://127.0.0.1:{ports[other]}"\n'
            f"public_key = '{made[other].public}'\nengines = [\"{engine}\"]\n"
        )
        both.append(sidecar)
    return both[0], both[1]


class Load:
    """``concurrency`` sessions, each moving one room after the other from the prefill to the decode worker."""

    def __init__(self, p: Sidecar, d: Sidecar, concurrency: int) -> None:
        self.p, self.d = p, d
        self.concurrency = concurrency
        self.ends: list[tuple[float, RoomEnd]] = []  # when, and how: both sides of every room
        self.open: dict[tuple[str, bool], float] = {}
        self.wrong = 0
        self._number = 0
        self._stop = False
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Load:
        self.pools = SharedPool.allocate(LAYOUT, PAGES), SharedPool.allocate(LAYOUT, PAGES)
        self.views = tuple(pool.pages() for pool in self.pools)
        self.free = tuple(list(range(PAGES)) for _ in range(2))
        self.prefill = await AsyncClient.connect(
            self.p.socket, engine_id=PREFILL, role="prefill", pools=[self.pools[0]]
        )
        self.decode = await AsyncClient.connect(self.d.socket, engine_id=DECODE, role="decode", pools=[self.pools[1]])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        await self.prefill.close()
        await self.decode.close()

    def start(self) -> None:
        self._stop = False
        self._tasks = [asyncio.create_task(self._session()) for _ in range(self.concurrency)]

    async def stop(self) -> None:
        """No new rooms; returns when every room has ended."""
        self._stop = True
        await asyncio.gather(*self._tasks)
        self._tasks = []

    async def _session(self) -> None:
        while not self._stop:
            try:
                await self.room()
            except PdxferError:
                await asyncio.sleep(0.05)  # the sidecar is away: the client attaches again by itself

    async def room(self) -> tuple[RoomEnd, RoomEnd]:
        """Move one room; both ends."""
        self._number += 1
        name = f"room-{self._number}"
        while min(map(len, self.free)) < PER_ROOM:
            await asyncio.sleep(0.01)
        mine, theirs = ([free.pop() for _ in range(PER_ROOM)] for free in self.free)
        try:
            return await self._move(name, self._number, mine, theirs)
        finally:
            self.free[0].extend(mine)
            self.free[1].extend(theirs)

    async def _move(self, name: str, seed: int, mine: list[int], theirs: list[int]) -> tuple[RoomEnd, RoomEnd]:
        data = np.random.default_rng(seed).integers(
            0, 256, (LAYOUT.planes, PER_ROOM, LAYOUT.spec().page_bytes), np.uint8
        )
        for plane, rows in zip(self.views[0], data, strict=True):
            plane[mine] = rows
        for plane in self.views[1]:
            plane[theirs] = 0
        receive = await self.decode.receive(name, source=PREFILL, pages=theirs)
        self.open[name, False] = time.monotonic()
        try:
            send = await self.prefill.open(name)
        except PdxferError:
            await receive.abort("prefill could not open it")
            self._note(await receive.ended())
            raise
        self.open[name, True] = time.monotonic()
        try:
            await send.push(mine[: PER_ROOM // 2])
            await send.push(mine[PER_ROOM // 2 :])
            await send.finish(b"first token")
        except PdxferError:
            pass_on = await send.ended()  # it ended while we pushed: its end says why
            assert not pass_on.done
        ends = await asyncio.gather(send.ended(), receive.ended())
        for end in ends:
            self._note(end)
        if ends[1].done:
            assert ends[1].aux == b"first token"
            same = all(np.array_equal(plane[theirs], rows) for plane, rows in zip(self.views[1], data, strict=True))
            self.wrong += not same
        return ends

    def _note(self, end: RoomEnd) -> None:
        del self.open[end.room, end.sending]
        self.ends.append((time.monotonic(), end))

    def done(self, since: float = 0.0) -> int:
        return sum(end.done for at, end in self.ends if at >= since)

    def reasons(self, since: float = 0.0) -> Counter[str]:
        return Counter(end.reason for at, end in self.ends if at >= since)

    def home(self) -> str:
        """What is not at its baseline, or "" ."""
        for sidecar in (self.p, self.d):
            status = sidecar.status()
            live = sum(sum(states.values()) for states in status["rooms_by_state"].values())
            slots = {k: v for side in status["slots"].values() for k, v in side.items() if k != "free" and v}
            pages = {k: v for k, v in status["pages"].items() if k != "home" and v}
            if live or slots or pages or not status["ready"]:
                return f"{sidecar.name}: rooms {live}, slots {slots}, pages {pages}, not ready for {status['reasons']}"
        return ""
