"""Seeded bugs: patches of the product's parts, never branches inside them.

``MUTANTS`` maps a name to a context manager that has the bug in force while it is open; the simulator must catch each.
``BY_SCENARIO`` names those that take an interleaving so rare that a test with that very interleaving stands for the
simulator: the function in tests/unit/test_core_failures.py that must fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from pdxfer.core.ends import Ends
from pdxfer.core.engines import Engines
from pdxfer.core.ledger import PageLedger, SlotState
from pdxfer.core.local import Local
from pdxfer.core.peers import Peers
from pdxfer.core.receiver import Receiver
from pdxfer.core.sender import Sender
from pdxfer.core.state import State
from pdxfer.core.workers import Workers

MUTANTS: dict[str, Callable[[], AbstractContextManager[object]]] = {}

BY_SCENARIO = {
    "quarantine_ends_with_the_writers_engine": "test_the_death_of_the_writers_engine_alone_frees_nothing_by_itself",
    "grants_of_a_dead_engine_are_used": "test_a_late_grant_of_a_dead_engine_is_not_used",
    "slot_generation_ignored": "test_a_late_fate_does_not_free_the_slots_next_generation",
    "any_segment_fits_any_grant": "test_a_late_segment_is_not_taken_for_the_slots_next_generation",
}


def nothing(*_: Any, **__: Any) -> None:
    return None


def replaces(owner: type, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The decorated function, called as ``bug(original, self, …)``, takes the place of a method."""

    def register(bug: Callable[..., Any]) -> Callable[..., Any]:
        original = getattr(owner, name)

        @contextmanager
        def in_force() -> Iterator[None]:
            def method(self: Any, *args: Any, **kwargs: Any) -> Any:
                return bug(original, self, *args, **kwargs)

            with patch.object(owner, name, method):
                yield

        MUTANTS[bug.__name__] = in_force
        return bug

    return register


@replaces(Ends, "bury")
def no_tombstone(original: Any, self: Ends, *args: Any, **kwargs: Any) -> None: ...


@replaces(Ends, "bury")
def early_abort_forgotten(original: Any, self: Ends, key: Any, reason: str, detail: str, *, early: bool = False) -> None:
    if not early:
        original(self, key, reason, detail)


@replaces(Ends, "_quarantine")
def slot_freed_on_release(original: Any, self: Ends, room: Any) -> None:
    st = self.state
    for index in room.outstanding.values():
        slot = st.engine.recv.all[index]
        if slot.state is SlotState.GRANTED:
            st.engine.recv.move(slot, SlotState.FREE, st.now)
            self.slots_freed = True
    room.outstanding.clear()


@replaces(Ends, "doubt")
def send_slot_freed_on_release(original: Any, self: Ends, id: int) -> None:
    original(self, id)
    st = self.state
    st.engine.send.move(st.engine.send.all[st.jobs[id].slot], SlotState.FREE, st.now)


@replaces(Ends, "settle")
def pages_home_before_the_copy_ended(original: Any, self: Ends, room: Any) -> None:
    jobs, room.jobs = room.jobs, set()
    original(self, room)
    room.jobs = jobs


@replaces(Ends, "settle")
def end_reported_twice(original: Any, self: Ends, room: Any) -> None:
    before = len(self.state.out)
    original(self, room)
    self.state.out += [a for a in self.state.out[before:] if type(a).__name__ in ("ToWorker", "RoomClosed")]


@replaces(State, "again")
def retransmission_off(original: Any, self: State, room: Any) -> None: ...


@replaces(Ends, "repeat")
def end_said_once(original: Any, self: Ends, node: str, key: Any) -> None:
    self.closing.pop((node, key), None)


@replaces(Ends, "on_ended")
def abort_of_a_peer_unhandled(original: Any, self: Ends, peer: Any, message: Any) -> None: ...


@replaces(Workers, "_abort")
def abort_of_a_worker_unhandled(original: Any, self: Workers, owner: Any, key: Any, detail: str) -> Any:
    return nothing


@replaces(Peers, "on_hello")
def quarantine_ends_with_the_writers_engine(original: Any, self: Peers, node: str, incarnation: int, message: Any) -> Any:
    peer = self.state.peers.get(node)
    old = peer.engine if peer is not None else None
    out = original(self, node, incarnation, message)
    if out is not None and out.engine != old:
        self.receiver.writers_gone(node)
    return out


@replaces(Receiver, "inquire")
def quarantine_is_never_asked_about(original: Any, self: Receiver) -> None:
    self.state.timers.set(("quarantine",), self.state.now + 1.0)


