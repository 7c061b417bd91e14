"""Sessions with other nodes: hello, heartbeats, loss, restart.

Owns: who is there, under which incarnation, with which engine, and when it was last heard. Must not: know sockets, or
how segments move.

A session needs no connection of its own: any authenticated message from a known incarnation is a sign of life, every
message names the incarnation that it is meant for, and the Hello is repeated until the peer shows that it holds it.
"""

from __future__ import annotations

from .ends import Ends
from .events import ForgetPeer, ToPeer
from .jobs import RemovePeer
from .ledger import SlotState
from .messages import Goodbye, Heartbeat, Hello
from .receiver import Receiver
from .sender import Sender
from .state import Peer, RecvRoom, SendRoom, State, agent_name


class Peers:
    def __init__(self, state: State, ends: Ends, sender: Sender, receiver: Receiver) -> None:
        self.state = state
        self.ends = ends
        self.sender = sender
        self.receiver = receiver

    # ourselves -----------------------------------------------------------------------------------------------------

    def hello(self) -> Hello:
        st = self.state
        return Hello(st.incarnation, st.revision, st.address, st.release, st.engine.info)

    def changed(self) -> None:
        """Our engine came or went: every peer must hold the new Hello."""
        self.state.revision += 1
        for peer in list(self.state.peers.values()):
            self._say_hello(peer)

    def _say_hello(self, peer: Peer) -> None:
        st = self.state
        st.emit(ToPeer(peer.node, peer.incarnation, self.hello()))
        peer.hello_at = st.now
        peer.hello_delay = min(peer.hello_delay * 2 or st.limits.retry_first, st.limits.retry_most)
        st.timers.set(("hello", peer.node), st.now + peer.hello_delay)

    def introduce(self, node: str, incarnation: int) -> None:
        """Answer a node that takes us for another, or whose Hello we lack, with our own Hello; not more often than it helps."""
        st = self.state
        peer = st.peers.get(node)
        if peer is None or st.now >= peer.hello_at + st.limits.retry_first:
            st.emit(ToPeer(node, incarnation, self.hello()))
            if peer is not None:
                peer.hello_at = st.now

    def retry_hello(self, node: str) -> None:
        st = self.state
        peer = st.peers.get(node)
        if peer is not None and (peer.seen < st.revision or peer.cut_at is not None) and peer.state != Peer.LOST:
            self._say_hello(peer)

    # coming up -----------------------------------------------------------------------------------------------------

    def ensure(self, node: str) -> Peer:
        """The peer, with a session being set up if there is none."""
        st = self.state
        peer = st.peers.get(node)
        if peer is None:
            peer = st.peers[node] = Peer(node, st.now)
            self._say_hello(peer)
            st.timers.set(("beat", node), st.now + st.limits.heartbeat_interval)
            st.timers.set(("silent", node), st.now + st.limits.connect_timeout)
        elif peer.state == Peer.LOST:
            self._state(peer, Peer.CONNECTING)
            peer.heard = st.now
            peer.seen = 0  # it may have forgotten us: say Hello until it shows that it holds it
            peer.hello_delay = 0.0
            self._say_hello(peer)
            st.timers.set(("silent", node), st.now + st.limits.connect_timeout)
        return peer

    def _state(self, peer: Peer, state: str) -> None:
        peer.state, peer.since = state, self.state.now

    def on_hello(self, node: str, incarnation: int, message: Hello) -> Peer | None:
        """A peer introduces itself, or has changed. None when it is an old incarnation speaking."""
        st = self.state
        if message.incarnation != incarnation:
            st.refuse(
                "peer",
                node,
                "bad_frame",
                f"Hello of incarnation {message.incarnation:x} in an envelope of {incarnation:x}",
            )
            return None
        peer = st.peers.get(node)
        engine = message.engine
        if engine is not None and engine.agent != agent_name(node, incarnation, engine.incarnation):
            st.refuse(
                "peer", node, "bad_frame", f"Hello with the engine {engine.agent[:80]!r}, which is not this node's"
            )
            return None
        if peer is None:
            peer = st.peers[node] = Peer(node, st.now)
            st.timers.set(("beat", node), st.now + st.limits.heartbeat_interval)
            st.timers.set(("silent", node), st.now + st.limits.stall_deadline)
        elif peer.incarnation and incarnation < peer.incarnation:
            st.refuse(
                "peer", node, "wrong_incarnation", f"incarnation {incarnation:x} is over, {peer.incarnation:x} is known"
            )
            return None
        elif peer.incarnation and incarnation > peer.incarnation:
            self._restarted(peer, f"incarnation {peer.incarnation:x} is over, {incarnation:x} is up")
        if peer.hello is not None and peer.incarnation == incarnation and message.revision <= peer.hello.revision:
            if message.revision == peer.hello.revision:
                if st.now >= peer.hello_at + st.limits.retry_most:
                    self._say_hello(peer)  # it says so again: it may have forgotten us
                self._answer(peer)
            return peer
        old = peer.engine
        fresh = peer.incarnation != incarnation
        same = not fresh and old is not None and engine is not None and old.incarnation == engine.incarnation
        if same and old != engine:
            st.refuse("peer", node, "bad_frame", f"Hello that changes engine {old.agent!r} under one incarnation")  # type: ignore[union-attr]
            return None
        peer.incarnation = incarnation
        peer.hello = message
        if peer.state != Peer.UP:
            self._state(peer, Peer.UP)
            peer.heard = st.now
            st.timers.set(("silent", node), st.now + st.limits.stall_deadline)
        if message.engine != old:
            peer.engine_since = st.now
        if not fresh and old is not None and (message.engine is None or message.engine.incarnation != old.incarnation):
            self._engine_gone(peer, old.agent)
        self._answer(peer)
        self.resume(peer)
        return peer

    def _answer(self, peer: Peer) -> None:
        """Show that we hold its Hello; give ours if it may lack it."""
        st = self.state
        assert peer.hello is not None
        again = peer.hello_at + st.limits.retry_first  # not sooner, or Hello answers Hello for ever
        if peer.seen < st.revision and st.now >= again:
            self._say_hello(peer)
        elif peer.seen < st.revision and ("hello", peer.node) not in st.timers:
            st.timers.set(("hello", peer.node), again)
        st.to_peer(peer.node, Heartbeat(st.revision, peer.hello.revision))

    def resume(self, peer: Peer) -> None:
        """The session or an engine came up: go on with what waited for it."""
        st = self.state
        for key in list(peer.rooms):
            room = (st.sends if key[2] else st.recvs).get((key[0], key[1]))
            if room is None or room.peer != peer.node:
                continue
            if isinstance(room, SendRoom):
                self.sender.pump(room)
                self.sender.arm(room)  # its engine may have gone
            elif isinstance(room, RecvRoom) and room.state == RecvRoom.WANTING:
                self.receiver.want(room)

    # heartbeats ----------------------------------------------------------------------------------------------------

    def on_heartbeat(self, peer: Peer, message: Heartbeat) -> None:
        st = self.state
        if message.seen > peer.seen:
            peer.seen = min(message.seen, st.revision)
            if peer.seen == st.revision:
                peer.hello_delay = 0.0
                if peer.cut_at is None:
                    st.timers.clear(("hello", peer.node))
        if peer.seen < st.revision and ("hello", peer.node) not in st.timers:
            self._say_hello(peer)

    def beat(self, node: str) -> None:
        st = self.state
        peer = st.peers.get(node)
        if peer is None:
            return
        seen = peer.hello.revision if peer.hello is not None else 0
        if peer.incarnation:
            st.to_peer(node, Heartbeat(st.revision, seen))
        interval = st.limits.heartbeat_interval * (4 if peer.state == Peer.LOST else 1)
        st.timers.set(("beat", node), st.now + interval)

    def heard(self, peer: Peer) -> None:
        """Any authenticated message of the right incarnation."""
        st = self.state
        peer.heard = st.now
        if peer.cut_at is not None and st.now >= peer.cut_at + 0.3:  # later than what was in the pipe when it was cut
            peer.cut_at = None
        if peer.state != Peer.UP and peer.hello is not None:
            self._state(peer, Peer.UP)
            st.timers.set(("silent", peer.node), st.now + st.limits.stall_deadline)
            self._answer(peer)
            self.resume(peer)

    def on_cut(self, node: str) -> None:
        """Its connection closed. That may be a restarted thread: give it the grace time to be heard again."""
        st = self.state
        peer = st.peers.get(node)
        if peer is not None and peer.state != Peer.LOST and peer.cut_at is None:
            peer.cut_at = st.now
            st.timers.set(("silent", node), min(st.now + st.limits.cut_grace, peer.heard + st.limits.stall_deadline))
            peer.hello_delay = 0.0
            self._say_hello(peer)  # should it be a new incarnation, this makes it answer with its own

    def silent(self, node: str) -> None:
        """The timer of silence rang: lost, or heard meanwhile."""
        st = self.state
        peer = st.peers.get(node)
        if peer is None:
            return
        if peer.state == Peer.LOST:
            if st.now - peer.since >= st.limits.peer_ttl and not peer.rooms and not self._slots_of(node):
                self.forget(peer)
            else:
                st.timers.set(("silent", node), st.now + st.limits.peer_ttl / 4)
            return
        if peer.state == Peer.CONNECTING:
            when = peer.since + st.limits.connect_timeout
        elif peer.cut_at is not None:
            when = min(peer.cut_at + st.limits.cut_grace, peer.heard + st.limits.stall_deadline)
        else:
            when = peer.heard + st.limits.stall_deadline
        if when > st.now:
            st.timers.set(("silent", node), when)
        elif peer.state == Peer.CONNECTING:
            self._lose(peer, "peer_unreachable", f"no answer within {st.limits.connect_timeout:g} s")
        elif peer.cut_at is not None:
            self._lose(
                peer, "peer_lost", f"its connection closed and it was not heard within {st.limits.cut_grace:g} s"
            )
        else:
            self._lose(peer, "peer_lost", f"silent for {st.limits.stall_deadline:g} s")

    # going away ----------------------------------------------------------------------------------------------------

    def _end_rooms(self, peer: Peer, reason: str, detail: str, *, tell: bool) -> None:
        st = self.state
        for key in list(peer.rooms):
            room = (st.sends if key[2] else st.recvs).get((key[0], key[1]))
            if room is not None and room.peer == peer.node:
                self.ends.end(room, reason, f"node {peer.node!r}: {detail}", tell=tell)
        peer.rooms.clear()
        for parked_key in [k for k, parked in st.parked.items() if parked.peer == peer.node]:
            st.unpark(parked_key)

    def _lose(self, peer: Peer, reason: str, detail: str) -> None:
        """It may hear us although we do not hear it: it is told what ends."""
        st = self.state
        self._end_rooms(peer, reason, detail, tell=bool(peer.incarnation))
        peer.cut_at = None
        self._state(peer, Peer.LOST)
        st.timers.clear(("hello", peer.node))
        if peer.incarnation:
            st.timers.set(("silent", peer.node), st.now + st.limits.peer_ttl / 4)
        else:
            self.forget(peer)

    def _restarted(self, peer: Peer, detail: str) -> None:
        """A new incarnation: the old one is dead, and its engine with it; it holds the lock that the old one held."""
        st = self.state
        rooms = [st.recvs.get((key[0], key[1])) for key in peer.rooms if not key[2]]
        waiting = [room for room in rooms if room is not None and room.state == RecvRoom.WANTING]
        self.ends.forget_peer(peer.node)
        self._end_rooms(peer, "peer_restarted", detail, tell=False)
        for room in waiting:  # its send may have been opened in the new incarnation: it, too, ends now
            self.ends.tell(peer.node, room.key, "peer_restarted", detail)
        if peer.engine is not None:
            self._remove_agent(peer.engine.agent)
        self.receiver.writers_gone(peer.node)
        peer.hello = None
        peer.hello_at = float("-inf")
        peer.seen = 0
        peer.cut_at = None
        peer.hello_delay = 0.0

    def on_goodbye(self, peer: Peer) -> None:
        """An orderly end: its engine is closed."""
        self._end_rooms(peer, "peer_lost", "it shut down", tell=False)
        self.ends.forget_peer(peer.node)
        if peer.engine is not None:
            self._remove_agent(peer.engine.agent)
        self.receiver.writers_gone(peer.node)
        self.forget(peer)

    def _engine_gone(self, peer: Peer, agent: str) -> None:
        """Its engine died: what was under way with it is lost."""
        st = self.state
        for key in list(peer.rooms):
            room = st.sends.get((key[0], key[1])) if key[2] else None
            if (
                room is not None
                and room.peer == peer.node
                and any(plan.granted and not plan.acked for plan in room.plans[room.acked : room.high])
            ):
                self.ends.end(room, "engine_lost", f"node {peer.node!r}: its engine died with segments of this room")
        self._remove_agent(agent)

    def _remove_agent(self, agent: str) -> None:
        st = self.state
        if st.engine.up and st.engine.agents.pop(agent, None) is not None:
            st.to_engine(RemovePeer(agent))

    def forget(self, peer: Peer) -> None:
        st = self.state
        for kind in ("hello", "beat", "silent"):
            st.timers.clear((kind, peer.node))
        del st.peers[peer.node]
        st.emit(ForgetPeer(peer.node))

    def _slots_of(self, node: str) -> bool:
        return any(s.peer == node and s.state is not SlotState.FREE for s in self.state.engine.recv.all)

    def goodbye(self) -> None:
        for node in list(self.state.peers):
            self.state.to_peer(node, Goodbye())
