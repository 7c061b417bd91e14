"""AsyncClient: the asyncio twin.

Owns: futures for answers and ends, and the loop's callbacks. Must not: start a thread or a task; everything runs in
callbacks of the loop that ``connect`` was called in, and signs of life go out while that loop runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from pdxfer.core import worker
from pdxfer.pools import SharedPool

from .errors import PdxferError, PdxferRefused, SidecarUnavailable
from .events import Ended, Event, Matched, MirrorEnd, MirrorEvicted, MirrorHeld, Rejected, Released, RoomEnd
from .link import CLOSED, DOWN, PASSING, UP, Link
from .mirror import TokenIds
from .pages import PageLists
from .rooms import Room, RoomKey


class AsyncRoom:
    """One side of a room."""

    def __init__(self, client: AsyncClient, room: Room) -> None:
        loop = asyncio.get_running_loop()
        self._client = client
        self._room = room
        self._ended: asyncio.Future[RoomEnd] = loop.create_future()
        self._matched: asyncio.Future[bool] = loop.create_future()
        self._released: dict[int, asyncio.Future[None]] = {}

    @property
    def room(self) -> str:
        return self._room.room

    @property
    def epoch(self) -> int:
        return self._room.epoch

    @property
    def end(self) -> RoomEnd | None:
        return self._room.end

    async def ended(self) -> RoomEnd:
        """Wait for the room's one end; from then on its pages are the worker's again. May be awaited more than once."""
        return await asyncio.shield(self._ended)

    async def matched(self) -> bool:
        """Wait until both sides have met; False when the room ended before."""
        return await asyncio.shield(self._matched)

    async def abort(self, detail: str = "") -> None:
        """End the room, whatever it is doing; then ``ended`` says when its pages are home. Never raises for a room that
        is ending anyway."""
        if self._room.end is None:
            await self._client.abort(self.room, self.epoch, detail)

    def _take(self, event: Event) -> None:
        match event:
            case Matched():
                _set(self._matched, True)
            case Released():
                if event.push in self._released:
                    _set(self._released.pop(event.push), None)
            case Ended():
                _set(self._ended, event.end)
                _set(self._matched, False)
                for future in self._released.values():
                    _set(future, None)
                self._released.clear()

    def _never(self) -> None:
        """Its open was refused: whoever found the handle (AsyncClient.find) and waits for an end learns that there is
        none."""
        if not self._ended.done() and self._room.refused is not None:
            self._ended.set_exception(self._room.refused)
            self._ended.exception()  # it is no fault that nobody waits
        _set(self._matched, False)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.room!r}, epoch {self.epoch})"


class AsyncSend(AsyncRoom):
    """A send, from AsyncClient.open."""

    async def push(
        self,
        pages: PageLists,
        first_page: int | Mapping[str, int] | None = None,
        layers: tuple[int, int] | None = None,
    ) -> int:
        """As SendRoom.push: returns the push's number once the sidecar has taken it. Raises PdxferRefused."""
        frame = self._client._link.rooms.push(self._room, pages, first_page, layers)
        await self._client._ask(frame)
        return frame.req

    async def finish(self, aux: bytes = b"") -> None:
        """Nothing more will be pushed."""
        await self._client._ask(self._client._link.rooms.finish(self._room, aux))

    async def released(self, push: int) -> None:
        """Wait until the pages of this push may be used again: they were read, or the room has ended."""
        if push in self._room.lent:
            future = self._released.setdefault(push, asyncio.get_running_loop().create_future())
            await asyncio.shield(future)


class AsyncReceive(AsyncRoom):
    """A receive, from AsyncClient.receive."""


