"""The runtime directory: one sidecar, one engine, growing incarnations; and the words to systemd."""

from __future__ import annotations

import asyncio
import errno
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
    assert RuntimeDir(str(tmp_path)).next_incarnation() == 1000
    assert runtime.next_incarnation() == first + 2  # it remembers its own


def full(*args: object, **more: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_running_sidecar_goes_on_without_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = RuntimeDir(str(tmp_path))
    runtime.acquire("p")
    first = runtime.next_incarnation()
    runtime.note_engine(os.getpid())
    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(os, "replace", full)
    monkeypatch.setattr(time, "time_ns", lambda: 1000)
    assert [runtime.respawn_incarnation() for _ in range(3)] == [first + 1, first + 2, first + 3]
    (warning,) = [r.getMessage() for r in caplog.records]  # once a minute
    assert f"{tmp_path / 'incarnation'} cannot be written (No space left on device)" in warning
    assert "free space in node.runtime_dir" in warning
    runtime.note_engine(os.getpid())
    runtime.publish_admin("127.0.0.1", 7970)
    assert "need --admin 127.0.0.1:7970" in caplog.text
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"lock", "incarnation"}  # no draft, and no pid of an engine that is no more
    assert int((tmp_path / "incarnation").read_text()) == first
    monkeypatch.undo()
    assert int((tmp_path / "incarnation").read_text()) < runtime.respawn_incarnation()
    runtime.release()


@pytest.mark.parametrize(
    ("number", "passes", "words"), [(errno.ENOSPC, True, "free space"), (errno.EFBIG, False, "ulimit -f")]
)
@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_start_without_disk_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, passes: bool, words: str
) -> None:
    def fail(*args: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    runtime = RuntimeDir(str(tmp_path))
    with pytest.raises(RuntimeDirError, match=rf"node.runtime_dir: expected .*{tmp_path}.*{words}") as caught:
        runtime.acquire("p")
        runtime.next_incarnation()
    assert caught.value.passes is passes


def test_its_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    runtime = RuntimeDir(str(tmp_path))
    before = os.umask(0)
    try:
        (tmp_path / ".admin.json.new").write_text("")  # left by a crash, with another mode
        runtime.acquire("p")
        asyncio.run(runtime.own_engines(patience=1.0, kill_after=1.0))
        runtime.next_incarnation()
        runtime.note_engine(os.getpid())
        runtime.publish_admin("127.0.0.1", 7970)
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("lock", "engine.lock", "incarnation", "engine.pid", "admin.json"), "0o600")
    runtime.release()


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
