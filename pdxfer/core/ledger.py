"""The ledger: who owns each page and each slot, always exactly one (R4).

Owns: every move of ownership. Must not: decide anything; `Node`'s parts decide and the ledger refuses what cannot be.

Pages of a worker's pool are HOME (the worker's own), READ (lent to one or more sends, which only read them: engines
share the pages of a common prefix between requests) or WRITE (lent to one receive). Slots are the engine's staging
memory. The sums over states never change while a pool or an engine lives; `audit` checks it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np

from .geometry import Pages
from .reasons import Refused

HOME, READ, WRITE = 0, 1, 2
PAGE_STATES = ("home", "read", "write")


class _PoolPages:
    __slots__ = ("owner", "readers", "state")

    def __init__(self, num_pages: int) -> None:
        self.state = np.zeros(num_pages, dtype=np.uint8)
        self.readers = np.zeros(num_pages, dtype=np.uint32)
        self.owner = np.zeros(num_pages, dtype=np.int64)  # the receive that a WRITE page is lent to


class PageLedger:
    """All pages of all attached workers."""

    def __init__(self) -> None:
        self._pools: dict[int, list[_PoolPages]] = {}

    def attach(self, worker: int, num_pages: Sequence[int]) -> None:
        assert worker not in self._pools
        self._pools[worker] = [_PoolPages(n) for n in num_pages]

    def detach(self, worker: int) -> None:
        """The worker's pages leave the books. They must all be HOME."""
        assert not self.lent(worker), f"worker {worker} detached with pages lent"
        del self._pools[worker]

    def check(self, worker: int, tables: Sequence[Pages], names: Sequence[str], *, write: bool) -> None:
        """Raise Refused unless all these pages can be lent: pages_out_of_range, pages_repeated or pages_not_owned."""
        for name, pool, pages in zip(names, self._pools[worker], tables, strict=True):
            if not len(pages):
                continue
            size = len(pool.state)
            top = int(pages.max())
            if top >= size:
                raise Refused("pages_out_of_range", f"pool {name!r}: page {top}, expected 0 to {size - 1}")
            if len(pages) > 1:
                ordered = np.sort(pages)
                same = ordered[1:] == ordered[:-1]
                if same.any():
                    raise Refused("pages_repeated", f"pool {name!r}: page {int(ordered[1:][same][0])} is named twice")
            state = pool.state[pages]
            bad = state != HOME if write else state == WRITE
            if bad.any():
                page = int(pages[bad][0])
                raise Refused(
                    "pages_not_owned", f"pool {name!r}: page {page} is lent ({PAGE_STATES[int(pool.state[page])]})"
                )

    def lend(self, worker: int, tables: Sequence[Pages], room: int, *, write: bool) -> None:
        """Move checked pages to a room: HOME → WRITE, or HOME/READ → READ."""
        for pool, pages in zip(self._pools[worker], tables, strict=True):
            if write:
                assert not pool.state[pages].any()
                pool.state[pages] = WRITE
                pool.owner[pages] = room
            else:
                assert not (pool.state[pages] == WRITE).any()
                pool.state[pages] = READ
                pool.readers[pages] += 1

    def give_back(self, worker: int, tables: Sequence[Pages], room: int, *, write: bool) -> None:
        """Move a room's pages home: WRITE → HOME, or READ → HOME with its last reader."""
        for pool, pages in zip(self._pools[worker], tables, strict=True):
            if write:
                assert (pool.state[pages] == WRITE).all() and (pool.owner[pages] == room).all()
                pool.state[pages] = HOME
                pool.owner[pages] = 0
            else:
                assert (pool.state[pages] == READ).all() and (pool.readers[pages] > 0).all()
                pool.readers[pages] -= 1
                pool.state[pages[pool.readers[pages] == 0]] = HOME

    def lent(self, worker: int) -> int:
        """How many of the worker's pages are not HOME."""
        return sum(int(np.count_nonzero(pool.state)) for pool in self._pools[worker])

    def counts(self) -> dict[int, dict[str, int]]:
        """Pages by state, for each worker."""
        out: dict[int, dict[str, int]] = {}
        for worker, pools in self._pools.items():
            total = np.zeros(3, dtype=np.int64)
            for pool in pools:
                total += np.bincount(pool.state, minlength=3)
            out[worker] = dict(zip(PAGE_STATES, map(int, total), strict=True))
        return out

    def audit(self) -> None:
        """Raise AssertionError when the books contradict themselves."""
        for worker, pools in self._pools.items():
            for pool in pools:
                assert (pool.state <= WRITE).all(), worker
                assert ((pool.readers > 0) == (pool.state == READ)).all(), f"worker {worker}: readers without READ"
                assert ((pool.owner != 0) == (pool.state == WRITE)).all(), f"worker {worker}: WRITE without owner"


