"""What a client knows of its rooms: open ones, requests under way, and what each frame of the sidecar means for them.

Owns: the table of rooms and of request numbers; each room's one end. Must not: touch a socket, read a clock for
anything but a room's age, or wait.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pdxfer.core import worker
from pdxfer.core.messages import MAX_AUX, good_name
from pdxfer.core.reasons import ENDS
from pdxfer.pools import SharedPool

from .errors import PdxferError, PdxferRefused
from .events import Ended, Event, Matched, Rejected, Released, RoomEnd
from .mirror import SIDECAR_LOST, MirrorTable, TokenIds
from .pages import Progress, held_of, planes_of, tables

RoomKey = tuple[str, int, bool]  # room, epoch, sending
M = TypeVar("M", bound=worker.MirrorRequest)


class Room:
    """One side of one room."""

    def __init__(self, room: str, epoch: int, sending: bool, pools: Sequence[SharedPool]) -> None:
        self.room = room
        self.epoch = epoch
        self.sending = sending
        self.matched = False
        self.end: RoomEnd | None = None
        self.refused: PdxferRefused | None = None  # its open was
        self.opened = time.monotonic()
        self.progress = Progress(pools) if sending else None
        self.lent: set[int] = set()  # pushes whose pages are not released
        self.last_push = 0

    @property
    def key(self) -> RoomKey:
        return (self.room, self.epoch, self.sending)


class Request:
    """A request that is not answered yet."""

    __slots__ = ("before", "epoch", "kind", "owner", "room", "sending")

    def __init__(self, kind: str, room: str, epoch: int, sending: bool, owner: Room | None) -> None:
        self.kind = kind
        self.room = room
        self.epoch = epoch
        self.sending = sending
        self.owner = owner
        self.before: list[npt.NDArray[np.int64]] | None = None  # progress before a push, in case it is refused


class Rooms:
    """Builds requests and takes answers. Requests that cannot be right raise PdxferRefused here and are not sent."""

    def __init__(self, pools: Sequence[SharedPool]) -> None:
        self.pools = tuple(pools)
        self.open_rooms: dict[RoomKey, Room] = {}
        self.mirror = MirrorTable(pools)
        self.requests: dict[int, Request] = {}
        self.ignored = 0  # frames about rooms and requests that are not known any more
        self.answered: Callable[[int, PdxferError | None], None] | None = None  # told of every answer to a request
        self._numbers = itertools.count(1)

    def number(self) -> int:
        return next(self._numbers)

    # requests ------------------------------------------------------------------------------------------------------

    def open(self, room: str, epoch: int) -> tuple[Room, worker.Open]:
        owner = self._begin(room, epoch, sending=True)
        req = self._note("open", owner)
        return owner, worker.Open(req, room, epoch)

    def receive(
        self, room: str, epoch: int, source: str, source_incarnation: int, pages: Any, held: int | Mapping[str, int] = 0
    ) -> tuple[Room, worker.Receive]:
        if not good_name(source):
            raise PdxferRefused("bad_engine_id", f"source is {source[:40]!r}", room)
        lists = tables(pages, self.pools, room, all_named=True)
        first = held_of(held, self.pools, [len(t) for t in lists], room)
        owner = self._begin(room, epoch, sending=False)
        req = self._note("receive", owner)
        raw = tuple(t.tobytes() for t in lists)
        return owner, worker.Receive(req, room, epoch, source, source_incarnation, raw, first if any(first) else ())

    def push(
        self,
        owner: Room,
        pages: Any,
        first_page: int | Mapping[str, int] | None,
        layers: tuple[int, int] | None,
    ) -> worker.Push:
        self._must_be_open(owner)
        assert owner.progress is not None
        lists = tables(pages, self.pools, owner.room, all_named=False)
        planes = planes_of(layers, self.pools, owner.room)
        first = owner.progress.first(first_page, self.pools, planes, owner.room)
        req = self._note("push", owner)
        self.requests[req].before = owner.progress.advance(first, [len(t) for t in lists], planes)
        owner.lent.add(req)
        owner.last_push = req
        raw = tuple(t.tobytes() for t in lists)
        return worker.Push(req, owner.room, owner.epoch, first, planes.plane0, planes.planes, raw)

    def finish(self, owner: Room, aux: bytes) -> worker.Finish:
        self._must_be_open(owner)
        if len(aux) > MAX_AUX:
            raise PdxferRefused("aux_too_large", f"{len(aux)} bytes, expected at most {MAX_AUX}", owner.room)
        return worker.Finish(self._note("finish", owner), owner.room, owner.epoch, bytes(aux))

    def abort(self, room: str, epoch: int, detail: str) -> worker.Abort:
        self._check_name(room, epoch)
        req = self.number()
        self.requests[req] = Request("abort", room, epoch, False, None)
        return worker.Abort(req, room, epoch, detail[:500])

    # requests for the mirror ---------------------------------------------------------------------------------------

    def lookup(self, model: str, tenant: str, tokens: TokenIds, hold: bool) -> worker.Lookup:
        return self._noted("lookup", self.mirror.lookup(self.number(), model, tenant, tokens, hold))

    def store(self, model: str, tenant: str, tokens: TokenIds, first_block: int, pages: Any) -> worker.Store:
        return self._noted("store", self.mirror.store(self.number(), model, tenant, tokens, first_block, pages))

    def load(self, lease: int, first_block: int, blocks: int, pages: Any) -> worker.Load:
        return self._noted("load", self.mirror.load(self.number(), lease, first_block, blocks, pages))

    def unpin(self, lease: int) -> worker.Unpin:
        return self._noted("unpin", worker.Unpin(self.number(), int(lease)))

    def cancel(self, operation: int) -> worker.Cancel:
        return self._noted("cancel", worker.Cancel(self.number(), int(operation)))

    def evict(self, model: str, tenant: str) -> worker.Evict:
        return self._noted("evict", self.mirror.evict(self.number(), model, tenant))

    @property
    def busy(self) -> bool:
        """Something is open, whose pages are lent."""
        return bool(self.open_rooms or self.mirror.open)

    def knows(self, room: str, epoch: int) -> bool:
        return (room, epoch, True) in self.open_rooms or (room, epoch, False) in self.open_rooms

    def withdraw(self, req: int) -> None:
        """The frame of this request was never sent: as if it had not been asked for."""
        request = self.requests.pop(req)
        self._undo(req, request)

    # answers -------------------------------------------------------------------------------------------------------

    def take(self, frame: worker.SidecarFrame) -> Event | None:
        """What a frame means to the engine; None when nothing. Never raises: a sidecar's late word is not an error."""
        match frame:
            case worker.Ok():
                if self.requests.pop(frame.req, None) is not None:
                    self._tell(frame.req, None)
                return None  # an answer to a ping has number 0
            case worker.Held() | worker.Evicted() | worker.MirrorEnded():
                event = self.mirror.take(frame)
                self.ignored += event is None
                return event
            case worker.Rejected():
                return self._rejected(frame)
            case worker.Matched():
                room = self.open_rooms.get((frame.room, frame.epoch, frame.sending))
                if room is not None and not room.matched:
                    room.matched = True
                    return Matched(frame.room, frame.epoch, frame.sending)
            case worker.Released():
                room = self.open_rooms.get((frame.room, frame.epoch, True))
                if room is not None and frame.req in room.lent:
                    room.lent.remove(frame.req)
                    return Released(frame.room, frame.epoch, frame.req)
            case worker.RoomEnded():
                room = self.open_rooms.pop((frame.room, frame.epoch, frame.sending), None)
                if room is not None:
                    values = {name: getattr(frame, name) for name in worker.RoomEnded.__struct_fields__}
                    return self._end(room, RoomEnd(**values))
        self.ignored += 1
        return None

    def fail_requests(self, error: PdxferError) -> None:
        """No answer will come any more. Rooms stay open until ``end_all``."""
        requests, self.requests = self.requests, {}
        for req in requests:
            self._tell(req, error)

    def end_all(self, detail: str, *, pages_safe: bool = True) -> list[Event]:
        """The sidecar is gone, and with it every room, store and load."""
        rooms, self.open_rooms = list(self.open_rooms.values()), {}
        meaning = ENDS[SIDECAR_LOST]
        now = time.monotonic()
        ends: list[Event] = [
            self._end(
                room,
                RoomEnd(
                    room.room, room.epoch, room.sending, meaning.state, SIDECAR_LOST, meaning.retriable, detail,
                    age=now - room.opened,
                    pages_safe=pages_safe,
                ),
            )
            for room in rooms
        ]  # fmt: skip
        return ends + self.mirror.end_all(detail, pages_safe=pages_safe)

    # inside --------------------------------------------------------------------------------------------------------

    def _rejected(self, frame: worker.Rejected) -> Event | None:
        request = self.requests.pop(frame.req, None)
        if request is None:
            self.ignored += 1
            return None
        self._undo(frame.req, request)
        if request.kind in ("open", "receive") and request.owner is not None:
            request.owner.refused = PdxferRefused(frame.code, frame.detail, request.room)
        self._tell(frame.req, PdxferRefused(frame.code, frame.detail, request.room))
        return Rejected(
            request.room, request.epoch, request.sending, request.kind, frame.req, frame.code, frame.detail
        )  # fmt: skip

    def _tell(self, req: int, error: PdxferError | None) -> None:
        if self.answered is not None:
            self.answered(req, error)

    def _undo(self, req: int, request: Request) -> None:
        owner = request.owner
        if owner is None:
            self.mirror.withdraw(req)
            return
        if request.kind in ("open", "receive"):
            self.open_rooms.pop(owner.key, None)
        elif request.kind == "push":
            owner.lent.discard(req)
            # A later push was already numbered on top of this one: then the caller must name first_page.
            if owner.last_push == req and owner.progress is not None and request.before is not None:
                owner.progress.restore(request.before)

    def _end(self, room: Room, end: RoomEnd) -> Ended:
        assert room.end is None, f"room {room.room} ended twice"
        room.end = end
        room.lent.clear()
        return Ended(end)

    def _begin(self, room: str, epoch: int, *, sending: bool) -> Room:
        self._check_name(room, epoch)
        owner = Room(room, epoch, sending, self.pools)
        if owner.key in self.open_rooms:
            verb = "open" if sending else "receive"
            raise PdxferRefused("room_exists", f"{verb} of epoch {epoch} was called before, and has not ended", room)
        self.open_rooms[owner.key] = owner
        return owner

    def _note(self, kind: str, owner: Room) -> int:
        req = self.number()
        self.requests[req] = Request(kind, owner.room, owner.epoch, owner.sending, owner)
        return req

    def _noted(self, kind: str, frame: M) -> M:
        self.requests[frame.req] = Request(kind, "", 0, False, None)
        return frame

    def _check_name(self, room: str, epoch: int) -> None:
        if not isinstance(room, str) or not good_name(room) or not 0 <= epoch < 2**31:
            raise PdxferRefused("bad_room_id", f"room {str(room)[:40]!r}, epoch {epoch}", str(room)[:40])

    def _must_be_open(self, owner: Room) -> None:
        if owner.refused is not None:
            raise PdxferRefused("unknown_room", f"its open was refused: {owner.refused.code}", owner.room)
        if owner.end is not None:
            raise PdxferRefused("unknown_room", f"it has ended: {owner.end.reason}: {owner.end.detail}", owner.room)
