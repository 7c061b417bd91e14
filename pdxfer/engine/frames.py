"""Frames on the stream between parent and engine child: a little-endian uint32 length, then that many bytes.

Owns: cutting a stream into frames. Must not: know what is in them (core.jobs does).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

HEAD: Final = 4


class TooLong(Exception):
    """A length above the limit: what follows cannot be told apart from garbage, so the stream is over."""


class Frames:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take what was received; yields the frames that are whole now. Raises TooLong."""
        self._buffer += data
        return self._cut()

    def _cut(self) -> Iterator[bytes]:
        while len(self._buffer) >= HEAD:
            length = int.from_bytes(self._buffer[:HEAD], "little")
            if length > self._limit:
                raise TooLong(f"a frame of {length} bytes, expected at most {self._limit}")
            if len(self._buffer) < HEAD + length:
                return
            body = bytes(self._buffer[HEAD : HEAD + length])
            del self._buffer[: HEAD + length]
            yield body
