"""Moving pages between pools and slots, and the digest of a slot's bytes.

Owns: gather, scatter, copy and digest. Must not: know jobs' numbers, NIXL or sockets. Every function checks what it is given
before it touches a byte, raises ValueError, and lets go of the GIL while it moves bytes.

The slot holds the rows one after the other, each plane by plane, page by page. Three ways to move one row, by cost:
runs of consecutive pages as plain slices over all planes at once; single pages by numpy's take (into a slot) and by indexed
assignment (out of one), plane by plane; and page by page where an odd stride forbids take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import xxhash

from pdxfer.core.jobs import Rows

from .planes import Bytes, Index, MappedPool, Plane

_LONG_RUN: Final = 8  # pages; from here on a slice for each run beats an index for each page
_CHUNK: Final = 256 << 10  # bytes of a pool-to-pool copy that stay in the cache between its two halves

Run = tuple[int, int, int]  # place in the row, first page, pages


def digest(data: Bytes) -> int:
    return xxhash.xxh3_64_intdigest(data.data)


class Row:
    """A Rows that has been checked against its pool."""

    __slots__ = ("index", "plane0", "planes", "pool", "runs", "size")

    def __init__(self, pools: Sequence[MappedPool], rows: Rows) -> None:
        if not 0 <= rows.pool < len(pools):
            raise ValueError(f"pool {rows.pool}, the worker has {len(pools)}")
        self.pool = pools[rows.pool]
        who = f"pool {self.pool.spec.name!r}"
        self.plane0, self.planes = rows.plane0, rows.planes
        if rows.plane0 < 0 or rows.planes < 1 or rows.plane0 + rows.planes > self.pool.spec.planes:
            raise ValueError(f"{who}: planes {rows.plane0}+{rows.planes} of {self.pool.spec.planes}")
        if not rows.pages or len(rows.pages) % 4:
            raise ValueError(f"{who}: a page table of {len(rows.pages)} bytes, expected a multiple of 4 above 0")
        self.index: Index = np.frombuffer(rows.pages, "<u4").astype(np.intp)
        single = len(rows.pages) == 4  # a block of the mirror mostly: spared the search for runs
        most = int(self.index[0]) if single else int(self.index.max())
        if most >= self.pool.num_pages:
            raise ValueError(f"{who}: page {most} of {self.pool.num_pages}")
        self.size = self.planes * len(self.index) * self.pool.spec.page_bytes
        self.runs = [(0, most, 1)] if single else self._find_runs()

    def _find_runs(self) -> list[Run] | None:
        """The runs of consecutive pages, if slices are the cheaper way."""
        pages = len(self.index)
        breaks = np.flatnonzero(np.diff(self.index) != 1)
        count = len(breaks) + 1
        steps = count if self.pool.cube is not None else count * self.planes
        if steps > self.planes and count * _LONG_RUN > pages:
            return None
        starts = [0, *(breaks + 1).tolist()]
        return [(a, int(self.index[a]), b - a) for a, b in zip(starts, [*starts[1:], pages], strict=True)]

    def gather(self, out: Bytes) -> None:
        """Pages to ``size`` consecutive bytes."""
        page_bytes = self.pool.spec.page_bytes
        slot = out.reshape(self.planes, len(self.index), page_bytes)
        planes = slice(self.plane0, self.plane0 + self.planes)
        if self.runs is not None:
            for at, page, n in self.runs:
                if self.pool.cube is not None:
                    slot[:, at : at + n] = self.pool.cube[planes, page : page + n]
                    continue
                for row, plane in zip(slot, self.pool.planes[planes], strict=True):
                    row[at : at + n] = plane.pages[page : page + n]
            return
        for row, plane in zip(slot, self.pool.planes[planes], strict=True):
            _take(plane, self.index, row)

    def scatter(self, data: Bytes) -> None:
        """``size`` consecutive bytes to pages."""
        page_bytes = self.pool.spec.page_bytes
        slot = data.reshape(self.planes, len(self.index), page_bytes)
        planes = slice(self.plane0, self.plane0 + self.planes)
        if self.runs is not None:
            for at, page, n in self.runs:
                if self.pool.cube is not None:
                    self.pool.cube[planes, page : page + n] = slot[:, at : at + n]
                    continue
                for row, plane in zip(slot, self.pool.planes[planes], strict=True):
                    plane.pages[page : page + n] = row[at : at + n]
            return
        for row, plane in zip(slot, self.pool.planes[planes], strict=True):
            plane.pages[self.index] = row


def _take(plane: Plane, index: Index, out: Bytes) -> None:
    if plane.units is None:
        for row, page in zip(out, index.tolist(), strict=True):
            row[:] = plane.pages[page]
        return
    if plane.step != 1:
        index = index * plane.step
    if plane.per_page != 1:
        index = (index[:, None] + np.arange(plane.per_page)).reshape(-1)
    # mode "clip" because "raise" goes through a temporary copy; the indices were checked
    np.take(plane.units, index, axis=0, out=out.reshape(len(index), -1), mode="clip")


def _rows(pools: Sequence[MappedPool], rows: Sequence[Rows], size: int) -> list[Row]:
    checked = [Row(pools, r) for r in rows]
    found = sum(r.size for r in checked)
    if found != size:
        raise ValueError(f"the rows have {found} bytes, the job says {size}")
    return checked


def gather(pools: Sequence[MappedPool], rows: Sequence[Rows], out: Bytes) -> None:
    """Read the pages of ``rows`` into ``out``, which they must fill."""
    at = 0
    for row in _rows(pools, rows, out.size):
        row.gather(out[at : at + row.size])
        at += row.size


def scatter(pools: Sequence[MappedPool], rows: Sequence[Rows], data: Bytes) -> None:
    """Write ``data`` into the pages of ``rows``, which must take all of it."""
    at = 0
    for row in _rows(pools, rows, data.size):
        row.scatter(data[at : at + row.size])
        at += row.size


def copy(
    source: Sequence[MappedPool],
    source_rows: Sequence[Rows],
    target: Sequence[MappedPool],
    target_rows: Sequence[Rows],
    size: int,
) -> None:
    """Copy pages to pages of pools that agree in their geometry."""
    pairs = list(zip(_rows(source, source_rows, size), _rows(target, target_rows, size), strict=False))
    if len(source_rows) != len(target_rows):
        raise ValueError(f"{len(source_rows)} rows to copy from, {len(target_rows)} to copy to")
    for a, b in pairs:
        ours = (a.planes, len(a.index), a.pool.spec.page_bytes)
        theirs = (b.planes, len(b.index), b.pool.spec.page_bytes)
        if ours != theirs:
            raise ValueError(
                f"pool {a.pool.spec.name!r}: (planes, pages, page bytes) are {ours} here and {theirs} there"
            )
    for a, b in pairs:
        _copy(a, b)


def _copy(a: Row, b: Row) -> None:
    one_run = a.runs is not None and b.runs is not None and len(a.runs) == len(b.runs) == 1
    if one_run and a.pool.cube is not None and b.pool.cube is not None:
        (page_a, page_b), n = (int(a.index[0]), int(b.index[0])), len(a.index)
        target = b.pool.cube[b.plane0 : b.plane0 + b.planes, page_b : page_b + n]
        target[...] = a.pool.cube[a.plane0 : a.plane0 + a.planes, page_a : page_a + n]
        return
    page_bytes = a.pool.spec.page_bytes
    step = max(1, _CHUNK // page_bytes)
    between = np.empty(min(step, len(a.index)) * page_bytes, np.uint8)
    for n in range(a.planes):
        plane_a, plane_b = a.pool.planes[a.plane0 + n], b.pool.planes[b.plane0 + n]
        for at in range(0, len(a.index), step):
            index = a.index[at : at + step]
            chunk = between[: len(index) * page_bytes].reshape(len(index), page_bytes)
            _take(plane_a, index, chunk)
            plane_b.pages[b.index[at : at + step]] = chunk
