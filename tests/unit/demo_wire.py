"""Two sidecars in one process for tests of the demo's workers: rooms are matched and pages copied in the event loop.

It keeps AsyncClient's interface and promises (one end for each room; pages untouched after it) and can be told to fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from pdxfer.client import PdxferRefused, RoomEnd, SidecarUnavailable
from pdxfer.core.reasons import ENDS
from pdxfer.pools import SharedPool

Key = tuple[str, int]


async def until(reached: Callable[[], object]) -> None:
    """Wait until it is true. The test's own deadline ends it."""
    while True:
        if reached():
            return
        await asyncio.sleep(0.002)


class Wire:
    """What joins the sidecars. ``delay`` seconds pass before the bytes of a room move."""

    def __init__(self, delay: float = 0.0) -> None:
        self.delay = delay
        self.damage = False  # turn a bit of the last page of each pool on its way
        self.ended: set[Key] = set()
        self.sends: dict[Key, Side] = {}
        self.receives: dict[Key, Side] = {}
        self.moved = 0
        self.pushes: dict[Key, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def look(self, key: Key) -> None:
        send, receive = self.sends.get(key), self.receives.get(key)
        if send is not None and receive is not None and send.finished and not send.moving:
            send.moving = True
            task = asyncio.create_task(self._move(key, send, receive))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _move(self, key: Key, send: Side, receive: Side) -> None:
        await asyncio.sleep(self.delay)
        if send.end is not None or receive.end is not None:
            return
        source = [page for pages in send.pushed for page in pages]
        if len(source) != len(receive.pages):
            self.finish(key, "page_count_mismatch", f"{len(source)} pages pushed, {len(receive.pages)} asked for")
            return
        for a, b in zip(send.client.pools, receive.client.pools, strict=True):
            for from_plane, to_plane in zip(a.pages(), b.pages(), strict=True):
                to_plane[receive.pages] = from_plane[source]
            if self.damage:
                b.pages()[0][receive.pages[-1], 7] ^= 1
        self.moved += 1
        self.pushes[key] = len(send.pushed)
        self.finish(key, "done", "")

    def finish(self, key: Key, reason: str, detail: str) -> None:
        self.ended.add(key)
        send = self.sends.pop(key, None)
        receive = self.receives.pop(key, None)
        aux = send.aux if send is not None else b""
        for side in (send, receive):
            if side is not None:
                side.over(reason, detail, b"" if side.sending else aux)


class Side:
    def __init__(self, client: FakeSidecar, key: Key, sending: bool, pages: list[int]) -> None:
        self.client = client
        self.key = key
        self.sending = sending
        self.pages = pages
        self.pushed: list[list[int]] = []
        self.finished = self.moving = False
        self.aux = b""
        self.end: RoomEnd | None = None
        self._ended = asyncio.Event()

    async def push(self, pages: list[int]) -> int:
        self._must_be_open()
        self.pushed.append(list(pages))
        await asyncio.sleep(0)
        return len(self.pushed)

    async def finish(self, aux: bytes) -> None:
        self._must_be_open()
        self.aux = aux
        self.finished = True
        self.client.wire.look(self.key)

    async def released(self, push: int) -> None:
        await self._ended.wait()

    async def ended(self) -> RoomEnd:
        await self._ended.wait()
        assert self.end is not None
        return self.end

    async def abort(self, detail: str = "") -> None:
        await self.client.abort(*self.key, detail)

    def over(self, reason: str, detail: str, aux: bytes) -> None:
        known = ENDS[reason]
        room, epoch = self.key
        self.end = RoomEnd(room, epoch, self.sending, known.state, reason, known.retriable, detail, aux=aux)
        self._ended.set()

    def _must_be_open(self) -> None:
        if self.end is not None:
            raise PdxferRefused("unknown_room", "it has ended", self.key[0])


class FakeSidecar:
    """AsyncClient's interface over a Wire."""

    def __init__(self, wire: Wire, node: str, pools: list[SharedPool]) -> None:
        self.wire = wire
        self.node = node
        self.pools = pools
        self.connected = True
        self.problem = ""
        self.aborts: list[Key] = []

    async def open(self, room: str, epoch: int = 0) -> Any:
        side = Side(self, (room, epoch), True, [])
        await self._begin(self.wire.sends, side)
        return side

    async def receive(self, room: str, source: str, pages: list[int], epoch: int = 0) -> Any:
        side = Side(self, (room, epoch), False, list(pages))
        await self._begin(self.wire.receives, side)
        return side

    async def abort(self, room: str, epoch: int = 0, detail: str = "") -> None:
        self.aborts.append((room, epoch))
        await asyncio.sleep(0)
        self.wire.finish((room, epoch), "aborted", detail)

    def find(self, room: str, epoch: int = 0, *, sending: bool) -> Any:
        return (self.wire.sends if sending else self.wire.receives).get((room, epoch))

    async def close(self) -> None:
        self.connected = False

    def lose(self) -> None:
        """The sidecar dies: its rooms end on both sides."""
        self.connected, self.problem = False, "the sidecar closed the connection"
        for key in [k for t in (self.wire.sends, self.wire.receives) for k, s in t.items() if s.client is self]:
            self.wire.finish(key, "sidecar_lost", "gone")

    async def _begin(self, table: dict[Key, Side], side: Side) -> None:
        if not self.connected:
            raise SidecarUnavailable("x.sock", self.problem)
        if side.key in self.wire.ended:
            raise PdxferRefused("room_reused", "it has ended", side.key[0])
        table[side.key] = side
        await asyncio.sleep(0)
        self.wire.look(side.key)
