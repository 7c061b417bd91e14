"""Deadlines by key: the only way in which the core waits.

Owns: a heap of (time, key) in which a key has one time at most. Must not: read a clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable


class Timers:
    __slots__ = ("_heap", "_serial", "_when")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Hashable]] = []
        self._when: dict[Hashable, tuple[float, int]] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._when)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._when

    def set(self, key: Hashable, when: float) -> None:
        """Ring for ``key`` at ``when``, and no longer at any time set before."""
        self._serial += 1
        self._when[key] = (when, self._serial)
        heapq.heappush(self._heap, (when, self._serial, key))
        if len(self._heap) > 64 + 4 * len(self._when):  # replaced entries: rebuild before they outnumber the live ones
            self._heap = [(when, serial, key) for key, (when, serial) in self._when.items()]
            heapq.heapify(self._heap)

    def clear(self, key: Hashable) -> None:
        self._when.pop(key, None)

    def next(self) -> float | None:
        """When the next key is due, or None."""
        while self._heap:
            when, serial, key = self._heap[0]
            if self._when.get(key) == (when, serial):
                return when
            heapq.heappop(self._heap)
        return None

    def due(self, now: float) -> Hashable | None:
        """Take one key that is due, or None."""
        when = self.next()
        if when is None or when > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._when[key]
        return key
