"""Nodes in one process, side by side, with engines and a network that do what the test says, at once or when told to.

Owns: delivery between Nodes, and the answers of an engine that always succeeds. Must not: check; tests do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from pdxfer.core import events, jobs, messages, worker
from pdxfer.core.events import Action
from pdxfer.core.geometry import PoolSpec
from pdxfer.core.limits import Limits, MirrorSettings
from pdxfer.core.messages import EngineInfo
from pdxfer.core.node import Node
from pdxfer.core.state import agent_name

SPECS = (PoolSpec("kv", "bf16", "2x3x64", 16, 3, 40), PoolSpec("index_k", "bf16", "128", 16, 2, 16))
PAGES = 16
SLOT_BYTES = 200


def table(*pages: int) -> bytes:
    return np.array(pages, dtype="<u4").tobytes()


def attach(engine_id: str, specs: tuple[PoolSpec, ...] = SPECS, pages: int = PAGES, **change: Any) -> worker.Attach:
    pools = tuple(
        worker.PoolAt(
            s, pages, tuple(worker.PlaneAt(0, i * pages * s.page_bytes, s.page_bytes) for i in range(s.planes))
        )
        for s in specs
    )
    fields: dict[str, Any] = {
        "req": 1, "version": worker.WORKER_PROTOCOL, "engine_id": engine_id, "role": "both", "pid": 42, "pools": pools,
        "fd_bytes": (1 << 20,),
    }  # fmt: skip
    return worker.Attach(**fields | change)


def landed(send: jobs.Send) -> messages.Segment:
    """The notification of a WRITE: its segment with the digest."""
    fields = {f: getattr(send.segment, f) for f in send.segment.__struct_fields__}
    return messages.Segment(**fields | {"digest": 77})


class Side:
    """A Node and its surroundings."""

    def __init__(self, net: Net, name: str, incarnation: int, limits: Limits) -> None:
        self.net, self.name = net, name
        self.node = Node(name, incarnation, f"tcp://{name}", "0", limits, net.mirror)
        self.engine = 0
        self.hold: set[type] = set()  # kinds of jobs that the engine does not answer
        self.bad: set[int] = set()  # offsets of entries whose bytes have changed
        self.held: list[jobs.EngineJob] = []
        self.jobs: list[jobs.EngineJob] = []
        self.actions: list[Action] = []
        self.frames: dict[int, list[worker.SidecarFrame]] = {}
        self.ids: dict[str, int] = {}
        self.req = 100

    # events in -----------------------------------------------------------------------------------------------------

    def handle(self, event: events.Event) -> list[Action]:
        actions = self.node.handle(event, self.net.now)
        self.node.audit()
        self.actions += actions
        for action in actions:
            match action:
                case events.ToWorker(id=id, frame=frame):
                    self.frames.setdefault(id, []).append(frame)
                case events.ToEngine(job=job):
                    self.jobs.append(job)
                    if type(job) in self.hold:
                        self.held.append(job)
                    else:
                        self.net.queue.append(("job", self, job))
                case events.ToPeer(node=target, to_incarnation=to, message=message):
                    self.net.queue.append(("message", self, (target, to, message)))
                case events.Resolve(engine_id=engine_id):
                    self.net.queue.append(("resolve", self, engine_id))
        return actions

    def report(self, report: jobs.EngineReport) -> None:
        self.handle(events.EngineSaid(report))
        self.net.settle()

    def start_engine(self, slots: int = 4) -> EngineInfo:
        self.engine += 1
        state = self.node.state
        agent = agent_name(self.name, state.incarnation, self.engine)
        info = EngineInfo(self.engine, agent, "1.5.1", b"meta", b"digest", 1 << 20, SLOT_BYTES, slots)
        self.report(jobs.Ready(info, slots, 7))
        return info

    def kill_engine(self) -> None:
        self.held.clear()
        self.handle(events.EngineGone("killed by the test"))
        self.net.settle()

    def attach(self, engine_id: str, **change: Any) -> int:
        id = self.net.connection = self.net.connection + 1
        self.ids[engine_id] = id
        self.handle(events.WorkerAttached(id, attach(engine_id, **change)))
        self.net.settle()
        return id

    def say(self, engine_id: str, kind: type, *args: Any, **kwargs: Any) -> worker.SidecarFrame | None:
        """A request; returns the answer that names its number."""
        self.req += 1
        id = self.ids[engine_id]
        self.handle(events.WorkerSaid(id, kind(self.req, *args, **kwargs)))
        self.net.settle()
        return next(
            (
                f
                for f in self.frames.get(id, [])
                if getattr(f, "req", None) == self.req and not isinstance(f, worker.Released)
            ),
            None,
        )

    def open(self, engine_id: str, room: str = "r", epoch: int = 0) -> Any:
        return self.say(engine_id, worker.Open, room, epoch)

    def push(
        self,
        engine_id: str,
        *tables: bytes,
        room: str = "r",
        epoch: int = 0,
        page0: tuple[int, ...] = (0, 0),
        plane0: int = 0,
        planes: int = 0,
    ) -> Any:
        return self.say(engine_id, worker.Push, room, epoch, page0, plane0, planes, tables)

    def finish(self, engine_id: str, room: str = "r", epoch: int = 0, aux: bytes = b"aux") -> Any:
        return self.say(engine_id, worker.Finish, room, epoch, aux)

    def receive(
        self, engine_id: str, source: str, *tables: bytes, room: str = "r", epoch: int = 0, incarnation: int = 0
    ) -> Any:
        return self.say(engine_id, worker.Receive, room, epoch, source, incarnation, tables)

    def abort(self, engine_id: str, room: str = "r", epoch: int = 0) -> Any:
        return self.say(engine_id, worker.Abort, room, epoch, "gone")

    def gone(self, engine_id: str) -> None:
        self.handle(events.WorkerGone(self.ids[engine_id], "closed"))
        self.net.settle()

    # what came of it -----------------------------------------------------------------------------------------------

    def ends(self, engine_id: str) -> list[worker.RoomEnded]:
        return [f for f in self.frames.get(self.ids[engine_id], []) if isinstance(f, worker.RoomEnded)]

    def end(self, engine_id: str) -> worker.RoomEnded:
        ends = self.ends(engine_id)
        assert len(ends) == 1, ends
        return ends[0]

    def released(self, engine_id: str) -> list[int]:
        return [f.req for f in self.frames.get(self.ids[engine_id], []) if isinstance(f, worker.Released)]

    def refusals(self) -> list[str]:
        return [a.code for a in self.actions if isinstance(a, events.Refuse)]

    def killed(self) -> list[str]:
        return [a.detail for a in self.actions if isinstance(a, events.KillEngine)]

    def lent(self) -> int:
        counts = self.node.state.pages.counts().values()
        return sum(sum(c.values()) - c["home"] for c in counts)

    def busy_slots(self) -> int:
        engine = self.node.state.engine
        return sum(len(ledger.all) - ledger.free for ledger in (engine.send, engine.recv))


class Net:
    """The nodes and what is on its way between them. ``drop`` says which messages are lost."""

    def __init__(self, *names: str, limits: Limits | None = None, mirror: MirrorSettings | None = None) -> None:
        self.mirror = mirror
        self.now = 0.0
        self.connection = 0
        self.queue: list[tuple[str, Side, Any]] = []
        self.limits = limits or Limits()
        self.where: dict[str, str] = {}  # registry: engine id -> node, or "!reason"
        self.deaf: set[tuple[str, str]] = set()  # cut links (source, target)
        self.drop: set[type] = set()
        self.notify = True  # engines hear of the WRITEs that landed
        self.delayed: list[tuple[Side, Any]] = []
        self.delay: set[type] = set()
        self.wire: list[tuple[str, str, messages.Message]] = []
        self.sides = {name: Side(self, name, 1, self.limits) for name in names}
        for side in self.sides.values():
            side.start_engine()

    def __iter__(self) -> Iterator[Side]:
        return iter(self.sides.values())

    def restart(self, name: str) -> Side:
        old = self.sides[name]
        side = self.sides[name] = Side(self, name, old.node.state.incarnation + 1, self.limits)
        self.queue = [q for q in self.queue if q[1] is not old]
        side.start_engine()
        return side

    def settle(self) -> None:
        """Carry everything that is on its way, and what follows from it."""
        while self.queue:
            what, side, item = self.queue.pop(0)
            if what == "message":
                self.carry(side, item)
            elif what == "job":
                self.answer(side, item)
            else:
                found = self.where.get(item, "!unknown_engine")
                missing = found.startswith("!")
                event = events.Resolved(item, "" if missing else found, 0, found[1:] if missing else "")
                if found != "!silence":
                    side.handle(event)

    def carry(self, side: Side, item: Any, *, late: bool = False) -> None:
        target, to, message = item
        self.wire.append((side.name, target, message))
        if type(message) in self.delay and not late:
            self.delayed.append((side, item))
        elif type(message) not in self.drop and (side.name, target) not in self.deaf and target in self.sides:
            frame = messages.encode(
                messages.Envelope(1, side.name, side.node.state.incarnation, target, to, (message,))
            )
            e = messages.decode(frame)
            self.sides[target].handle(events.PeerSaid(e.source, e.incarnation, e.to_incarnation, e.body))

    def release(self) -> None:
        """What was delayed arrives now."""
        self.delay = set()
        delayed, self.delayed = self.delayed, []
        for side, item in delayed:
            self.carry(side, item, late=True)
        self.settle()

    def answer(self, side: Side, job: jobs.EngineJob) -> None:
        """What an engine says that always succeeds."""
        reports: list[jobs.EngineReport] = []
        match job:
            case jobs.MapPools(worker=id):
                reports = [jobs.Mapped(id, "")]
            case jobs.AddPeer(info=info):
                reports = [jobs.PeerAdded(info.agent, "")]
            case jobs.Send(job=id):
                reports = [jobs.Gathered(id), jobs.Sent(id, 77, "", 0.0)]
            case jobs.Scatter(job=id):
                reports = [jobs.Scattered(id, "", False)]
            case jobs.Copy(job=id):
                reports = [jobs.Copied(id, "")]
            case jobs.MapMirror():
                reports = [jobs.MirrorMapped("")]
            case jobs.MirrorStore(job=id, entries=entries):
                reports = [jobs.MirrorStored(id, tuple(e.offset for e in entries), "")]
            case jobs.MirrorLoad(job=id, entries=entries):
                bad = tuple(n for n, e in enumerate(entries) if e.offset in side.bad or e.digest != e.offset)
                reports = [jobs.MirrorLoaded(id, bad, "")]
        for report in reports:
            side.handle(events.EngineSaid(report))
        own = side.node.state.engine.info
        if isinstance(job, jobs.Send) and own is not None and self.notify:
            self.sides[job.agent.split(":")[0]].handle(events.EngineSaid(jobs.Landed(own.agent, landed(job))))

    def unhold(self, side: Side, kind: type) -> None:
        side.hold.discard(kind)
        held, side.held = side.held, []
        self.queue += [("job", side, job) for job in held]
        self.settle()

    def sleep(self, seconds: float) -> None:
        """Let time pass, with every deadline on the way."""
        until = self.now + seconds
        while True:
            dues = [d for s in self if (d := s.node.next_deadline()) is not None]
            due = min(dues, default=until)
            if due >= until:
                break
            self.now = max(self.now, due)
            for side in list(self):
                if (when := side.node.next_deadline()) is not None and when <= self.now:
                    side.handle(events.Tick())
            self.settle()
        self.now = until
        for side in list(self):
            side.handle(events.Tick())
        self.settle()

    def at_baseline(self) -> bool:
        return not any(
            s.lent()
            or s.busy_slots()
            or s.node.state.sends
            or s.node.state.recvs
            or s.node.state.homing
            or s.node.state.jobs
            or s.node.mirrors.operations
            for s in self
        )


def pair(limits: Limits | None = None) -> tuple[Net, Side, Side]:
    """Nodes p and d, each with a worker ("prefill" and "decode")."""
    net = Net("p", "d", limits=limits)
    p, d = net.sides["p"], net.sides["d"]
    p.attach("prefill")
    d.attach("decode")
    net.where["prefill"] = "p"
    return net, p, d
