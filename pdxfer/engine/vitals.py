"""The page of shared memory between a parent and its engine child: heartbeat and last words.

Owns: its layout. Must not: decide what counts as progress (loop.py) or as a stall (the supervisor).

Shared memory, because it can be read from a child that hangs, and after one that is dead.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import Final

SIZE: Final = 4096
_BEAT: Final = struct.Struct("<Q")
_LENGTH: Final = struct.Struct("<I")
_TEXT: Final = _BEAT.size + _LENGTH.size


class Vitals:
    def __init__(self, fd: int) -> None:
        """Map the page; ``fd`` stays the caller's."""
        self._map = mmap.mmap(fd, SIZE)
        self._beat = 0

    @staticmethod
    def create() -> int:
        """The descriptor of a new page."""
        fd = os.memfd_create("pdxfer-vitals", os.MFD_CLOEXEC)
        os.ftruncate(fd, SIZE)
        return fd

    def tick(self) -> None:
        """Child: one more round of real progress."""
        self._beat += 1
        _BEAT.pack_into(self._map, 0, self._beat)

    def heartbeat(self) -> int:
        return int(_BEAT.unpack_from(self._map, 0)[0])

    def say(self, text: str) -> None:
        """Child: what is to be known if nothing more is heard."""
        raw = text.encode(errors="replace")[: SIZE - _TEXT]
        _LENGTH.pack_into(self._map, _BEAT.size, 0)
        self._map[_TEXT : _TEXT + len(raw)] = raw
        _LENGTH.pack_into(self._map, _BEAT.size, len(raw))

    def words(self) -> str:
        length = min(int(_LENGTH.unpack_from(self._map, _BEAT.size)[0]), SIZE - _TEXT)
        return self._map[_TEXT : _TEXT + length].decode(errors="replace")

    def close(self) -> None:
        self._map.close()
