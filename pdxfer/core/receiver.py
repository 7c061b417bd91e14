"""The receiving side: from a worker's receive() to the last verified scatter.

Owns: wants, slot credits, landing, scattering, completeness, quarantine. Must not: touch send slots or pushes.

RESOLVING ──registry──► WANTING ──Accept──► RECEIVING ──all scattered and verified──► DONE
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from . import messages, worker
from .ends import Ends
from .events import KillEngine, Resolve
from .geometry import Coverage, Piece, check_held, page_array, piece_bytes
from .jobs import Scatter, rows_of
from .ledger import Slot, SlotState
from .patience import Deadline, Patience, receive_deadline
from .reasons import Refused
from .state import JobRecord, Peer, RecvRoom, State, Worker
from .worker import Matched

if TYPE_CHECKING:
    from .local import Local


class Receiver(Patience[RecvRoom]):
    def __init__(self, state: State, ends: Ends, local: Local) -> None:
        self.state = state
        self.ends = ends
        self.local = local

    # the worker's request ------------------------------------------------------------------------------------------

    def receive(self, owner: Worker, frame: worker.Receive) -> RecvRoom:
        """Take pages on loan and create the room. Raises Refused, having changed nothing."""
        st = self.state
        key = (frame.room, frame.epoch)
        if key in st.recvs:
            raise Refused(
                "room_exists", f"receive of room {frame.room}/{frame.epoch} is under way (state {st.recvs[key].state})"
            )
        if not messages.good_name(frame.source):
            raise Refused("bad_engine_id", f"source {frame.source[:40]!r}")
        if len(frame.pages) != len(owner.specs):
            raise Refused("pools_unequal", f"{len(frame.pages)} page tables, expected {len(owner.specs)}")
        whole = [page_array(raw) for raw in frame.pages]
        held = frame.held or (0,) * len(whole)
        check_held(owner.names, [len(t) for t in whole], held)
        for name, table, n in zip(owner.names, whole, held, strict=True):
            if n and len(np.unique(table)) != len(table):  # the ledger sees only those behind the held ones
                raise Refused("pages_repeated", f"pool {name!r}: a page that is held is named twice")
        tables = [table[n:] for table, n in zip(whole, held, strict=True)]
        st.pages.check(owner.id, tables, owner.names, write=True)
        coverage = Coverage(owner.specs, [len(t) for t in whole])
        coverage.take([Piece(i, 0, owner.specs[i].planes, 0, n) for i, n in enumerate(held) if n])
        room = RecvRoom(frame.room, frame.epoch, st.serial(), owner, st.now)
        st.pages.lend(owner.id, tables, room.serial, write=True)
        room.source, room.source_incarnation = frame.source, frame.source_incarnation
        room.raw, room.held, room.tables = frame.pages, held, tables
        room.coverage = coverage
        st.recvs[key] = room
        owner.rooms[room.key] = None
        self.arm(room)
        return room

    def received(self, room: RecvRoom) -> None:
        """After the worker has its Ok: find the sender."""
        st = self.state
        if room.source in st.by_engine_id:
            if room.source_incarnation not in (0, st.incarnation):
                self.ends.end(
                    room,
                    "peer_restarted",
                    f"asked for incarnation {room.source_incarnation:x}, this is {st.incarnation:x}",
                )
                return
            room.state = RecvRoom.WANTING
            send = st.sends.get((room.room, room.epoch))
            tomb = st.tombstones.get((room.room, room.epoch, True))
            if send is not None and send.worker.engine_id == room.source:
                self.local.match(send, room)
            elif send is None and tomb is not None:
                reason = "protocol_error" if tomb.reason == "done" else tomb.reason
                self.ends.end(room, reason, tomb.detail or "the room was sent before")
            return
        st.emit(Resolve(room.source))

    def resolved(self, room: RecvRoom, node: str, incarnation: int) -> None:
        """The registry has said where the source is; the session with that node exists or is being set up."""
        st = self.state
        room.state = RecvRoom.WANTING
        room.peer = node
        room.progress = st.now
        peer = st.peers[node]
        peer.rooms[room.key] = None
        if peer.state == Peer.UP:
            self.want(room)
        self.arm(room)

    def want(self, room: RecvRoom) -> None:
        """Say what we want, now and until it is answered."""
        st = self.state
        peer = st.peers[room.peer]
        if room.source_incarnation and room.source_incarnation != peer.incarnation:
            self.ends.end(
                room, "peer_restarted",
                f"asked for incarnation {room.source_incarnation:x} of node {room.peer!r}, it is {peer.incarnation:x} now",
            )  # fmt: skip
            return
        held = room.held if any(room.held) else ()
        st.to_peer(
            room.peer,
            messages.Want(
                room.room, room.epoch, room.source, room.worker.engine_id, room.worker.specs, room.wanted, held
            ),
        )
        st.again(room)

    def retry(self, room: RecvRoom) -> None:
        if room.state == RecvRoom.WANTING and room.peer and self.state.peers[room.peer].state == Peer.UP:
            self.want(room)

    # the sender's messages -----------------------------------------------------------------------------------------

    def _theirs(self, peer: Peer, room: str, epoch: int) -> RecvRoom | None:
        found = self.state.recvs.get((room, epoch))
        return found if found is not None and found.peer == peer.node else None

    def _accepted(self, room: RecvRoom) -> None:
        if room.state == RecvRoom.WANTING:
            room.state = RecvRoom.RECEIVING
            self.state.timers.clear(("retry", room.key, room.serial))
            self.state.to_worker(room.worker, Matched(room.room, room.epoch, False))
            room.progress = self.state.now  # once: a repeated message is no progress
        self.arm(room)

    def on_accept(self, peer: Peer, accept: messages.Accept) -> None:
        room = self._theirs(peer, accept.room, accept.epoch)
        if room is None:
            self._answer_dead(peer, accept.room, accept.epoch)
            return
        self._accepted(room)

    def on_need(self, peer: Peer, need: messages.Need) -> None:
        room = self._theirs(peer, need.room, need.epoch)
        if room is None:
            self._answer_dead(peer, need.room, need.epoch)
            return
        self._accepted(room)
        st = self.state
        again = need.upto <= room.need
        if not again:
            room.need = need.upto
            room.progress = st.now
        if again:  # a repetition: its grants may have been lost
            for segment, index in room.outstanding.items():
                slot = st.engine.recv.all[index]
                if slot.state is SlotState.GRANTED:
                    self._say_grant(room, segment, slot)
        self._queue(room)

    def _queue(self, room: RecvRoom) -> None:
        if not room.queued and room.granted < room.need:
            room.queued = True
            self.state.grant_queue.append(room)
            self.ends.slots_freed = True

    def _say_grant(self, room: RecvRoom, segment: int, slot: Slot) -> None:
        assert self.state.engine.info is not None
        self.state.to_peer(
            room.peer,
            messages.Grant(
                room.room, room.epoch, segment, slot.index, slot.generation, self.state.engine.info.incarnation
            ),
        )

    def grant(self) -> None:
        """Give free receive slots to the rooms that need them, one each in turn, as far as no peer takes them all."""
        st = self.state
        if not st.engine.up:
            return
        slots = st.engine.recv
        idle = 0
        while slots.free and idle < len(st.grant_queue):
            room = st.grant_queue.popleft()
            if not room.live or room.granted >= room.need:
                room.queued = False
                continue
            held = slots.held_by(room.peer)
            crowded = held and (slots.free <= len(slots.all) // 4 or held >= max(1, len(slots.all) * 3 // 4))
            if crowded or len(room.outstanding) >= st.limits.room_window:
                st.grant_queue.append(room)
                idle += 1
                continue
            idle = 0
            peer = st.peers[room.peer]
            engine = peer.engine.incarnation if peer.engine is not None else 0
            slot = slots.take(SlotState.GRANTED, room.room, room.epoch, room.granted, room.peer, engine, st.now)
            room.outstanding[room.granted] = slot.index
            room.granted += 1
            self._say_grant(room, slot.segment, slot)
            if room.granted < room.need:
                st.grant_queue.append(room)
            else:
                room.queued = False

    def landed(self, node: str, segment: messages.Segment) -> None:
        """A segment is in its slot: by notification or by message, whichever comes first."""
        st = self.state
        info = st.engine.info
        if info is None or segment.engine != info.incarnation or not 0 <= segment.slot < len(st.engine.recv.all):
            return  # of an engine that is gone; the room ended with it
        slot = st.engine.recv.all[segment.slot]
        ours = (
            slot.generation == segment.generation
            and slot.peer == node
            and (slot.room, slot.epoch, slot.segment) == (segment.room, segment.epoch, segment.segment)
        )
        room = st.recvs.get((segment.room, segment.epoch))
        if room is None or room.peer != node:
            if ours and slot.state is SlotState.QUARANTINED:  # the writer has just said that it is finished
                self._free(slot)
            return
        if not ours or slot.state is not SlotState.GRANTED:
            if segment.segment in room.verified:
                self._ack(room)
            return
        room.progress = st.now
        self._accepted(room)
        problem = None
        for piece in segment.pieces:
            problem = problem or room.coverage.take_checked(piece)
        size = 0 if problem else piece_bytes(room.worker.specs, segment.pieces)
        if problem or size != segment.bytes or size > info.slot_bytes:
            detail = problem or f"{segment.bytes} bytes, expected {size}, a slot has {info.slot_bytes}"
            self.ends.end(room, "protocol_error", f"segment {segment.segment}: {detail}")
            return
        st.engine.recv.move(slot, SlotState.SCATTERING, st.now)
        id = st.job(JobRecord("scatter", room, slot=slot.index, peer=node, bytes=segment.bytes))
        room.jobs.add(id)
        rows = rows_of(segment.pieces, list(room.raw))
        st.to_engine(Scatter(id, room.worker.id, rows, slot.index, segment.bytes, segment.digest))

    def scattered(self, id: int, error: str, mismatch: bool) -> None:
        st = self.state
        record = st.jobs.pop(id)
        room = record.room
        assert isinstance(room, RecvRoom)
        st.timers.clear(("job", id))
        slot = st.engine.recv.all[record.slot]
        segment = slot.segment
        self._free(slot)
        room.jobs.discard(id)
        if not room.live:
            self.ends.settle(room)
            return
        room.outstanding.pop(segment, None)
        if mismatch or error:
            self.ends.end(room, "digest_mismatch" if mismatch else "copy_error", f"segment {segment}: {error}")
            return
        room.verified.add(segment)
        room.bytes += record.bytes
        while room.below in room.verified:
            room.below += 1
        room.progress = st.now
        if not self.complete(room):
            self._ack(room)
            self._queue(room)
            self.arm(room)

    def _free(self, slot: Slot) -> None:
        self.state.engine.recv.move(slot, SlotState.FREE, self.state.now)
        self.ends.slots_freed = True

    def _ack(self, room: RecvRoom) -> None:
        also = tuple(sorted(s for s in room.verified if s > room.below)[:64]) if len(room.verified) > room.below else ()
        self.state.to_peer(room.peer, messages.Ack(room.room, room.epoch, room.below, also))

    def on_finish(self, peer: Peer, finish: messages.Finish) -> None:
        room = self._theirs(peer, finish.room, finish.epoch)
        if room is None:
            self._answer_dead(peer, finish.room, finish.epoch)
            return
        self._accepted(room)
        if room.finish is None:
            room.finish, room.aux = finish.segments, finish.aux
            room.progress = self.state.now
        if not self.complete(room):
            self._ack(room)

    def complete(self, room: RecvRoom) -> bool:
        """End the room when everything has come. True when it ended."""
        if room.finish is None or room.below < room.finish:
            return False
        if room.coverage.left:
            self.ends.end(
                room,
                "page_count_mismatch",
                f"prefill finished, {room.coverage.left} of the pages × layers asked for never came",
            )
            return True
        room.bytes = sum(t.size * s.planes * s.page_bytes for t, s in zip(room.tables, room.worker.specs, strict=True))
        if room.peer:
            self.state.to_peer(room.peer, messages.Done(room.room, room.epoch))
        self.ends.end(room, "done", "")
        return True

    def _answer_dead(self, peer: Peer, room: str, epoch: int) -> None:
        """A live sender talks to a room that has ended here, or never was."""
        st = self.state
        if (room, epoch) in st.recvs:
            st.refuse("peer", peer.node, "not_your_room", f"room {room}/{epoch} is received from another node")
            return
        tomb = st.tombstones.get((room, epoch, False))
        if tomb is not None and tomb.reason == "done":
            st.to_peer(peer.node, messages.Done(room, epoch))
        else:  # said once: what is answered here is repeated until it is answered
            reason, detail = (
                (tomb.reason, tomb.detail) if tomb is not None else ("protocol_error", "no such receive here")
            )
            st.to_peer(peer.node, self.ends.ended((room, epoch, False), reason, detail))

    # waiting -------------------------------------------------------------------------------------------------------

    def deadline(self, room: RecvRoom) -> Deadline:
        """(when, reason, detail) of the phase that the room is in."""
        return receive_deadline(self.state, room)

    # quarantine ----------------------------------------------------------------------------------------------------

    def inquire(self) -> None:
        """Ask the writers of quarantined slots; after too long, fence them off by killing our own engine."""
        st = self.state
        if not st.engine.up:
            return
        slots = [s for s in st.engine.recv.all if s.state is SlotState.QUARANTINED]
        if not slots:
            return
        assert st.engine.info is not None
        asked: dict[str, list[tuple[str, int, int, int, int]]] = {}
        for s in slots:
            asked.setdefault(s.peer, []).append((s.room, s.epoch, s.segment, s.index, s.generation))
        for node, grants in asked.items():
            st.to_peer(node, messages.SlotQuery(st.engine.info.incarnation, tuple(grants)))
        st.timers.set(("quarantine",), st.now + st.limits.retry_first * 2)
        oldest = st.now - min(s.since for s in slots)
        if oldest >= st.limits.quarantine_limit and not st.engine.killing:
            busy = (
                any(s.state in (SlotState.GRANTED, SlotState.SCATTERING) for s in st.engine.recv.all)
                or st.engine.send.by_peer
            )
            if not busy or len(slots) * 2 >= len(st.engine.recv.all) or oldest >= 4 * st.limits.quarantine_limit:
                st.engine.killing = True
                st.emit(
                    KillEngine(
                        f"{len(slots)} receive slots in quarantine, the oldest for {oldest:.0f} s: fencing their writers"
                    )
                )

    def on_fate(self, peer: Peer, fate: messages.SlotFate) -> None:
        st = self.state
        if st.engine.info is None or fate.engine != st.engine.info.incarnation:
            return
        for index, generation in fate.free:
            if 0 <= index < len(st.engine.recv.all):
                slot = st.engine.recv.all[index]
                if slot.state is SlotState.QUARANTINED and slot.generation == generation and slot.peer == peer.node:
                    self._free(slot)

    def writers_gone(self, node: str) -> None:
        """This incarnation of the node is over, and every engine of it is dead: what it held in doubt is free.

        The death of one of its engines alone proves nothing about a slot: a grant outlives the engine that it was made
        under and its next one may be writing; the query is answered by the node, which knows.
        """
        for slot in self.state.engine.recv.all:
            if slot.peer == node and slot.state is SlotState.QUARANTINED:
                self._free(slot)
