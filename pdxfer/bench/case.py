"""What is measured: sizes, which pages a room has, and what must be in them.

Owns: the arithmetic that both workers, and both plain processes, do alike without talking to each other. Must not: move a byte.

Pages are scattered: a lane (one of the rooms that run at a time) has pages drawn from the whole pool. The sender's table turns by one
with each room, so the bytes of a room are never those that the room before left in the same pages of the receiver.
"""

from __future__ import annotations

import math
import os
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pdxfer.pools import PoolLayout, SharedPool

Cells = npt.NDArray[np.uint8]
Table = npt.NDArray[np.int64]

PAGE_TOKENS: Final = 16  # of no consequence for the bytes
SEED: Final = 2026


class Case(NamedTuple):
    """One layout and size. A room is ``pages`` logical pages in each of ``planes`` planes."""

    page_bytes: int
    planes: int
    pages: int
    lanes: int  # the most rooms that run at a time: both pools are made for so many

    @property
    def room_bytes(self) -> int:
        return self.page_bytes * self.planes * self.pages

    @property
    def descriptors(self) -> int:
        """Of a room's transfer, when every page of every plane has its own."""
        return self.planes * self.pages

    def layout(self) -> PoolLayout:
        return PoolLayout("kv", "uint8", (self.page_bytes,), PAGE_TOKENS, self.planes)

    @property
    def source_pages(self) -> int:
        return self.lanes * (self.pages + 1)

    @property
    def target_pages(self) -> int:
        return self.lanes * self.pages

    def source_table(self, lane: int, number: int, pages: int) -> Table:
        """The sender's pages for room ``number`` of a lane."""
        own: Table = _shuffled(1, self.source_pages).reshape(self.lanes, self.pages + 1)[lane]
        turned: Table = np.roll(own, -number)
        return turned[:pages]

    def target_table(self, lane: int, pages: int) -> Table:
        own: Table = _shuffled(2, self.target_pages).reshape(self.lanes, self.pages)[lane]
        return own[:pages]


class Memory(NamedTuple):
    """A worker's pool, for another process to map."""

    path: str
    size: int
    planes: tuple[int, ...]  # where each begins
    pages: int

    @classmethod
    def of(cls, pool: SharedPool) -> Memory:
        path = f"/proc/{os.getpid()}/fd/{pool.fds[0]}"
        return cls(path, pool.fd_bytes[0], tuple(plane.offset for plane in pool.at().planes), pool.num_pages)


class Batch(NamedTuple):
    """So many rooms, so many at a time. ``name`` is new for every batch: a room's id is used once."""

    name: str
    lanes: int
    rooms_each: int
    pages: int

    @property
    def rooms(self) -> int:
        return self.lanes * self.rooms_each

    def room(self, lane: int, number: int) -> str:
        return f"{self.name}-{lane}-{number}"


def rooms_each(rooms: int, lanes: int) -> int:
    """At least two for each lane, so that every pool page is used again."""
    return max(2, math.ceil(rooms / lanes))


def content(planes: Table | int, pages: Table | int, page_bytes: int) -> Cells:
    """What the sender holds in these cells of its pool, one row for each. No two cells are alike."""
    key = np.asarray(planes, np.uint64) << np.uint64(32) | np.asarray(pages, np.uint64)
    rows = (np.atleast_1d(key) + np.uint64(SEED)) * np.uint64(0x9E3779B97F4A7C15)
    words = np.arange(-(-page_bytes // 8), dtype=np.uint64) * np.uint64(0xD1B54A32D192ED03)
    return (rows[:, None] ^ words[None, :]).view(np.uint8)[:, :page_bytes]


def _shuffled(seed: int, count: int) -> Table:
    if (seed, count) not in _tables:
        _tables[seed, count] = np.random.default_rng(SEED + seed).permutation(count)
    return _tables[seed, count]


_tables: dict[tuple[int, int], Table] = {}  # both are asked for with every room
