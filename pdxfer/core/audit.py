"""The invariants of a node, checked as a whole: for tests, the simulator, and nothing else.

Owns: R4 and R5 as assertions. Must not: change anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from .geometry import Pages
from .ledger import SlotState
from .state import RecvRoom, Room, SendRoom, State


def audit(st: State, lent: Sequence[tuple[int, Sequence[Pages]]] = ()) -> None:
    """Raise AssertionError, naming it, when an invariant does not hold. ``lent``: (worker, tables) that no room holds."""
    st.pages.audit()
    st.engine.send.audit()
    st.engine.recv.audit()
    rooms: list[Room] = [*st.sends.values(), *st.recvs.values()]
    for room in rooms:
        assert room.live, f"{room} is in the tables and has ended"
        assert ("room", room.key, room.serial) in st.timers, f"{room} ({room.state}) waits without a deadline"
        assert room.key in room.worker.rooms, f"{room} is unknown to its worker"
        if room.peer:
            assert room.peer in st.peers, f"{room}: peer {room.peer} is not in the tables"
            assert room.key in st.peers[room.peer].rooms, f"{room} is unknown to its peer"
    for room in st.homing.values():
        assert not room.live and room.jobs, f"{room} has ended, is not home, and no job holds it"
    for id, record in st.jobs.items():
        assert ("job", id) in st.timers, f"job {id} ({record.kind}) waits without a deadline"
    for key in st.parked:
        assert ("parked", key) in st.timers, f"want {key} is parked without a deadline"
    assert sum(st.parked_by.values()) == len(st.parked), "parked wants that no peer has"
    for node in st.peers:
        assert ("silent", node) in st.timers, f"peer {node} has no deadline"
    _slots(st)
    _pages(st, lent)


def _slots(st: State) -> None:
    sending = {r.slot for r in st.jobs.values() if r.kind == "send"}
    scattering = {r.slot for r in st.jobs.values() if r.kind == "scatter"}
    assert {s.index for s in st.engine.send.all if s.state is not SlotState.FREE} == sending, (
        "a send slot without a job"
    )
    assert {s.index for s in st.engine.recv.all if s.state is SlotState.SCATTERING} == scattering, (
        "a scatter without a job"
    )
    held = {i for r in st.recvs.values() for i in r.outstanding.values()}
    for slot in st.engine.recv.all:
        if slot.state is SlotState.GRANTED:
            assert slot.index in held, f"slot {slot.index} is granted to no live room"
        if slot.state is SlotState.QUARANTINED:
            assert ("quarantine",) in st.timers, f"slot {slot.index} is quarantined and nobody asks"


def _pages(st: State, others: Sequence[tuple[int, Sequence[Pages]]]) -> None:
    """The pages lent are those that rooms, or the others, hold: no more, no less."""
    lent: dict[int, list[set[int]]] = {w.id: [set() for _ in w.specs] for w in st.workers.values()}
    rooms: list[Room] = [*st.sends.values(), *st.recvs.values(), *st.homing.values()]
    for room in rooms:
        pools = lent[room.worker.id]
        if isinstance(room, SendRoom):
            for push in room.pushes:
                if not push.home:
                    for pool, table in zip(pools, push.tables, strict=True):
                        pool.update(map(int, table))
        elif isinstance(room, RecvRoom):
            for pool, table in zip(pools, room.tables, strict=True):
                pool.update(map(int, table))
    for worker, tables in others:
        for pool, table in zip(lent[worker], tables, strict=True):
            pool.update(map(int, table))
    for worker, pools in lent.items():
        assert st.pages.lent(worker) == sum(map(len, pools)), (
            f"worker {worker}: the ledger lends other pages than rooms hold"
        )
