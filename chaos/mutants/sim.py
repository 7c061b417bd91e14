"""Seeded bugs of the core, for the simulator: each must be caught within some seeds, or an invariant is missing.

Owns: the bugs and what each is, in words. They are patches of the product's parts, never branches inside them. Must not:
be imported by the product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from pdxfer.core import events, messages
from pdxfer.core.ends import Ends
from pdxfer.core.engines import Engines
from pdxfer.core.ledger import PageLedger, SlotState
from pdxfer.core.local import Local
from pdxfer.core.mirror import MirrorIndex
from pdxfer.core.mirrors import Mirrors
from pdxfer.core.node import Node
from pdxfer.core.peers import Peers
from pdxfer.core.receiver import Receiver
from pdxfer.core.regions import Region
from pdxfer.core.sender import Sender
from pdxfer.core.state import State
from pdxfer.core.timers import Timers
from pdxfer.core.workers import Workers

FOR_EVER = 1e6


@dataclass(frozen=True)
class Mutant:
    name: str
    what: str
    in_force: Callable[[], AbstractContextManager[object]]
    likely: int | None  # a seed that was seen to catch it; tests try it first


MUTANTS: dict[str, Mutant] = {}
_Bug = Callable[..., Any]


def replaces(
    owner: type, method: str, what: str, *, likely: int | None = None, name: str = ""
) -> Callable[[_Bug], _Bug]:
    """The decorated function, called as ``bug(original, self, …)``, takes the place of a method."""

    def register(bug: _Bug) -> _Bug:
        original = getattr(owner, method)

        @contextmanager
        def in_force() -> Iterator[None]:
            def instead(self: Any, *args: Any, **kwargs: Any) -> Any:
                return bug(original, self, *args, **kwargs)

            with patch.object(owner, method, instead):
                yield

        mutant = Mutant(name or bug.__name__, what, in_force, likely)
        MUTANTS[mutant.name] = mutant
        return bug

    return register


@replaces(
    Node, "handle", "an ABORT from a peer ends the bootstrap thread, and nobody starts it again: the original wedge"
)
def bootstrap_thread_ends_on_abort(original: Any, self: Any, event: Any, now: float) -> Any:
    dead = getattr(self, "thread_is_dead", False)
    if dead and isinstance(event, events.PeerSaid | events.PeerCut):
        event = events.Tick()
    actions = original(self, event, now)
    if isinstance(event, events.PeerSaid) and any(
        isinstance(m, messages.Ended) and m.reason == "aborted" for m in event.body
    ):
        self.thread_is_dead = dead = True
    return [a for a in actions if not isinstance(a, events.ToPeer)] if dead else actions


@replaces(Ends, "bury", "the end of a room is not remembered")
def no_tombstone(original: Any, self: Ends, *args: Any, **kwargs: Any) -> None: ...


@replaces(Ends, "bury", "an abort that comes before its room is forgotten", likely=114)
def early_abort_forgotten(
    original: Any, self: Ends, key: Any, reason: str, detail: str, *, early: bool = False
) -> None:
    if not early:
        original(self, key, reason, detail)


@replaces(Ends, "_quarantine", "a receive slot is free as soon as its room has ended, whoever may still write into it")
def slot_freed_on_release(original: Any, self: Ends, room: Any) -> None:
    st = self.state
    for index in room.outstanding.values():
        slot = st.engine.recv.all[index]
        if slot.state is SlotState.GRANTED:
            st.engine.recv.move(slot, SlotState.FREE, st.now)
            self.slots_freed = True
    room.outstanding.clear()


@replaces(Ends, "doubt", "a send slot is free as soon as its room has ended, though the WRITE still reads it")
def send_slot_freed_on_release(original: Any, self: Ends, id: int) -> None:
    original(self, id)
    st = self.state
    st.engine.send.move(st.engine.send.all[st.jobs[id].slot], SlotState.FREE, st.now)


@replaces(Ends, "settle", "pages go home while a gather, scatter or copy still touches them")
def pages_home_before_the_copy_ended(original: Any, self: Ends, room: Any) -> None:
    jobs, room.jobs = room.jobs, set()
    original(self, room)
    room.jobs = jobs


@replaces(Ends, "settle", "duplicate completion: the end of a room is told twice")
def end_reported_twice(original: Any, self: Ends, room: Any) -> None:
    before = len(self.state.out)
    original(self, room)
    self.state.out += [a for a in self.state.out[before:] if type(a).__name__ in ("ToWorker", "RoomClosed")]


@replaces(State, "again", "nothing is said a second time")
def retransmission_off(original: Any, self: State, room: Any) -> None: ...


@replaces(Ends, "repeat", "the end of a room is told to the peer once, acknowledged or not")
def end_said_once(original: Any, self: Ends, node: str, key: Any) -> None:
    self.closing.pop((node, key), None)


@replaces(Ends, "on_ended", "an ABORT from a peer does nothing")
def abort_of_a_peer_unhandled(original: Any, self: Ends, peer: Any, message: Any) -> None: ...


@replaces(Workers, "_abort", "a worker's abort does nothing")
def abort_of_a_worker_unhandled(original: Any, self: Workers, owner: Any, key: Any, detail: str) -> Any:
    return _nothing


@replaces(
    Peers,
    "on_hello",
    "quarantine ignored on a new incarnation: a new engine of the writer's node frees its slots unasked",
)
def quarantine_ends_with_the_writers_engine(
    original: Any, self: Peers, node: str, incarnation: int, message: Any
) -> Any:
    peer = self.state.peers.get(node)
    old = peer.engine if peer is not None else None
    out = original(self, node, incarnation, message)
    if out is not None and out.engine != old:
        self.receiver.writers_gone(node)
    return out


@replaces(Receiver, "inquire", "the writer of a quarantined slot is never asked whether it is finished")
def quarantine_is_never_asked_about(original: Any, self: Receiver) -> None:
    self.state.timers.set(("quarantine",), self.state.now + 1.0)


@replaces(Sender, "query", "a writer that is asked says that it is finished, though its WRITE is under way")
def every_slot_is_said_to_be_free(original: Any, self: Sender, peer: Any, query: Any) -> None:
    jobs, self.state.jobs = self.state.jobs, {}
    original(self, peer, query)
    self.state.jobs = jobs


@replaces(PageLedger, "give_back", "a pushed page goes home without the ledger")
def ledger_move_forgotten(original: Any, self: PageLedger, worker: int, tables: Any, room: int, *, write: bool) -> None:
    if write:
        original(self, worker, tables, room, write=write)


@replaces(Sender, "pushed", "pushed pages are released once all their copies were posted")
def pages_released_before_the_gather(original: Any, self: Sender, room: Any) -> None:
    original(self, room)
    for push in room.pushes:
        if room.live and not push.home and not push.uncut:
            self.ends.push_home(room, push, told=True)


@replaces(Receiver, "_answer_dead", "the receiver's Done is not repeated to a sender that missed it", likely=185)
def done_is_said_once(original: Any, self: Receiver, peer: Any, room: str, epoch: int) -> None: ...


@replaces(Receiver, "complete", "a receive is done when the sender has finished, whatever has arrived")
def done_without_counting(original: Any, self: Receiver, room: Any) -> Any:
    if room.finish is not None and room.below < room.finish:
        room.below = room.finish
        room.coverage.left = 0
    return original(self, room)


@replaces(Workers, "answer_attach", "a worker attaches again while its last life's pages are still touched", likely=102)
def attached_while_its_last_life_lingers(original: Any, self: Workers, owner: Any) -> None:
    gone = [w for w in self.state.workers.values() if w.gone]
    for w in gone:
        w.gone = False
    original(self, owner)
    for w in gone:
        w.gone = True


@replaces(Engines, "lost", "the death of the engine ends no room")
def engine_death_ends_nothing(original: Any, self: Engines, event: Any) -> None:
    if self.state.engine.up:
        self.state.engine.info = None


@replaces(Local, "copied", "a transfer within one node is done before its last copy")
def local_done_too_early(original: Any, self: Local, id: int, error: str) -> None:
    send = self.state.jobs[id].room
    original(self, id, error)
    if send.live and send.finished is not None and send.jobs:  # type: ignore[attr-defined]
        receive = send.local
        assert receive is not None
        self.ends.end(receive, "done", "")
        self.ends.end(send, "done", "")


@replaces(Peers, "silent", "a silent peer is waited for", likely=212)
def lost_peers_are_waited_for(original: Any, self: Peers, node: str) -> None:
    self.state.timers.set(("silent", node), self.state.now + 1.0)


@replaces(Sender, "on_grant", "a late grant of an engine that is dead is used on its successor")
def grants_of_a_dead_engine_are_used(original: Any, self: Sender, peer: Any, grant: Any) -> None:
    if peer.engine is not None:
        fields = {f: getattr(grant, f) for f in grant.__struct_fields__} | {"engine": peer.engine.incarnation}
        grant = type(grant)(**fields)
    original(self, peer, grant)


@replaces(Receiver, "on_fate", "a late answer about a slot frees its next generation")
def slot_generation_ignored(original: Any, self: Receiver, peer: Any, fate: Any) -> None:
    slots = self.state.engine.recv.all
    free = tuple((i, slots[i].generation) for i, _ in fate.free if i < len(slots))
    original(self, peer, type(fate)(fate.engine, free))


@replaces(Receiver, "landed", "a late segment is taken for whatever its slot is granted for by now")
def any_segment_fits_any_grant(original: Any, self: Receiver, node: str, segment: Any) -> None:
    slots = self.state.engine.recv.all
    if self.state.engine.up and 0 <= segment.slot < len(slots) and slots[segment.slot].state is SlotState.GRANTED:
        slot = slots[segment.slot]
        now = {"room": slot.room, "epoch": slot.epoch, "segment": slot.segment, "generation": slot.generation}
        segment = type(segment)(**{f: getattr(segment, f) for f in segment.__struct_fields__} | now)
    original(self, node, segment)


@replaces(Workers, "lost", "the end of a worker's connection is not noticed")
def dead_worker_unnoticed(original: Any, self: Workers, event: Any) -> None:
    owner = self.state.workers.get(event.id)
    if owner is not None and self.state.by_engine_id.get(owner.engine_id) is owner:
        del self.state.by_engine_id[owner.engine_id]
        self.state.timers.clear(("worker", owner.id))


@replaces(MirrorIndex, "find", "a block is found while it is being filled: a load races with the store")
def half_filled_blocks_are_found(original: Any, self: MirrorIndex, space: str, keys: Any) -> Any:
    known = self._spaces.get(space)
    if known is not None:
        for key in keys:
            if key in known.filling:
                entry = known.filling[key]
                digest = self._digest[entry]
                self.filled(entry, digest)
    return original(self, space, keys)


@replaces(MirrorIndex, "_first", "what is pinned is evicted like everything else")
def eviction_ignores_pins(original: Any, self: MirrorIndex, space: Any) -> Any:
    return next((e for e in space.ready.values() if self._used[e] != self._tick), None)


@replaces(Mirrors, "settle", "the pages of a store or load go home while a copy still touches them")
def mirror_pages_home_before_the_copy_ended(original: Any, self: Mirrors, op: Any) -> None:
    jobs, op.jobs = op.jobs, {}
    original(self, op)
    op.jobs = jobs


@replaces(Mirrors, "engine_lost", "what a dead engine was filling is taken for filled", likely=363)
def half_filled_blocks_are_reused(original: Any, self: Mirrors, detail: str) -> None:
    for op in dict.fromkeys(self.jobs.values()):
        if not op.loading:
            for _, entry in [b for batch in op.jobs.values() for b in batch if b[1] in op.left]:
                self.landed(op, entry, 0)
    original(self, detail)


@replaces(Mirrors, "_entry", "of two pools only the first is stored and loaded")
def one_pool_of_two(original: Any, self: Mirrors, op: Any, block: int, entry: int) -> Any:
    whole = original(self, op, block, entry)
    return type(whole)(whole.offset, whole.digest, whole.rows[:1])


@replaces(Mirrors, "_space", "tenants find what others have stored")
def tenants_share(original: Any, self: Mirrors, model: str, tenant: str) -> str:
    return "everybody"


@replaces(Sender, "matched", "what the receiver holds already is sent all the same")
def held_pages_are_sent(original: Any, self: Sender, room: Any, specs: Any, pages: Any, held: Any, who: str) -> Any:
    return original(self, room, specs, pages, (), who)


@replaces(
    Region, "offset", "the mirror is sized for another dtype: entries are laid closer together than they are long"
)
def mirror_sized_for_another_dtype(original: Any, self: Region, entry: int) -> int:
    return self.base + entry * (self.entry_bytes * 132 // 256)


@replaces(Mirrors, "overdue", "a store or load has no deadline", likely=199)
def no_deadline_of_the_mirror(original: Any, self: Mirrors, serial: int) -> None: ...


def _no_deadline(side: type, reason: str, phase: str) -> None:
    @replaces(
        side, "deadline", f"{phase} has no deadline ({reason})", name=f"no_deadline_{side.__name__.lower()}_{reason}"
    )
    def bug(original: Any, self: Any, room: Any) -> Any:
        when, why, detail = original(self, room)
        return (when + FOR_EVER, why, detail) if why in (reason, "room_timeout") else (when, why, detail)


_no_deadline(Sender, "open_timeout", "a send that nobody wants")
_no_deadline(Sender, "push_timeout", "a send that its worker has forgotten")
_no_deadline(Sender, "credit_timeout", "a send without credits")
_no_deadline(Sender, "ack_timeout", "a send that is not acknowledged")
_no_deadline(Sender, "engine_unavailable", "a send that waits for an engine")
_no_deadline(Sender, "transfer_deadline", "a send whose job is under way")
_no_deadline(Receiver, "registry_unavailable", "a want that the registry does not answer")
_no_deadline(Receiver, "want_timeout", "a want that the prefill worker does not open")
_no_deadline(Receiver, "engine_unavailable", "a receive that waits for its engine")


@replaces(Node, "_job_overdue", "a posted job has no deadline")
def no_deadline_of_a_job(original: Any, self: Any, id: int) -> None: ...


@replaces(Timers, "set", "a want that came before its room is parked without a deadline")
def no_deadline_of_a_parked_want(original: Any, self: Any, key: Any, when: float) -> None:
    if key[0] != "parked":
        original(self, key, when)


@replaces(Timers, "set", "a Hello is said once, whether it was heard or not")
def hello_said_once(original: Any, self: Any, key: Any, when: float) -> None:
    if key[0] != "hello":
        original(self, key, when)


def _nothing(*_: Any, **__: Any) -> None:
    return None
