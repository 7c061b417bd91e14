"""Turning what an engine passes (lists, arrays, dicts) into page tables, and layers into planes.

Owns: checking page lists before they leave the process. Must not: know rooms or sockets. Whether pages are free is the
sidecar's to say; whether they are numbers of pages at all is said here, where the traceback shows the caller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pdxfer.pools import SharedPool

from .errors import PdxferRefused

PageList = Sequence[int] | npt.NDArray[Any]
PageLists = PageList | Mapping[str, PageList]


class Planes(NamedTuple):
    """What a layer range means: planes of every pool (0, 0 means all), and layers of this many."""

    plane0: int
    planes: int
    layer0: int
    layers: int  # 0: all


def table(pages: Any, pool: SharedPool, room: str) -> npt.NDArray[np.uint32]:
    """One page list as little-endian uint32. Raises TypeError or PdxferRefused('pages_out_of_range')."""
    found = np.asarray(pages)
    if found.size == 0 and found.ndim == 1:
        return np.empty(0, dtype="<u4")
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise TypeError(
            f"pool {pool.name!r}: pages are {found.dtype} of shape {found.shape}, expected a flat list of whole numbers"
        )
    low, high = int(found.min()), int(found.max())
    if low < 0 or high >= pool.num_pages:
        raise PdxferRefused(
            "pages_out_of_range",
            f"pool {pool.name!r}: page {low if low < 0 else high}, expected 0 … {pool.num_pages - 1}",
            room,
        )
    return found.astype("<u4", copy=False)


def tables(pages: Any, pools: Sequence[SharedPool], room: str, *, all_named: bool) -> list[npt.NDArray[np.uint32]]:
    """A table per pool: one list goes for every pool, a dict names a list for each.

    ``all_named``: a dict must name every pool; otherwise a pool that it leaves out has no pages here.
    """
    if isinstance(pages, Mapping):
        names = {pool.name for pool in pools}
        unknown = sorted(str(key) for key in pages if key not in names)
        missing = sorted(names - pages.keys()) if all_named else []
        if unknown or missing:
            raise PdxferRefused(
                "pools_unequal",
                f"page lists for {sorted(map(str, pages))}, this worker's pools are {sorted(names)}",
                room,
            )
        return [table(pages.get(pool.name, ()), pool, room) for pool in pools]
    return [table(pages, pool, room) for pool in pools]


def held_of(
    held: int | Mapping[str, int], pools: Sequence[SharedPool], pages: Sequence[int], room: str
) -> tuple[int, ...]:
    """How many of the first ``pages`` of each pool are there already. Raises PdxferRefused."""
    if isinstance(held, Mapping):
        if unknown := sorted(str(key) for key in held if key not in {pool.name for pool in pools}):
            raise PdxferRefused("pools_unequal", f"held names {unknown}, which are no pools here", room)
        found = tuple(int(held.get(pool.name, 0)) for pool in pools)
    else:
        found = (int(held),) * len(pools)
    for pool, have, most in zip(pools, found, pages, strict=True):
        if not 0 <= have <= most:
            raise PdxferRefused("pages_out_of_range", f"pool {pool.name!r}: {have} pages are held, of {most}", room)
    return found


def planes_of(layers: tuple[int, int] | None, pools: Sequence[SharedPool], room: str) -> Planes:
    """A range (first layer, how many) as planes. Raises PdxferRefused('planes_out_of_range')."""
    if layers is None:
        return Planes(0, 0, 0, 0)
    first, count = layers
    shapes = {(pool.layout.layers, pool.layout.planes_per_layer) for pool in pools}
    if len(shapes) != 1:
        have = ", ".join(f"{p.name}: {p.layout.layers} layers of {p.layout.planes_per_layer} planes" for p in pools)
        raise PdxferRefused(
            "planes_out_of_range",
            f"layers={layers} means the same planes in every pool, and these pools differ ({have}); push whole pages",
            room,
        )
    total, per_layer = shapes.pop()
    if first < 0 or count < 1 or first + count > total:
        raise PdxferRefused(
            "planes_out_of_range", f"layers {first} … {first + count - 1}, the pools have 0 … {total - 1}", room
        )
    return Planes(first * per_layer, count * per_layer, first, count)


class Progress:
    """Which logical page comes next in each layer of each pool of a send, so that callers need not count."""

    def __init__(self, pools: Sequence[SharedPool]) -> None:
        self._next = [np.zeros(pool.layout.layers, dtype=np.int64) for pool in pools]

    def first(
        self, first_page: int | Mapping[str, int] | None, pools: Sequence[SharedPool], planes: Planes, room: str
    ) -> tuple[int, ...]:
        """The first logical page of a push, for each pool."""
        if isinstance(first_page, Mapping):
            unknown = sorted(str(key) for key in first_page if key not in {pool.name for pool in pools})
            if unknown:
                raise PdxferRefused("pools_unequal", f"first_page names {unknown}, which are no pools here", room)
            counted = [self._of(i, planes) for i in range(len(pools))]
            found = [first_page.get(pool.name, count) for pool, count in zip(pools, counted, strict=True)]
        elif first_page is not None:
            found = [first_page] * len(pools)
        else:
            found = [self._of(i, planes) for i in range(len(pools))]
        for pool, page in zip(pools, found, strict=True):
            if page is None:
                raise PdxferRefused(
                    "planes_repeated",
                    f"pool {pool.name!r}: the layers of this push stand at different pages; name first_page",
                    room,
                )
            if not 0 <= page < 2**31:
                raise PdxferRefused("pages_out_of_range", f"pool {pool.name!r}: first_page is {page}", room)
        return tuple(int(page) for page in found if page is not None)

    def advance(self, first: Sequence[int], counts: Sequence[int], planes: Planes) -> list[npt.NDArray[np.int64]]:
        """A push was made. Returns the state before it, for ``restore``."""
        before = [n.copy() for n in self._next]
        for i, count in enumerate(counts):
            if count:
                self._layers(i, planes)[:] = first[i] + count
        return before

    def restore(self, before: list[npt.NDArray[np.int64]]) -> None:
        self._next = before

    def _layers(self, pool: int, planes: Planes) -> npt.NDArray[np.int64]:
        array = self._next[pool]
        return array[planes.layer0 : planes.layer0 + planes.layers] if planes.layers else array

    def _of(self, pool: int, planes: Planes) -> int | None:
        at = self._layers(pool, planes)
        return int(at[0]) if bool((at == at[0]).all()) else None
