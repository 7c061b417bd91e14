"""Attached workers: admission, requests, aborts, silence and death.

Owns: what a worker may ask and what it is told at once. Must not: move segments; `sender`, `receiver` and `local` do.

A request is either taken (Ok) or refused by name, and a refused one has changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from . import events, jobs, messages, worker
from .ends import Ends
from .events import DropWorker, ToWorker
from .mirrors import Mirrors
from .reasons import Refused
from .receiver import Receiver
from .sender import Sender
from .state import RecvRoom, Room, State, Worker

MAX_PAGES: Final = 1 << 24  # of a worker: the ledger keeps 13 bytes for each


class Workers:
    def __init__(self, state: State, ends: Ends, sender: Sender, receiver: Receiver, mirrors: Mirrors) -> None:
        self.mirrors = mirrors
        self.state = state
        self.ends = ends
        self.sender = sender
        self.receiver = receiver

    def attached(self, event: events.WorkerAttached) -> None:
        st = self.state
        frame = event.frame
        try:
            if frame.version != worker.WORKER_PROTOCOL:
                raise Refused("wrong_version", f"worker protocol {frame.version}, expected {worker.WORKER_PROTOCOL}")
            if not messages.good_name(frame.engine_id):
                raise Refused("bad_engine_id", f"{frame.engine_id[:40]!r}")
            if st.draining:
                raise Refused("draining", "the sidecar is shutting down")
            other = st.by_engine_id.get(frame.engine_id)
            if other is not None:
                raise Refused(
                    "engine_id_taken",
                    f"engine id {frame.engine_id!r} is held by process {other.pid}, attached {st.now - other.attached_at:.0f} s ago",
                )
            names = [pool.spec.name for pool in frame.pools]
            if len(set(names)) != len(names) or len(names) > 256:
                raise Refused("bad_layout", f"pool names {names[:20]}, expected at most 256 different ones")
            for pool in frame.pools:
                pool.spec.check()
                if len(pool.planes) != pool.spec.planes:
                    raise Refused(
                        "bad_layout",
                        f"pool {pool.spec.name!r}: {len(pool.planes)} planes are placed, its layout has {pool.spec.planes}",
                    )
                if not 0 < pool.num_pages <= MAX_PAGES:
                    raise Refused(
                        "bad_layout",
                        f"pool {pool.spec.name!r}: num_pages is {pool.num_pages}, expected 1 to {MAX_PAGES}",
                    )
                for i, plane in enumerate(pool.planes):
                    self._check_plane(pool, i, plane, frame.fd_bytes)
                used = pool.spec.planes * pool.num_pages * pool.spec.page_bytes
                if used > sum(frame.fd_bytes):
                    raise Refused(
                        "bad_layout",
                        f"pool {pool.spec.name!r}: its pages have {used} bytes, the memory {sum(frame.fd_bytes)}: planes overlap",
                    )
            if sum(pool.num_pages for pool in frame.pools) > MAX_PAGES:
                raise Refused("bad_layout", f"more than {MAX_PAGES} pages in all pools")
        except Refused as error:
            st.emit(ToWorker(event.id, worker.Rejected(frame.req, error.code, error.detail)))
            st.emit(DropWorker(event.id))
            st.refuse("worker", frame.engine_id[:40], error.code, error.detail)
            return
        owner = Worker(event.id, frame.engine_id, frame.role, frame.pid, st.now)
        owner.specs = tuple(pool.spec for pool in frame.pools)
        owner.names = names
        owner.num_pages = tuple(pool.num_pages for pool in frame.pools)
        owner.map_job = jobs.MapPools(event.id, frame.pools, frame.fd_bytes)
        owner.unanswered_attach = frame.req
        st.workers[event.id] = owner
        st.by_engine_id[owner.engine_id] = owner
        st.pages.attach(event.id, owner.num_pages)
        st.timers.set(("worker", event.id), st.now + st.limits.stall_deadline)
        if st.engine.up:
            st.to_engine(owner.map_job)
        else:
            self.answer_attach(owner)

    @staticmethod
    def _check_plane(pool: worker.PoolAt, index: int, plane: worker.PlaneAt, fd_bytes: tuple[int, ...]) -> None:
        """Raise Refused('bad_layout') unless the plane lies within its memory, one page behind the other."""
        what = f"pool {pool.spec.name!r}, plane {index}"
        if not 0 <= plane.fd < len(fd_bytes):
            raise Refused("bad_layout", f"{what}: file descriptor {plane.fd} of {len(fd_bytes)}")
        if plane.stride < pool.spec.page_bytes:
            raise Refused(
                "bad_layout", f"{what}: stride {plane.stride}, expected at least page_bytes ({pool.spec.page_bytes})"
            )
        end = plane.offset + (pool.num_pages - 1) * plane.stride + pool.spec.page_bytes
        if plane.offset < 0 or end > fd_bytes[plane.fd]:
            raise Refused(
                "bad_layout", f"{what}: bytes {plane.offset} to {end - 1}, its memory has {fd_bytes[plane.fd]}"
            )

    def answer_attach(self, owner: Worker) -> None:
        """Its pools are mapped, or will be by the next engine: let it begin, unless its last life still lingers.

        A worker that was cut off and comes back brings the same memory: until no job of its old attachment touches that,
        it must not think that its pages are home.
        """
        st = self.state
        owner.may_begin = True
        lingers = any(w.gone and w.engine_id == owner.engine_id for w in st.workers.values())
        if owner.unanswered_attach is not None and not lingers:
            st.to_worker(
                owner,
                worker.Attached(
                    owner.unanswered_attach, worker.WORKER_PROTOCOL, st.name, st.incarnation, st.limits.stall_deadline
                ),
            )
            owner.unanswered_attach = None

    def said(self, event: events.WorkerSaid) -> None:
        st = self.state
        owner = st.workers.get(event.id)
        if owner is None or owner.gone:
            return
        owner.heard = st.now
        frame = event.frame
        if isinstance(frame, worker.Ping):
            return
        try:
            if isinstance(frame, worker.MirrorRequest):
                after = self.mirrors.request(owner, frame)
            else:
                st.handling = (frame.room, frame.epoch)
                after = self._request(owner, frame)
        except Refused as error:
            st.to_worker(owner, worker.Rejected(frame.req, error.code, error.detail))
            st.refuse("worker", owner.engine_id, error.code, error.detail)
            return
        st.to_worker(owner, worker.Ok(frame.req))
        after()

    def _request(self, owner: Worker, frame: worker.RoomRequest) -> Callable[[], None]:
        """Take a request, or raise Refused having changed nothing. Returns what follows the worker's Ok."""
        st = self.state
        if not messages.good_name(frame.room) or not 0 <= frame.epoch < 2**31:
            raise Refused("bad_room_id", f"room {frame.room[:40]!r}, epoch {frame.epoch}")
        key = (frame.room, frame.epoch)
        if isinstance(frame, worker.Open):
            early = self._admit(frame, sending=True)
            opened = self.sender.open(owner, frame)
            return early(opened) if early is not None else lambda: self.sender.opened(opened)
        if isinstance(frame, worker.Receive):
            early = self._admit(frame, sending=False)
            received = self.receiver.receive(owner, frame)
            return early(received) if early is not None else lambda: self.receiver.received(received)
        if isinstance(frame, worker.Abort):
            return self._abort(owner, key, frame.detail[:500])
        room = st.sends.get(key)
        if room is None:
            tomb = st.tombstones.get((*key, True))
            found = f"it has ended: {tomb.reason}" if tomb is not None and not tomb.early else "it was never opened"
            raise Refused("unknown_room", f"no send of room {frame.room}/{frame.epoch} is open: {found}")
        if room.worker is not owner:
            raise Refused("not_your_room", f"send of room {room} belongs to worker {room.worker.engine_id!r}")
        if isinstance(frame, worker.Push):
            self.sender.push(room, frame)
            return lambda: self.sender.pushed(room)
        self.sender.finish(room, frame.aux)
        return lambda: self.sender.finished(room)

    def _admit(
        self, frame: worker.Open | worker.Receive, *, sending: bool
    ) -> Callable[[Room], Callable[[], None]] | None:
        """May a room begin? Raises Refused. An early abort lets it begin, and ends it at once."""
        st = self.state
        if st.draining:
            raise Refused("draining", "the sidecar is shutting down")
        if len(st.sends) + len(st.recvs) + len(st.homing) >= st.limits.max_rooms:
            raise Refused("too_many_rooms", f"{st.limits.max_rooms} rooms are live")
        tomb = st.tombstones.get((frame.room, frame.epoch, sending))
        if tomb is None:
            return None
        if not tomb.early:
            raise Refused("room_reused", f"room {frame.room}/{frame.epoch} has ended here: {tomb.reason}")
        reason, detail = tomb.reason, tomb.detail
        return lambda room: lambda: self.ends.end(room, reason, detail)

    def _abort(self, owner: Worker, key: tuple[str, int], detail: str) -> Callable[[], None]:
        """Ends this worker's sides. Of a room that is over, nothing; of one that is not here yet, its arrival."""
        st = self.state
        rooms: list[Room] = [r for r in (st.sends.get(key), st.recvs.get(key)) if r is not None]
        mine = [r for r in rooms if r.worker is owner]
        if rooms and not mine:
            return self._abort_before(owner, key, detail, rooms[0])
        if not rooms:
            unknown = [side for side in (True, False) if (*key, side) not in st.tombstones]
            if len(unknown) < 2:  # it has ended, or its arrival is doomed already: the abort is repeated
                for side in unknown:  # of a room whose two sides may be here, the other one
                    self.ends.bury((*key, side), "aborted_early", detail, early=True)
                return lambda: None
            for side in (True, False):
                self.ends.bury((*key, side), "aborted_early", detail, early=True)
            if key in st.parked:
                self.ends.end_parked(key, "aborted", detail)
            raise Refused(
                "unknown_room",
                f"room {key[0]}/{key[1]} is not here; if it comes within {st.limits.tombstone_ttl:g} s it ends as aborted_early",
            )

        def end() -> None:
            for room in mine:
                if room.live:
                    self.ends.end(room, "aborted", detail or f"asked by worker {owner.engine_id!r}")

        return end

    def _abort_before(self, owner: Worker, key: tuple[str, int], detail: str, room: Room) -> Callable[[], None]:
        """The other side is here already, by another worker, and this one aborts its own before it came."""
        st = self.state
        waits = isinstance(room, RecvRoom) and room.source == owner.engine_id
        if (*key, not room.sending) in st.tombstones:
            return lambda: None  # the abort is repeated
        if not (room.sending or waits) or room.local is not None:
            raise Refused("not_your_room", f"room {room} belongs to worker {room.worker.engine_id!r}")
        self.ends.bury((*key, not room.sending), "aborted_early", detail, early=True)
        if waits:
            return lambda: self.ends.end(room, "aborted", detail or f"asked by worker {owner.engine_id!r}")
        raise Refused("unknown_room", f"your side of room {room} is not here; if it comes, it ends as aborted_early")

    def _fail_waiting(self, owner: Worker, reason: str, detail: str, since: float) -> None:
        """Receives, here and on other nodes, that have waited since ``since`` or longer for rooms of this worker."""
        st = self.state
        for key in [k for k, p in st.parked.items() if p.want.source == owner.engine_id and p.since <= since]:
            self.ends.end_parked(key, reason, detail)
        for room in [r for r in st.recvs.values() if r.source == owner.engine_id and r.opened <= since]:
            if room.live and room.state == RecvRoom.WANTING and not room.peer and room.local is None:
                self.ends.end(room, reason, detail)

    def lost(self, event: events.WorkerGone) -> None:
        st = self.state
        owner = st.workers.get(event.id)
        if owner is None or owner.gone:
            return
        owner.gone = True
        if st.by_engine_id.get(owner.engine_id) is owner:
            del st.by_engine_id[owner.engine_id]
        st.timers.clear(("worker", owner.id))
        for key in list(owner.rooms):
            room = (st.sends if key[2] else st.recvs).get((key[0], key[1]))
            if room is not None and room.worker is owner and room.live:
                self.ends.end(room, "worker_lost", f"worker {owner.engine_id!r} (process {owner.pid}): {event.detail}")
        self._fail_waiting(owner, "worker_lost", f"prefill worker {owner.engine_id!r}: {event.detail}", st.now)
        self.mirrors.worker_gone(owner)
        self._release(owner)

    def _release(self, owner: Worker) -> None:
        """Once no job touches its pages, a gone worker's pools are unmapped and leave the books."""
        st = self.state
        if owner.gone and not owner.rooms and not owner.operations and owner.id in st.workers:
            self.mirrors.worker_released(owner)
            st.pages.detach(owner.id)
            del st.workers[owner.id]
            if st.engine.up:
                st.to_engine(jobs.UnmapPools(owner.id))
            else:
                st.emit(DropWorker(owner.id))
            heir = st.by_engine_id.get(owner.engine_id)
            if heir is not None and heir.may_begin:
                self.answer_attach(heir)

    def silent(self, id: int) -> None:
        """No sign of life of a worker with live rooms: it is hung, and its rooms end."""
        st = self.state
        owner = st.workers[id]
        when = owner.heard + st.limits.stall_deadline
        if when <= st.now:
            when = st.now + 1.0
            for key in list(owner.rooms):
                room = (st.sends if key[2] else st.recvs).get((key[0], key[1]))
                if (
                    room is not None
                    and room.worker is owner
                    and st.now - max(owner.heard, room.opened) >= st.limits.stall_deadline
                ):
                    self.ends.end(
                        room,
                        "worker_stalled",
                        f"worker {owner.engine_id!r} (process {owner.pid}) silent for {st.now - owner.heard:.0f} s",
                    )
            detail = f"prefill worker {owner.engine_id!r} (process {owner.pid}) silent for {st.now - owner.heard:.0f} s"
            self._fail_waiting(owner, "worker_stalled", detail, st.now - st.limits.stall_deadline)
        st.timers.set(("worker", id), when)

    def release_gone(self) -> None:
        for owner in [w for w in self.state.workers.values() if w.gone]:
            self._release(owner)
