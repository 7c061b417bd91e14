"""The engine child as the core sees it: what it reports, how it comes and how it goes.

Owns: reports' dispatch, what is told again to a new engine, what ends with an old one. Must not: spawn or kill; the
daemon does, when it is asked by KillEngine.
"""

from __future__ import annotations

from typing import Final

from . import events, jobs
from .ends import Ends
from .events import DropWorker
from .ledger import SlotLedger
from .local import Local
from .mirrors import Mirrors
from .peers import Peers
from .receiver import Receiver
from .sender import Sender
from .state import Peer, RecvRoom, Room, SendRoom, State
from .worker import Rejected
from .workers import Workers

MAX_FATAL: Final = 1000  # agents that are remembered for having killed an engine


class Engines:
    def __init__(
        self, state: State, ends: Ends, sender: Sender, receiver: Receiver, local: Local, peers: Peers, workers: Workers,
        mirrors: Mirrors,
    ) -> None:  # fmt: skip
        self.mirrors = mirrors
        self.state = state
        self.ends = ends
        self.sender = sender
        self.receiver = receiver
        self.local = local
        self.peers = peers
        self.workers = workers

    def said(self, event: events.EngineSaid) -> None:
        st = self.state
        report = event.report
        if isinstance(report, jobs.Ready):
            self._ready(report)
            return
        if not st.engine.up:
            return  # the last words of an engine that is gone
        record = st.jobs.get(getattr(report, "job", 0))
        if record is not None:
            st.handling = (record.room.room, record.room.epoch)
        match report:
            case jobs.Gathered(job=id) if id in st.jobs:
                if not st.jobs[id].gathered:
                    self.sender.gathered(st.jobs[id])
            case jobs.Sent(job=id, digest=digest, error=error) if id in st.jobs:
                self.sender.sent(id, digest, error)
            case jobs.Scattered(job=id, error=error, mismatch=mismatch) if id in st.jobs:
                self.receiver.scattered(id, error, mismatch)
            case jobs.Copied(job=id, error=error) if id in st.jobs:
                self.local.copied(id, error)
            case jobs.MirrorStored(job=id, digests=digests, error=error) if id in self.mirrors.jobs:
                self.mirrors.stored(id, digests, error)
            case jobs.MirrorLoaded(job=id, bad=bad, error=error) if id in self.mirrors.jobs:
                self.mirrors.loaded(id, bad, error)
            case jobs.MirrorMapped(error=error):
                if error:
                    st.refuse("engine", "own engine", "map_failed", f"the mirror: {error}")
            case jobs.Landed(agent=agent, segment=segment):
                node = agent.rsplit(":", 2)[0]
                if node in st.peers:
                    self.receiver.landed(node, segment)
                else:
                    st.refuse("engine", agent, "no_session", f"a notification for room {segment.room}/{segment.epoch}")
            case jobs.PeerAdded(agent=agent, error=error):
                if agent in st.engine.agents:
                    st.engine.agents[agent] = f"metadata refused: {error}" if error else "ready"
                    self.ends.slots_freed = True
            case jobs.Mapped(worker=id, error=error):
                owner = st.workers.get(id)
                if owner is not None and error:
                    if owner.unanswered_attach is not None:
                        st.to_worker(owner, Rejected(owner.unanswered_attach, "map_failed", error))
                    st.refuse("worker", owner.engine_id, "map_failed", error)
                    st.emit(DropWorker(id))
                elif owner is not None:
                    self.workers.answer_attach(owner)
            case jobs.Counters():
                st.engine_counters = report.values
            case _:
                st.refuse("engine", "own engine", "bad_frame", f"{type(report).__name__} for an unknown job")
        self.workers.release_gone()

    def _ready(self, report: jobs.Ready) -> None:
        st = self.state
        assert not st.engine.up, "a second engine is ready"
        engine = st.engine
        engine.info = report.info
        engine.pid = report.pid
        engine.since = st.now
        engine.killing = False
        engine.agents = {}
        engine.expect = 0
        engine.send = SlotLedger(report.send_slots)
        engine.recv = SlotLedger(report.info.slots)
        self.mirrors.map()
        for owner in st.workers.values():
            assert owner.map_job is not None
            st.to_engine(owner.map_job)
        self.peers.changed()
        for peer in list(st.peers.values()):
            if peer.state == Peer.UP:
                self.peers.resume(peer)
        for room in list(st.sends.values()):
            if room.live and room.local is not None:
                self.local.pump(room)
        self.mirrors.pump()
        self.ends.slots_freed = True

    def lost(self, event: events.EngineGone) -> None:
        """The engine is dead: every copy under way is lost, and nothing else."""
        st = self.state
        if not st.engine.up:
            return
        for agent, state in st.engine.agents.items():
            if (
                state == "adding"
            ):  # NIXL crashes on some metadata: whoever's was being added twice is taken for the cause
                st.fatal_agents[agent] = st.fatal_agents.get(agent, 0) + 1
        while len(st.fatal_agents) > MAX_FATAL:
            del st.fatal_agents[next(iter(st.fatal_agents))]
        st.engine.info = None
        st.engine.pid = 0
        st.engine.since = st.now
        records = list(st.jobs.values())
        for id in st.jobs:
            st.timers.clear(("job", id))
        st.jobs.clear()
        hit: list[Room] = []
        for record in records:
            hit += [room for room in (record.room, record.partner) if room is not None]
        for room in hit:
            room.jobs.clear()
        for room in [*hit, *(r for r in st.recvs.values() if r.outstanding)]:
            if isinstance(room, RecvRoom):
                room.outstanding.clear()
            if room.live and isinstance(room, SendRoom) and room.done_heard:
                self.ends.end(room, "done", "")  # its receiver has verified every byte; only our reports are lost
            elif room.live:
                self.ends.end(room, "engine_lost", event.detail)
            else:
                self.ends.settle(room)
        self.mirrors.engine_lost(event.detail)
        st.send_queue.clear()
        for send in [r for r in st.sends.values() if any(p.granted and not p.sent for p in r.plans[r.acked : r.high])]:
            self.ends.end(send, "engine_lost", event.detail)
        st.engine.send, st.engine.recv = SlotLedger(0), SlotLedger(0)
        st.timers.clear(("quarantine",))
        for send in st.sends.values():
            self.sender.arm(send)
        for receive in st.recvs.values():
            self.receiver.arm(receive)
        self.workers.release_gone()
        for owner in st.workers.values():
            self.workers.answer_attach(owner)
        if st.down:
            self.peers.goodbye()
        else:
            self.peers.changed()
