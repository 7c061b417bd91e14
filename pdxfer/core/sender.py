"""The sending side: from a worker's open() to the receiver's Done.

Owns: matching a want, cutting pushes into segments, asking for slots, sending, repeating until acknowledged. Must not:
touch receive slots, or a receive's pages.

OPEN ──want──► MATCHED ──first segment──► SENDING ──all acknowledged, Done──► DONE
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from . import messages, worker
from .ends import Ends
from .geometry import Pages, Piece, PoolSpec, check_held, cut, difference, page_array, without
from .jobs import AddPeer, Rows, Send
from .ledger import SlotState
from .patience import Deadline, Patience, send_deadline
from .reasons import Refused
from .state import JobRecord, Parked, Peer, Plan, Push, SendRoom, State, Worker
from .worker import Matched

if TYPE_CHECKING:
    from .local import Local

FATAL: Final = 3  # engines that died while they were adding an agent, before it is taken for the cause
PARK_SHARE: Final = 4  # of the wants that may be parked, one peer may have a quarter


class Sender(Patience[SendRoom]):
    def __init__(self, state: State, ends: Ends, local: Local) -> None:
        self.state = state
        self.ends = ends
        self.local = local

    # the worker's requests -----------------------------------------------------------------------------------------

    def open(self, owner: Worker, frame: worker.Open) -> SendRoom:
        """Raises Refused: room_exists. Tombstones and limits were checked by the caller."""
        st = self.state
        key = (frame.room, frame.epoch)
        if key in st.sends:
            raise Refused(
                "room_exists", f"send of room {frame.room}/{frame.epoch} is open (state {st.sends[key].state})"
            )
        room = SendRoom(frame.room, frame.epoch, st.serial(), owner, st.now)
        st.sends[key] = room
        owner.rooms[room.key] = None
        self.arm(room)
        return room

    def opened(self, room: SendRoom) -> None:
        """After the worker has its Ok: take the want that may be waiting, here or parked."""
        st = self.state
        key = (room.room, room.epoch)
        parked = st.unpark(key)
        receive = st.recvs.get(key)
        if receive is not None and receive.source == room.worker.engine_id and not receive.peer:
            self.local.match(room, receive)
        elif parked is not None and parked.peer in st.peers:
            self.on_want(st.peers[parked.peer], parked.want)

    def push(self, room: SendRoom, frame: worker.Push) -> None:
        """Take pages on loan. Raises Refused, having changed nothing."""
        st = self.state
        if room.finished is not None:
            raise Refused("push_after_finish", f"room {room} was finished with {sum(room.counts)} pages")
        specs = room.worker.specs
        if len(frame.pages) != len(specs) or len(frame.page0) != len(specs):
            raise Refused(
                "pools_unequal",
                f"{len(frame.pages)} page tables, {len(frame.page0)} first pages, expected {len(specs)}",
            )
        tables: list[Pages] = [page_array(raw) for raw in frame.pages]
        rects: list[Piece] = []
        ends: list[int] = []
        for i, (spec, pages, page0) in enumerate(zip(specs, tables, frame.page0, strict=True)):
            if not len(pages):  # a pool that this push leaves alone may have other planes
                ends.append(0)
                continue
            planes = frame.planes or spec.planes
            if frame.plane0 < 0 or planes < 1 or frame.plane0 + planes > spec.planes:
                raise Refused(
                    "planes_out_of_range",
                    f"pool {spec.name!r}: planes {frame.plane0} to {frame.plane0 + planes - 1}, expected 0 to {spec.planes - 1}",
                )
            end = page0 + len(pages)
            if page0 < 0 or end > room.worker.num_pages[i]:
                raise Refused(
                    "pages_out_of_range",
                    f"pool {spec.name!r}: logical pages {page0} to {end - 1}, expected at most {room.worker.num_pages[i]} pages",
                )
            ends.append(end)
            rects.append(Piece(i, frame.plane0, planes, page0, len(pages)))
        st.pages.check(room.worker.id, tables, room.worker.names, write=False)
        if (twice := room.covered.overlap(rects)) is not None:
            raise Refused("planes_repeated", f"room {room}: {twice}")
        room.covered.grow(ends)
        room.covered.take(rects)
        room.counts = [max(a, b) for a, b in zip(room.counts, ends, strict=True)]
        st.pages.lend(room.worker.id, tables, room.serial, write=False)
        room.pushes.append(Push(frame.req, frame.page0, frame.pages, tables, rects))
        room.progress = st.now

    def pushed(self, room: SendRoom) -> None:
        """After the worker has its Ok."""
        for push in room.pushes:
            if not push.tables or not any(len(t) for t in push.tables):
                if not push.home:
                    self.ends.push_home(room, push, told=True)
        if room.peer or room.local is not None:
            if not self._counts_fit(room):
                return
            self.pump(room)
        self.arm(room)

    def finish(self, room: SendRoom, aux: bytes) -> None:
        """Raises Refused, having changed nothing."""
        if room.finished is not None:
            raise Refused("push_after_finish", f"room {room} was finished before")
        if len(aux) > messages.MAX_AUX:
            raise Refused("aux_too_large", f"room {room}: {len(aux)} bytes of aux, expected at most {messages.MAX_AUX}")
        room.finished = aux
        room.progress = self.state.now

    def finished(self, room: SendRoom) -> None:
        """After the worker has its Ok."""
        if room.peer or room.local is not None:
            if not self._counts_fit(room):
                return
            self.pump(room)
        self.arm(room)

    def _counts_fit(self, room: SendRoom) -> bool:
        """End the room when what was pushed cannot be what the receiver asked for."""
        names = room.worker.names
        for name, have, want in zip(names, room.counts, room.wanted, strict=True):
            if have > want or (room.finished is not None and have != want):
                self.ends.end(
                    room, "page_count_mismatch", f"pool {name!r}: prefill has {have} pages, decode asked for {want}"
                )
                return False
        if room.finished is not None and room.covered.left:
            self.ends.end(room, "page_count_mismatch", f"{room.covered.left} of the pages × layers were never pushed")
            return False
        return True

    # matching ------------------------------------------------------------------------------------------------------

    def on_want(self, peer: Peer, want: messages.Want) -> None:
        st = self.state
        key = (want.room, want.epoch)
        room = st.sends.get(key)
        if room is None:
            tomb = st.tombstones.get((want.room, want.epoch, True))
            if tomb is not None:
                reason = "protocol_error" if tomb.reason == "done" else tomb.reason
                self._refuse_want(peer, want, reason, tomb.detail or "the room was sent before")
            elif st.draining:
                self._refuse_want(peer, want, "shutdown", "prefill's sidecar is shutting down")
            elif key not in st.parked:
                mine = st.parked_by.get(peer.node, 0)
                if len(st.parked) >= st.limits.park_limit or mine * PARK_SHARE >= st.limits.park_limit:
                    st.refuse(
                        "peer", peer.node, "overloaded", f"{len(st.parked)} wants are parked, {mine} of this peer"
                    )
                    return
                st.park(key, Parked(peer.node, want, st.now))
            return
        if room.peer or room.local is not None:
            if room.peer == peer.node:
                st.to_peer(peer.node, messages.Accept(room.room, room.epoch))
            else:
                self._refuse_want(
                    peer,
                    want,
                    "protocol_error",
                    f"the room is matched with {room.peer or 'a worker of its own node'!r}",
                )
            return
        if want.source != room.worker.engine_id:
            self._refuse_want(
                peer,
                want,
                "unknown_engine",
                f"room {room} is sent by {room.worker.engine_id!r}, wanted from {want.source!r}",
            )
            return
        room.peer = peer.node
        peer.rooms[room.key] = None
        self.matched(room, want.specs, want.pages, want.held, f"decode worker {want.target!r}")

    def matched(
        self, room: SendRoom, specs: tuple[PoolSpec, ...], pages: tuple[int, ...], held: tuple[int, ...], who: str
    ) -> bool:
        """Compare layouts and begin. False when the room ended over it."""
        st = self.state
        differ = difference(room.worker.specs, specs)
        if differ is not None:
            pool, field, ours, theirs = differ
            self.ends.end(
                room,
                "layout_mismatch",
                f"pool {pool!r}, field {field!r}: prefill worker {room.worker.engine_id!r} has {ours!r}, {who} has {theirs!r}",
            )
            return False
        try:
            check_held(room.worker.names, pages, held or (0,) * len(pages))
        except Refused as error:
            self.ends.end(room, "protocol_error", f"{who} wants {pages} pages and holds {held}: {error.detail}")
            return False
        room.wanted, room.held = pages, held or (0,) * len(pages)
        room.state = SendRoom.MATCHED
        room.progress = st.now
        st.to_worker(room.worker, Matched(room.room, room.epoch, True))
        if room.peer:
            st.to_peer(room.peer, messages.Accept(room.room, room.epoch))
        if not self._counts_fit(room):
            return False
        self.pump(room)
        self.arm(room)
        return True

    def unpark(self, key: tuple[str, int]) -> None:
        """A want has waited too long for its room."""
        st = self.state
        self.ends.end_parked(key, "want_timeout", f"not opened within {st.limits.want_timeout:g} s")

    def _refuse_want(self, peer: Peer, want: messages.Want, reason: str, detail: str) -> None:
        st = self.state  # said once: a want is repeated until it is answered
        st.to_peer(peer.node, self.ends.ended((want.room, want.epoch, True), reason, detail))

    # moving --------------------------------------------------------------------------------------------------------

    def pump(self, room: SendRoom) -> None:
        """Cut what can be cut, ask for slots, say finish, and see whether that was all."""
        st = self.state
        if room.local is not None:
            self.local.pump(room)
            return
        peer = st.peers[room.peer]
        info = peer.engine
        if info is not None and st.engine.info is not None:
            self._add_peer(info.agent, peer)
            if not room.slot_bytes:
                room.slot_bytes = min(info.slot_bytes, st.engine.info.slot_bytes)
            before = len(room.plans)
            for push in room.pushes:
                if push.uncut:
                    try:
                        segments = list(cut(room.worker.specs, without(push.uncut, room.held), room.slot_bytes))
                    except Refused as error:
                        self.ends.end(room, "layout_mismatch", error.detail)
                        return
                    push.uncut = []
                    push.left += len(segments)
                    for pieces, size in segments:
                        room.plans.append(Plan(len(room.plans), pieces, size, push))
                    if not push.left and not push.home:  # the receiver holds all of it
                        self.ends.push_home(room, push, told=True)
            if len(room.plans) > before:
                st.to_peer(room.peer, messages.Need(room.room, room.epoch, len(room.plans)))
                room.state = SendRoom.SENDING
        if room.finished is not None and not room.said_finish and not any(push.uncut for push in room.pushes):
            room.said_finish = True
            room.state = SendRoom.SENDING
            st.to_peer(room.peer, messages.Finish(room.room, room.epoch, len(room.plans), room.finished))
        if self._owed(room):
            room.retry = 0.0
            st.again(room)

    def _add_peer(self, agent: str, peer: Peer) -> None:
        st = self.state
        if agent not in st.engine.agents:
            assert peer.engine is not None
            if st.fatal_agents.get(agent, 0) >= FATAL:
                st.engine.agents[agent] = f"its metadata is taken for what killed {st.fatal_agents[agent]} engines here"
                return
            st.engine.agents[agent] = "adding"
            st.to_engine(AddPeer(peer.engine))

    def on_grant(self, peer: Peer, grant: messages.Grant) -> None:
        st = self.state
        room = st.sends.get((grant.room, grant.epoch))
        if room is None or room.peer != peer.node or room.local is not None:
            return  # a late grant: the receiver learns of the end by Ended, and of the slot by its query
        if peer.engine is None or grant.engine != peer.engine.incarnation or not st.engine.up:
            return  # repeated when both engines are up
        if not 0 <= grant.segment < len(room.plans) or not 0 <= grant.slot < peer.engine.slots:
            self.ends.end(
                room, "protocol_error", f"granted slot {grant.slot} for segment {grant.segment} of {len(room.plans)}"
            )
            return
        plan = room.plans[grant.segment]
        if plan.granted:
            return
        plan.granted, plan.slot, plan.generation = True, grant.slot, grant.generation
        room.granted += 1
        room.high = max(room.high, grant.segment + 1)
        room.progress = st.now
        st.send_queue.append((room, plan))
        self.arm(room)
        self.ends.slots_freed = True

    def dispatch(self) -> None:
        """Give free send slots to granted segments, in order, as far as no peer takes them all."""
        st = self.state
        if not st.engine.up:
            return
        kept: list[tuple[SendRoom, Plan]] = []
        slots = st.engine.send
        while slots.free and st.send_queue:
            room, plan = st.send_queue.popleft()
            if not room.live:
                continue
            held = slots.held_by(room.peer)
            peer = st.peers[room.peer]
            info = peer.engine
            if info is None:
                continue  # its engine died: the room is ended by that
            agent = st.engine.agents.get(info.agent, "")
            if agent not in ("ready", "adding"):
                self.ends.end(room, "metadata_refused", f"node {room.peer!r}: {agent}")
                continue
            assert st.engine.info is not None
            slot_bytes = min(info.slot_bytes, st.engine.info.slot_bytes)
            if plan.bytes > slot_bytes:  # it was cut for an engine that is gone
                detail = f"segment {plan.index} has {plan.bytes} bytes, the slots of the new engine {slot_bytes}"
                self.ends.end(room, "engine_lost", detail)
                continue
            if agent == "adding" or (
                held and (slots.free <= len(slots.all) // 4 or held >= max(1, len(slots.all) // 2))
            ):
                kept.append((room, plan))
                continue
            self._send(room, plan, info)
            self.arm(room)
        st.send_queue.extendleft(reversed(kept))

    def _send(self, room: SendRoom, plan: Plan, info: messages.EngineInfo) -> None:
        st = self.state
        slot = st.engine.send.take(
            SlotState.SENDING, room.room, room.epoch, plan.index, room.peer, info.incarnation, st.now
        )
        record = JobRecord(
            "send", room, slot=slot.index, plan=plan, peer=room.peer,
            remote_slot=plan.slot, remote_generation=plan.generation,
        )  # fmt: skip
        plan.job = st.job(record)
        room.jobs.add(plan.job)
        segment = messages.Segment(
            room.room, room.epoch, plan.index, plan.slot, plan.generation, info.incarnation, plan.bytes, 0, plan.pieces
        )
        st.to_engine(
            Send(
                plan.job, room.worker.id, self.rows(plan), slot.index, plan.bytes, info.agent,
                info.slot_base + plan.slot * info.slot_bytes, segment,
            )
        )  # fmt: skip

    @staticmethod
    def rows(plan: Plan) -> tuple[Rows, ...]:
        """Where the segment's pages lie in the worker's pools."""
        push = plan.push
        out = []
        for p in plan.pieces:
            first = 4 * (p.page0 - push.page0[p.pool])
            out.append(Rows(p.pool, p.plane0, p.planes, push.raw[p.pool][first : first + 4 * p.pages]))
        return tuple(out)

    def gathered(self, record: JobRecord) -> None:
        """The segment's pages have been read."""
        room, plan = record.room, record.plan
        assert isinstance(room, SendRoom) and plan is not None
        record.gathered = True
        plan.push.left -= 1
        if room.live:
            room.progress = self.state.now
            if not plan.push.left and not plan.push.uncut and not plan.push.home:
                self.ends.push_home(room, plan.push, told=True)
            if room.done_heard:
                self._complete(room)
        else:
            self.ends.settle(room)

    def sent(self, id: int, digest: int, error: str) -> None:
        """The WRITE is terminal."""
        st = self.state
        record = st.jobs.pop(id)
        room, plan = record.room, record.plan
        assert isinstance(room, SendRoom) and plan is not None
        st.timers.clear(("job", id))
        st.engine.send.move(st.engine.send.all[record.slot], SlotState.FREE, st.now)
        self.ends.slots_freed = True
        room.jobs.discard(id)
        plan.job = 0
        if not record.gathered and not error:
            self.gathered(record)
        if not room.live:
            self.ends.settle(room)
        elif error:
            self.ends.end(room, "transfer_error", f"segment {plan.index}: {error}")
        else:
            plan.sent, plan.digest = True, digest
            room.bytes += plan.bytes
            room.progress = st.now
            if ("retry", room.key, room.serial) not in st.timers:
                room.retry = 0.0
                st.again(room)
            self.arm(room)

    def on_ack(self, peer: Peer, ack: messages.Ack) -> None:
        room = self._theirs(peer, ack.room, ack.epoch)
        if room is None:
            return
        below = min(ack.below, len(room.plans))
        for index in [*range(room.acked, below), *ack.also]:
            if 0 <= index < len(room.plans) and room.plans[index].sent and not room.plans[index].acked:
                room.plans[index].acked = True
                room.progress = self.state.now  # a repeated Ack is none: it would put every deadline off for ever
        while room.acked < len(room.plans) and room.plans[room.acked].acked:
            room.acked += 1

    def on_done(self, peer: Peer, done: messages.Done) -> None:
        room = self._theirs(peer, done.room, done.epoch)
        if room is None:
            return
        if not room.said_finish:
            self.ends.end(room, "protocol_error", "Done came before finish")
            return
        room.done_heard = True
        room.progress = self.state.now
        self._complete(room)

    def _complete(self, room: SendRoom) -> None:
        """A Done can overtake our own engine's reports: pages must be home first, slots wait for their report alone."""
        if all(push.home for push in room.pushes):
            room.bytes = sum(plan.bytes for plan in room.plans)
            self.ends.end(room, "done", "")

    def _theirs(self, peer: Peer, room: str, epoch: int) -> SendRoom | None:
        found = self.state.sends.get((room, epoch))
        return found if found is not None and found.peer == peer.node else None

    # repeating and waiting -----------------------------------------------------------------------------------------

    def _owed(self, room: SendRoom) -> bool:
        """Does the receiver owe us an answer?"""
        return (
            len(room.plans) > room.granted
            or room.said_finish
            or any(p.sent and not p.acked for p in room.plans[room.acked : room.high])
        )

    def retry(self, room: SendRoom) -> None:
        """Say again what has not been answered."""
        st = self.state
        if not room.peer:
            return
        if st.engine.up and any(push.uncut for push in room.pushes):
            self.pump(room)
            if not room.live:
                return
        if len(room.plans) > room.granted:
            st.to_peer(room.peer, messages.Need(room.room, room.epoch, len(room.plans)))
        said = 0
        for plan in room.plans[room.acked : room.high]:
            if plan.sent and not plan.acked and said < 32:
                said += 1
                st.to_peer(room.peer, self._segment(room, plan))
        if room.said_finish:
            assert room.finished is not None
            st.to_peer(room.peer, messages.Finish(room.room, room.epoch, len(room.plans), room.finished))
        if self._owed(room):
            st.again(room)

    def _segment(self, room: SendRoom, plan: Plan) -> messages.Segment:
        peer = self.state.peers[room.peer]
        engine = peer.engine.incarnation if peer.engine is not None else 0
        return messages.Segment(
            room.room, room.epoch, plan.index, plan.slot, plan.generation, engine, plan.bytes, plan.digest, plan.pieces
        )

    def deadline(self, room: SendRoom) -> Deadline:
        """(when, reason, detail) of the phase that the room is in."""
        return send_deadline(self.state, room)

    def query(self, peer: Peer, query: messages.SlotQuery) -> None:
        """Which of these grants will never be written under again?"""
        st = self.state
        busy = {
            (r.remote_slot, r.remote_generation) for r in st.jobs.values() if r.kind == "send" and r.peer == peer.node
        }
        free = tuple(
            (slot, generation)
            for room, epoch, _segment, slot, generation in query.slots
            if (slot, generation) not in busy and self._theirs(peer, room, epoch) is None
        )
        if free:
            st.to_peer(peer.node, messages.SlotFate(query.engine, free))
