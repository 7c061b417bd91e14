"""A virtual sidecar: the drivers of one real Node.

Owns: turning the Node's actions into frames, jobs and deaths; the supervisor's duties for the engine; the checks after
each event. Must not: filter what the Node says.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from pdxfer.core import events, jobs, messages, worker
from pdxfer.core.node import Node
from pdxfer.core.state import RecvRoom

from .engine import VirtualEngine
from .grants import Grants
from .memory import Memory
from .world import Violation, World

if TYPE_CHECKING:
    from .worker import VirtualWorker


class Sidecar:
    def __init__(
        self, world: World, name: str, make_node: type[Node] = Node, *, send_slots: int = 3, recv_slots: int = 4
    ) -> None:
        self.world = world
        self.name = name
        self.make_node = make_node
        self.send_slots, self.recv_slots = send_slots, recv_slots
        self.incarnation = 0
        self.engine_incarnation = 0
        self.core: Node | None = None
        self.engine: VirtualEngine | None = None
        self.connections: dict[int, VirtualWorker] = {}
        self.memories: dict[int, Memory] = {}  # descriptors that the parent holds, by attachment
        self.next_connection = 0
        self.frozen = False
        self.frozen_events: list[events.Event] = []
        self.clock = 0.0  # ahead of the world's
        self.tick_at = float("inf")
        self.audit_every = 1
        self.handled = 0
        self.no_engine_before = 0.0  # until then every engine dies as it starts
        self.registry_fails = ""  # an end reason, or "silence"
        self.start()

    # life ----------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.incarnation += 1
        self.core = self.make_node(
            self.name, self.incarnation, f"tcp://{self.name}", "0", self.world.limits, self.world.mirror
        )
        self.mirror: dict[int, list[int]] = {}  # a new parent has a new one
        self.tick_at = float("inf")
        self.frozen, self.frozen_events = False, []
        self.grants = Grants(self)
        self._spawn()

    def kill(self, back_after: float) -> None:
        """The parent dies; its engine with it. The next incarnation comes up when both are gone."""
        if self.core is None:
            return
        self.world.note(self.name, "PARENT KILLED")
        self.core = None
        if self.engine is not None:
            self.engine.kill()
            self.engine = None
        self.world.network.reset(self.name)
        old, self.connections, self.memories = list(self.connections.values()), {}, {}
        for peer in old:
            peer.disconnected()
        self.world.after(back_after, self.start)

    def _spawn(self) -> None:
        self.engine_incarnation += 1
        incarnation, parent = self.engine_incarnation, self.incarnation

        def up() -> None:
            if self.core is None or self.incarnation != parent:
                return
            if self.world.now < self.no_engine_before:
                self.world.after(0.1, up)
                return
            self.engine = VirtualEngine(self, incarnation, self.send_slots, self.recv_slots)
            self.world.engines[self.engine.agent] = self.engine
            self.engine.report(jobs.Ready(self.engine.info, self.send_slots, incarnation))

        self.world.after(self.world.respawn / 2, up)

    def kill_engine(self, detail: str) -> None:
        engine = self.engine
        if engine is None:
            return
        self.world.note(self.name, f"ENGINE KILLED: {detail}")
        engine.kill()
        self.engine = None
        parent = self.incarnation
        when = max(engine.last_report, self.world.now) + 0.001  # its last reports are delivered first

        def gone() -> None:
            if self.core is not None and self.incarnation == parent:
                self.deliver(events.EngineGone(detail))

        self.world.at(when, gone)

    def hang_engine(self) -> None:
        """It stops; the supervisor kills it after the stall deadline."""
        engine = self.engine
        if engine is None:
            return
        self.world.note(self.name, "ENGINE HUNG")
        engine.hung = True
        self.world.after(
            self.world.limits.stall_deadline,
            lambda: self.kill_engine("heartbeat stopped") if self.engine is engine and engine.hung else None,
        )

    def flip(self, rng: random.Random) -> None:
        """Somebody, or a bad bit, changes a byte of the mirror: of an entry that is not being copied just then, since between
        the comparison of a digest and the copy nothing could notice it.
        """
        copied = self.engine.copied if self.engine is not None else {}
        full = [place for offset, place in self.mirror.items() if place and offset not in copied]
        if full:
            place = rng.choice(full)
            place[rng.randrange(len(place))] = -4
            self.world.flipped += 1

    def freeze(self, seconds: float) -> None:
        self.frozen = True
        self.world.note(self.name, f"PARENT FROZEN for {seconds:.2f} s")
        parent = self.incarnation

        def thaw() -> None:
            if self.incarnation != parent or self.core is None:
                return
            self.frozen = False
            waiting, self.frozen_events = self.frozen_events, []
            for event in waiting:
                self.deliver(event)
            self.tick()

        self.world.after(seconds, thaw)

    # events and actions --------------------------------------------------------------------------------------------

    def engine_said(self, engine: VirtualEngine, report: jobs.EngineReport) -> None:
        if self.core is not None and engine.agent.startswith(f"{self.name}:{self.incarnation:x}:"):
            self.deliver(events.EngineSaid(report))

    def deliver(self, event: events.Event) -> None:
        if self.core is None:
            return
        if self.frozen:
            self.frozen_events.append(event)
            return
        world = self.world
        if world.trace:
            world.note(self.name, event)
        try:
            may_be_granted = self.grants.before(event)
            actions = self.core.handle(event, world.now + self.clock)
            self.handled += 1
            if self.handled % self.audit_every == 0:
                self.core.audit()
            self._punctual()
            self._reserved()
            self.grants.used(may_be_granted)
            self.grants.freed()
        except Violation:
            raise
        except Exception as error:
            raise Violation(f"node {self.name}, event {event}: {type(error).__name__}: {error}") from error
        self._act(actions)
        self._set_tick()
        if isinstance(event, events.EngineGone):
            parent = self.incarnation
            world.after(world.respawn, lambda: self._spawn() if self.incarnation == parent else None)

    def _punctual(self) -> None:
        """R5: each room's timer rings no later than the deadline of its phase, and than the longest that a phase may have."""
        core = self.core
        assert core is not None
        lim = core.state.limits
        longest = max(
            lim.open_timeout, lim.want_timeout, lim.resolve_timeout, lim.push_timeout, lim.credit_timeout, lim.ack_timeout,
            lim.engine_timeout, 2 * lim.transfer_deadline,
        )  # fmt: skip
        latest = core.state.now + longest + 1e-6
        for room in core.state.sends.values():
            due, late = core.sender.deadline(room), room.timer_at
            if late > due[0] + 1e-6:
                raise Violation(f"node {self.name}: send {room} is due at {due}, its timer rings at {late}")
            if room.live and late > latest:
                raise Violation(
                    f"node {self.name}: send {room} has no deadline within {longest:g} s, its timer rings at {late}: {due}"
                )
        for receive in core.state.recvs.values():
            due, late = core.receiver.deadline(receive), receive.timer_at
            if late > due[0] + 1e-6:
                raise Violation(f"node {self.name}: receive {receive} is due at {due}, its timer rings at {late}")
            waits = receive.state in (RecvRoom.RESOLVING, RecvRoom.WANTING) or not core.state.engine.up
            if receive.live and waits and late > latest:
                raise Violation(
                    f"node {self.name}: receive {receive} has no deadline within {longest:g} s, its timer rings at {late}: {due}"
                )
        timers = core.state.timers
        for key in core.state.parked:
            if ("parked", key) not in timers:
                raise Violation(f"node {self.name}: the parked want of room {key} waits without a deadline")
        for peer in core.state.peers.values():
            unsaid = peer.seen < core.state.revision or peer.cut_at is not None
            if peer.state != peer.LOST and unsaid and ("hello", peer.node) not in timers:
                raise Violation(f"node {self.name}: peer {peer.node} has not seen our Hello, which is not said again")
            silent = core.state.now - max(peer.heard, peer.since)
            if peer.state != peer.LOST and silent > core.state.limits.stall_deadline + 1e-6:
                raise Violation(f"node {self.name}: peer {peer.node} is {peer.state}, and silent for {silent:.2f} s")

    def _reserved(self) -> None:
        """R2: a slot that a WRITE is on its way to, or will be, is nobody else's."""
        core, engine = self.core, self.engine
        if core is None or engine is None or not engine.incoming:
            return
        info = core.state.engine.info
        if info is None or info.agent != engine.agent:
            return
        for index, generation, why in engine.incoming.values():
            engine.check_slot(index, generation, why)

    def tick(self) -> None:
        self.deliver(events.Tick())

    def _set_tick(self) -> None:
        assert self.core is not None
        when = self.core.next_deadline()
        if when is None:
            return
        when = max(when - self.clock, self.world.now + 1e-6)
        if when < self.tick_at or self.tick_at <= self.world.now:
            self.tick_at = when
            core = self.core

            def ring() -> None:
                if self.core is core and self.tick_at == when:
                    self.tick_at = float("inf")
                    if self.frozen:
                        return
                    self.tick()

            self.world.at(when, ring)

    def _act(self, actions: list[events.Action]) -> None:
        world = self.world
        bodies: dict[tuple[str, int], list[events.ToPeer]] = {}
        for action in actions:
            if world.trace:
                world.note(self.name, action)
            match action:
                case events.ToPeer(node=node, to_incarnation=to, message=message):
                    if isinstance(message, messages.Grant):
                        self.grants.said(message)
                    bodies.setdefault((node, to), []).append(action)
                case events.ToWorker(id=id, frame=frame):
                    if id in self.connections:
                        self.connections[id].says(id, frame)
                case events.ToEngine(job=job):
                    if self.engine is not None:
                        self.engine.submit(job)
                    if isinstance(job, jobs.UnmapPools):
                        self.memories.pop(job.worker, None)
                case events.DropWorker(id=id):
                    gone = self.connections.pop(id, None)
                    if gone is not None:
                        gone.disconnected()
                        world.after(0.0, lambda id=id: self.deliver(events.WorkerGone(id, "dropped")))  # type: ignore[misc]
                    else:
                        self.memories.pop(id, None)
                case events.KillEngine(detail=detail):
                    world.after(0.002, lambda detail=detail: self.kill_engine(detail))  # type: ignore[misc]
                case events.Resolve(engine_id=engine_id):
                    self._resolve(engine_id)
                case events.RoomClosed(room=room, epoch=epoch, sending=sending, reason=reason):
                    key = (f"{self.name}:{self.incarnation}", room, epoch, sending)
                    if key in world.closed:
                        raise Violation(
                            f"node {self.name}: room {room}/{epoch} (sending={sending}) ended twice: {world.closed[key]}, {reason}"
                        )
                    world.closed[key] = reason
                case events.ForgetPeer() | events.Refuse():
                    continue
        for (
            node,
            to,
        ), parts in bodies.items():  # what one event causes for one peer travels in one frame, or in several
            size = world.wire.choice((1, 2, 16))
            for i in range(0, len(parts), size):
                world.network.send(self.name, self.incarnation, node, to, tuple(p.message for p in parts[i : i + size]))

    def _resolve(self, engine_id: str) -> None:
        if self.registry_fails == "silence":
            return
        found = next((w for w in self.world.workers if w.engine_id == engine_id and w.connected), None)
        if self.registry_fails:
            answer = events.Resolved(engine_id, "", 0, self.registry_fails)
        elif found is None:
            answer = events.Resolved(engine_id, "", 0, "unknown_engine")
        else:
            answer = events.Resolved(engine_id, found.side.name, 0, "")
        self.world.after(0.002 + 0.05 * self.world.wire.random(), lambda: self.deliver(answer))

    # the worker socket ---------------------------------------------------------------------------------------------

    def connect(self, peer: VirtualWorker, attach: worker.Attach, memory: Memory) -> int | None:
        if self.core is None:
            return None
        self.next_connection += 1
        id = self.next_connection
        self.connections[id] = peer
        self.memories[id] = memory
        self.world.after(0.0003, lambda: self.deliver(events.WorkerAttached(id, attach)))
        return id

    def hang_up(self, id: int, detail: str) -> None:
        """The kernel closes the worker's socket."""
        if self.connections.pop(id, None) is not None:
            parent = self.incarnation
            self.world.after(
                0.0005, lambda: self.deliver(events.WorkerGone(id, detail)) if self.incarnation == parent else None
            )
