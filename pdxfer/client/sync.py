"""Client: the polled twin, for an engine's own loop.

Owns: waiting in ``poll`` and handing out events. Must not: start a thread; it works only while it is polled, at least
once a second, since the sidecar takes a silent worker for hung. Use one client from one thread.
"""

from __future__ import annotations

import select
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from pdxfer.core import worker
from pdxfer.pools import SharedPool

from .errors import SidecarUnavailable
from .events import Event, RoomEnd
from .link import CLOSED, DOWN, PASSING, UP, Link
from .mirror import TokenIds
from .pages import PageLists
from .rooms import Room


class _Handle:
    def __init__(self, client: Client, room: Room) -> None:
        self._client = client
        self._room = room

    @property
    def room(self) -> str:
        return self._room.room

    @property
    def epoch(self) -> int:
        return self._room.epoch

    @property
    def matched(self) -> bool:
        return self._room.matched

    @property
    def end(self) -> RoomEnd | None:
        """How it ended, once poll() has reported that."""
        return self._room.end

    def abort(self, detail: str = "") -> None:
        """End the room, whatever it is doing. Its pages are home when its end is reported."""
        if self._room.end is None:
            self._client.abort(self.room, self.epoch, detail)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.room!r}, epoch {self.epoch})"


class SendRoom(_Handle):
    """A send, from Client.open."""

    def push(
        self,
        pages: PageLists,
        first_page: int | Mapping[str, int] | None = None,
        layers: tuple[int, int] | None = None,
    ) -> int:
        """Lend pages until they are Released, or the room has ended. Returns the push's number.

        ``pages``: page numbers in the order of the tokens, one list for all pools or a dict pool → list.
        ``first_page``: which page of the room the first one is; left out, each layer goes on where its last push
        ended. ``layers``: (first layer, how many), for pushes layer by layer.
        """
        frame = self._client._link.rooms.push(self._room, pages, first_page, layers)
        self._client._link.request(frame)
        return frame.req

    def finish(self, aux: bytes = b"") -> int:
        """Nothing more will be pushed. ``aux`` travels with the room (first token, sampling state)."""
        frame = self._client._link.rooms.finish(self._room, aux)
        self._client._link.request(frame)
        return frame.req


class ReceiveRoom(_Handle):
    """A receive, from Client.receive."""


