"""A worker's pools as the engine sees them: mapped memory, one byte view per plane.

Owns: mapping, and every check that a worker's pages lie inside what it passed. Must not: copy pages (copy.py does).

A worker that shrank its memory would kill the engine by SIGBUS: a memfd must therefore be sealed against shrinking.
Other shared memory (files in /dev/shm, say) cannot be sealed; it is accepted, and then such a worker costs an engine
restart, and is refused when its pools are mapped again.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from pdxfer.core.geometry import PoolSpec
from pdxfer.core.worker import PlaneAt, PoolAt

Bytes = npt.NDArray[np.uint8]
Index = npt.NDArray[np.intp]

_LEAST_UNIT: Final = 256  # bytes; below, an index per unit costs more than a copy per page


class Plane:
    """One plane: ``pages[i]`` is page i. ``units`` is the same memory without gaps, cut so that pages are whole units."""

    __slots__ = ("pages", "per_page", "step", "units")

    def __init__(self, buffer: mmap.mmap, at: PlaneAt, page_bytes: int, num_pages: int) -> None:
        stride = at.stride if num_pages > 1 else page_bytes
        self.pages: Bytes = np.ndarray(
            (num_pages, page_bytes), np.uint8, buffer=buffer, offset=at.offset, strides=(stride, 1)
        )
        # numpy's take needs memory without gaps and would silently copy the whole pool otherwise
        unit = math.gcd(stride, page_bytes)
        self.step = stride // unit
        self.per_page = page_bytes // unit
        self.units: Bytes | None = None
        if unit == page_bytes or unit >= _LEAST_UNIT:
            count = (num_pages - 1) * self.step + self.per_page
            self.units = np.ndarray((count, unit), np.uint8, buffer=buffer, offset=at.offset)


class MappedPool:
    """``cube[plane, page]`` exists when the planes are evenly spaced in one descriptor's memory."""

    def __init__(self, at: PoolAt, buffers: Sequence[mmap.mmap]) -> None:
        self.spec: PoolSpec = at.spec
        self.num_pages = at.num_pages
        size = at.spec.page_bytes
        self.planes = [Plane(buffers[p.fd], p, size, at.num_pages) for p in at.planes]
        first = at.planes[0]
        steps = {b.offset - a.offset for a, b in zip(at.planes, at.planes[1:], strict=False)}
        self.cube: Bytes | None = None
        if len({(p.fd, p.stride) for p in at.planes}) == 1 and len(steps) <= 1:
            step = steps.pop() if steps else size
            if step > 0:
                self.cube = np.ndarray(
                    (len(at.planes), at.num_pages, size),
                    np.uint8,
                    buffer=buffers[first.fd],
                    offset=first.offset,
                    strides=(step, first.stride, 1),
                )


def map_pools(pools: Sequence[PoolAt], fd_bytes: Sequence[int], fds: Sequence[int]) -> list[MappedPool]:
    """Map a worker's pools. Raises ValueError, naming pool, field, expected and found. The descriptors stay the caller's."""
    if len(fds) != len(fd_bytes):
        raise ValueError(f"{len(fds)} descriptors for {len(fd_bytes)} sizes")
    for pool in pools:
        _check(pool, fd_bytes)
    buffers = [_map(n, fd, size) for n, (fd, size) in enumerate(zip(fds, fd_bytes, strict=True))]
    return [MappedPool(pool, buffers) for pool in pools]


def _check(pool: PoolAt, fd_bytes: Sequence[int]) -> None:
    spec = pool.spec
    who = f"pool {spec.name!r}"
    if pool.num_pages < 1 or spec.page_bytes < 1 or len(pool.planes) != spec.planes or spec.planes < 1:
        raise ValueError(
            f"{who}: {pool.num_pages} pages of {spec.page_bytes} bytes in {len(pool.planes)} planes,"
            f" expected at least one page and {spec.planes} planes"
        )
    for n, plane in enumerate(pool.planes):
        if not 0 <= plane.fd < len(fd_bytes):
            raise ValueError(f"{who}, plane {n}: descriptor {plane.fd}, there are {len(fd_bytes)}")
        if plane.stride < spec.page_bytes:
            raise ValueError(f"{who}, plane {n}: stride {plane.stride}, expected at least a page ({spec.page_bytes})")
        end = plane.offset + (pool.num_pages - 1) * plane.stride + spec.page_bytes
        if plane.offset < 0 or end > fd_bytes[plane.fd]:
            raise ValueError(
                f"{who}, plane {n}: bytes {plane.offset} to {end},"
                f" expected within the {fd_bytes[plane.fd]} bytes of descriptor {plane.fd}"
            )


def _map(n: int, fd: int, size: int) -> mmap.mmap:
    found = os.fstat(fd).st_size
    if found < size or size < 1:
        raise ValueError(f"descriptor {n} has {found} bytes, expected the {size} of the attach")
    memfd = os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:")
    if memfd and not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ValueError(
            f"descriptor {n} is a memfd without F_SEAL_SHRINK: shrinking it would kill the engine; seal it first"
        )
    try:
        return mmap.mmap(fd, size)
    except OSError as error:
        raise ValueError(f"descriptor {n} ({size} bytes) cannot be mapped for reading and writing: {error}") from None
