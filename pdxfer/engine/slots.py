"""Staging slots: the one piece of memory that a remote engine may write into.

Owns: the memory and where each slot lies. Must not: know what is in a slot or whose it is (the core's ledger does).

Send slots come first, receive slots after them. The memory is never unmapped while the process lives: a peer may still
be writing (R2), and then the unmapping would kill us.
"""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from pdxfer.pools import memory

from .exits import NO_MEMORY, Fault
from .settings import EngineSettings

Bytes = npt.NDArray[np.uint8]

_HUGE = 2 << 20


class Slots:
    def __init__(self, settings: EngineSettings) -> None:
        """Raises Fault when the machine has not enough memory."""
        self.slot_bytes = settings.slot_bytes
        self.send_count = settings.send_slots
        self.recv_count = settings.recv_slots
        self.size = settings.memory
        asked = f"{self.size >> 20} MiB of staging memory asked for (engine.send_slots, recv_slots and slot_bytes)"
        left = memory.available()
        if left is not None and left < self.size:
            raise Fault(NO_MEMORY, f"{asked}, {left >> 20} MiB available: make them smaller, or give the process more")
        try:
            self._map = mmap.mmap(-1, self.size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise Fault(NO_MEMORY, f"{asked}: {error.strerror}") from None
        whole = np.frombuffer(self._map, np.uint8)
        skip = -whole.ctypes.data % _HUGE
        self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes: Bytes = whole[skip : skip + self.size]
        self._bytes.fill(0)  # touched now, so that no transfer waits for the kernel's memory
        self.address = int(self._bytes.ctypes.data)

    @property
    def recv_address(self) -> int:
        """Of receive slot 0."""
        return self.address + self.send_count * self.slot_bytes

    def send_address(self, slot: int) -> int:
        return self.address + slot * self.slot_bytes

    def send(self, slot: int, size: int) -> Bytes:
        """The first ``size`` bytes of a send slot. Raises ValueError."""
        return self._part("send", slot, self.send_count, 0, size)

    def recv(self, slot: int, size: int) -> Bytes:
        """The first ``size`` bytes of a receive slot. Raises ValueError."""
        return self._part("receive", slot, self.recv_count, self.send_count, size)

    def _part(self, kind: str, slot: int, count: int, first: int, size: int) -> Bytes:
        if not 0 <= slot < count:
            raise ValueError(f"{kind} slot {slot}, there are {count}")
        if not 0 < size <= self.slot_bytes:
            raise ValueError(f"{size} bytes in {kind} slot {slot}, expected 1 to {self.slot_bytes}")
        start = (first + slot) * self.slot_bytes
        return self._bytes[start : start + size]
