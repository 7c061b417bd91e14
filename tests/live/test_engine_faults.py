"""Engines that die, are stopped, lie or cannot start: the others live on, and every Send ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from engines import SMALL, Handle, close, pair, pool_of, table

from pdxfer.core import jobs
from pdxfer.core.geometry import PoolSpec
from pdxfer.core.jobs import Rows
from pdxfer.core.worker import PlaneAt, PoolAt
from pdxfer.engine.agent import metadata_digest
from pdxfer.engine.settings import EngineSettings

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).resolve().parents[2]
TCP = msgspec.structs.replace(SMALL, tls="tcp")
PAGES = (Rows(0, 0, 1, table(np.arange(64))),)
SIZE = 64 * 16384


def test_target_killed_in_the_middle_and_started_again() -> None:
    async def main() -> None:
        p, d = await pair(TCP)
        other = Handle("o", TCP)
        assert await p.add(await other.start()) == ""
        other.child.send(jobs.Expect(1))
        source = pool_of(16384, 64, fill=1)
        await p.map(1, source)
        for round_ in range(3):
            os.kill(d.child.pid, signal.SIGSTOP)  # so that transfers are certainly under way
            doomed = [p.post(d.info, PAGES, SIZE, slot=s, recv=s) for s in range(3)]
            healthy = p.post(other.info, PAGES, SIZE, slot=3)
            assert (await p.report(jobs.Sent, job=healthy)).error == ""
            d.child.kill()
            assert "SIGKILL" in await d.ended()
            assert d.child.exit_status == -signal.SIGKILL and d.child.pid is None and d.child.heartbeat == 0
            for job in doomed:
                assert (await p.report(jobs.Sent, job=job)).error, "a WRITE to a dead engine was said to be done"
            late = p.post(d.info, PAGES, SIZE)
            assert (await p.report(jobs.Sent, job=late)).error
            p.child.send(jobs.RemovePeer(d.info.agent))
            await d.start(incarnation=round_ + 2)
            assert await p.add(d.info) == ""
            d.child.send(jobs.Expect(1))
            job = p.post(d.info, PAGES, SIZE)
            assert (await p.report(jobs.Sent, job=job)).error == ""
            await d.landed(job)
        await close(p, d, other)
        assert p.child.exit_status == 0

    asyncio.run(main())


def test_initiator_killed_costs_the_target_nothing() -> None:
    async def main() -> None:
        p, d = await pair(TCP)
        source = pool_of(16384, 64, fill=1)
        await p.map(1, source)
        for slot in range(4):
            p.post(d.info, PAGES, SIZE, slot=slot, recv=slot)
        await p.report(jobs.Gathered)
        p.child.kill()
        await p.ended()
        await p.start(incarnation=2)
        await p.map(1, source)
        assert await p.add(d.info) == ""
        job = p.post(d.info, PAGES, SIZE)
        assert (await p.report(jobs.Sent, job=job)).error == ""
        await d.landed(job)
        await close(p, d)
        assert d.child.exit_status == 0

    asyncio.run(main())


def test_a_cut_connection_ends_a_generation_and_the_next_one_works() -> None:
    """The peer's sockets are shut, as a broken link would: afterwards the same two engines can talk again."""

    async def main() -> None:
        settings = msgspec.structs.replace(TCP, devices="lo")
        p, d = await pair(settings)
        await p.map(1, pool_of(16384, 64, fill=1))
        job = p.post(d.info, PAGES, SIZE)
        assert (await p.report(jobs.Sent, job=job)).error == ""
        assert cut_tcp(d.child.pid) > 0
        deadline = time.monotonic() + 10
        while True:
            job = p.post(d.info, PAGES, SIZE)
            error = (await p.report(jobs.Sent, job=job)).error
            if error:
                break
            assert time.monotonic() < deadline, "the cut was never noticed"
        while error:
            assert time.monotonic() < deadline, error
            await asyncio.sleep(0.1)
            job = p.post(d.info, PAGES, SIZE)
            error = (await p.report(jobs.Sent, job=job)).error
        await d.landed(job)
        await close(p, d)
        assert [h.child.exit_status for h in (p, d)] == [0, 0]

    asyncio.run(main())