class Client:
    """Attach to the sidecar at ``path``. Raises SidecarUnavailable or AttachRefused.

    ``timeout`` bounds the attach; with ``wait`` also a sidecar that is not there yet is waited for so long.
    """

    def __init__(
        self,
        path: str,
        engine_id: str,
        role: str,
        pools: Sequence[SharedPool],
        *,
        timeout: float = 15.0,
        wait: bool = False,
    ) -> None:
        self._epoll = select.epoll()
        self._watched: tuple[int, int] | None = None  # the socket, and what is waited for
        try:
            self._link = Link(path, engine_id, role, pools, attach_timeout=timeout, on_socket=self._on_socket)
            self._attach(timeout, wait)
        except BaseException:
            self.close()
            raise

    # rooms ---------------------------------------------------------------------------------------------------------

    def open(self, room: str, epoch: int = 0) -> SendRoom:
        """Begin a send. A refusal comes from poll() as Rejected."""
        owner, frame = self._link.rooms.open(room, epoch)
        self._link.request(frame)
        return SendRoom(self, owner)

    def receive(
        self, room: str, source: str, pages: PageLists, epoch: int = 0, source_incarnation: int = 0,
        held: int | Mapping[str, int] = 0,
    ) -> ReceiveRoom:  # fmt: skip
        """Lend pages to a receive from the worker ``source``, until the room has ended.

        ``held``: so many of the first pages (of every pool, or a dict pool → number) have their content already, from the
        mirror say. They are neither lent nor sent, and other rooms of this worker may read them meanwhile.
        """
        owner, frame = self._link.rooms.receive(room, epoch, source, source_incarnation, pages, held)
        self._link.request(frame)
        return ReceiveRoom(self, owner)

    def abort(self, room: str, epoch: int = 0, detail: str = "") -> None:
        """End this worker's sides of a room. A room that is not there yet is ended when it comes."""
        if self._link.state != UP and self._link.rooms.knows(room, epoch):
            return  # it is ending already, with the sidecar
        self._link.request(self._link.rooms.abort(room, epoch, detail))

    # the host mirror -----------------------------------------------------------------------------------------------
    #
    # Each call returns its number; what comes of it is an event of poll() with that number: MirrorHeld, MirrorEnd,
    # MirrorEvicted, or Rejected.

    def lookup(self, model: str, tokens: TokenIds, *, tenant: str = "", hold: bool = True) -> int:
        """How much of this prompt does the mirror hold? ``hold``: keep it there until unpin(), or mirror.timeout.

        ``tokens``: the whole prompt's token ids. Nothing of another model or tenant is ever found.
        """
        return self._mirror(self._link.rooms.lookup(model, tenant, tokens, hold))

    def store(self, model: str, tokens: TokenIds, pages: PageLists, *, tenant: str = "", first_block: int = 0) -> int:
        """Lend the pages of the prompt's whole blocks from ``first_block`` on until MirrorEnd; what is missing is copied.

        ``pages``: page numbers in the order of the tokens, one list for all pools or a dict pool → list. They are read
        only, and may be lent to sends meanwhile.
        """
        return self._mirror(self._link.rooms.store(model, tenant, tokens, first_block, pages))

    def load(self, lease: int, pages: PageLists, blocks: int, *, first_block: int = 0) -> int:
        """Lend pages until MirrorEnd, for ``blocks`` blocks of a lease from ``first_block`` on."""
        return self._mirror(self._link.rooms.load(lease, first_block, blocks, pages))

    def cancel(self, number: int) -> int:
        """End a store or load now; its MirrorEnd says when its pages are home."""
        return self._mirror(self._link.rooms.cancel(number))

    def unpin(self, lease: int) -> int:
        """Let go what a lookup holds. Loads that are under way go on."""
        return self._mirror(self._link.rooms.unpin(lease))

    def evict(self, model: str, *, tenant: str = "") -> int:
        """Forget all that was stored for a model and tenant."""
        return self._mirror(self._link.rooms.evict(model, tenant))

    def _mirror(self, frame: worker.MirrorRequest) -> int:
        self._link.request(frame)
        return frame.req

    # events --------------------------------------------------------------------------------------------------------

    def poll(self, timeout: float = 0.0) -> list[Event]:
        """What has happened. Waits up to ``timeout`` seconds for the first event; signs of life go out meanwhile."""
        end = time.monotonic() + timeout
        while True:
            now = time.monotonic()
            self._link.step(now)
            if self._link.events or now >= end or self._link.state == CLOSED:
                events = list(self._link.events)
                self._link.events.clear()
                return events
            self._wait(min(end - now, self._link.due(now)))

    def fileno(self) -> int:
        """A descriptor that is readable when poll() has something to read: the same one across reconnects.

        While disconnected nothing makes it readable, so poll at least once a second besides.
        """
        return self._epoll.fileno()

    @property
    def node(self) -> str:
        return self._link.node

    @property
    def incarnation(self) -> int:
        """Of the sidecar: what ``source_incarnation`` of a receive may ask for."""
        return self._link.incarnation

    @property
    def connected(self) -> bool:
        return self._link.state == UP

    @property
    def problem(self) -> str:
        """Why it is not connected now; empty when it is."""
        return self._link.problem

    def close(self) -> None:
        """Leave: the sidecar ends what is open. The pools stay the caller's. Twice is once."""
        if hasattr(self, "_link"):
            self._link.close()
        self._epoll.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # inside --------------------------------------------------------------------------------------------------------

    def _attach(self, timeout: float, wait: bool) -> None:
        end = time.monotonic() + timeout
        while True:
            now = time.monotonic()
            self._link.step(now)
            if self._link.state == UP:
                return
            refusal = self._link.refusal
            if refusal is not None and not (wait and refusal.code in PASSING and now < end):
                raise refusal
            if now >= end or (self._link.state == DOWN and not wait):
                raise SidecarUnavailable(self._link.path, self._link.problem or f"no answer within {timeout:g} s")
            self._wait(min(end - now, self._link.due(now)))

    def _wait(self, seconds: float) -> None:
        self._watch()
        self._epoll.poll(max(0.0, seconds), 1)

    def _on_socket(self, fd: int, is_open: bool) -> None:
        if is_open:
            self._epoll.register(fd, select.EPOLLIN)
            self._watched = (fd, select.EPOLLIN)
        elif self._watched is not None:
            self._epoll.unregister(fd)
            self._watched = None

    def _watch(self) -> None:
        """Wait for room to write only while something waits to be written."""
        if self._watched is not None:
            fd, mask = self._watched
            wanted = select.EPOLLIN | (select.EPOLLOUT if self._link.wants_write else 0)
            if wanted != mask:
                self._epoll.modify(fd, wanted)
                self._watched = (fd, wanted)
