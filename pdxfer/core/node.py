"""One node of pdxfer as a pure state machine (R3).

``Node.handle(event, now)`` takes one event and returns the actions that it causes; ``next_deadline()`` says when a
``Tick`` is due at the latest. Owns: dispatch, time, operators. Must not: read a clock, do I/O,
draw a random number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import events, messages, mirrorbooks
from .ends import Ends
from .engines import Engines
from .events import Action, Event
from .limits import Limits, MirrorSettings
from .local import Local
from .mirrors import Mirrors
from .peers import Peers
from .receiver import Receiver
from .sender import Sender
from .snapshot import snapshot
from .state import Peer, RecvRoom, Room, SendRoom, State
from .workers import Workers


class Node:
    """The core of one sidecar.

    ``name`` and ``incarnation`` identify it to its peers; an incarnation must be larger than all before it. ``address``
    is what peers connect to, ``release`` is for people. ``mirror``: the host mirror's size and shape; none, if left out.
    """

    def __init__(
        self, name: str, incarnation: int, address: str, release: str, limits: Limits | None = None,
        mirror: MirrorSettings | None = None,
    ) -> None:  # fmt: skip
        self.state = State(name, incarnation, address, release, limits or Limits())
        self.ends = Ends(self.state)
        self.local = Local(self.state, self.ends)
        self.sender = Sender(self.state, self.ends, self.local)
        self.receiver = Receiver(self.state, self.ends, self.local)
        self.local.sender, self.local.receiver = self.sender, self.receiver
        self.peers = Peers(self.state, self.ends, self.sender, self.receiver)
        self.mirrors = Mirrors(self.state, mirror or MirrorSettings())
        self.workers = Workers(self.state, self.ends, self.sender, self.receiver, self.mirrors)
        self.engines = Engines(
            self.state, self.ends, self.sender, self.receiver, self.local, self.peers, self.workers, self.mirrors
        )
        self._handlers: dict[type, Callable[[Any], None]] = {
            events.WorkerAttached: self.workers.attached,
            events.WorkerSaid: self.workers.said,
            events.WorkerGone: self.workers.lost,
            events.PeerSaid: self._peer_said,
            events.PeerCut: lambda event: self.peers.on_cut(event.node),
            events.Resolved: self._resolved,
            events.EngineSaid: self.engines.said,
            events.EngineGone: self.engines.lost,
            events.OperatorAbort: self._operator_abort,
            events.RoomBroken: self._room_broken,
            events.Drain: self._drain,
            events.Shutdown: self._shutdown,
            events.Tick: lambda event: None,
        }
        sender, receiver = self.sender, self.receiver
        self._by_message: dict[type, Callable[[Peer, Any], None]] = {
            messages.Want: sender.on_want,
            messages.Grant: sender.on_grant,
            messages.Ack: sender.on_ack,
            messages.Done: sender.on_done,
            messages.SlotQuery: sender.query,
            messages.Accept: receiver.on_accept,
            messages.Need: receiver.on_need,
            messages.Segment: lambda peer, segment: receiver.landed(peer.node, segment),
            messages.Finish: receiver.on_finish,
            messages.SlotFate: receiver.on_fate,
            messages.Ended: self.ends.on_ended,
            messages.EndedAck: self.ends.on_ended_ack,
            messages.Heartbeat: self.peers.on_heartbeat,
            messages.Goodbye: lambda peer, _: self.peers.on_goodbye(peer),
        }

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event at time ``now`` (seconds of any monotonic clock). Never raises for anything that comes in."""
        st = self.state
        st.now = max(st.now, now)
        self._ring()
        st.handling = None
        self._handlers[type(event)](event)
        self._move()
        actions, st.out = st.out, []
        return actions

    def next_deadline(self) -> float | None:
        """When a Tick is due at the latest, or None."""
        return self.state.timers.next()

    def snapshot(self) -> dict[str, Any]:
        """The state for people: see core.snapshot."""
        return {**snapshot(self.state), "mirror": mirrorbooks.snapshot(self.mirrors)}

    def audit(self) -> None:
        """Raise AssertionError when an invariant does not hold. Cheap enough for tests, too dear for each event."""
        from .audit import audit

        audit(self.state, [(op.owner.id, op.tables) for op in self.mirrors.operations.values()])
        mirrorbooks.audit(self.mirrors)

    def _move(self) -> None:
        """Hand out what came free, until nothing moves."""
        while self.ends.slots_freed:
            self.ends.slots_freed = False
            self.sender.dispatch()
            self.receiver.grant()
        if self.ends.quarantined:
            self.ends.quarantined = False
            self.receiver.inquire()
        self.state.expect()

    # time ----------------------------------------------------------------------------------------------------------

    def _ring(self) -> None:
        st = self.state
        while (key := st.timers.due(st.now)) is not None:
            assert isinstance(key, tuple)
            match key:
                case ("room" | "retry" as kind, (room_id, epoch, sending), serial):
                    room = (st.sends if sending else st.recvs).get((room_id, epoch))
                    if room is None or room.serial != serial:
                        continue
                    st.handling = (room_id, epoch)
                    if isinstance(room, SendRoom):
                        self.sender.timeout(room) if kind == "room" else self.sender.retry(room)
                    elif isinstance(room, RecvRoom):
                        self.receiver.timeout(room) if kind == "room" else self.receiver.retry(room)
                case ("job", id):
                    self._job_overdue(id)
                case ("closing", node, room_key):
                    self.ends.repeat(node, room_key)
                case ("parked", room_key):
                    self.sender.unpark(room_key)
                case ("hello", node):
                    self.peers.retry_hello(node)
                case ("beat", node):
                    self.peers.beat(node)
                case ("silent", node):
                    self.peers.silent(node)
                case ("worker", id):
                    self.workers.silent(id)
                case ("quarantine",):
                    self.receiver.inquire()
                case ("graves",):
                    self.ends.weather()
                case ("mirror", serial):
                    self.mirrors.overdue(serial)
                    self.workers.release_gone()
                case ("lease", id):
                    self.mirrors.expired(id)
                case _:
                    raise AssertionError(f"unknown timer {key}")

    def _job_overdue(self, id: int) -> None:
        """A job is past its deadline. A WRITE goes on in doubt; a copy cannot be taken back but by killing the engine."""
        st = self.state
        record = st.jobs[id]
        lim = st.limits
        if record.kind == "send" and not record.doubtful:
            room = record.room
            if room.live:
                self.ends.end(
                    room,
                    "transfer_deadline",
                    f"segment {record.plan.index if record.plan else '?'} not written within {lim.transfer_deadline:g} s",
                )
            if not record.doubtful:
                self.ends.doubt(id)
            if record.gathered:
                return
        if st.engine.up and not st.engine.killing:
            st.engine.killing = True
            st.emit(events.KillEngine(f"job {id} ({record.kind}) of room {record.room} is not over after its deadline"))
        st.timers.set(("job", id), st.now + lim.transfer_deadline)

    # peers ---------------------------------------------------------------------------------------------------------

    def _peer_said(self, event: events.PeerSaid) -> None:
        st = self.state
        peer = st.peers.get(event.node)
        if event.node == st.name:
            st.refuse("peer", event.node, "wrong_source", "a frame from a node with this node's own name")
            return
        for message in event.body:
            if isinstance(message, messages.Hello):
                peer = self.peers.on_hello(event.node, event.incarnation, message)
                if peer is None:
                    return
                continue
            if event.to_incarnation not in (0, st.incarnation):
                st.refuse(
                    "peer", event.node, "wrong_incarnation",
                    f"{type(message).__name__} for incarnation {event.to_incarnation:x}, this is {st.incarnation:x}",
                )  # fmt: skip
                self.peers.introduce(event.node, event.incarnation)  # it learns that we restarted
                return
            if peer is None or peer.incarnation != event.incarnation or peer.hello is None:
                st.refuse("peer", event.node, "no_session", f"{type(message).__name__} before Hello")
                if peer is not None or not isinstance(message, messages.Heartbeat):  # which answers a Hello
                    self.peers.introduce(event.node, 0)
                return
            self.peers.heard(peer)
            handler = self._by_message.get(type(message))
            if handler is None:
                st.refuse("peer", event.node, "bad_frame", f"{type(message).__name__} is not for the core")
                continue
            st.handling = (message.room, message.epoch) if isinstance(message, messages.RoomMessage) else None
            handler(peer, message)
            if event.node not in st.peers:
                return  # that was a goodbye

    def _resolved(self, event: events.Resolved) -> None:
        """The registry has answered: go on, or end, each receive that waits for this engine id."""
        st = self.state
        for room in [r for r in st.recvs.values() if r.state == RecvRoom.RESOLVING and r.source == event.engine_id]:
            if event.engine_id in st.by_engine_id:  # it has attached here meanwhile
                self.receiver.received(room)
            elif event.node and event.node != st.name:
                peer = self.peers.ensure(event.node)
                self.receiver.resolved(room, peer.node, event.incarnation)
            elif event.node:
                self.ends.end(
                    room, "unknown_engine", f"{event.engine_id!r} should be on this node, and is not attached"
                )
            else:
                self.ends.end(room, event.error or "unknown_engine", f"engine id {event.engine_id!r}")

    # operators -----------------------------------------------------------------------------------------------------

    def _operator_abort(self, event: events.OperatorAbort) -> None:
        st = self.state
        key = (event.room, event.epoch)
        rooms: list[Room] = [r for r in (st.sends.get(key), st.recvs.get(key)) if r is not None]
        for room in rooms:
            if room.live:
                self.ends.end(room, "operator_abort", event.detail or "pdxfer abort")
        self.workers.release_gone()

    def _room_broken(self, event: events.RoomBroken) -> None:
        st = self.state
        rooms: list[Room | None] = [st.sends.get((event.room, event.epoch)), st.recvs.get((event.room, event.epoch))]
        for room in rooms:
            if room is not None and room.live:
                self.ends.end(room, "internal_error", event.detail)
        self.workers.release_gone()

    def _drain(self, event: events.Drain) -> None:
        """What is open goes on; what waits for a room that can no more be opened does not."""
        self.state.draining = True
        for key in list(self.state.parked):
            self.ends.end_parked(key, "shutdown", f"node {self.state.name!r} takes no new rooms")

    def _shutdown(self, event: events.Shutdown) -> None:
        """End every room by name; the peers hear it, and goodbye once the engine is closed."""
        st = self.state
        st.draining = st.down = True
        rooms: list[Room] = [*st.sends.values(), *st.recvs.values()]
        for room in rooms:
            if room.live:
                self.ends.end(room, "shutdown", f"node {st.name!r} is shutting down")
        for key in list(st.parked):
            self.ends.end_parked(key, "shutdown", f"node {st.name!r} is shutting down")
        self.mirrors.shutdown(f"node {st.name!r} is shutting down")
        if not st.engine.up:
            self.peers.goodbye()
