"""The mirror's index: which blocks of which prefixes lie in host memory, and in which entry of it.

Owns: the keys of prefixes, the state of every entry, the choice of what is evicted. Must not: know bytes, pages, workers
or jobs; `mirrors` moves those and tells the index what has become of an entry.

A *block* is ``block_tokens`` tokens of a prompt, counted from its beginning; only whole blocks are kept. An *entry* is a piece of
the mirror's memory that holds one block in **all** pools of a worker: KV, index-K and whatever else, found together or not
at all. A *space* is what may share entries: one model, one layout, one tenant. Spaces never see each other's entries, whatever
their keys are.

Entries are EMPTY; FILLING while a store copies into them; READY when every byte has landed; DOOMED when they were dropped
while somebody still read them. Only READY ones are found, only READY ones without pins are evicted.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

import xxhash

EMPTY, FILLING, READY, DOOMED = 0, 1, 2, 3
DROPS = ("evicted", "asked", "corrupt")  # why an entry is found no more
ENTRY_STATES = ("empty", "filling", "ready", "doomed")
MAX_TOKEN: Final = 2**31 - 1  # the largest token id
TOKEN_BYTES: Final = 4  # of a token id as it travels: little-endian uint32


def prefix_keys(tokens: bytes, block_tokens: int) -> list[bytes]:
    """The key of each whole block of a prompt: 16 bytes that depend on every token up to the block's end.

    ``tokens``: little-endian uint32 token ids. The hash (xxh3, 128 bits) finds equal prefixes; it is no secret, which is
    why an index never looks beyond its own space.
    """
    step = block_tokens * TOKEN_BYTES
    state = xxhash.xxh3_128()
    keys = []
    for start in range(0, len(tokens) - step + 1, step):
        state.update(tokens[start : start + step])
        keys.append(state.digest())
    return keys


class _Space:
    __slots__ = ("filling", "ready")

    def __init__(self) -> None:
        self.ready: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self.filling: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self.ready) + len(self.filling)


class MirrorIndex:
    """All entries of one region.

    ``entries``: how many there are. ``share``: the part of them, 0 to 1, that one space may hold.
    """

    def __init__(self, entries: int, share: float = 1.0) -> None:
        assert entries > 0 and 0 < share <= 1
        self.entries = entries
        self.most = max(1, int(entries * share))
        self.counts = [entries, 0, 0, 0]  # entries by state
        self.dropped = dict.fromkeys(DROPS, 0)
        self._state = bytearray(entries)
        self._pins = array("I", bytes(4 * entries))
        self._used = array("Q", bytes(8 * entries))  # the tick of the last use
        self._digest = array("Q", bytes(8 * entries))
        self._key: list[bytes] = [b""] * entries
        self._space: list[str] = [""] * entries
        self._free = array("I", range(entries - 1, -1, -1))
        self._spaces: dict[str, _Space] = {}
        self._given: OrderedDict[tuple[str, bytes], int] = (
            OrderedDict()
        )  # blocks that are not stored: how often they came
        self._oldest: list[tuple[int, str]] = []  # a heap with one item for each space: not later than its oldest use
        self._heaped: set[str] = set()  # whose item there is
        self._tick = 0

    # finding -------------------------------------------------------------------------------------------------------

    def find(self, space: str, keys: Sequence[bytes]) -> list[int]:
        """The entries of the longest run of READY blocks from the first key on. Changes nothing."""
        known = self._spaces.get(space)
        found: list[int] = []
        if known is not None:
            get = known.ready.get
            for key in keys:
                entry = get(key)
                if entry is None:
                    break
                found.append(entry)
        return found

    def touch(self, entries: Sequence[int]) -> None:
        """These READY entries, the blocks of one prefix from its beginning, were used: they are evicted last, the end of
        the prefix before its beginning.
        """
        self._tick += 1
        for entry in reversed(entries):
            assert self._state[entry] == READY
            self._used[entry] = self._tick
            self._spaces[self._space[entry]].ready.move_to_end(self._key[entry])

    def digest(self, entry: int) -> int:
        return self._digest[entry]

    def state(self, entry: int) -> int:
        return self._state[entry]

    def pins(self, entry: int) -> int:
        return self._pins[entry]

    def known(self, space: str, key: bytes) -> bool:
        """Whether this block is there, or on its way."""
        found = self._spaces.get(space)
        return found is not None and (key in found.ready or key in found.filling)

    def spaces(self) -> dict[str, int]:
        """How many entries each space holds."""
        return {name: len(space) for name, space in self._spaces.items()}

    # filling -------------------------------------------------------------------------------------------------------

    def begin(self, space: str, keys: Sequence[bytes], first: int = 0) -> list[tuple[int, int]]:
        """Make room for the blocks of a prefix from ``first`` on that are not there: (number of the block, its entry, now
        FILLING).

        Blocks that are READY or that somebody is filling are left as they are. Evicts what was used least recently: of
        this space when that holds its share, of any else; never what is pinned, nor a block of this prefix. Returns fewer
        blocks than are missing, the first ones, when no more can be had.
        """
        self._tick += 1
        mine = self._spaces.setdefault(space, _Space())
        self._touch_own(mine, keys)
        taken: list[tuple[int, int]] = []
        for i in range(first, len(keys)):
            key = keys[i]
            if key in mine.ready or key in mine.filling:
                continue
            entry = self._take(space, mine)
            if entry is None:
                break
            self._move(entry, FILLING)
            self._key[entry], self._space[entry], self._used[entry] = key, space, self._tick
            mine.filling[key] = entry
            taken.append((i, entry))
        if len(mine):
            self._spaces[space] = mine  # the eviction of its last block has taken it out
        else:
            self._spaces.pop(space, None)
        return taken

    def gap(self, space: str, keys: Sequence[bytes]) -> int | None:
        """The first of these blocks that is neither there nor on its way."""
        return next((i for i, key in enumerate(keys) if not self.known(space, key)), None)

    def given(self, space: str, keys: Sequence[bytes], times: int) -> int:
        """The blocks of a prefix come once more: how many, from the first on, have come so often now, or are there.

        As many blocks are remembered as there are entries, those that came last.
        """
        enough = len(keys)
        for i, key in enumerate(keys):
            if self.known(space, key):
                continue
            count = self._given.pop((space, key), 0) + 1
            self._given[space, key] = count
            if count < times:
                enough = min(enough, i)
        while len(self._given) > self.entries:
            self._given.popitem(last=False)
        return enough

    def filled(self, entry: int, digest: int) -> None:
        """Every byte of a FILLING entry has landed: FILLING → READY."""
        assert self._state[entry] == FILLING
        key, name = self._key[entry], self._space[entry]
        self._given.pop((name, key), None)
        space = self._spaces[name]
        del space.filling[key]
        self._tick += 1
        self._used[entry] = self._tick
        if name not in self._heaped:
            if len(self._oldest) > 2 * len(self._spaces) + 64:  # of spaces that came and went
                self._oldest = [item for item in self._oldest if item[1] in self._spaces]
                heapq.heapify(self._oldest)
                self._heaped = {item[1] for item in self._oldest}
            self._heaped.add(name)
            heapq.heappush(self._oldest, (self._tick, name))
        space.ready[key] = entry
        self._digest[entry] = digest
        self._move(entry, READY)

    def abandon(self, entry: int) -> None:
        """A FILLING entry will not be filled, and nobody writes into it any more: FILLING → EMPTY."""
        assert self._state[entry] == FILLING
        name = self._space[entry]
        space = self._spaces[name]
        del space.filling[self._key[entry]]
        if not len(space):
            del self._spaces[name]
        self._empty(entry)

    # holding and dropping ------------------------------------------------------------------------------------------

    def pin(self, entries: Iterable[int]) -> None:
        """READY entries are being read: they stay until unpinned, once for each pin."""
        for entry in entries:
            assert self._state[entry] == READY
            self._pins[entry] += 1

    def unpin(self, entries: Iterable[int]) -> None:
        for entry in entries:
            assert self._pins[entry] > 0 and self._state[entry] in (READY, DOOMED)
            self._pins[entry] -= 1
            if not self._pins[entry] and self._state[entry] == DOOMED:
                self._empty(entry)

    def drop(self, entry: int, why: str) -> None:
        """A READY entry is found no more: it is EMPTY at once, or when its last pin goes."""
        assert self._state[entry] == READY
        name = self._space[entry]
        space = self._spaces[name]
        del space.ready[self._key[entry]]
        if not len(space):
            del self._spaces[name]
        self.dropped[why] += 1
        if self._pins[entry]:
            self._move(entry, DOOMED)
        else:
            self._empty(entry)

    def drop_all(self, space: str, why: str) -> int:
        """Every READY entry of a space. Returns how many those were."""
        known = self._spaces.get(space)
        found = list(known.ready.values()) if known is not None else []
        for entry in found:
            self.drop(entry, why)
        return len(found)

    # its own parts -------------------------------------------------------------------------------------------------

    def _touch_own(self, mine: _Space, keys: Sequence[bytes]) -> None:
        held = [entry for key in keys if (entry := mine.ready.get(key)) is not None]
        for entry in reversed(held):
            self._used[entry] = self._tick
            mine.ready.move_to_end(self._key[entry])

    def _take(self, name: str, mine: _Space) -> int | None:
        """An EMPTY entry, if need be by an eviction."""
        if len(mine) >= self.most:
            victim = self._first(mine)
        elif self._free:
            return self._free.pop()
        else:
            victim = self._first_of_all()
        if victim is None:
            return None
        self.drop(victim, "evicted")
        return self._free.pop()

    def _first(self, space: _Space) -> int | None:
        """What of this space goes first: nothing that is pinned, or that is used by what is going on now."""
        victim = None
        passed = []
        for entry in space.ready.values():
            if self._used[entry] == self._tick:
                break
            if not self._pins[entry]:
                victim = entry
                break
            passed.append(entry)
        for entry in passed:  # in use: they go to the end, and are not passed over again and again
            self._used[entry] = self._tick
            space.ready.move_to_end(self._key[entry])
        return victim

    def _first_of_all(self) -> int | None:
        """Likewise of all spaces: of the one whose oldest use is the oldest."""
        looked: list[tuple[int, str]] = []
        victim = None
        while self._oldest and victim is None:
            _, name = heapq.heappop(self._oldest)
            space = self._spaces.get(name)
            if space is None or not space.ready:
                self._heaped.discard(name)
                continue
            oldest = self._used[next(iter(space.ready.values()))]
            if self._oldest and oldest > self._oldest[0][0]:
                heapq.heappush(self._oldest, (oldest, name))
                continue
            victim = self._first(space)
            looked.append((oldest, name))
        for item in looked:
            heapq.heappush(self._oldest, item)
        return victim

    def _empty(self, entry: int) -> None:
        self._move(entry, EMPTY)
        self._key[entry], self._space[entry] = b"", ""
        self._free.append(entry)

    def _move(self, entry: int, state: int) -> None:
        self.counts[self._state[entry]] -= 1
        self.counts[state] += 1
        self._state[entry] = state

    def audit(self) -> None:
        """Raise AssertionError when the books contradict themselves."""
        assert self.counts == [self._state.count(state) for state in range(4)]
        assert sorted(self._free) == [i for i in range(self.entries) if self._state[i] == EMPTY]
        ready = {e: (n, k) for n, space in self._spaces.items() for k, e in space.ready.items()}
        filling = {e: (n, k) for n, space in self._spaces.items() for k, e in space.filling.items()}
        assert sum(map(len, self._spaces.values())) == len(ready) + len(filling), "two keys have one entry"
        heaped = {name: tick for tick, name in self._oldest}
        assert len(heaped) == len(self._oldest) and heaped.keys() == self._heaped
        for name, space in self._spaces.items():
            assert len(space), f"space {name!r} is empty and kept"
            assert len(space) <= self.most, f"space {name!r} holds more than its share"
            uses = [self._used[entry] for entry in space.ready.values()]
            assert uses == sorted(uses), f"space {name!r} is not in the order of its uses"
            assert not uses or heaped.get(name, uses[0] + 1) <= uses[0], f"space {name!r} is evicted from too late"
        for entry in range(self.entries):
            state = self._state[entry]
            assert (state == READY) == (entry in ready) and (state == FILLING) == (entry in filling), entry
            assert not self._pins[entry] or state in (READY, DOOMED), (
                f"entry {entry} is pinned and {ENTRY_STATES[state]}"
            )
            assert state != DOOMED or self._pins[entry], f"entry {entry} is dropped, and nobody holds it"
            if state in (READY, FILLING):
                assert (self._space[entry], self._key[entry]) == (ready | filling)[entry], entry
