"""One connection to the sidecar: a non-blocking unix stream of frames.

Owns: the socket, its send buffer and the frame codec's use. Must not: know rooms, or come back after it is lost; the
next connection is a new object.
"""

from __future__ import annotations

import array
import errno
import socket
from collections.abc import Sequence
from typing import Final

from pdxfer.core import worker
from pdxfer.core.reasons import Refused

from .errors import ConnectionLost, PdxferRefused, SidecarUnavailable

MAX_UNSENT: Final = 64 << 20  # bytes: more than that, and the sidecar is not reading
_READ: Final = 1 << 18
_READS: Final = 16  # per receive(): one busy connection must not keep its engine's loop


class Connection:
    """Raises SidecarUnavailable when nobody listens at ``path``."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._in = bytearray()
        self._out = bytearray()
        self._fds: tuple[int, ...] = ()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            found = {
                errno.ENOENT: "there is no such socket",
                errno.ECONNREFUSED: "nobody listens there (a sidecar died and has not come back)",
                errno.EAGAIN: "its queue of new connections is full",
                errno.EACCES: "this user may not connect to it",
            }.get(error.errno or 0, error.strerror or str(error))
            raise SidecarUnavailable(path, found) from error

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def unsent(self) -> int:
        return len(self._out)

    def send(self, frame: worker.WorkerFrame, fds: Sequence[int] = ()) -> None:
        """Queue a frame and send what goes out at once. ``fds`` go with the first frame of a connection.

        Raises PdxferRefused (frame_too_large, overloaded: nothing was queued) or ConnectionLost.
        """
        raw = worker.encode(frame)
        if len(raw) - 4 > worker.MAX_WORKER_FRAME:
            raise PdxferRefused("frame_too_large", f"{len(raw) - 4} bytes, expected at most {worker.MAX_WORKER_FRAME}")
        if len(self._out) + len(raw) > MAX_UNSENT:
            raise PdxferRefused("overloaded", f"the sidecar does not read: {len(self._out)} bytes wait to be sent")
        if fds:
            assert not self._out, "descriptors go with the first frame"
            self._fds = tuple(fds)
        self._out += raw
        self.flush()

    def flush(self) -> bool:
        """Send what the socket takes; True when nothing is left. Raises ConnectionLost."""
        while self._out:
            try:
                with memoryview(self._out) as view:
                    if self._fds:
                        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", self._fds))
                        sent = self._socket.sendmsg([view[:_READ]], [rights])
                        self._fds = ()  # they go with the first byte
                    else:
                        sent = self._socket.send(view[:_READ])
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno in (errno.EPIPE, errno.ECONNRESET) and self._readable():
                    return False  # what it said before it hung up, a refusal by name, is still to be read
                raise ConnectionLost(f"sending to the sidecar: {error.strerror}") from error
            del self._out[:sent]
        return True

    def receive(self) -> list[worker.SidecarFrame]:
        """The frames that have arrived. Raises ConnectionLost when the connection is over and nothing came before."""
        frames: list[worker.SidecarFrame] = []
        for _ in range(_READS):
            try:
                chunk = self._socket.recv(_READ)
            except BlockingIOError:
                break
            except ConnectionResetError:
                chunk = b""  # it closed with words of ours unread
            except OSError as error:
                return self._over(frames, f"reading from the sidecar: {error.strerror}")
            if not chunk:
                torn = f" in the middle of a frame ({len(self._in)} bytes of it)" if self._in else ""
                return self._over(frames, f"the sidecar closed the connection{torn}")
            self._in += chunk
            self._cut(frames)
        return frames

    def close(self) -> None:
        self._socket.close()

    def _over(self, frames: list[worker.SidecarFrame], detail: str) -> list[worker.SidecarFrame]:
        """The frames that came before the end go first; the next receive() meets the end again."""
        if frames:
            return frames
        raise ConnectionLost(detail)

    def _cut(self, frames: list[worker.SidecarFrame]) -> None:
        start = 0
        while len(self._in) - start >= 4:
            size = int.from_bytes(self._in[start : start + 4], "little")
            if size > worker.MAX_WORKER_FRAME:
                raise ConnectionLost(
                    f"the sidecar sent a frame of {size} bytes, expected at most {worker.MAX_WORKER_FRAME}"
                )
            if len(self._in) - start - 4 < size:
                break
            try:
                frames.append(worker.decode_from_sidecar(bytes(self._in[start + 4 : start + 4 + size])))
            except Refused as error:
                raise ConnectionLost(
                    f"the sidecar sent a frame that is not understood ({error.detail});"
                    " run the same pdxfer release on both sides"
                ) from error
            start += 4 + size
        del self._in[:start]

    def _readable(self) -> bool:
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except OSError:
            return False
