"""The sidecar's worker socket: whatever a worker does is refused by name, and costs nobody else anything."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import resource
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from pdxfer import workerlink
from pdxfer.core import worker
from pdxfer.core.events import Event, WorkerAttached, WorkerGone, WorkerSaid
from pdxfer.pools import PoolLayout, SharedPool
from pdxfer.workers import SocketInUse, WorkerService

LAYOUT = PoolLayout("kv", "float32", (4, 8), 4, planes=2)


class Core:
    """A recorder of events that answers as little as a core must."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.refused: list[tuple[str, str]] = []
        self.service: WorkerService | None = None
        self.on_attach: Callable[[WorkerAttached], None] = self.accept
        self.on_said: Callable[[WorkerSaid], None] = lambda said: None

    def accept(self, event: WorkerAttached) -> None:
        assert self.service is not None
        self.service.fds(event.id)
        self.service.send(event.id, worker.Attached(event.frame.req, 1, "n", 7, 10.0))

    def deliver(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, WorkerAttached):
            self.on_attach(event)
        elif isinstance(event, WorkerSaid):
            self.on_said(event)

    def of(self, kind: type) -> list[Any]:
        return [e for e in self.events if isinstance(e, kind)]


class Raw:
    """A worker without manners: a plain socket that sends whatever it is told to."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.setblocking(False)
        self.socket.connect(path)
        self.buffer = b""

    def put(self, raw: bytes, fds: tuple[int, ...] = ()) -> None:
        if fds:
            assert socket.send_fds(self.socket, [raw], list(fds)) == len(raw)
        else:
            assert self.socket.send(raw) == len(raw)

    async def frames(self, count: int) -> list[worker.SidecarFrame]:
        out: list[worker.SidecarFrame] = []
        while len(out) < count:
            frame = await self.frame()
            assert frame is not None, f"closed after {out}"
            out.append(frame)
        return out

    async def frame(self) -> worker.SidecarFrame | None:
        """The next frame; None when the connection is closed."""
        while True:
            if len(self.buffer) >= 4:
                size = int.from_bytes(self.buffer[:4], "little")
                if len(self.buffer) >= 4 + size:
                    body, self.buffer = self.buffer[4 : 4 + size], self.buffer[4 + size :]
                    return worker.decode_from_sidecar(body)
            try:
                chunk = self.socket.recv(1 << 16)
            except BlockingIOError:
                await asyncio.sleep(0.002)
                continue
            except ConnectionResetError:
                return None
            if not chunk:
                return None
            self.buffer += chunk

    async def refusal(self) -> worker.Rejected:
        """The one frame before the connection closes."""
        frame = await self.frame()
        assert isinstance(frame, worker.Rejected), frame
        assert await self.frame() is None
        return frame

    def attach(self, pool: SharedPool, engine_id: str = "w", **change: Any) -> None:
        self.put(worker.encode(attach_frame(pool, engine_id, **change)), pool.fds)


def attach_frame(pool: SharedPool, engine_id: str = "w", **change: Any) -> worker.Attach:
    frame = worker.Attach(1, 1, engine_id, "both", os.getpid(), (pool.at(),), pool.fd_bytes)
    return msgspec.structs.replace(frame, **change)


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


@pytest.fixture
def pool() -> Iterator[SharedPool]:
    with SharedPool.allocate(LAYOUT, 8) as made:
        yield made


def run(tmp_path: Path, test: Callable[[WorkerService, Core], Any], **options: Any) -> Core:
    """Serve, run ``test``, close, and check what must hold after every test."""
    core = Core()

    async def main() -> None:
        service = WorkerService(
            str(tmp_path / "w.sock"), core.deliver, refused=lambda *r: core.refused.append(r), **options
        )
        core.service = service
        await service.start()
        try:
            async with asyncio.timeout(20):
                await test(service, core)
        finally:
            await service.close()
        assert service.connections == 0 and service.open_fds == 0

    asyncio.run(main())
    attached = [e.id for e in core.of(WorkerAttached)]
    assert sorted(e.id for e in core.of(WorkerGone)) == sorted(attached), "one end for each attach"
    assert len(set(attached)) == len(attached)
    return core


async def until(true: Callable[[], object]) -> None:
    while not true():
        await asyncio.sleep(0.002)


async def still_serves(service: WorkerService, pool: SharedPool) -> None:
    other = Raw(service.path)
    other.attach(pool, "the next one")
    assert isinstance(await other.frame(), worker.Attached)
    other.socket.close()


# good ----------------------------------------------------------------------------------------------------------------


def test_attach_say_answer_leave(tmp_path: Path, pool: SharedPool) -> None:
    async def test(service: WorkerService, core: Core) -> None:
        core.on_said = lambda said: service.send(said.id, worker.Ok(getattr(said.frame, "req", 0)))
        raw = Raw(service.path)
        raw.attach(pool)
        assert await raw.frame() == worker.Attached(1, 1, "n", 7, 10.0)
        raw.put(worker.encode(worker.Open(2, "r", 0)) + worker.encode(worker.Finish(3, "r", 0, b"a")))
        assert await raw.frames(2) == [worker.Ok(2), worker.Ok(3)]
        (event,) = core.of(WorkerAttached)
        (fd,) = service.fds(event.id)
        assert os.fstat(fd).st_ino == os.fstat(pool.fds[0]).st_ino and not os.get_inheritable(fd)
        assert pool.held()
        raw.socket.close()
        await until(lambda: core.of(WorkerGone))
        assert service.fds(event.id), "open until the engine has been told to unmap"
        service.forget(event.id)
        service.forget(event.id)
        assert not service.fds(event.id) and not pool.held()

    core = run(tmp_path, test)
    assert core.refused == []
    assert [type(e.frame).__name__ for e in core.of(WorkerSaid)] == ["Open", "Finish"]


def test_a_frame_in_many_pieces_and_many_frames_in_one(tmp_path: Path, pool: SharedPool) -> None:
    async def test(service: WorkerService, core: Core) -> None:
        raw = Raw(service.path)
        whole = worker.encode(attach_frame(pool))
        raw.put(whole[:1], pool.fds)
        for i in range(1, len(whole)):
            raw.put(whole[i : i + 1])
            if i % 16 == 0:
                await asyncio.sleep(0)
        assert isinstance(await raw.frame(), worker.Attached)
        raw.put(b"".join(worker.encode(worker.Open(i, f"r{i}", 0)) for i in range(500)))
        await until(lambda: len(core.of(WorkerSaid)) == 500)

    core = run(tmp_path, test)
    assert [e.frame.req for e in core.of(WorkerSaid)] == list(range(500))


def test_pings_are_answered_so_that_a_stopped_sidecar_can_be_told(tmp_path: Path, pool: SharedPool) -> None:
    async def test(service: WorkerService, core: Core) -> None:
        raw = Raw(service.path)
        raw.attach(pool)
        raw.put(worker.encode(worker.Ping()))
        assert (await raw.frames(2))[1] == worker.Ok(0)

    run(tmp_path, test)


def test_the_core_refuses_a_taken_id_and_drops(tmp_path: Path, pool: SharedPool) -> None:
    async def test(service: WorkerService, core: Core) -> None:
        def refuse(event: WorkerAttached) -> None:
            service.send(event.id, worker.Rejected(event.frame.req, "engine_id_taken", "held by process 1"))
            service.drop(event.id)

        core.on_attach = refuse
        raw = Raw(service.path)
        raw.attach(pool)
        assert (await raw.refusal()).code == "engine_id_taken"
        await until(lambda: core.of(WorkerGone))
        assert service.open_fds == 0, "nobody asked for its descriptors, so they are closed"

    run(tmp_path, test)


# bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (framed(b"\xc1garbage"), "bad_frame"),
        (framed(b""), "bad_frame"),
        (framed(msgspec.msgpack.encode({"type": "Attach"})), "bad_frame"),
        (framed(msgspec.msgpack.encode({"type": "Teleport", "req": 1})), "bad_frame"),
        (framed(msgspec.msgpack.encode({"type": "Attach", "version": 2, "new": []})), "wrong_version"),
        (framed(b"\x91" * 5000), "bad_frame"),
        (struct.pack("<I", 2**32 - 1), "frame_too_large"),
        (b"GET / HTTP/1.1\r\n\r\n", "frame_too_large"),
        (worker.encode(worker.Open(9, "r", 0)), "not_attached"),
        (worker.encode(worker.Ping()), "not_attached"),
    ],
)
def test_garbage_first(tmp_path: Path, pool: SharedPool, sent: bytes, code: str) -> None:
    async def test(service: WorkerService, core: Core) -> None:
        raw = Raw(service.path)
        raw.put(sent)
        refusal = await raw.refusal()
        assert refusal.code == code and refusal.detail
        assert refusal.req == (9 if b"Open" in sent else 0)
        await still_serves(service, pool)

    core = run(tmp_path, test)
    assert [c for c, _ in core.refused] == [code]


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (framed(b"\xc1garbage"), "bad_frame"),
        (framed(msgspec.msgpack.encode({"type": "Ok", "req": 1})), "bad_frame"),
        (framed(msgspec.msgpack.encode({"type": "Open", "req": 1, "room": 5, "epoch": 0})), "bad_frame"),
        (struct.pack("<I", worker.MAX_WORKER_FRAME + 1), "frame_too_large"),
    ],
)
def test_garbage_later(tmp_path: Path, pool: SharedPool, sent: bytes, code: str) -> None:
    async def test(service: WorkerService, core: Core) -> None:
        other = Raw(service.path)
        other.attach(pool, "other")
        await other.frame()
        raw = Raw(service.path)
        raw.attach(pool)
        assert isinstance(await raw.frame(), worker.Attached)
        raw.put(worker.encode(worker.Open(2, "r", 0)) + sent + worker.encode(worker.Open(3, "never taken", 0)))
        assert (await raw.refusal()).code == code
        await until(lambda: core.of(WorkerGone))
        assert code in core.of(WorkerGone)[0].detail
        other.put(worker.encode(worker.Ping()))
        assert await other.frame() == worker.Ok(0)

    core = run(tmp_path, test)
    assert [e.frame.room for e in core.of(WorkerSaid) if isinstance(e.frame, worker.Open)] == ["r"]


def test_a_second_attach_is_refused_and_changes_nothing(tmp_path: Path, pool: SharedPool) -> None:
    async def test(service: WorkerService, core: Core) -> None:
        raw = Raw(service.path)
        raw.attach(pool)
        raw.attach(pool, "another", req=5)
        raw.put(worker.encode(worker.Ping()))
        _, refusal, pong = await raw.frames(3)
        assert isinstance(refusal, worker.Rejected) and (refusal.code, refusal.req) == ("already_attached", 5)
        assert pong == worker.Ok(0)
        assert service.open_fds == 1

    run(tmp_path, test)


def test_a_torn_frame(tmp_path: Path, pool: SharedPool) -> None:
    async def test(service: WorkerService, core: Core) -> None:
        raw = Raw(service.path)
        raw.attach(pool)
        await raw.frame()
        raw.put(worker.encode(worker.Open(2, "r", 0))[:-3])
        raw.socket.shutdown(socket.SHUT_WR)
        assert "middle of a frame" in (await raw.refusal()).detail

    assert [c for c, _ in run(tmp_path, test).refused] == ["bad_frame"]


def plane(pool: SharedPool, **change: int) -> dict[str, Any]:
    """The pools of an attach with one field of plane 1 changed."""
    at = pool.at()
    changed = msgspec.structs.replace(at.planes[1], **change)
    return {"pools": (msgspec.structs.replace(at, planes=(at.planes[0], changed)),)}


def spec(pool: SharedPool, **change: Any) -> dict[str, Any]:
    at = pool.at()
    return {"pools": (msgspec.structs.replace(at, spec=msgspec.structs.replace(at.spec, **change)),)}


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (lambda p: {"version": 2}, "wrong_version", "expected 1"),
        (lambda p: {"engine_id": ""}, "bad_engine_id", "''"),
        (lambda p: {"engine_id": "x" * 129}, "bad_engine_id", "xxx"),
        (lambda p: {"engine_id": "a\nb"}, "bad_engine_id", "a"),
        (lambda p: {"fd_bytes": (1, 2)}, "bad_layout", "sizes of 2 descriptors, 1 came"),
        (lambda p: {"fd_bytes": (p.fd_bytes[0] + 1,)}, "bad_layout", r"fd_bytes\[0\]"),
        (lambda p: {"fd_bytes": (0,)}, "bad_layout", r"fd_bytes\[0\]"),
        (lambda p: {"fd_bytes": (-1,)}, "bad_layout", r"fd_bytes\[0\]"),
        (lambda p: {"pools": ()}, "bad_layout", "pools: 0"),
        (lambda p: {"pools": (p.at(), p.at())}, "bad_layout", "different ones"),
        (lambda p: plane(p, fd=1), "bad_layout", "plane 1: fd is 1, expected 0 … 0"),
        (lambda p: plane(p, fd=-1), "bad_layout", "plane 1: fd is -1"),
        (lambda p: plane(p, offset=-4), "bad_layout", "plane 1: offset is -4"),
        (lambda p: plane(p, offset=2**40), "bad_layout", "plane 1: its 8 pages reach to byte"),
        (lambda p: plane(p, stride=127), "bad_layout", r"plane 1: stride is 127, expected at least page_bytes \(128\)"),
        (lambda p: plane(p, stride=2**40), "bad_layout", "plane 1: its 8 pages"),
        (lambda p: spec(p, planes=3), "bad_layout", "2 planes are placed, its layout has 3"),
        (lambda p: spec(p, page_bytes=0), "bad_layout", "page_bytes is 0"),
        (lambda p: spec(p, page_tokens=-1), "bad_layout", "page_tokens is -1"),
        (lambda p: spec(p, name=""), "bad_layout", "1 to 64 characters"),
        (lambda p: {"pools": (msgspec.structs.replace(p.at(), num_pages=0),)}, "bad_layout", "num_pages is 0"),
        (lambda p: {"pools": (msgspec.structs.replace(p.at(), num_pages=2**31),)}, "bad_layout", "num_pages"),
    ],
)
def test_an_attach_that_is_not_what_it_says(
    tmp_path: Path, pool: SharedPool, change: Callable[[SharedPool], dict[str, Any]], code: str, said: str
) -> None:
    async def test(service: WorkerService, core: Core) -> None:
        raw = Raw(service.path)
        raw.attach(pool, **change(pool))
        refusal = await raw.refusal()
        assert (refusal.code, refusal.req) == (code, 1)
        with pytest.raises(AssertionError, match=said):  # its text, by pytest's own matching
            raise AssertionError(refusal.detail)
        assert core.events == [] and service.open_fds == 0
        await still_serves(service, pool)

    run(tmp_path, test)


def test_memory_that_could_hurt_the_engine_is_refused(tmp_path: Path, pool: SharedPool) -> None:
    size = pool.fd_bytes[0]
    unsealed = os.memfd_create("a", os.MFD_ALLOW_SEALING)
    os.posix_fallocate(unsealed, 0, size)
    sparse = os.memfd_create("b", os.MFD_ALLOW_SEALING)
    os.ftruncate(sparse, size)
    fcntl.fcntl(sparse, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    readonly = os.open(f"/proc/self/fd/{pool.fds[0]}", os.O_RDONLY)
    read_end, write_end = os.pipe()

    async def test(service: WorkerService, core: Core) -> None:
        for fd, said in (
            (unsealed, "F_SEAL_SHRINK"), (sparse, "reserved 0"), (readonly, "not open for"), (read_end, "no memory")
        ):  # fmt: skip
            raw = Raw(service.path)
            raw.put(worker.encode(attach_frame(pool)), (fd,))
            refusal = await raw.refusal()
            assert refusal.code == "bad_layout" and said in refusal.detail, refusal
        raw = Raw(service.path)
        raw.put(worker.encode(attach_frame(pool)))
        assert "0 came with the frame" in (await raw.refusal()).detail
        await still_serves(service, pool)

    before = len(os.listdir("/proc/self/fd"))
    run(tmp_path, test)
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    for fd in (unsealed, sparse, readonly, read_end, write_end):
        os.close(fd)


def test_descriptors_passed_without_end_are_closed(tmp_path: Path, pool: SharedPool) -> None:
    async def test(service: WorkerService, core: Core) -> None:
        before = len(os.listdir("/proc/self/fd"))
        raw = Raw(service.path)
        raw.put(b"\xff", pool.fds * 200)
        await asyncio.sleep(0.02)
        with contextlib.suppress(BrokenPipeError):
            raw.put(b"\x00", pool.fds * 200)
        assert (await raw.refusal()).code == "bad_layout"
        await until(lambda: not service.connections)
        raw.socket.close()
        assert len(os.listdir("/proc/self/fd")) == before
        again = Raw(service.path)
        again.attach(pool)
        await again.frame()
        again.put(worker.encode(worker.Ping()), pool.fds * 50)  # after the attach the kernel drops them
        assert await again.frame() == worker.Ok(0)
        again.socket.close()
        await until(lambda: core.of(WorkerGone))
        service.forget(core.of(WorkerGone)[0].id)
        await until(lambda: len(os.listdir("/proc/self/fd")) == before)

    run(tmp_path, test)


# time, memory, load --------------------------------------------------------------------------------------------------


def test_half_open_connections_time_out(tmp_path: Path, pool: SharedPool) -> None:
    async def test(service: WorkerService, core: Core) -> None:
        silent, slow = Raw(service.path), Raw(service.path)
        slow.put(worker.encode(attach_frame(pool))[:20], pool.fds)
        assert (await silent.refusal()).code == "attach_timeout"
        assert (await slow.refusal()).code == "attach_timeout"
        await until(lambda: service.connections == 0)

    run(tmp_path, test, attach_timeout=0.1)


def test_attached_connections_do_not_time_out(tmp_path: Path, pool: SharedPool) -> None:
    async def test(service: WorkerService, core: Core) -> None:
        raw = Raw(service.path)
        raw.attach(pool)
        await raw.frame()
        await asyncio.sleep(0.2)
        assert service.connections == 1

    run(tmp_path, test, attach_timeout=0.1)


def test_a_crowd_that_never_attaches_does_not_keep_a_worker_out(tmp_path: Path, pool: SharedPool) -> None:
    async def test(service: WorkerService, core: Core) -> None:
        crowd = [Raw(service.path) for _ in range(40)]
        await asyncio.sleep(0.02)
        await still_serves(service, pool)
        assert (await crowd[0].refusal()).code == "overloaded"

    run(tmp_path, test, max_half_open=8)


def test_too_many_connections(tmp_path: Path, pool: SharedPool) -> None:
    async def test(service: WorkerService, core: Core) -> None:
        held = [Raw(service.path) for _ in range(3)]
        for i, raw in enumerate(held):
            raw.attach(pool, f"w{i}")
            await raw.frame()
        refusal = await Raw(service.path).refusal()
        assert refusal.code == "overloaded" and "3 connections" in refusal.detail
        held[0].socket.close()
        await until(lambda: core.of(WorkerGone))
        await still_serves(service, pool)

    run(tmp_path, test, max_connections=3)


def test_another_user_is_a_stranger(tmp_path: Path, pool: SharedPool) -> None:
    async def test(service: WorkerService, core: Core) -> None:
        assert os.stat(service.path).st_mode & 0o777 == 0o600
        service._uids = frozenset((12345,))  # as if this process were another user's
        refusal = await Raw(service.path).refusal()
        assert refusal.code == "stranger" and f"user {os.geteuid()}" in refusal.detail

    run(tmp_path, test)


def test_users_that_may_attach_can_knock(tmp_path: Path, pool: SharedPool) -> None:
    async def test(service: WorkerService, core: Core) -> None:
        assert os.stat(service.path).st_mode & 0o777 == 0o666
        await still_serves(service, pool)

    run(tmp_path, test, users=(12345,))


def test_a_worker_that_does_not_read_is_dropped(tmp_path: Path, pool: SharedPool) -> None:
    async def test(service: WorkerService, core: Core) -> None:
        raw, other = Raw(service.path), Raw(service.path)
        raw.attach(pool)
        other.attach(pool, "other")
        await other.frame()
        await until(lambda: len(core.of(WorkerAttached)) == 2)
        id = core.of(WorkerAttached)[0].id
        frame = worker.RoomEnded("r", 0, False, "DONE", "done", False, "", 1, 0.1, bytes(1 << 16))
        inside = len(core.events)
        for _ in range(100):
            service.send(id, frame)
        assert len(core.events) == inside, "no event from within send"
        await until(lambda: core.of(WorkerGone))
        assert "too_slow" in core.of(WorkerGone)[0].detail
        service.send(id, frame)  # of a worker that is gone: nothing
        other.put(worker.encode(worker.Ping()))
        assert await other.frame() == worker.Ok(0)

    assert [c for c, _ in run(tmp_path, test, max_buffer=1 << 20).refused] == ["too_slow"]


def test_what_was_sent_before_a_drop_arrives(tmp_path: Path, pool: SharedPool) -> None:
    async def test(service: WorkerService, core: Core) -> None:
        raw = Raw(service.path)
        raw.attach(pool)
        await raw.frame()
        id = core.of(WorkerAttached)[0].id
        frame = worker.RoomEnded("r", 0, False, "DONE", "done", False, "", 1, 0.1, bytes(1 << 16))
        for _ in range(40):
            service.send(id, frame)
        service.drop(id)
        service.send(id, worker.Ok(1))
        assert await raw.frames(40) == [frame] * 40
        assert await raw.frame() is None

    run(tmp_path, test)


def test_a_flood_does_not_starve_the_others(tmp_path: Path, pool: SharedPool) -> None:
    async def test(service: WorkerService, core: Core) -> None:
        flood, other = Raw(service.path), Raw(service.path)
        flood.attach(pool, "flood")
        other.attach(pool, "other")
        await flood.frame()
        await other.frame()
        ids = {e.frame.engine_id: e.id for e in core.of(WorkerAttached)}
        many = b"".join(worker.encode(worker.Abort(i, f"r{i}", 0, "")) for i in range(1000))
        sent = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                sent += flood.socket.send(many)
        other.put(worker.encode(worker.Open(1, "mine", 0)))
        before = len(core.events)
        await until(lambda: any(e.id == ids["other"] for e in core.of(WorkerSaid)))
        ahead = [e.id for e in core.events[before:] if isinstance(e, WorkerSaid)].index(ids["other"])
        assert ahead <= 4 * workerlink.FRAMES, f"{ahead} frames of the flood came first"

    run(tmp_path, test)


def test_out_of_descriptors_pauses_and_recovers(tmp_path: Path, pool: SharedPool) -> None:
    async def test(service: WorkerService, core: Core) -> None:
        raw = Raw(service.path)
        raw.attach(pool)
        await raw.frame()
        waiting = [Raw(service.path) for _ in range(3)]
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        top = max(int(fd) for fd in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (top + 1, limits[1]))
        spare: list[int] = []
        try:
            with contextlib.suppress(OSError):
                while True:
                    spare.append(os.open("/dev/null", os.O_RDONLY))
            await until(lambda: service.accept_pauses)
            raw.put(worker.encode(worker.Ping()))
            assert await raw.frame() == worker.Ok(0), "those who are in go on"
            await asyncio.sleep(0.1)
            assert service.accept_pauses == 1, "it does not spin"
        finally:
            for fd in spare:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for i, late in enumerate(waiting):
            late.attach(pool, f"late{i}")
            assert isinstance(await late.frame(), worker.Attached)

    assert {c for c, _ in run(tmp_path, test).refused} == {"overloaded"}


def test_an_accept_that_fails_costs_one_connection(
    tmp_path: Path, pool: SharedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(service: WorkerService, core: Core) -> None:
        real = service._welcome
        calls: list[int] = []

        def first_fails(connection: socket.socket) -> None:
            calls.append(1)
            if len(calls) == 1:
                raise OSError(errno.ENOTCONN, "gone already")
            real(connection)

        monkeypatch.setattr(service, "_welcome", first_fails)
        assert await Raw(service.path).frame() is None
        await still_serves(service, pool)

    run(tmp_path, test)


def test_a_defect_in_the_core_costs_one_worker(tmp_path: Path, pool: SharedPool) -> None:
    async def test(service: WorkerService, core: Core) -> None:
        def fail(said: WorkerSaid) -> None:
            raise RuntimeError("a defect")

        raw, other = Raw(service.path), Raw(service.path)
        raw.attach(pool)
        other.attach(pool, "other")
        await raw.frame()
        await other.frame()
        core.on_said = fail
        raw.put(worker.encode(worker.Open(1, "r", 0)))
        assert (await raw.refusal()).code == "internal"
        core.on_said = lambda said: None
        other.put(worker.encode(worker.Ping()))
        assert await other.frame() == worker.Ok(0)

    assert [c for c, _ in run(tmp_path, test).refused] == ["internal"]


# the path ------------------------------------------------------------------------------------------------------------


def test_the_socket_is_private_and_goes_with_the_service(tmp_path: Path) -> None:
    async def test(service: WorkerService, core: Core) -> None:
        found = os.stat(service.path)
        assert stat.S_IMODE(found.st_mode) == 0o600 and stat.S_ISSOCK(found.st_mode)

    run(tmp_path, test)
    assert not (tmp_path / "w.sock").exists()


def test_a_stale_socket_is_replaced_and_a_live_one_is_not(tmp_path: Path, pool: SharedPool) -> None:
    path = tmp_path / "w.sock"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()

    async def test(service: WorkerService, core: Core) -> None:
        with pytest.raises(SocketInUse, match="live process"):
            await WorkerService(service.path, core.deliver).start()
        await still_serves(service, pool)

    run(tmp_path, test)
    alien = socket.socket(socket.AF_UNIX)
    alien.bind(str(path))
    alien.listen()
    with pytest.raises(SocketInUse):
        asyncio.run(WorkerService(str(path), Core().deliver).start())
    alien.close()


def test_other_files_are_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "w.sock"
    path.write_text("precious")
    with pytest.raises(OSError, match="not a socket"):
        asyncio.run(WorkerService(str(path), Core().deliver).start())
    assert path.read_text() == "precious"


def test_a_path_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="at most 107 bytes"):
        asyncio.run(WorkerService(str(tmp_path / ("x" * 120)), Core().deliver).start())


def test_close_with_workers_attached(tmp_path: Path, pool: SharedPool) -> None:
    async def test(service: WorkerService, core: Core) -> None:
        raw = Raw(service.path)
        raw.attach(pool)
        await raw.frame()
        await service.close()
        assert await raw.frame() is None

    run(tmp_path, test)
    assert not pool.held()


def test_mutated_frames_never_get_past_their_connection(tmp_path: Path, pool: SharedPool) -> None:
    random = Random(7)

    async def test(service: WorkerService, core: Core) -> None:
        core.on_said = lambda said: service.send(said.id, worker.Ok(getattr(said.frame, "req", 0)))
        for round in range(150):
            good = worker.encode(attach_frame(pool, f"w{round}"))
            good += worker.encode(worker.Push(2, "r", 0, (0,), 0, 0, (b"\x01\x00\x00\x00",)))
            good += worker.encode(worker.Receive(3, "r", 0, "p", 0, (b"\x01\x00\x00\x00",)))
            raw = bytearray(good)
            for _ in range(random.randint(1, 6)):
                raw[random.randrange(len(raw))] = random.randrange(256)
            if random.random() < 0.3:
                del raw[random.randrange(len(raw)) :]
            bad = Raw(service.path)
            with contextlib.suppress(BrokenPipeError):
                bad.put(bytes(raw) or b"\x00", pool.fds * random.choice((0, 1, 1, 1, 2)))
                bad.socket.shutdown(socket.SHUT_WR)
            while await bad.frame() is not None:
                pass
            bad.socket.close()
        await until(lambda: service.connections == 0)
        for event in core.of(WorkerGone):
            service.forget(event.id)
        assert service.open_fds == 0
        await still_serves(service, pool)

    core = run(tmp_path, test)
    assert "internal" not in {code for code, _ in core.refused}
    assert len(core.refused) > 50
