"""The truth about grants: who was given which slot of which engine, and who may still write under a grant.

Owns: what every node has granted, and the two judgements made of it. Must not: tell a node anything; a node that used a grant
wrongly, or freed a slot too early, is found out here even if no byte happens to land.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdxfer.core import messages
from pdxfer.core.events import Event, PeerSaid
from pdxfer.core.ledger import SlotState
from pdxfer.core.state import Plan, SendRoom

from .world import Violation, World

if TYPE_CHECKING:
    from .sidecar import Sidecar

Given = tuple[str, int, int, int]  # node, engine incarnation, slot, generation
Doubt = tuple[int, int, str, int, str]  # engine incarnation, generation, room, epoch, writer's node


class Grants:
    """One sidecar's view of the world's grants; it lives as long as the parent does."""

    def __init__(self, side: Sidecar) -> None:
        self._side = side
        self._world: World = side.world
        self._in_doubt: dict[int, Doubt] = {}  # quarantined slots, as they were after the last event

    def said(self, grant: messages.Grant) -> None:
        """This node grants."""
        given = (self._side.name, grant.engine, grant.slot, grant.generation)
        self._world.granted[given] = (grant.room, grant.epoch, grant.segment)

    def before(self, event: Event) -> list[tuple[SendRoom, Plan]]:
        """The segments that this event may have granted: their plans, if they are not granted yet."""
        core = self._side.core
        if core is None or not isinstance(event, PeerSaid):
            return []
        found = []
        for message in event.body:
            if isinstance(message, messages.Grant):
                room = core.state.sends.get((message.room, message.epoch))
                if room is not None and message.segment < len(room.plans) and not room.plans[message.segment].granted:
                    found.append((room, room.plans[message.segment]))
        return found

    def used(self, plans: list[tuple[SendRoom, Plan]]) -> None:
        """After the event: a grant that was accepted must be one that the peer's engine of now has made for this segment."""
        core = self._side.core
        assert core is not None
        for room, plan in plans:
            peer = core.state.peers.get(room.peer)
            if not plan.granted or not room.live or peer is None or peer.engine is None:
                continue
            given = (room.peer, peer.engine.incarnation, plan.slot, plan.generation)
            found, expected = self._world.granted.get(given), (room.room, room.epoch, plan.index)
            if found != expected:
                raise Violation(
                    f"node {self._side.name}: send {room} takes slot {plan.slot} generation {plan.generation} of engine"
                    f" {given[1]} of {room.peer} for granted to {expected}; it was granted to {found}"
                )

    def freed(self) -> None:
        """After the event: a slot that left quarantine must have no writer that would still begin to write into it."""
        core = self._side.core
        assert core is not None
        info = core.state.engine.info
        now: dict[int, Doubt] = {}
        for slot in core.state.engine.recv.all if info is not None else ():
            assert info is not None
            if slot.state is SlotState.QUARANTINED:
                now[slot.index] = (info.incarnation, slot.generation, slot.room, slot.epoch, slot.peer)
        for index, doubt in self._in_doubt.items():
            if info is not None and doubt[0] == info.incarnation and now.get(index) != doubt:
                self._no_writer(index, doubt)
        self._in_doubt = now

    def _no_writer(self, index: int, doubt: Doubt) -> None:
        _, generation, name, epoch, node = doubt
        writer = self._world.sidecars[node].core
        room = writer.state.sends.get((name, epoch)) if writer is not None else None
        if room is None or not room.live or room.peer != self._side.name:
            return
        for plan in room.plans:
            waits = plan.granted and not plan.sent and not plan.job
            if waits and (plan.slot, plan.generation) == (index, generation):
                raise Violation(
                    f"node {self._side.name}: slot {index} generation {generation} left quarantine, and {node} will still"
                    f" write segment {plan.index} of room {room} into it"
                )