def cut_tcp(pid: int) -> int:
    """Shut the connected TCP sockets of another process (pidfd_getfd). Returns how many."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = os.pidfd_open(pid)
    cut = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        if not os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
            continue
        fd = libc.syscall(438, pidfd, int(name), 0)
        if fd < 0:
            pytest.skip("pidfd_getfd is not permitted here")
        with socket.socket(fileno=fd) as s:
            if s.family != socket.AF_INET:
                continue
            try:
                s.getpeername()
            except OSError:
                continue
            s.shutdown(socket.SHUT_RDWR)
            cut += 1
    os.close(pidfd)
    return cut


def test_metadata_that_was_changed_is_refused() -> None:
    async def main() -> None:
        p, d = await pair()
        stranger = Handle("s")
        info = await stranger.start()
        changed = bytearray(info.metadata)
        changed[len(changed) // 2] ^= 1
        replace = msgspec.structs.replace
        assert "digest" in await p.add(replace(info, metadata=bytes(changed)))
        assert "digest" in await p.add(replace(info, agent="s:1:2"))
        assert "digest" in await p.add(replace(info, metadata=info.metadata + b"\0"))
        assert "NIXL 0.1" in await p.add(replace(info, nixl="0.1"))
        assert "metadata has 0 bytes" in await p.add(replace(info, metadata=b""))
        alias = replace(info, agent="s:1:9", digest=metadata_digest("s:1:9", info.nixl, info.metadata))
        assert "is that of 's:1:1'" in await p.add(alias)
        assert "burned" in await p.add(alias)
        assert "own name" in await p.add(p.info)
        assert await p.add(info) == ""
        assert await p.add(info) == ""
        other = replace(info, slots=1)
        assert "other metadata" in await p.add(other)
        await p.map(1, pool_of(16384, 64, fill=1))
        job = p.post(info, PAGES, SIZE)
        stranger.child.send(jobs.Expect(1))
        assert (await p.report(jobs.Sent, job=job)).error == ""
        await close(p, d, stranger)

    asyncio.run(main())


def test_garbage_in_a_notification_is_counted_and_dropped() -> None:
    script = """
        import os, sys
        sys.path.insert(0, sys.argv[1])
        from pdxfer.engine.nixl import load
        nixl = load()
        agent = nixl.api.nixl_agent("vandal", nixl.api.nixl_agent_config(enable_prog_thread=False, backends=[]))
        agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
        name = agent.add_remote_agent(bytes.fromhex(sys.stdin.readline()))
        for raw in (b"", b"garbage", os.urandom(2000), b"\\x9a" * 50, os.urandom(60000)):
            agent.send_notif(name, raw)
        import time
        end = time.monotonic() + 3
        while time.monotonic() < end:
            agent.get_new_notifs()
            time.sleep(0.001)
        os._exit(0)
    """

    async def main() -> None:
        p, d = await pair()
        vandal = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-c", textwrap.dedent(script), str(ROOT)], stdin=subprocess.PIPE, env=SMALL.environment()
        )
        assert vandal.stdin is not None
        vandal.stdin.write(d.info.metadata.hex().encode() + b"\n")
        vandal.stdin.close()

        def garbage() -> float:
            counters = [r.values for r in d.reports if isinstance(r, jobs.Counters)]
            return counters[-1]["notifications_garbage"] if counters else 0

        await d.until(lambda: garbage() == 5)
        await asyncio.to_thread(vandal.wait)
        await p.map(1, pool_of(16384, 64, fill=1))
        job = p.post(d.info, PAGES, SIZE)
        assert (await p.report(jobs.Sent, job=job)).error == ""
        landed = await d.landed(job)
        assert landed.agent == p.info.agent
        await close(p, d)
        assert d.child.exit_status == 0

    asyncio.run(main())


def test_removed_peer() -> None:
    async def main() -> None:
        p, d = await pair(TCP)
        await p.map(1, pool_of(16384, 64, fill=1))
        os.kill(d.child.pid, signal.SIGSTOP)
        doomed = [p.post(d.info, PAGES, SIZE, slot=s, recv=s) for s in range(3)]
        await p.report(jobs.Gathered, job=doomed[-1])
        p.child.send(jobs.RemovePeer(d.info.agent))
        p.child.send(jobs.RemovePeer("nobody:1:1"))
        job = p.post(d.info, PAGES, SIZE, slot=3)
        assert "removed" in (await p.report(jobs.Sent, job=job)).error
        assert await p.add(d.info) == ""
        os.kill(d.child.pid, signal.SIGCONT)
        for job in doomed:
            await p.report(jobs.Sent, job=job)
        deadline = time.monotonic() + 5
        while (await p.report(jobs.Sent, job=p.post(d.info, PAGES, SIZE, slot=3))).error:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        await close(p, d)
        assert p.child.exit_status == 0

    asyncio.run(main())


def test_without_nixl_the_engine_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("nixl", "nixl_cu12", "nixl_cu13"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('No module named {name}', name={name!r})")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def main() -> None:
        e = Handle("e")
        await e.child.start("e", 1, 1)
        detail = await e.ended()
        assert "NIXL is not installed: pip install 'pdxfer[engine]'" in detail
        assert e.child.exit_status == 69
        assert e.reports == []

    asyncio.run(main())
    assert "Traceback" not in capfd.readouterr().err


def test_ucx_that_cannot_start_is_named() -> None:
    async def main() -> None:
        e = Handle("e", msgspec.structs.replace(SMALL, devices="nosuchdevice0", tls="tcp"))
        await e.child.start("e", 1, 1)
        detail = await e.ended()
        assert "did not start its UCX back end" in detail and "engine.devices" in detail
        assert e.child.exit_status == 72

    asyncio.run(main())


def test_too_much_staging_memory_is_refused_by_name() -> None:
    async def main() -> None:
        e = Handle("e", EngineSettings(slot_bytes=64 << 20, send_slots=4096, recv_slots=4096))
        await e.child.start("e", 1, 1)
        assert "staging memory asked for" in await e.ended()
        assert e.child.exit_status == 71

    asyncio.run(main())


def test_memory_that_a_worker_takes_away_costs_one_engine_and_is_refused_then() -> None:
    """Shared memory that cannot be sealed: the worker shrinks its file under the engine."""

    async def main() -> None:
        e = Handle("e")
        await e.start()
        fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)
        os.ftruncate(fd, 8 * 4096)
        at = PoolAt(PoolSpec("kv", "uint8", "x", 16, 1, 4096), 8, (PlaneAt(0, 0, 4096),))
        e.child.send(jobs.MapPools(1, (at,), (8 * 4096,)), (fd,))
        assert (await e.report(jobs.Mapped, worker=1)).error == ""
        os.ftruncate(fd, 4096)
        e.child.send(jobs.Copy(1, 4096, 1, (Rows(0, 0, 1, table([6])),), 1, (Rows(0, 0, 1, table([7])),)))
        assert "SIGBUS" in await e.ended()
        e.child.send(jobs.Expect(1))  # to a dead engine: nothing happens
        await e.start(incarnation=2)
        e.child.send(jobs.MapPools(1, (at,), (8 * 4096,)), (fd,))
        assert "expected the 32768" in (await e.report(jobs.Mapped, worker=1)).error
        os.close(fd)
        await close(e)

    asyncio.run(main())


def test_a_stopped_engine_does_not_beat_and_close_ends_it() -> None:
    async def main() -> None:
        e = Handle("e")
        await e.start()
        pid = e.child.pid
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(0.1)
        beat = e.child.heartbeat
        await asyncio.sleep(0.5)
        assert e.child.heartbeat == beat
        await e.child.close(0.3)
        assert e.child.exit_status == -signal.SIGKILL
        assert _state(pid) == "gone"
        await e.start(incarnation=2)
        await close(e)
        assert e.child.exit_status == 0 and len(e.exits) == 1

    asyncio.run(main())


def test_signals_for_the_group_do_not_end_it_and_a_lock_is_inherited(tmp_path: Path) -> None:
    import fcntl

    async def main() -> None:
        lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(lock, fcntl.LOCK_EX)
        e = Handle("e", inherit=(lock,))
        await e.start()
        os.close(lock)
        other = os.open(tmp_path / "lock", os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(e.child.pid, number)
        await asyncio.sleep(0.3)
        assert not e.exits
        await close(e)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)

    asyncio.run(main())


def test_it_dies_with_its_parent() -> None:
    script = """
        import asyncio, os, sys
        sys.path.insert(0, sys.argv[1])
        from pdxfer.core import jobs
        from pdxfer.engine.child import EngineChild
        from pdxfer.engine.settings import EngineSettings
        async def main():
            ready = asyncio.Event()
            child = EngineChild(EngineSettings(send_slots=1, recv_slots=1), lambda r: ready.set(), print)
            await child.start("e", 1, 1)
            await ready.wait()
            print(child.pid, flush=True)
            await asyncio.sleep(60)
        asyncio.run(main())
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script), str(ROOT)], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    engine = int(parent.stdout.readline())
    os.kill(engine, signal.SIGSTOP)  # even so: it cannot see the socket close
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while _state(engine) not in ("Z", "gone"):  # a zombie, where nothing adopts orphans
        assert time.monotonic() < deadline, "the engine outlived its parent"
        time.sleep(0.02)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