class SlotState(enum.StrEnum):
    FREE = "free"
    SENDING = "sending"  # send slot: being gathered into, or its WRITE is posted
    DOUBTFUL = "doubtful"  # send slot: its room is over, its WRITE is not known to be
    GRANTED = "granted"  # receive slot: a peer may write into it
    SCATTERING = "scattering"  # receive slot: landed, being verified and scattered
    QUARANTINED = "quarantined"  # receive slot: its room is over, its writer not known to be finished or dead


_MOVES = {
    SlotState.FREE: {SlotState.SENDING, SlotState.GRANTED},
    SlotState.SENDING: {SlotState.FREE, SlotState.DOUBTFUL},
    SlotState.DOUBTFUL: {SlotState.FREE},
    SlotState.GRANTED: {SlotState.SCATTERING, SlotState.QUARANTINED, SlotState.FREE},
    SlotState.SCATTERING: {SlotState.FREE},
    SlotState.QUARANTINED: {SlotState.FREE},
}


class Slot:
    __slots__ = ("epoch", "generation", "index", "peer", "peer_engine", "room", "segment", "since", "state")

    def __init__(self, index: int) -> None:
        self.index = index
        self.state = SlotState.FREE
        self.generation = 0
        self.room = ""
        self.epoch = 0
        self.segment = 0
        self.peer = ""
        self.peer_engine = 0  # engine incarnation of the peer at the time
        self.since = 0.0


class SlotLedger:
    """The send slots, or the receive slots, of one engine incarnation."""

    def __init__(self, count: int) -> None:
        self.all = [Slot(i) for i in range(count)]
        self._free = list(range(count))[::-1]
        self.by_peer: dict[str, int] = {}  # slots that are not FREE, by peer

    @property
    def free(self) -> int:
        return len(self._free)

    def take(
        self, state: SlotState, room: str, epoch: int, segment: int, peer: str, peer_engine: int, now: float
    ) -> Slot:
        """FREE → ``state``, under a new generation. There must be a free slot."""
        slot = self.all[self._free.pop()]
        assert slot.state is SlotState.FREE
        assert state in _MOVES[SlotState.FREE]
        slot.state = state
        slot.generation += 1
        slot.room, slot.epoch, slot.segment, slot.peer, slot.peer_engine, slot.since = (
            room,
            epoch,
            segment,
            peer,
            peer_engine,
            now,
        )
        self.by_peer[peer] = self.by_peer.get(peer, 0) + 1
        return slot

    def move(self, slot: Slot, state: SlotState, now: float) -> None:
        assert state in _MOVES[slot.state], f"slot {slot.index}: {slot.state} to {state}"
        slot.state = state
        slot.since = now
        if state is SlotState.FREE:
            self._free.append(slot.index)
            self.by_peer[slot.peer] -= 1
            if not self.by_peer[slot.peer]:
                del self.by_peer[slot.peer]
            slot.room, slot.peer = "", ""

    def held_by(self, peer: str) -> int:
        return self.by_peer.get(peer, 0)

    def counts(self) -> dict[str, int]:
        out: dict[str, int] = {}
        for slot in self.all:
            out[slot.state] = out.get(slot.state, 0) + 1
        return out

    def audit(self) -> None:
        """Raise AssertionError when the books contradict themselves."""
        assert sorted(self._free) == [s.index for s in self.all if s.state is SlotState.FREE]
        assert sum(self.by_peer.values()) == len(self.all) - len(self._free)
