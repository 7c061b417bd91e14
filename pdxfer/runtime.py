"""The runtime directory: one sidecar at a time, one engine at a time, and an incarnation that only grows.

Owns: the directory's lock, the engine's lock, the files ``incarnation``, ``engine.pid`` and ``admin.json``, and the
words to systemd. Must not: know what runs under the locks.

Locks are flock()s on open files, so the kernel drops them with the last process that holds them. The engine child
inherits the engine lock: whoever can take it knows that no engine of an earlier parent lives, and so that nothing
writes into slots or pools any more.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import signal
import socket
import time
from pathlib import Path

log = logging.getLogger(__name__)


class RuntimeDirBusy(Exception):
    """Another sidecar, or an engine that cannot be ended, holds the runtime directory."""


class RuntimeDirError(Exception):
    """The runtime directory cannot be used."""


class RuntimeDir:
    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._lock = -1
        self.engine_lock = -1

    def acquire(self, node: str) -> None:
        """Create the directory and lock it. Raises RuntimeDirBusy, naming the holder, or RuntimeDirError."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RuntimeDirError(
                f"node.runtime_dir {self.path}: {error.strerror}; expected a directory that user {os.getuid()} can write:"
                " create it, or set node.runtime_dir"
            ) from None
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
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"node {node}, pid {os.getpid()}\n".encode(), 0)

    def next_incarnation(self) -> int:
        """Greater than every one before, also when the clock went back while the directory lived."""
        path = self.path / "incarnation"
        try:
            last = int(path.read_text())
        except FileNotFoundError:
            last = 0
        except ValueError:
            log.warning("%s is not a number and is written anew", path)
            last = 0
        incarnation = max(time.time_ns(), last + 1)
        self._write("incarnation", f"{incarnation}\n", sync=True)
        return incarnation

    async def own_engines(self, patience: float, kill_after: float) -> None:
        """Wait until no engine of an earlier parent lives. One that does not end by itself is killed.

        Raises RuntimeDirBusy when it lives on all the same.
        """
        self.engine_lock = os.open(self.path / "engine.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
        self._write("engine.pid", f"{pid} {_started(pid)}\n")

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
        self._write("admin.json", json.dumps({"host": host, "port": port, "pid": os.getpid()}) + "\n")

    def release(self) -> None:
        """The engine must be dead by now."""
        for name in ("admin.json", "engine.pid"):
            (self.path / name).unlink(missing_ok=True)
        for fd in (self.engine_lock, self._lock):
            if fd >= 0:
                os.close(fd)
        self.engine_lock = self._lock = -1

    def _write(self, name: str, text: str, *, sync: bool = False) -> None:
        """Whole or not at all."""
        temporary = self.path / f".{name}.new"
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(temporary, self.path / name)


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
