"""The core's driver: turns events into ``Node.handle`` calls, and the actions into calls of the parts. The one place that does.

Owns: the node, the queue of events, the core's timer, and what happens when the core raises. Must not: decide anything
about rooms, or wait for anything; every sink that it calls returns at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from . import logs
from .core import events, jobs, messages, worker
from .core.events import Action, Event
from .core.node import Node
from .core.reasons import DONE, ENDS
from .metrics import Metrics, side
from .supervisor import OverBudget, RestartPolicy

log = logging.getLogger(__name__)

FULL_ENVELOPE = messages.MAX_FRAME // 4  # bytes of messages, roughly, after which an envelope is sent


class Sinks(Protocol):
    """Where actions go. Nothing here may block or raise for what a peer or a worker did."""

    def to_worker(self, id: int, frame: worker.SidecarFrame) -> None: ...
    def drop_worker(self, id: int) -> None: ...
    def fds(self, id: int) -> tuple[int, ...]: ...
    def mirror_fds(self) -> tuple[int, ...]: ...
    def forget_worker(self, id: int) -> None: ...
    def to_peer(self, envelope: messages.Envelope) -> None: ...
    def forget_peer(self, node: str) -> None: ...
    def to_engine(self, job: jobs.EngineJob, fds: tuple[int, ...]) -> None: ...
    def kill_engine(self, why: str) -> None: ...
    def resolve(self, engine_id: str) -> None: ...


class Driver:
    def __init__(
        self,
        node: Node,
        sinks: Sinks,
        metrics: Metrics,
        errors: RestartPolicy,
        give_up: Callable[[str], None],
    ) -> None:
        self.node = node
        self._sinks = sinks
        self._metrics = metrics
        self._errors = errors  # the budget for events that the core raises on
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[Event] = deque()
        self._busy = False
        self._timer: asyncio.TimerHandle | None = None
        self._limiter = logs.Limiter()
        self._to_peers: dict[tuple[str, int], list[messages.Message]] = {}
        self._to_peers_size: dict[tuple[str, int], int] = {}
        self._mapped: set[int] = set()  # workers whose pools the engine knows
        self._leaving: set[int] = set()  # workers whose connection is over or being closed
        self._attached: dict[int, str] = {}  # for logs
        self._actions: dict[type, Callable[[Any], None]] = {
            events.ToWorker: lambda a: sinks.to_worker(a.id, a.frame),
            events.DropWorker: self._drop_worker,
            events.ToPeer: self._to_peer,
            events.ForgetPeer: lambda a: sinks.forget_peer(a.node),
            events.ToEngine: self._to_engine,
            events.KillEngine: self._kill_engine,
            events.Resolve: lambda a: sinks.resolve(a.engine_id),
            events.RoomClosed: self._room_closed,
            events.Refuse: lambda a: self.refused(a.origin, a.who, a.code, a.detail),
        }

    # in ------------------------------------------------------------------------------------------------------------

    def deliver(self, event: Event) -> None:
        """Hand the core an event. An action may cause the next event before this one's are all done: it waits its turn."""
        self._inbox.append(event)
        if not self._busy:
            self._drain()

    def deliver_all(self, batch: Iterable[Event]) -> None:
        self._inbox.extend(batch)
        if not self._busy:
            self._drain()

    def _drain(self) -> None:
        self._busy = True
        try:
            while self._inbox:
                self._take(self._inbox.popleft())
            for node, incarnation in list(self._to_peers):
                self._send(node, incarnation)
        finally:
            self._busy = False
        self._arm()

    def _take(self, event: Event) -> None:
        if isinstance(event, events.WorkerAttached):
            self._attached[event.id] = event.frame.engine_id
            log.info(
                "worker %r attached (role %s, pid %d, %d pools)",
                event.frame.engine_id,
                event.frame.role,
                event.frame.pid,
                len(event.frame.pools),
            )
        elif isinstance(event, events.WorkerGone):
            self._leaving.add(event.id)
            log.info("worker %r is gone: %s", self._attached.pop(event.id, "?"), event.detail)
        try:
            actions = self.node.handle(event, self._loop.time())
        except Exception as error:  # noqa: BLE001 - logged with its traceback there, and budgeted
            self._core_raised(event, error)
            return
        self._execute(actions)
        if isinstance(event, events.EngineGone):
            self._mapped.clear()
        if self._leaving:
            self._forget_workers()

    def _execute(self, actions: list[Action]) -> None:
        for action in actions:
            try:
                self._actions[type(action)](action)
            except Exception as error:  # noqa: BLE001 - likewise; the actions after it must not be lost
                self._core_raised(action, error)

    def _core_raised(self, what: Event | Action, error: Exception) -> None:
        """A defect. One event is lost, the rest goes on; a node that keeps raising is better started afresh."""
        log.exception("a defect: %s raised; report it with this traceback", type(what).__name__)
        self._metrics.core_errors.inc()
        st = self.node.state
        pending, st.out = st.out, []  # what it decided before it raised is in its books: the others must hear it
        if isinstance(what, events.WorkerSaid) and not isinstance(what.frame, worker.Ping):
            answered = any(
                isinstance(a, events.ToWorker) and getattr(a.frame, "req", 0) == what.frame.req for a in pending
            )
            if not answered:
                why = f"{type(error).__name__}: {error}"[:200]
                pending.insert(0, events.ToWorker(what.id, worker.Rejected(what.frame.req, "internal", why)))
        self._execute(pending)
        broken = self.node.state.handling
        if broken is not None and isinstance(what, Event) and not isinstance(what, events.RoomBroken):
            detail = f"{type(what).__name__} raised {type(error).__name__}: {error}"[:300]
            self._inbox.appendleft(events.RoomBroken(*broken, detail))
        try:
            self._errors.died(self._loop.time(), f"{type(what).__name__}: {type(error).__name__}: {error}")
        except OverBudget as over:
            self._give_up(str(over))

    # time ----------------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        """A timer that rings too early costs one Tick; so it is only ever moved forward."""
        deadline = self.node.next_deadline()
        if deadline is None or (self._timer is not None and self._timer.when() <= deadline):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(deadline, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self.deliver(events.Tick())

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    # out -----------------------------------------------------------------------------------------------------------

    def _drop_worker(self, action: events.DropWorker) -> None:
        self._leaving.add(action.id)
        self._sinks.drop_worker(action.id)

    def _to_engine(self, action: events.ToEngine) -> None:
        job = action.job
        fds: tuple[int, ...] = ()
        if isinstance(job, jobs.MapPools):
            fds = self._sinks.fds(job.worker)
            self._mapped.add(job.worker)
        elif isinstance(job, jobs.MapMirror):
            fds = self._sinks.mirror_fds()
        self._sinks.to_engine(job, fds)
        if isinstance(job, jobs.UnmapPools):
            self._mapped.discard(job.worker)

    def _forget_workers(self) -> None:
        """Close the descriptors of pools that neither a worker nor an engine has a claim to."""
        for id in [id for id in self._leaving if id not in self._mapped and id not in self.node.state.workers]:
            self._leaving.discard(id)
            self._sinks.forget_worker(id)

    def _kill_engine(self, action: events.KillEngine) -> None:
        log.error("the engine is killed as a fence: %s", action.detail)
        self._metrics.engine_kills.inc()
        self._sinks.kill_engine(action.detail)

    def _to_peer(self, action: events.ToPeer) -> None:
        """Messages of one turn travel together."""
        key = (action.node, action.to_incarnation)
        waiting = self._to_peers.setdefault(key, [])
        waiting.append(action.message)
        size = self._to_peers_size[key] = self._to_peers_size.get(key, 0) + _size(action.message)
        if len(waiting) >= messages.MAX_PER_FRAME or size >= FULL_ENVELOPE:
            self._send(*key)

    def _send(self, node: str, incarnation: int) -> None:
        body = self._to_peers.pop((node, incarnation))
        self._to_peers_size.pop((node, incarnation))
        st = self.node.state
        self._sinks.to_peer(
            messages.Envelope(messages.PROTOCOL, st.name, st.incarnation, node, incarnation, tuple(body))
        )

    # logs and metrics ----------------------------------------------------------------------------------------------

    def _room_closed(self, action: events.RoomClosed) -> None:
        self._metrics.room_closed(action.sending, action.reason, action.bytes, action.age)
        level = logging.DEBUG if action.reason == DONE else logging.INFO
        if log.isEnabledFor(level):
            log.log(
                level, "room %s/%d %s %s (%s) after %.3f s, %d bytes, peer %s%s", action.room, action.epoch, side(action.sending),
                ENDS[action.reason].state, action.reason, action.age, action.bytes, action.peer or "none",
                f": {action.detail}" if action.detail else "",
            )  # fmt: skip

    def refused(self, origin: str, who: str, code: str, detail: str, count: int = 1) -> None:
        """Count it; say it once per source and reason, since strangers can send without end."""
        self._metrics.refuse(origin, code, count)
        quiet = self._limiter.allow((origin, who, code), self._loop.time())
        if quiet is not None:
            log.warning(
                "refused from %s %s: %s: %s%s",
                origin,
                who,
                code,
                detail,
                f" (and {quiet} more like it)" if quiet else "",
            )


def _size(message: messages.Message) -> int:
    """Bytes on the wire, roughly and not too few, of the messages that can be long."""
    match message:
        case messages.Finish(aux=aux):
            return 512 + len(aux)
        case messages.Hello(engine=engine):
            return 1024 + (len(engine.metadata) if engine is not None else 0)
        case messages.Segment(pieces=pieces):
            return 512 + 48 * len(pieces)
        case messages.Want(specs=specs):
            return 512 + 256 * len(specs)
        case messages.Ack(also=also):
            return 512 + 9 * len(also)
        case messages.SlotQuery(slots=slots):
            return 64 + 256 * len(slots)
        case messages.SlotFate(free=free):
            return 64 + 18 * len(free)
    return 1024
