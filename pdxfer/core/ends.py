"""How rooms end: once, by name, with every page home, and remembered.

Owns: the end of a room on this side, tombstones, and telling the peer until it has answered. Must not: know how
segments move.

A room that ends is dead at once: its tombstone stands, its peer is being told, no message can revive it. Its worker is
told when no local job touches its pages any more, which the remote side cannot delay (R2).
"""

from __future__ import annotations

from .events import RoomClosed
from .ledger import SlotState
from .messages import Ended, EndedAck
from .reasons import ENDS
from .state import Peer, Push, RecvRoom, Room, RoomKey, SendRoom, State, Tombstone
from .worker import Released, RoomEnded


class Ends:
    def __init__(self, state: State) -> None:
        self.state = state
        self.closing: dict[tuple[str, RoomKey], tuple[Ended, float, float]] = {}  # (peer, key) -> message, delay, until
        self.slots_freed = False  # a slot came free: the queues should be looked at
        self.quarantined = False  # a slot was quarantined: its writer should be asked

    # ending --------------------------------------------------------------------------------------------------------

    def end(self, room: Room, reason: str, detail: str, *, tell: bool = True) -> None:
        """End a live room. ``tell``: its peer does not know yet."""
        st = self.state
        assert room.live, f"room {room} ends twice"
        assert reason in ENDS, reason
        room.reason, room.detail, room.ended_at = reason, detail, st.now
        del (st.sends if room.sending else st.recvs)[(room.room, room.epoch)]
        for kind in ("room", "retry"):
            st.timers.clear((kind, room.key, room.serial))
        self.bury(room.key, reason, detail)
        if room.peer and (peer := st.peers.get(room.peer)) is not None:
            peer.rooms.pop(room.key, None)
        if isinstance(room, RecvRoom):
            self._quarantine(room)
            if not room.peer and room.local is None and room.state == RecvRoom.WANTING:  # a send to come on this node
                self.doom(room.room, room.epoch, reason, detail)
        for id in list(room.jobs):
            record = st.jobs[id]
            if record.kind == "send" and not record.doubtful:
                self.doubt(id)
        if tell and reason != "done" and room.peer:
            self.tell(room.peer, room.key, reason, detail)
        st.homing[room.serial] = room
        other, room.local = room.local, None
        if other is not None:
            other.local = None
            if other.live and reason != "done":
                self.end(other, reason, detail, tell=False)
        self.settle(room)

    def settle(self, room: Room) -> None:
        """Bring an ended room's pages home as far as no job touches them; report the end once all are."""
        st = self.state
        if room.live or room.serial not in st.homing:
            return
        if isinstance(room, SendRoom):
            busy = {st.jobs[id].plan.push for id in room.jobs if not st.jobs[id].gathered}  # type: ignore[union-attr]
            for push in room.pushes:
                if not push.home and push not in busy:
                    self.push_home(room, push, told=False)
            if busy:
                return
        else:
            assert isinstance(room, RecvRoom)
            if room.jobs:
                return
            st.pages.give_back(room.worker.id, room.tables, room.serial, write=True)
        del st.homing[room.serial]
        worker = room.worker
        worker.rooms.pop(room.key, None)
        entry = ENDS[room.reason]
        age = st.now - room.opened
        aux = room.aux if isinstance(room, RecvRoom) and room.reason == "done" else b""
        frame = RoomEnded(
            room.room, room.epoch, room.sending, entry.state, room.reason, entry.retriable,
            self.message(room), room.bytes, age, aux,
        )  # fmt: skip
        st.to_worker(worker, frame)
        st.emit(
            RoomClosed(
                room.room, room.epoch, room.sending, room.reason, room.detail, room.bytes, age, room.peer or st.name
            )
        )

    def push_home(self, room: SendRoom, push: Push, *, told: bool) -> None:
        """A push has been read, or never will be: its pages go home. ``told``: the worker gets a Released for it."""
        assert not push.home
        push.home = True
        self.state.pages.give_back(room.worker.id, push.tables, room.serial, write=False)
        if told:
            self.state.to_worker(room.worker, Released(push.req, room.room, room.epoch))

    def message(self, room: Room) -> str:
        """The end in a sentence for people: what, which peer, which phase, bytes done, age; and what to do."""
        st = self.state
        entry = ENDS[room.reason]
        if room.reason == "done":
            return ""
        side = "send" if room.sending else "receive"
        peer = f" with node {room.peer!r}" if room.peer else ""
        return (
            f"{entry.meaning}: {room.detail or 'no detail'} ({side} of room {room}{peer}, phase {room.state},"
            f" {room.bytes} bytes done, {st.now - room.opened:.1f} s old); {entry.advice}"
        )

    def doubt(self, id: int) -> None:
        """A send's room is over or its deadline has passed, and its WRITE is not known to be."""
        st = self.state
        record = st.jobs[id]
        record.doubtful = True
        st.engine.send.move(st.engine.send.all[record.slot], SlotState.DOUBTFUL, st.now)
        st.timers.set(("job", id), st.now + st.limits.quarantine_limit)

    def _quarantine(self, room: RecvRoom) -> None:
        st = self.state
        for index in room.outstanding.values():
            slot = st.engine.recv.all[index]
            if slot.state is SlotState.GRANTED:
                st.engine.recv.move(slot, SlotState.QUARANTINED, st.now)
                self.quarantined = True
        room.outstanding.clear()

    # tombstones ----------------------------------------------------------------------------------------------------

    def bury(self, key: RoomKey, reason: str, detail: str, *, early: bool = False) -> None:
        st = self.state
        st.tombstones.pop(key, None)
        st.tombstones[key] = Tombstone(reason, detail, st.now + st.limits.tombstone_ttl, early)
        while len(st.tombstones) > st.limits.max_tombstones:
            del st.tombstones[next(iter(st.tombstones))]
        if ("graves",) not in st.timers:
            st.timers.set(("graves",), st.now + st.limits.tombstone_ttl)

    def doom(self, room: str, epoch: int, reason: str, detail: str) -> None:
        """Its receiver is dead: a send that is not open yet ends as it arrives."""
        if (room, epoch, True) not in self.state.tombstones and (room, epoch) not in self.state.sends:
            self.bury((room, epoch, True), reason, detail, early=True)

    def end_parked(self, key: tuple[str, int], reason: str, detail: str) -> None:
        """A want that waits for its room will not get it."""
        parked = self.state.unpark(key)
        assert parked is not None
        self.tell(parked.peer, (*key, True), reason, detail)
        self.doom(*key, reason, detail)

    def weather(self) -> None:
        """Forget the tombstones whose time is over: they lie in the order of their dates."""
        st = self.state
        while st.tombstones:
            key = next(iter(st.tombstones))
            if st.tombstones[key].until > st.now:
                st.timers.set(("graves",), st.tombstones[key].until)
                return
            del st.tombstones[key]

    # telling the peer ----------------------------------------------------------------------------------------------

    def tell(self, node: str, key: RoomKey, reason: str, detail: str) -> None:
        """Send Ended until it is acknowledged."""
        st = self.state
        message = self.ended(key, reason, detail)
        self.closing[(node, key)] = (message, st.limits.retry_first, st.now + 4 * st.limits.stall_deadline)
        st.to_peer(node, message)
        st.timers.set(("closing", node, key), st.now + st.limits.retry_first)

    def ended(self, key: RoomKey, reason: str, detail: str) -> Ended:
        name = self.state.name
        return Ended(*key, reason, f"{name}: {detail}"[:500] if detail else name)

    def repeat(self, node: str, key: RoomKey) -> None:
        st = self.state
        found = self.closing.get((node, key))
        if found is None:
            return
        message, delay, until = found
        if st.now >= until or node not in st.peers:
            del self.closing[(node, key)]
            return
        delay = min(delay * 2, st.limits.retry_most)
        self.closing[(node, key)] = (message, delay, until)
        st.to_peer(node, message)
        st.timers.set(("closing", node, key), st.now + delay)

    def on_ended(self, peer: Peer, message: Ended) -> None:
        """The other side has ended the room."""
        st = self.state
        st.to_peer(peer.node, EndedAck(message.room, message.epoch, message.by_sender))
        reason = message.reason if message.reason in ENDS and message.reason != "done" else "protocol_error"
        key = (message.room, message.epoch)
        room: Room | None = st.recvs.get(key) if message.by_sender else st.sends.get(key)
        if room is not None:
            if room.peer and room.peer != peer.node:
                st.refuse("peer", peer.node, "not_your_room", f"Ended for room {room}, whose peer is {room.peer!r}")
            elif room.peer:
                self.end(room, reason, message.detail, tell=False)
            elif room.sending and room.local is None:  # open, and its want never came or was lost: kill it
                room.peer = peer.node
                self.end(room, reason, message.detail, tell=False)
            return
        if not message.by_sender:
            parked = st.parked.get(key)
            if parked is not None and parked.peer == peer.node:
                st.unpark(key)
            self.doom(message.room, message.epoch, reason, message.detail)

    def on_ended_ack(self, peer: Peer, message: EndedAck) -> None:
        key: RoomKey = (message.room, message.epoch, message.by_sender)
        if self.closing.pop((peer.node, key), None) is not None:
            self.state.timers.clear(("closing", peer.node, key))

    def forget_peer(self, node: str) -> None:
        """Its incarnation is over: nobody is there to be told."""
        for node_key in [k for k in self.closing if k[0] == node]:
            del self.closing[node_key]
            self.state.timers.clear(("closing", *node_key))
