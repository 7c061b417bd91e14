"""The sidecar's side of the worker socket.

Owns: the listening socket, the workers' connections, and the descriptors of their pools. Must not: know rooms; frames
that decode go to the core as events, and what the core answers is sent. Nothing that a worker does, sends, or fails to
read gets past its own connection: it is refused by name and dropped, and the others do not notice.

For every WorkerAttached that was delivered, WorkerGone is delivered exactly once, never from within ``send`` or
``drop``.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
from collections.abc import Callable, Iterable
from typing import Final

from .core import worker
from .core.events import Event, WorkerAttached, WorkerGone, WorkerSaid
from .core.reasons import Refused
from .workerlink import Hooks, WorkerLink

log = logging.getLogger(__name__)

ACCEPTS: Final = 16  # per turn of the loop
ACCEPT_PAUSE: Final = 0.2  # seconds without accepting, after the process ran out of descriptors
CLOSE_TIMEOUT: Final = 1.0  # seconds for the last words to go out at shutdown
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class SocketInUse(Exception):
    """Another sidecar serves this path."""


class WorkerService:
    """``deliver`` gets WorkerAttached, WorkerSaid and WorkerGone; ``refused(code, detail)`` what was refused here.

    ``users``: ids of users who may connect beside root and the sidecar's own; the kernel says who a process is, so the
    socket's mode lets everybody knock where there are any.
    """

    def __init__(
        self,
        path: str,
        deliver: Callable[[Event], None],
        *,
        refused: Callable[[str, str], None] | None = None,
        attach_timeout: float = 5.0,
        max_connections: int = 1024,
        max_half_open: int = 128,
        max_buffer: int = 64 << 20,
        users: Iterable[int] = (),
    ) -> None:
        self.path = os.fspath(path)
        self.accept_pauses = 0
        self._deliver = deliver
        self._on_refused = refused
        self._attach_timeout = attach_timeout
        self._max_connections = max_connections
        self._max_half_open = max_half_open
        self._max_buffer = max_buffer
        self._uids = frozenset((0, os.geteuid(), *users))
        self._mode = 0o600 if self._uids <= {0, os.geteuid()} else 0o666
        self._links: dict[int, WorkerLink] = {}  # open connections
        self._half_open: dict[int, WorkerLink] = {}  # those that have not attached, oldest first
        self._fds: dict[int, tuple[int, ...]] = {}  # pools' descriptors, until forget
        self._mapped: set[int] = set()  # attachments whose descriptors were asked for
        self._next_id = 1
        self._listener: socket.socket | None = None
        self._lock = -1
        self._inode: tuple[int, int] | None = None
        self._resume: asyncio.TimerHandle | None = None
        self._empty: asyncio.Event | None = None  # while closing: set when the last connection is

    async def start(self) -> None:
        """Listen. Raises SocketInUse when a live sidecar has the path, OSError when it cannot be made."""
        self._loop = asyncio.get_running_loop()
        if len(os.fsencode(self.path)) > 107:
            raise OSError(
                errno.ENAMETOOLONG, "a unix socket's path has at most 107 bytes; choose a shorter one", self.path
            )
        os.makedirs(os.path.dirname(self.path) or ".", mode=0o700, exist_ok=True)
        self._take_path()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            listener.bind(self.path)
            os.chmod(self.path, self._mode)  # before listen: until then nobody can connect
            found = os.stat(self.path)
            self._inode = (found.st_dev, found.st_ino)
            listener.listen(256)
        except BaseException:
            listener.close()
            self._give_path_back()
            raise
        self._listener = listener
        self._loop.add_reader(listener.fileno(), self._accept)

    def send(self, id: int, frame: worker.SidecarFrame) -> None:
        """Queue a frame; never blocks and never fails. A worker that reads too slowly is dropped."""
        link = self._links.get(id)
        if link is not None:
            link.send(frame)

    def drop(self, id: int) -> None:
        """Close a connection after what was sent to it. For one that has closed: its descriptors are not needed."""
        link = self._links.get(id)
        if link is not None:
            link.finish("dropped by the sidecar")
        else:
            self.forget(id)

    def fds(self, id: int) -> tuple[int, ...]:
        """The pools' descriptors, open until ``forget``; none for a worker that is gone and was never mapped."""
        if id in self._fds:
            self._mapped.add(id)
        return self._fds.get(id, ())

    def forget(self, id: int) -> None:
        """The engine has been told to unmap: close the descriptors. Twice is once."""
        self._mapped.discard(id)
        for fd in self._fds.pop(id, ()):
            os.close(fd)

    async def close(self) -> None:
        """Stop listening; give what was sent a moment to go out, then close everything."""
        self._stop_accepting()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            self._give_path_back()
        for link in list(self._links.values()):
            link.finish("the sidecar shuts down")
        if self._links:
            self._empty = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), CLOSE_TIMEOUT)
        for link in list(self._links.values()):
            link.abandon("the sidecar shuts down")
        await asyncio.sleep(0)  # the last WorkerGone go out
        for id in list(self._fds):
            self.forget(id)

    @property
    def connections(self) -> int:
        return len(self._links)

    @property
    def open_fds(self) -> int:
        """Descriptors of pools that are held, for metrics and tests."""
        return sum(map(len, self._fds.values()))

    # accepting -----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._listener is not None
        for _ in range(ACCEPTS):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._pause(error)
                    return
                log.warning("worker socket %s: accept: %s", self.path, error)
                continue  # this one connection came to nothing
            try:
                self._welcome(connection)
            except OSError as error:
                log.warning("worker socket %s: a connection failed at once: %s", self.path, error)
                connection.close()

    def _pause(self, error: OSError) -> None:
        """Out of descriptors: the listener stays readable, so accepting again at once would only spin."""
        assert self._listener is not None
        self.accept_pauses += 1
        self.refused("overloaded", f"accepting paused for {ACCEPT_PAUSE} s: {error.strerror}; raise ulimit -n")
        self._loop.remove_reader(self._listener.fileno())
        self._resume = self._loop.call_later(ACCEPT_PAUSE, self._start_accepting)

    def _start_accepting(self) -> None:
        self._resume = None
        if self._listener is not None:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _stop_accepting(self) -> None:
        if self._resume is not None:
            self._resume.cancel()
            self._resume = None
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())

    def _welcome(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, uid = int.from_bytes(raw[:4], "little"), int.from_bytes(raw[4:8], "little")
        id, self._next_id = self._next_id, self._next_id + 1
        hooks = Hooks(self._attached, self._said, self._gone, self.refused)
        link = WorkerLink(
            self._loop, connection, id, pid, hooks, attach_timeout=self._attach_timeout, max_buffer=self._max_buffer
        )
        self._links[id] = link
        self._half_open[id] = link
        if uid not in self._uids:
            allowed = ", ".join(map(str, sorted(self._uids)))
            link.refuse(Refused("stranger", f"process {pid} runs as user {uid}, allowed are {allowed}"))
        elif len(self._links) > self._max_connections:
            link.refuse(Refused("overloaded", f"{self._max_connections} connections are open, which is the limit"))
        elif len(self._half_open) > self._max_half_open:
            # The oldest has had the longest time to attach. A worker that attaches at once is never the oldest.
            oldest = self._half_open.pop(next(iter(self._half_open)))
            oldest.refuse(
                Refused("overloaded", f"{self._max_half_open} connections have not attached, which is the limit")
            )

    # what links report ---------------------------------------------------------------------------------------------

    def _attached(self, link: WorkerLink, frame: worker.Attach, fds: tuple[int, ...]) -> None:
        self._half_open.pop(link.id, None)
        self._fds[link.id] = fds
        self._deliver(WorkerAttached(link.id, frame))

    def _said(self, link: WorkerLink, frame: worker.WorkerRequest | worker.Ping) -> None:
        self._deliver(WorkerSaid(link.id, frame))

    def _gone(self, link: WorkerLink, detail: str) -> None:
        self._links.pop(link.id, None)
        self._half_open.pop(link.id, None)
        if not self._links and self._empty is not None:
            self._empty.set()
        if not link.attached:
            return
        if link.id not in self._mapped:
            self.forget(link.id)  # no engine ever saw them, so nobody will be told to unmap
        try:
            self._deliver(WorkerGone(link.id, detail))
        except Exception:
            log.exception("worker %d: its end was not taken by the core", link.id)
            self.refused("internal", f"worker {link.id}: its end was not taken by the core")

    def refused(self, code: str, detail: str) -> None:
        if self._on_refused is not None:
            self._on_refused(code, detail)

    # the path ------------------------------------------------------------------------------------------------------

    def _take_path(self) -> None:
        """One sidecar per path: the lock decides, race-free; then a socket file that is left over may be removed."""
        self._lock = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._answers():
                raise BlockingIOError
        except BlockingIOError:
            os.close(self._lock)
            self._lock = -1
            raise SocketInUse(
                f"{self.path}: a live process serves this socket; stop it, or give this sidecar another worker.socket"
            ) from None
        if os.path.lexists(self.path):
            if not stat.S_ISSOCK(os.lstat(self.path).st_mode):
                os.close(self._lock)
                self._lock = -1
                raise OSError(errno.EEXIST, "this is not a socket; remove it or choose another path", self.path)
            os.unlink(self.path)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
            try:
                probe.connect(self.path)
            except BlockingIOError:
                return True  # its backlog is full, but it is there
            except OSError:
                return False
            return True

    def _give_path_back(self) -> None:
        if self._inode is not None and os.path.lexists(self.path):
            found = os.lstat(self.path)
            if (found.st_dev, found.st_ino) == self._inode:
                os.unlink(self.path)
        self._inode = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
