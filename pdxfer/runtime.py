"""The runtime directory: one sidecar at a time, one engine at a time, and an incarnation that only grows.

Owns: the directory's lock, the engine's lock, the files ``incarnation``, ``engine.pid`` and ``admin.json``, and the
words to systemd. Must not: know what runs under the locks.

Locks are flock()s on open files, so the kernel drops them with the last process that holds them. The engine child
inherits the engine lock: whoever can take it knows that no engine of an earlier parent lives, and so that nothing
writes into slots or pools any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
import socket
import time
from pathlib import Path

from . import shortage
from .logs import Limiter

log = logging.getLogger(__name__)


class RuntimeDirBusy(Exception):
    """Another sidecar, or an engine that cannot be ended, holds the runtime directory."""


class RuntimeDirError(Exception):
    """The runtime directory cannot be used. ``passes``: it may be another time, as when its disk is full."""

    def __init__(self, message: str, *, passes: bool = False) -> None:
        super().__init__(message)
        self.passes = passes


class RuntimeDir:
    """Its start needs the disk. A running sidecar does not: what it cannot write then, it says and goes on without."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._lock = -1
        self.engine_lock = -1
        self._last = 0  # the greatest incarnation that this process took
        self._warnings = Limiter(60.0)

    def acquire(self, node: str) -> None:
        """Create the directory and lock it. Raises RuntimeDirBusy, naming the holder, or RuntimeDirError."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._unusable(error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock, 200, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._lock)
            self._lock = -1
            raise RuntimeDirBusy(
                f"node.runtime_dir {self.path} is in use by another sidecar ({holder});"
                " stop that one, or give this one a runtime directory of its own"
            ) from None
        try:
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"node {node}, pid {os.getpid()}\n".encode(), 0)
        except OSError as error:
            os.close(self._lock)
            self._lock = -1
            raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> RuntimeDirError:
        short = shortage.of(error)
        if short is not None:
            words = short.words if error.filename else f"{self.path}: {short.words}"
            return RuntimeDirError(
                f"node.runtime_dir: expected to write a few small files, found {words}", passes=short.passes
            )
        return RuntimeDirError(
            f"node.runtime_dir {self.path}: {error.strerror}; expected a directory that user {os.getuid()} can write:"
            " create it, or set node.runtime_dir"
        )

    def next_incarnation(self) -> int:
        """The sidecar's own, at its start: greater than every one before, also when the clock went back while the
        directory lived. Raises RuntimeDirError when it cannot be read and written: peers rely on it that none comes twice.
        """
        path = self.path / "incarnation"
        try:
            last = int(path.read_text())
        except FileNotFoundError:
            last = 0
        except ValueError:
            log.warning("%s is not a number and is written anew", path)
            last = 0
        except OSError as error:
            raise self._unusable(error) from error
        self._last = max(time.time_ns(), last + 1, self._last + 1)
        try:
            self._write("incarnation", f"{self._last}\n", sync=True)
        except OSError as error:
            raise self._unusable(error) from error
        return self._last

    def respawn_incarnation(self) -> int:
        """An engine's, which needs no disk: greater than every one that this process took.

        One that could not be written could come again only in a later sidecar, and only if the clock went back behind it:
        the nanoseconds since 1970 make that practically impossible. Even then no engine's name comes twice, since the
        sidecar's own incarnation, which was written, is part of it.
        """
        self._last = max(time.time_ns(), self._last + 1)
        without = "a clock that goes back before the next start is not noticed"
        self._note("incarnation", f"{self._last}\n", without, keep=True)
        return self._last

    async def own_engines(self, patience: float, kill_after: float) -> None:
        """Wait until no engine of an earlier parent lives. One that does not end by itself is killed.

        Raises RuntimeDirBusy when it lives on all the same.
        """
        try:
            self.engine_lock = os.open(self.path / "engine.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._unusable(error) from error
        loop = asyncio.get_running_loop()
        began = loop.time()
        killed = False
        while True:
            try:
                fcntl.flock(self.engine_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waited = loop.time() - began
                if waited > kill_after and not killed:
                    killed = True
                    self._kill_old_engine()
                if waited > patience:
                    raise RuntimeDirBusy(
                        f"an engine of an earlier sidecar ({self._old_engine() or 'pid unknown'}) still holds"
                        f" {self.path / 'engine.lock'} after {waited:.0f} s; end it by hand, or reboot if it cannot be killed"
                    ) from None
                await asyncio.sleep(0.02)
            else:
                return

    def note_engine(self, pid: int) -> None:
        without = "an engine that outlives this sidecar must be ended by hand"
        self._note("engine.pid", f"{pid} {_started(pid)}\n", without)

    def _old_engine(self) -> str:
        try:
            return f"pid {(self.path / 'engine.pid').read_text().split()[0]}"
        except (OSError, IndexError):
            return ""

    def _kill_old_engine(self) -> None:
        try:
            pid, started = map(int, (self.path / "engine.pid").read_text().split())
        except (OSError, ValueError) as error:
            log.warning("an earlier engine lives and its pid is not known: %s", error)
            return
        if _started(pid) != started:  # the number belongs to another process by now
            log.warning("an earlier engine holds the lock, but pid %d is another process", pid)
            return
        log.warning("the engine of an earlier sidecar (pid %d) did not end with its parent: it is killed", pid)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            log.info("pid %d was gone already", pid)

    def publish_admin(self, host: str, port: int) -> None:
        """For `pdxfer status` and the like: where the admin service is."""
        text = json.dumps({"host": host, "port": port, "pid": os.getpid()}) + "\n"
        self._note("admin.json", text, f"`pdxfer status` and the like need --admin {host}:{port}")

    def release(self) -> None:
        """The engine must be dead by now."""
        for name in ("admin.json", "engine.pid"):
            try:
                (self.path / name).unlink(missing_ok=True)
            except OSError as error:
                log.warning("%s stays behind: %s", self.path / name, error.strerror)
        for fd in (self.engine_lock, self._lock):
            if fd >= 0:
                os.close(fd)
        self.engine_lock = self._lock = -1

    def _note(self, name: str, text: str, without: str, *, keep: bool = False) -> None:
        """Write it, or warn, once a minute, and go on. ``keep``: the old text is of use still."""
        try:
            self._write(name, text, sync=keep)
        except OSError as error:
            quiet = self._warnings.allow((name,), time.monotonic())
            if quiet is not None:
                log.warning(
                    "%s cannot be written (%s) and the sidecar goes on; until it can be, %s: free space in"
                    " node.runtime_dir, or make it writable (%d more like this since the last)",
                    self.path / name, error.strerror, without, quiet,
                )  # fmt: skip
            if not keep:
                with contextlib.suppress(OSError):  # said above; what the file says is not true any more
                    (self.path / name).unlink(missing_ok=True)

    def _write(self, name: str, text: str, *, sync: bool = False) -> None:
        """Whole or not at all, for its owner's eyes."""
        temporary = self.path / f".{name}.new"
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(fd, "w", encoding="utf-8") as file:
                os.fchmod(fd, 0o600)
                file.write(text)
                file.flush()
                if sync:
                    os.fsync(fd)
            os.replace(temporary, self.path / name)
        except OSError as error:
            error.filename = error.filename or str(self.path / name)
            with contextlib.suppress(OSError):  # the first error is the one to tell
                temporary.unlink(missing_ok=True)
            raise


def _started(pid: int) -> int:
    """When the kernel started this process, in its own ticks; 0 when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])


class Notifier:
    """Words to systemd, if it listens ($NOTIFY_SOCKET)."""

    def __init__(self) -> None:
        address = os.environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        microseconds = os.environ.get("WATCHDOG_USEC", "")
        mine = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_interval = int(microseconds) / 2e6 if microseconds.isdecimal() and mine and address else None

    def say(self, *words: str) -> None:
        """For example "READY=1". Never blocks."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as s:
                s.sendto("\n".join(words).encode(), self._address)
        except OSError as error:
            log.warning("systemd does not take %s: %s", words, error)
