"""The engine's side of the host mirror: entries, their digests, and the copies between them and pages.

Owns: the mapping and its bounds. Must not: know what is stored where, or for whom; each job says it.

An entry holds a block's pages pool by pool, plane by plane, page by page, as a slot does. Its digest is taken when it is filled,
and compared before the first byte of it goes into a page.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Sequence
from typing import Final

import numpy as np

from pdxfer.core.jobs import MirrorEntry

from . import copy
from .planes import Bytes, MappedPool

_MADV_POPULATE_WRITE: Final = 23
_STEP: Final = 16 << 20  # bytes of one call: a page fault elsewhere waits no longer than for one of them


class Mirror:
    def __init__(self, fd: int, size: int) -> None:
        """Raises ValueError or OSError. The descriptor stays the caller's."""
        found = os.fstat(fd).st_size
        if not 0 < size <= found:
            raise ValueError(f"{size} bytes of mirror, its memory has {found}")
        self._map = mmap.mmap(fd, size)
        self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes: Bytes = np.frombuffer(self._map, np.uint8)
        threading.Thread(target=self._populate, name="pdxfer-populate", daemon=True).start()

    def _populate(self) -> None:
        """Have the kernel map all of it, bit by bit and beside the work: else each first touch of a page waits for that, which
        makes the first stores after a start several times as slow.
        """
        libc = ctypes.CDLL(None, use_errno=True)  # its calls let go of the GIL, those of the mmap module do not
        address = int(self._bytes.ctypes.data)
        for offset in range(0, self._bytes.size, _STEP):
            size = min(_STEP, self._bytes.size - offset)
            if libc.madvise(ctypes.c_void_p(address + offset), ctypes.c_size_t(size), _MADV_POPULATE_WRITE):
                return  # an older kernel (before 5.14): then they wait

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
