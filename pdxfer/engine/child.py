"""The parent's handle of its engine child.

Owns: the child process, the socket to it, the vitals page; spawning, killing and burying it. Must not: decide when (the
supervisor and the core do), or load NIXL.

``on_exit`` is called exactly once per start, after the child was reaped and its last report was delivered: from then on
nothing writes into slots or pools any more. All callbacks come in the event loop's thread. Start it from the main thread: the
kernel kills the child when the *thread* that started it ends.
"""

from __future__ import annotations

import array
import asyncio
import logging
import os
import site
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from pdxfer.core.jobs import MAX_ENGINE_FRAME, Close, EngineJob, EngineReport, decode_report, encode
from pdxfer.core.state import agent_name

from . import exits
from .frames import Frames, TooLong
from .link import MAX_FDS
from .main import Spec
from .settings import EngineSettings
from .vitals import Vitals

log = logging.getLogger(__name__)

_CHUNK: Final = 256 << 10
_AGAIN: Final = 0.05  # seconds
_ROOT: Final = str(Path(__file__).resolve().parents[2])  # where `import pdxfer` finds this package


class EngineChild:
    """One engine at a time; it can be started again after ``on_exit``."""

    def __init__(
        self,
        settings: EngineSettings,
        on_report: Callable[[EngineReport], None],
        on_exit: Callable[[str], None],
        *,
        inherit: Sequence[int] = (),
    ) -> None:
        """``inherit``: descriptors that the child keeps open for as long as it lives, e.g. a lock."""
        self.settings = settings
        self.exit_status: int | None = None  # of the last child, as subprocess gives it
        self.fault = ""  # the last child's own words for its end
        self._on_report = on_report
        self._on_exit = on_exit
        self._inherit = tuple(inherit)
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._socket: socket.socket | None = None
        self._vitals: Vitals | None = None
        self._frames = Frames(MAX_ENGINE_FRAME)
        self._out: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._writing = False
        self._buried = asyncio.Event()
        self._buried.set()
        self._why = ""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def heartbeat(self) -> int:
        """Ticks once per round of the engine's loop, and not while a copy hangs. 0 when there is no engine."""
        return 0 if self._vitals is None else self._vitals.heartbeat()

    async def start(self, node: str, parent_incarnation: int, incarnation: int) -> None:
        """Spawn the child; Ready, or ``on_exit``, follows. Raises OSError when no process can be had."""
        if self._process is not None:
            raise RuntimeError(f"engine pid {self._process.pid} has not ended yet")
        for variable in self.settings.variables():
            log.info("engine environment: %s=%s (%s)", *variable)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        vitals_fd = Vitals.create()
        try:
            spec = Spec(
                agent_name(node, parent_incarnation, incarnation),
                incarnation,
                os.getpid(),
                theirs.fileno(),
                vitals_fd,
                self.settings,
            )
            vitals = Vitals(vitals_fd)
            process = subprocess.Popen(  # noqa: ASYNC220 - returns after fork and exec; a pidfd tells of the rest
                [sys.executable, "-P", "-m", "pdxfer.engine.main", msgspec.json.encode(spec).decode()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # UCX writes its warnings to standard output, which is not ours to fill
                env=_environment(self.settings),
                pass_fds=(theirs.fileno(), vitals_fd, *self._inherit),
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(vitals_fd)
        try:
            self._pidfd = os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            process.wait()
            ours.close()
            raise
        self._process = process
        self._socket = ours
        self._vitals = vitals
        self._frames = Frames(MAX_ENGINE_FRAME)
        self._why = self.fault = ""
        self.exit_status = None
        self._buried.clear()
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        loop.add_reader(ours, self._readable)
        loop.add_reader(self._pidfd, self._died)

    def send(self, job: EngineJob, fds: Sequence[int] = ()) -> None:
        """Never blocks. ``fds`` may be closed afterwards. To a dead engine it does nothing: ``on_exit`` tells."""
        if self._socket is None:
            return
        data = memoryview(encode(job))
        kept = tuple(os.dup(fd) for fd in fds)
        # the kernel takes so many descriptors beside a byte, so the first bytes each carry a share
        for at in range(0, len(kept), MAX_FDS):
            self._out.append((data[:1], kept[at : at + MAX_FDS]))
            data = data[1:]
        self._out.append((data, ()))
        if not self._writing:
            self._write()

    def kill(self) -> None:
        """SIGKILL: the one sure fence against its writes. ``on_exit`` follows."""
        if self._process is not None:
            self._process.kill()

    async def close(self, timeout: float) -> None:
        """Have it end in order, by force after ``timeout`` seconds; returns when it is buried."""
        if self._process is None:
            return
        self.send(Close())
        try:
            await asyncio.wait_for(self._buried.wait(), timeout)
        except TimeoutError:
            log.warning("engine pid %s did not end within %.1f s of Close and is killed", self.pid, timeout)
            self.kill()
            await self._buried.wait()

    # the socket ----------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        assert self._socket is not None
        loop = asyncio.get_running_loop()
        while self._out:
            data, fds = self._out[0]
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                sent = self._socket.sendmsg([data], ancillary)
            except BlockingIOError:
                if not self._writing:
                    self._writing = True
                    loop.add_writer(self._socket, self._write)
                return
            except ConnectionError:
                self._drop_queue()  # it is dead or dying; its end is announced by the pidfd
                break
            except OSError as error:
                # Too many descriptors are on their way (ETOOMANYREFS), or the kernel is short of memory: both pass.
                log.warning("engine pid %s: a job cannot be sent now and is tried again: %s", self.pid, error)
                loop.call_later(_AGAIN, self._write_again)
                break
            _close(fds)
            if sent < len(data):
                self._out[0] = (data[sent:], ())
            else:
                self._out.popleft()
        if self._writing:
            self._writing = False
            loop.remove_writer(self._socket)

    def _write_again(self) -> None:
        if self._socket is not None and self._out and not self._writing:
            self._write()

    def _readable(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._socket)
            return
        self._take(data)

    def _take(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                self._deliver(decode_report(body))
        except (msgspec.MsgspecError, TooLong) as error:
            log.error("a defect: engine pid %s sends what is no report and is killed: %s", self.pid, error)
            self._why = f"it sent what is no report ({error})"
            self._frames = Frames(MAX_ENGINE_FRAME)
            self.kill()

    def _deliver(self, report: EngineReport) -> None:
        try:
            self._on_report(report)
        except Exception:
            log.exception("a defect: the parent raised on %s; later reports go on", type(report).__name__)

    def _drop_queue(self) -> None:
        for _, fds in self._out:
            _close(fds)
        self._out.clear()

    # the end -------------------------------------------------------------------------------------------------------

    def _died(self) -> None:
        process, sock, vitals = self._process, self._socket, self._vitals
        assert process is not None and sock is not None and vitals is not None
        status = process.wait()  # the pidfd is readable: this reaps and does not wait
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self._last_reports(sock)
        loop.remove_reader(sock)
        if self._writing:
            self._writing = False
            loop.remove_writer(sock)
        self._drop_queue()
        sock.close()
        self.exit_status = status
        self.fault = vitals.words() if status != exits.ORDERLY else ""
        vitals.close()
        self._process = self._socket = self._vitals = None
        parts = [p for p in (self._why, self.fault) if p]
        detail = f"engine pid {process.pid}: {exits.words(status)}" + "".join(f": {p}" for p in parts)
        self._buried.set()
        self._on_exit(detail)

    def _last_reports(self, sock: socket.socket) -> None:
        """What the dead child had written and we had not read."""
        while not self._why:
            try:
                data = sock.recv(_CHUNK)
            except OSError:
                return
            if not data:
                return
            self._take(data)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _environment(settings: EngineSettings) -> dict[str, str]:
    environment = settings.environment()
    if _ROOT not in (*site.getsitepackages(), site.getusersitepackages()):  # a checkout that is not installed
        environment["PYTHONPATH"] = os.pathsep.join(p for p in (environment.get("PYTHONPATH", ""), _ROOT) if p)
    return environment