@replaces(Sender, "query")
def every_slot_is_said_to_be_free(original: Any, self: Sender, peer: Any, query: Any) -> None:
    jobs, self.state.jobs = self.state.jobs, {}
    original(self, peer, query)
    self.state.jobs = jobs


@replaces(PageLedger, "give_back")
def ledger_move_forgotten(original: Any, self: PageLedger, worker: int, tables: Any, room: int, *, write: bool) -> None:
    if write:
        original(self, worker, tables, room, write=write)


@replaces(Sender, "pushed")
def pages_released_before_the_gather(original: Any, self: Sender, room: Any) -> None:
    original(self, room)
    for push in room.pushes:
        if room.live and not push.home and not push.uncut:
            self.ends.push_home(room, push, told=True)


@replaces(Receiver, "_answer_dead")
def done_is_said_once(original: Any, self: Receiver, peer: Any, room: str, epoch: int) -> None: ...


@replaces(Receiver, "complete")
def done_without_counting(original: Any, self: Receiver, room: Any) -> Any:
    if room.finish is not None and room.below < room.finish:
        room.below = room.finish
        room.coverage.left = 0
    return original(self, room)


@replaces(Workers, "answer_attach")
def attached_while_its_last_life_lingers(original: Any, self: Workers, owner: Any) -> None:
    gone = [w for w in self.state.workers.values() if w.gone]
    for w in gone:
        w.gone = False
    original(self, owner)
    for w in gone:
        w.gone = True


@replaces(Engines, "lost")
def engine_death_ends_nothing(original: Any, self: Engines, event: Any) -> None:
    if self.state.engine.up:
        self.state.engine.info = None


@replaces(Local, "copied")
def local_done_too_early(original: Any, self: Local, id: int, error: str) -> None:
    send = self.state.jobs[id].room
    original(self, id, error)
    if send.live and send.finished is not None and send.jobs:  # type: ignore[attr-defined]
        receive = send.local
        assert receive is not None
        self.ends.end(receive, "done", "")
        self.ends.end(send, "done", "")


@replaces(Sender, "deadline")
def forgotten_pushes_have_no_deadline(original: Any, self: Sender, room: Any) -> Any:
    when, reason, detail = original(self, room)
    return (when + 1e6, reason, detail) if reason in ("push_timeout", "room_timeout") else (when, reason, detail)


@replaces(Sender, "deadline")
def unwanted_sends_have_no_deadline(original: Any, self: Sender, room: Any) -> Any:
    when, reason, detail = original(self, room)
    return (when + 1e6, reason, detail) if reason == "open_timeout" else (when, reason, detail)


@replaces(Receiver, "deadline")
def wants_have_no_deadline(original: Any, self: Receiver, room: Any) -> Any:
    when, reason, detail = original(self, room)
    return (when + 1e6, reason, detail) if reason in ("want_timeout", "registry_unavailable") else (when, reason, detail)


@replaces(Peers, "silent")
def lost_peers_are_waited_for(original: Any, self: Peers, node: str) -> None:
    self.state.timers.set(("silent", node), self.state.now + 1.0)


@replaces(Sender, "on_grant")
def grants_of_a_dead_engine_are_used(original: Any, self: Sender, peer: Any, grant: Any) -> None:
    if peer.engine is not None:
        fields = {f: getattr(grant, f) for f in grant.__struct_fields__} | {"engine": peer.engine.incarnation}
        grant = type(grant)(**fields)
    original(self, peer, grant)


@replaces(Receiver, "on_fate")
def slot_generation_ignored(original: Any, self: Receiver, peer: Any, fate: Any) -> None:
    slots = self.state.engine.recv.all
    free = tuple((i, slots[i].generation) for i, _ in fate.free if i < len(slots))
    original(self, peer, type(fate)(fate.engine, free))


@replaces(Receiver, "landed")
def any_segment_fits_any_grant(original: Any, self: Receiver, node: str, segment: Any) -> None:
    slots = self.state.engine.recv.all
    if self.state.engine.up and 0 <= segment.slot < len(slots):
        fields = {f: getattr(segment, f) for f in segment.__struct_fields__}
        segment = type(segment)(**fields | {"generation": slots[segment.slot].generation})
    original(self, node, segment)


@replaces(Workers, "lost")
def dead_worker_unnoticed(original: Any, self: Workers, event: Any) -> None:
    owner = self.state.workers.get(event.id)
    if owner is not None and self.state.by_engine_id.get(owner.engine_id) is owner:
        del self.state.by_engine_id[owner.engine_id]
        self.state.timers.clear(("worker", owner.id))
