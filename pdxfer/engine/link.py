"""The child's end of the socket to its parent.

Owns: receiving jobs with their descriptors, queueing reports. Must not: interpret either.

Nothing here blocks: a parent that does not read costs memory up to a bound, above which hints are left out (a Landed that is
lost is said again by message), and everything else is bounded by the jobs that the parent has given.
"""

from __future__ import annotations

import array
import os
import socket
from collections import deque
from collections.abc import Iterator
from typing import Final

from pdxfer.core.jobs import MAX_ENGINE_FRAME, EngineJob, EngineReport, Landed, MapMirror, MapPools, decode_job, encode

from .frames import Frames

_CHUNK: Final = 256 << 10
MAX_FDS: Final = 250  # descriptors beside one byte of the stream; the kernel's own limit is 253
_MOST_QUEUED: Final = 16 << 20  # bytes of reports above which hints are left out
_INT: Final = array.array("i").itemsize


class ParentGone(Exception):
    """The socket is closed at the other end."""


class Link:
    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        sock.setblocking(False)
        self._frames = Frames(MAX_ENGINE_FRAME)
        self._fds: deque[int] = deque()
        self._out = bytearray()
        self._lost = False  # descriptors of the frame that is coming did not come through
        self.dropped = 0

    def receive(self) -> Iterator[tuple[EngineJob, tuple[int, ...]]]:
        """The jobs that have come, each with its descriptors, which become the caller's. Raises ParentGone."""
        while True:
            try:
                data, ancillary, flags, _ = self.socket.recvmsg(
                    _CHUNK, socket.CMSG_SPACE(MAX_FDS * _INT), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except ConnectionError:
                raise ParentGone from None
            came = array.array("i")
            for level, kind, raw in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    came.frombytes(raw[: len(raw) - len(raw) % _INT])
            if not data:
                raise ParentGone
            for body in self._frames.feed(data):
                job = decode_job(body)
                fds: tuple[int, ...] = ()
                if isinstance(job, MapPools | MapMirror):
                    fds = tuple(self._fds)
                    self._fds.clear()
                    if self._lost:
                        self._lost = False
                        close_all(fds)
                        fds = ()
                yield job, fds
            # A read ends with the byte that carries descriptors, and that is one of a frame's first: what has become whole
            # by this read came before it, and these are the next frame's.
            self._fds.extend(came)
            if flags & socket.MSG_CTRUNC:
                self._lost = True

    def report(self, report: EngineReport) -> None:
        """Queue a report; ``flush`` sends it."""
        if len(self._out) > _MOST_QUEUED and isinstance(report, Landed):
            self.dropped += 1
            return
        self._out += encode(report)

    def flush(self) -> None:
        """Send what the socket takes. Raises ParentGone."""
        while self._out:
            try:
                sent = self.socket.send(self._out)
            except BlockingIOError:
                return
            except ConnectionError:
                raise ParentGone from None
            del self._out[:sent]

    @property
    def queued(self) -> bool:
        return bool(self._out)


def close_all(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)
