"""The engine's side of the host mirror: entries, their digests, and the copies between them and pages.

Owns: the mapping and its bounds. Must not: know what is stored where, or for whom; each job says it.

An entry holds a block's pages pool by pool, plane by plane, page by page, as a slot does. Its digest is taken when it is filled,
and compared before the first byte of it goes into a page.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np

from pdxfer.core.jobs import MirrorEntry

from . import copy
from .planes import Bytes, MappedPool


class Mirror:
    def __init__(self, fd: int, size: int) -> None:
        """Raises ValueError or OSError. The descriptor stays the caller's."""
        found = os.fstat(fd).st_size
        if not 0 < size <= found:
            raise ValueError(f"{size} bytes of mirror, its memory has {found}")
        self._map = mmap.mmap(fd, size)
        self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes: Bytes = np.frombuffer(self._map, np.uint8)

    def entry(self, offset: int, size: int) -> Bytes:
        """Raises ValueError."""
        if offset < 0 or size < 1 or offset + size > self._bytes.size:
            raise ValueError(f"bytes {offset}+{size} of a mirror of {self._bytes.size}")
        return self._bytes[offset : offset + size]

    def store(self, pools: Sequence[MappedPool], entries: Sequence[MirrorEntry], size: int) -> tuple[int, ...]:
        """Gather each entry's pages. Returns the digests. Raises ValueError."""
        digests = []
        for entry in entries:
            place = self.entry(entry.offset, size)
            copy.gather(pools, entry.rows, place)
            digests.append(copy.digest(place))
        return tuple(digests)

    def load(self, pools: Sequence[MappedPool], entries: Sequence[MirrorEntry], size: int) -> tuple[int, ...]:
        """Scatter each entry whose digest fits. Returns which do not. Raises ValueError."""
        bad = []
        for n, entry in enumerate(entries):
            place = self.entry(entry.offset, size)
            if copy.digest(place) == entry.digest:
                copy.scatter(pools, entry.rows, place)
            else:
                bad.append(n)
        return tuple(bad)
