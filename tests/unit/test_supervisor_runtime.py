"""The runtime directory: one sidecar, one engine, growing incarnations; and the words to systemd."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pdxfer.runtime import Notifier, RuntimeDir, RuntimeDirBusy, RuntimeDirError


def test_a_second_sidecar_is_refused_and_the_holder_is_named(tmp_path: Path) -> None:
    first, second = RuntimeDir(str(tmp_path / "run")), RuntimeDir(str(tmp_path / "run"))
    first.acquire("p")
    with pytest.raises(RuntimeDirBusy, match=rf"in use by another sidecar \(node p, pid {os.getpid()}\)"):
        second.acquire("q")
    first.release()
    second.acquire("q")
    second.release()


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeDirError, match=r"node.runtime_dir .*file/run"):
        RuntimeDir(str(tmp_path / "file" / "run")).acquire("p")


def test_incarnations_grow_even_when_the_clock_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = RuntimeDir(str(tmp_path))
    first = runtime.next_incarnation()
    assert abs(first - time.time_ns()) < 5e9
    monkeypatch.setattr(time, "time_ns", lambda: 1000)
    assert runtime.next_incarnation() == first + 1
    assert RuntimeDir(str(tmp_path)).next_incarnation() == first + 2
    (tmp_path / "incarnation").write_text("torn")
    assert runtime.next_incarnation() == 1000


ORPHAN = "import fcntl, os, sys, time; print(os.getpid(), flush=True); time.sleep(60)"


def orphan(runtime: RuntimeDir) -> subprocess.Popen[str]:
    """A process that holds the engine lock, as an engine that outlived its parent does."""
    fd = os.open(runtime.path / "engine.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    child = subprocess.Popen([sys.executable, "-c", ORPHAN], pass_fds=(fd,), stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.readline()
    os.close(fd)
    return child


def test_an_engine_of_an_earlier_parent_is_waited_for_then_killed(tmp_path: Path) -> None:
    runtime = RuntimeDir(str(tmp_path))
    child = orphan(runtime)
    runtime.note_engine(child.pid)
    began = time.monotonic()
    asyncio.run(runtime.own_engines(patience=10.0, kill_after=0.3))
    assert 0.3 <= time.monotonic() - began < 5
    assert child.wait(5) == -signal.SIGKILL
    runtime.release()


def test_a_process_that_only_has_the_engines_old_pid_is_not_killed(tmp_path: Path) -> None:
    runtime = RuntimeDir(str(tmp_path))
    child = orphan(runtime)
    (tmp_path / "engine.pid").write_text(f"{child.pid} 1\n")  # started at another time
    with pytest.raises(RuntimeDirBusy, match=rf"pid {child.pid}.*engine.lock"):
        asyncio.run(runtime.own_engines(patience=0.5, kill_after=0.1))
    assert child.poll() is None
    child.kill()
    child.wait()
    runtime.release()


def test_words_to_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "20000000")
        notifier = Notifier()
        notifier.say("READY=1", "STATUS=x")
        assert systemd.recv(100) == b"READY=1\nSTATUS=x"
        assert notifier.watchdog_interval == 10.0
    notifier.say("STOPPING=1")  # nobody listens any more: logged, not raised
    monkeypatch.delenv("NOTIFY_SOCKET")
    Notifier().say("READY=1")
