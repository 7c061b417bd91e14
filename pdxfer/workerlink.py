"""One worker's connection, as the sidecar sees it.

Owns: its socket, buffers and deadline; cutting bytes into frames; refusing what is none. Must not: know other
connections or the core. It reports through Hooks, and raises nothing into the loop.

States: waiting for the attach → attached → finishing (what was sent goes out, nothing is read) → closed.
"""

from __future__ import annotations

import array
import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from .attachment import MAX_FDS, check_attach, own_descriptors
from .core import worker
from .core.reasons import Refused

log = logging.getLogger(__name__)

MAX_ATTACH: Final = 1 << 20  # bytes of an attach frame: strangers get no large buffers
READ: Final = 1 << 18  # bytes per turn of the loop
FRAMES: Final = 64  # per turn: a flood waits its turn behind everybody else
LINGER: Final = 2.0  # seconds for the last words to go out


class Hooks(NamedTuple):
    attached: Callable[[WorkerLink, worker.Attach, tuple[int, ...]], None]  # the descriptors become the hook's
    said: Callable[[WorkerLink, worker.WorkerRequest | worker.Ping], None]
    gone: Callable[[WorkerLink, str], None]  # exactly once, from the loop itself
    refused: Callable[[str, str], None]


class WorkerLink:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection: socket.socket,
        id: int,
        pid: int,
        hooks: Hooks,
        *,
        attach_timeout: float,
        max_buffer: int,
    ) -> None:
        self.id = id
        self.pid = pid
        self.attached = False
        self._loop = loop
        self._socket = connection
        self._hooks = hooks
        self._max_buffer = max_buffer
        self._in = bytearray()
        self._at = 0  # where in _in the next frame begins
        self._out = bytearray()
        self._passed: list[int] = []  # descriptors that came before the attach frame was whole
        self._finishing = ""
        self._closed = False
        self._reading = True
        self._writing = False
        self._flush_due = False
        self._timer = loop.call_later(attach_timeout, self._too_late, attach_timeout)
        loop.add_reader(connection.fileno(), self._readable)

    # out -----------------------------------------------------------------------------------------------------------

    def send(self, frame: worker.SidecarFrame) -> None:
        if self._closed or self._finishing:
            return
        self._out += worker.encode(frame)
        if len(self._out) > self._max_buffer:
            self._flush()
            if len(self._out) > self._max_buffer:
                detail = f"{len(self._out)} bytes wait for worker {self.id} (process {self.pid}), which does not read"
                self._hooks.refused("too_slow", detail)
                self.abandon(f"too_slow: {detail}")
                return
        if not self._flush_due and not self._writing:
            self._flush_due = True  # all that is sent in this turn of the loop goes out in one call
            self._loop.call_soon(self._flush)

    def refuse(self, why: Refused, req: int = 0) -> None:
        """Say why, then close."""
        if self._closed or self._finishing:
            return
        self._hooks.refused(why.code, f"worker {self.id} (process {self.pid}): {why.detail}")
        self.send(worker.Rejected(req, why.code, why.detail))
        self.finish(f"{why.code}: {why.detail}")

    def finish(self, detail: str) -> None:
        """Close once everything that was sent is out, or LINGER is over."""
        if self._closed or self._finishing:
            return
        self._finishing = detail
        self._stop_reading()
        self._timer.cancel()
        self._timer = self._loop.call_later(LINGER, self.abandon, detail)
        self._loop.call_soon(self._flush)

    def abandon(self, detail: str) -> None:
        """Close now."""
        if self._closed:
            return
        self._closed = True
        self._timer.cancel()
        self._stop_reading()
        self._stop_writing()
        self._socket.close()
        self._close_passed()
        self._in.clear()
        self._out.clear()
        self._loop.call_soon(self._hooks.gone, self, self._finishing or detail)

    def _flush(self) -> None:
        self._flush_due = False
        if self._closed:
            return
        try:
            while self._out:
                with memoryview(self._out) as view:
                    sent = self._socket.send(view[: 1 << 20])
                del self._out[:sent]
        except BlockingIOError:
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self._socket.fileno(), self._flush)
            return
        except OSError as error:
            self.abandon(f"its connection broke: {error.strerror}")
            return
        self._stop_writing()
        if self._finishing:
            self.abandon(self._finishing)

    # in ------------------------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        try:
            chunk = self._socket.recv(READ) if self.attached else self._receive_with_fds()
        except BlockingIOError:
            return
        except ConnectionResetError:
            chunk = b""  # it closed, or died, with words of ours unread
        except OSError as error:
            self.abandon(f"its connection broke: {error.strerror}")
            return
        except Refused as why:
            self.refuse(why)
            return
        if not chunk:
            self._end_of_stream()
            return
        self._in += chunk
        self._frames()

    def _end_of_stream(self) -> None:
        left = len(self._in) - self._at
        if left:
            self.refuse(
                Refused("bad_frame", f"the connection closed in the middle of a frame, after {left} bytes of it")
            )
        else:
            self.abandon("its connection closed")

    def _receive_with_fds(self) -> bytes:
        """Before the attach: bytes and descriptors. After it plain recv is used, and the kernel drops descriptors."""
        space = socket.CMSG_LEN(MAX_FDS * array.array("i").itemsize)
        chunk, ancillary, flags, _ = self._socket.recvmsg(READ, space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, raw in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(raw[: len(raw) - len(raw) % fds.itemsize])
                self._passed.extend(fds)
        if flags & socket.MSG_CTRUNC:
            raise Refused(
                "overloaded", "the sidecar is out of file descriptors and could not take the pools'; see ulimit -n"
            )
        if len(self._passed) > MAX_FDS:
            raise Refused("bad_layout", f"more than {MAX_FDS} descriptors were passed")
        return chunk

    def _frames(self) -> None:
        """Take up to FRAMES frames. When more are waiting, come back after everybody else had a turn."""
        if self._closed or self._finishing:
            return
        for _ in range(FRAMES):
            try:
                body = self._next_frame()
                if body is None:
                    self._compact()
                    self._start_reading()
                    return
                self._take(body)
            except Refused as why:
                self.refuse(why)
                return
            except Exception:  # of the core or of this module: a defect, and this worker's alone
                log.exception("worker %d (process %d): its frame was not taken", self.id, self.pid)
                self.refuse(Refused("internal", "the frame could not be handled; see the sidecar's log"))
                return
            if self._closed or self._finishing:
                return
        self._compact()
        self._stop_reading()
        self._loop.call_soon(self._frames)

    def _next_frame(self) -> bytes | None:
        left = len(self._in) - self._at
        if left < 4:
            return None
        size = int.from_bytes(self._in[self._at : self._at + 4], "little")
        most = worker.MAX_WORKER_FRAME if self.attached else MAX_ATTACH
        if size > most:
            raise Refused("frame_too_large", f"a frame of {size} bytes, expected at most {most}")
        if left - 4 < size:
            return None
        start = self._at + 4
        self._at = start + size
        return bytes(self._in[start : start + size])

    def _compact(self) -> None:
        del self._in[: self._at]
        self._at = 0

    def _take(self, body: bytes) -> None:
        if not self.attached:
            self._attach(body)
            return
        frame = worker.decode_from_worker(body)
        if isinstance(frame, worker.Attach):
            self._hooks.refused("already_attached", f"worker {self.id} (process {self.pid})")
            self.send(worker.Rejected(frame.req, "already_attached", "this connection has attached before"))
            return
        if isinstance(frame, worker.Ping):
            self.send(worker.Ok(0))  # so that a worker can tell a stopped sidecar from a quiet one
        self._hooks.said(self, frame)

    def _attach(self, body: bytes) -> None:
        try:
            frame = worker.decode_from_worker(body)
        except Refused:
            version = _version_of(body)
            if version is not None and version != worker.WORKER_PROTOCOL:
                raise Refused(
                    "wrong_version", f"worker protocol {version}, expected {worker.WORKER_PROTOCOL}"
                ) from None
            raise
        if not isinstance(frame, worker.Attach):
            req = getattr(frame, "req", 0)
            self.refuse(Refused("not_attached", f"{type(frame).__name__} came first, expected Attach"), req)
            return
        try:
            check_attach(frame, self._passed)
            fds = own_descriptors(self._passed)
        except Refused as why:
            self.refuse(why, frame.req)
            return
        self._close_passed()
        self._timer.cancel()
        self.attached = True
        self._hooks.attached(self, frame, fds)

    def _too_late(self, seconds: float) -> None:
        self.refuse(Refused("attach_timeout", f"no whole attach frame within {seconds:g} s of connecting"))

    # the loop's watches --------------------------------------------------------------------------------------------

    def _start_reading(self) -> None:
        if not self._reading and not self._closed and not self._finishing:
            self._reading = True
            self._loop.add_reader(self._socket.fileno(), self._readable)

    def _stop_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._socket.fileno())

    def _stop_writing(self) -> None:
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._socket.fileno())

    def _close_passed(self) -> None:
        for fd in self._passed:
            try:
                os.close(fd)
            except OSError as error:
                if error.errno != errno.EIO:  # closed all the same
                    raise
        self._passed.clear()


def _version_of(body: bytes) -> int | None:
    """The version that an attach from another release states, whatever else is in it."""
    try:
        loose = msgspec.msgpack.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError):
        return None
    version = loose.get("version") if isinstance(loose, dict) else None
    return version if type(version) is int else None