class AsyncMirror:
    """A store or load of the host mirror, from AsyncClient.store or load."""

    def __init__(self, client: AsyncClient, number: int) -> None:
        self._client = client
        self.number = number
        self._ended: asyncio.Future[MirrorEnd] = asyncio.get_running_loop().create_future()

    async def ended(self) -> MirrorEnd:
        """Wait for its one end; from then on its pages are the worker's again."""
        return await asyncio.shield(self._ended)

    async def cancel(self) -> None:
        """End it now; then ``ended`` says when its pages are home. Never raises for one that is ending anyway."""
        if not self._ended.done() and self._client.connected:
            await self._client._ask(self._client._link.rooms.cancel(self.number))


class AsyncClient:
    """Made by ``await AsyncClient.connect(...)``."""

    def __init__(
        self,
        path: str,
        engine_id: str,
        role: str,
        pools: Sequence[SharedPool],
        *,
        timeout: float = 15.0,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_event = on_event
        self._answers: dict[int, asyncio.Future[None]] = {}
        self._rooms: dict[RoomKey, AsyncRoom] = {}
        self._mirrors: dict[int, AsyncMirror] = {}
        self._asking: set[int] = set()  # lookups and evictions whose caller waits
        self._told: dict[int, MirrorHeld | MirrorEvicted] = {}  # answers, until their caller takes them
        self._timer: asyncio.TimerHandle | None = None
        self._socket = -1
        self._writing = False
        self._changed = asyncio.Event()  # of the link's state; set again and again
        self._link = Link(path, engine_id, role, pools, attach_timeout=timeout, on_socket=self._watch_socket)
        self._link.rooms.answered = self._answer

    @classmethod
    async def connect(
        cls,
        path: str,
        engine_id: str,
        role: str,
        pools: Sequence[SharedPool],
        *,
        timeout: float = 15.0,
        wait: bool = False,
        on_event: Callable[[Event], None] | None = None,
    ) -> Self:
        """Attach. Raises SidecarUnavailable or AttachRefused; ``wait``: wait up to ``timeout`` for the sidecar to
        appear.

        ``on_event`` is called with every event, Disconnected and Reconnected among them; it must not block.
        """
        self = cls(path, engine_id, role, pools, timeout=timeout, on_event=on_event)
        end = self._loop.time() + timeout
        try:
            while True:
                self._pump()
                link = self._link
                now = self._loop.time()
                if link.state == UP:
                    return self
                if link.refusal is not None and not (wait and link.refusal.code in PASSING and now < end):
                    raise link.refusal
                if now >= end or (link.state == DOWN and not wait):
                    raise SidecarUnavailable(link.path, link.problem or f"no answer within {timeout:g} s")
                self._changed.clear()
                try:
                    await asyncio.wait_for(self._changed.wait(), min(end - now, 1.0))
                except TimeoutError:
                    continue
        except BaseException:
            self._close()
            raise

    # rooms ---------------------------------------------------------------------------------------------------------

    async def open(self, room: str, epoch: int = 0) -> AsyncSend:
        """Begin a send. Raises PdxferRefused or SidecarUnavailable."""
        owner, frame = self._link.rooms.open(room, epoch)
        handle = AsyncSend(self, owner)
        await self._begin(handle, frame)
        return handle

    async def receive(
        self, room: str, source: str, pages: PageLists, epoch: int = 0, source_incarnation: int = 0,
        held: int | Mapping[str, int] = 0,
    ) -> AsyncReceive:  # fmt: skip
        """Lend pages to a receive from the worker ``source``, until the room has ended. ``held`` as in Client.receive."""
        owner, frame = self._link.rooms.receive(room, epoch, source, source_incarnation, pages, held)
        handle = AsyncReceive(self, owner)
        await self._begin(handle, frame)
        return handle

    async def abort(self, room: str, epoch: int = 0, detail: str = "") -> None:
        """End this worker's sides of a room. A room that is not there yet is ended when it comes.

        The request is on its way before this first waits, so a cancelled caller has aborted all the same.
        """
        if self._link.state != UP and self._link.rooms.knows(room, epoch):
            return  # it is ending already, with the sidecar
        try:
            await self._ask(self._link.rooms.abort(room, epoch, detail))
        except SidecarUnavailable:
            if not self._link.rooms.knows(room, epoch):
                raise

    def find(self, room: str, epoch: int = 0, *, sending: bool) -> AsyncRoom | None:
        """The handle of a room that has not ended: for one whose open or receive was cancelled."""
        return self._rooms.get((room, epoch, sending))

    # the host mirror -----------------------------------------------------------------------------------------------

    async def lookup(self, model: str, tokens: TokenIds, *, tenant: str = "", hold: bool = True) -> MirrorHeld:
        """As Client.lookup. Raises PdxferRefused or SidecarUnavailable."""
        held = await self._learn(self._link.rooms.lookup(model, tenant, tokens, hold))
        assert isinstance(held, MirrorHeld)
        return held

    async def store(
        self, model: str, tokens: TokenIds, pages: PageLists, *, tenant: str = "", first_block: int = 0
    ) -> AsyncMirror:
        """As Client.store."""
        return await self._operate(self._link.rooms.store(model, tenant, tokens, first_block, pages))

    async def load(self, lease: int, pages: PageLists, blocks: int, *, first_block: int = 0) -> AsyncMirror:
        """As Client.load."""
        return await self._operate(self._link.rooms.load(lease, first_block, blocks, pages))

    async def unpin(self, lease: int) -> None:
        """As Client.unpin."""
        await self._ask(self._link.rooms.unpin(lease))

    async def evict(self, model: str, *, tenant: str = "") -> int:
        """As Client.evict: how many blocks were forgotten."""
        evicted = await self._learn(self._link.rooms.evict(model, tenant))
        assert isinstance(evicted, MirrorEvicted)
        return evicted.blocks

    async def _learn(self, frame: worker.Lookup | worker.Evict) -> MirrorHeld | MirrorEvicted:
        """The answer with content comes right before the Ok: keep it for the caller, who is woken by that."""
        self._asking.add(frame.req)
        try:
            await self._ask(frame)
            return self._told[frame.req]
        except asyncio.CancelledError:
            held = self._told.get(frame.req)
            if isinstance(held, MirrorHeld) and held.lease and self._link.state == UP:
                self._send_quietly(self._link.rooms.unpin(held.lease))
            raise
        finally:
            self._asking.discard(frame.req)
            self._told.pop(frame.req, None)

    async def _operate(self, frame: worker.Store | worker.Load) -> AsyncMirror:
        handle = self._mirrors[frame.req] = AsyncMirror(self, frame.req)
        try:
            await self._ask(frame)
        except asyncio.CancelledError:
            # Nobody would hold the handle, so nobody could ever cancel it.
            if not handle._ended.done() and self._link.state == UP:
                self._send_quietly(self._link.rooms.cancel(frame.req))
            raise
        except PdxferRefused:
            self._mirrors.pop(frame.req, None)
            raise
        except SidecarUnavailable:
            if frame.req in self._link.rooms.mirror.open:
                await handle.ended()  # only then are its pages surely untouched
            self._mirrors.pop(frame.req, None)
            raise
        return handle

    @property
    def node(self) -> str:
        return self._link.node

    @property
    def incarnation(self) -> int:
        return self._link.incarnation

    @property
    def connected(self) -> bool:
        return self._link.state == UP

    @property
    def problem(self) -> str:
        """Why it is not connected now; empty when it is."""
        return self._link.problem

    async def wait_connected(self) -> None:
        """Wait until it is attached; after a loss it attaches again by itself."""
        while self._link.state != UP:
            self._changed.clear()
            await self._changed.wait()

    async def close(self) -> None:
        """Leave: the sidecar ends what is open. Here every open room ends, as sidecar_lost. Twice is once."""
        self._close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    # inside --------------------------------------------------------------------------------------------------------

    async def _begin(self, handle: AsyncRoom, frame: worker.Open | worker.Receive) -> None:
        key = handle._room.key
        self._rooms[key] = handle
        try:
            await self._ask(frame)
        except asyncio.CancelledError:
            # Nobody would hold the handle, so nobody could ever end the room: end it.
            if handle.end is None and self._link.state == UP:
                self._send_quietly(self._link.rooms.abort(frame.room, frame.epoch, "its open was cancelled"))
            raise
        except PdxferRefused:
            self._rooms.pop(key, None)
            raise
        except SidecarUnavailable:
            if self._link.rooms.open_rooms.get(key) is handle._room:
                await handle.ended()  # only then are its pages surely untouched
            self._rooms.pop(key, None)
            raise

    async def _ask(self, frame: worker.WorkerRequest) -> None:
        """Send a request and wait for its answer."""
        try:
            self._link.request(frame)
        except PdxferError:
            self._mind()  # if the loss was met here, the link has to go on at once
            raise
        answer: asyncio.Future[None] = self._loop.create_future()
        self._answers[frame.req] = answer
        self._mind()
        try:
            await answer
        finally:
            self._answers.pop(frame.req, None)

    def _send_quietly(self, frame: worker.WorkerRequest) -> None:
        try:
            self._link.request(frame)
        except PdxferError as error:
            # Lost or overloaded: either way the link ends every room of its own accord.
            self._link.problem = self._link.problem or str(error)
        self._mind()

    def _answer(self, req: int, error: PdxferError | None) -> None:
        future = self._answers.pop(req, None)
        if future is not None and not future.done():
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

    def _pump(self) -> None:
        """The link's turn: from the socket, or from the timer."""
        state = self._link.state
        self._link.step(self._loop.time())
        self._deliver()
        if self._link.state != state:
            self._changed.set()
        self._mind()

    def _deliver(self) -> None:
        while self._link.events:
            event = self._link.events.popleft()
            if isinstance(event, Matched | Released | Ended):
                sending = event.end.sending if isinstance(event, Ended) else getattr(event, "sending", True)
                key = (event.room, event.epoch, sending)
                handle = self._rooms.pop(key, None) if isinstance(event, Ended) else self._rooms.get(key)
                if handle is not None:
                    handle._take(event)
            elif isinstance(event, MirrorHeld | MirrorEvicted):
                if event.number in self._asking:
                    self._told[event.number] = event
                elif isinstance(event, MirrorHeld) and event.lease and self._link.state == UP:
                    self._send_quietly(self._link.rooms.unpin(event.lease))  # its caller was cancelled
            elif isinstance(event, MirrorEnd):
                operation = self._mirrors.pop(event.number, None)
                if operation is not None:
                    _set(operation._ended, event)
            elif isinstance(event, Rejected):
                if event.request in ("open", "receive"):
                    handle = self._rooms.pop((event.room, event.epoch, event.sending), None)
                    if handle is not None:
                        handle._never()
            else:
                self._changed.set()
            if self._on_event is not None:
                try:
                    self._on_event(event)
                except Exception as error:  # noqa: BLE001 - the engine's own callback: its fault must not stop the link
                    self._loop.call_exception_handler({"message": f"on_event raised for {event}", "exception": error})

    def _mind(self) -> None:
        """Be called again in time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._link.state == CLOSED:
            return
        if self._socket >= 0 and self._writing != self._link.wants_write:
            self._writing = self._link.wants_write
            if self._writing:
                self._loop.add_writer(self._socket, self._pump)
            else:
                self._loop.remove_writer(self._socket)
        delay = 0.0 if self._link.events else self._link.due(self._loop.time())
        self._timer = self._loop.call_later(delay, self._pump)

    def _watch_socket(self, fd: int, is_open: bool) -> None:
        if is_open:
            self._socket = fd
            self._loop.add_reader(fd, self._pump)
        else:
            self._loop.remove_reader(fd)
            if self._writing:
                self._loop.remove_writer(fd)
            self._writing = False
            self._socket = -1

    def _close(self) -> None:
        if self._link.state == CLOSED:
            return
        self._link.close()
        self._mind()
        self._deliver()


def _set(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)
