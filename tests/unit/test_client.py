"""Both clients against a scripted sidecar: answers, refusals, loss, return, and each room's one end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import select
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from pdxfer.client import (
    AsyncClient,
    AttachRefused,
    Client,
    Disconnected,
    Ended,
    Event,
    Matched,
    PdxferRefused,
    Reconnected,
    Rejected,
    Released,
    SidecarUnavailable,
    connection,
    link,
)
from pdxfer.core import worker
from pdxfer.core.geometry import page_array
from pdxfer.pools import PoolLayout, SharedPool, memory

PATIENCE = 10.0


class Peer:
    """One accepted connection, blocking, in the sidecar's thread."""

    def __init__(self, accepted: socket.socket) -> None:
        self.socket = accepted
        self.socket.settimeout(PATIENCE)
        self.fds: list[int] = []
        self.buffer = b""
        self.said: list[worker.WorkerFrame] = []

    def read(self, *, pings: bool = False) -> worker.WorkerFrame | None:
        """The next frame but pings, which are answered; None at the end."""
        while True:
            while len(self.buffer) < 4 or len(self.buffer) < 4 + int.from_bytes(self.buffer[:4], "little"):
                raw, fds, _, _ = socket.recv_fds(self.socket, 1 << 16, 32)
                self.fds += fds
                if not raw:
                    return None
                self.buffer += raw
            size = int.from_bytes(self.buffer[:4], "little")
            frame = worker.decode_from_worker(self.buffer[4 : 4 + size])
            self.buffer = self.buffer[4 + size :]
            if isinstance(frame, worker.Ping) and not pings:
                with contextlib.suppress(BrokenPipeError):  # it may have left since
                    self.send(worker.Ok(0))
                continue
            self.said.append(frame)
            return frame

    def send(self, *frames: worker.SidecarFrame) -> None:
        self.socket.sendall(b"".join(map(worker.encode, frames)))

    def attach(self, incarnation: int = 7, stall: float = 10.0) -> worker.Attach:
        frame = self.read()
        assert isinstance(frame, worker.Attach), frame
        self.send(worker.Attached(frame.req, 1, "n", incarnation, stall))
        return frame

    def serve(self, answer: Callable[[Peer, Any], None] | None = None) -> None:
        """Take everything until the worker leaves; ``answer`` may say more than Ok."""
        with contextlib.suppress(OSError):
            while (frame := self.read()) is not None:
                if answer is None:
                    self.send(worker.Ok(getattr(frame, "req", 0)))
                else:
                    answer(self, frame)


class Sidecar:
    """Runs one script per connection, one after the other, in a thread. A script that fails fails the test."""

    def __init__(self, path: Path, *scripts: Callable[[Peer], None]) -> None:
        self.path = str(path)
        self.scripts = list(scripts)
        self.peers: list[Peer] = []
        self.failed: BaseException | None = None
        self.listener = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        self.listener.bind(self.path)
        self.listener.listen()
        self.listener.settimeout(PATIENCE)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            for script in self.scripts:
                accepted, _ = self.listener.accept()
                peer = Peer(accepted)
                self.peers.append(peer)
                try:
                    script(peer)
                finally:
                    peer.socket.close()
                    for fd in peer.fds:
                        os.close(fd)
        except BaseException as error:  # noqa: BLE001 - raised again where the test is
            self.failed = error
        finally:
            self.listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.thread.join(PATIENCE)
        if kind is None:
            if self.failed is not None:
                raise self.failed
            assert not self.thread.is_alive(), "the sidecar's script has not ended"


@pytest.fixture
def pool() -> Iterator[SharedPool]:
    with SharedPool.allocate(PoolLayout("kv", "float32", (4, 8), 4, planes=4, planes_per_layer=2), 16) as made:
        yield made


def ended(
    room: str, sending: bool = True, reason: str = "done", state: str = "DONE", aux: bytes = b""
) -> worker.RoomEnded:
    return worker.RoomEnded(room, 0, sending, state, reason, False, "", 10, 0.5, aux)


def answer(peer: Peer, frame: Any) -> None:
    """A sidecar that takes everything; what is finished or received is done at once."""
    peer.send(worker.Ok(frame.req))
    match frame:
        case worker.Open():
            peer.send(worker.Matched(frame.room, 0, True))
        case worker.Push():
            peer.send(worker.Released(frame.req, frame.room, 0))
        case worker.Finish():
            peer.send(ended(frame.room))
        case worker.Receive():
            peer.send(worker.Matched(frame.room, 0, False), ended(frame.room, False, aux=b"first token"))
        case worker.Abort():
            peer.send(ended(frame.room, True, "aborted", "ABORTED"), ended(frame.room, False, "aborted", "ABORTED"))


def normal(peer: Peer) -> None:
    peer.attach()
    peer.serve(answer)


def wait_for(client: Client, kind: type, count: int = 1) -> list[Event]:
    """Poll until so many events of a kind have come; returns all events."""
    events: list[Event] = []
    end = time.monotonic() + PATIENCE
    while sum(isinstance(e, kind) for e in events) < count:
        assert time.monotonic() < end, f"waited for {count} × {kind.__name__}, got {events}"
        events += client.poll(0.1)
    return events


# sync ----------------------------------------------------------------------------------------------------------------


def test_a_send_and_a_receive(tmp_path: Path, pool: SharedPool) -> None:
    with Sidecar(tmp_path / "s", normal) as sidecar, Client(sidecar.path, "w", "both", [pool]) as client:
        assert (client.node, client.incarnation, client.connected, client.problem) == ("n", 7, True, "")
        send = client.open("r")
        first = send.push([1, 2])
        second = send.push([3], layers=None)
        send.finish(b"aux")
        events = wait_for(client, Ended)
        assert [type(e) for e in events] == [Matched, Released, Released, Ended]
        assert [e.push for e in events if isinstance(e, Released)] == [first, second]
        end = events[-1].end  # type: ignore[union-attr]
        assert (end.room, end.sending, end.state, end.reason, end.bytes, end.age, end.done) == (
            "r", True, "DONE", "done", 10, 0.5, True
        )  # fmt: skip
        assert send.end is end and send.matched
        receive = client.receive("r", "elsewhere", [5, 6], source_incarnation=3)
        events = wait_for(client, Ended)
        assert receive.end is not None and receive.end.aux == b"first token"
    attach, _, push, push2, finish, received = sidecar.peers[0].said
    assert isinstance(attach, worker.Attach) and attach.pools == (pool.at(),) and attach.fd_bytes == pool.fd_bytes
    assert isinstance(push, worker.Push) and page_array(push.pages[0]).tolist() == [1, 2] and push.page0 == (0,)
    assert isinstance(push2, worker.Push) and push2.page0 == (2,)
    assert isinstance(finish, worker.Finish) and finish.aux == b"aux"
    assert isinstance(received, worker.Receive)
    assert (received.source, received.source_incarnation, page_array(received.pages[0]).tolist()) == (
        "elsewhere",
        3,
        [5, 6],
    )


def test_several_pools_have_descriptors_of_their_own(tmp_path: Path, pool: SharedPool) -> None:
    inodes: list[int] = []

    def script(peer: Peer) -> None:
        peer.attach()
        inodes.extend(os.fstat(fd).st_ino for fd in peer.fds)
        peer.serve()

    with SharedPool.allocate(PoolLayout("index", "bfloat16", (4, 8), 4, planes=2), 8) as other:
        with Sidecar(tmp_path / "s", script) as sidecar:
            Client(sidecar.path, "w", "both", [pool, other]).close()
        assert inodes == [os.fstat(p.fds[0]).st_ino for p in (pool, other)]
        (attach,) = sidecar.peers[0].said
        assert isinstance(attach, worker.Attach) and [p.planes[0].fd for p in attach.pools] == [0, 1]


def test_no_sidecar(tmp_path: Path, pool: SharedPool) -> None:
    path = str(tmp_path / "s")
    with pytest.raises(SidecarUnavailable, match=r"no such socket; start it with `pdxfer serve`"):
        Client(path, "w", "both", [pool])
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(path)
    stale.close()
    with pytest.raises(SidecarUnavailable, match="nobody listens there"):
        Client(path, "w", "both", [pool])
    started = time.monotonic()
    with pytest.raises(SidecarUnavailable):
        Client(path, "w", "both", [pool], timeout=0.3, wait=True)
    assert 0.25 < time.monotonic() - started < 2


def test_wait_for_a_sidecar_that_comes_later(tmp_path: Path, pool: SharedPool) -> None:
    sidecars: list[Sidecar] = []
    timer = threading.Timer(0.2, lambda: sidecars.append(Sidecar(tmp_path / "s", normal)))
    timer.start()
    with Client(str(tmp_path / "s"), "w", "both", [pool], wait=True) as client:
        assert client.connected
        assert client.poll() == [], "the first attach is no Reconnected"
    timer.join()
    with sidecars[0]:
        pass


def test_attach_refused(tmp_path: Path, pool: SharedPool) -> None:
    def script(peer: Peer) -> None:
        frame = peer.read()
        peer.send(worker.Rejected(frame.req, "engine_id_taken", "held by process 1"))  # type: ignore[union-attr]

    with Sidecar(tmp_path / "s", script) as sidecar, pytest.raises(AttachRefused, match="held by process 1") as caught:
        Client(sidecar.path, "w", "both", [pool])
    assert caught.value.code == "engine_id_taken"


@pytest.mark.parametrize(
    ("engine_id", "count", "code"), [("", 1, "bad_engine_id"), ("w", 0, "bad_layout"), ("w", 2, "bad_layout")]
)
def test_an_attach_that_cannot_be_right_is_not_sent(
    tmp_path: Path, pool: SharedPool, engine_id: str, count: int, code: str
) -> None:
    with pytest.raises(AttachRefused) as caught:
        Client(str(tmp_path / "none"), engine_id, "both", [pool] * count)
    assert caught.value.code == code


def test_a_sidecar_that_says_nothing_at_attach(tmp_path: Path, pool: SharedPool) -> None:
    silent = Sidecar(tmp_path / "s", lambda peer: peer.serve(lambda p, f: None))
    with silent, pytest.raises(SidecarUnavailable, match=r"did not answer within 0\.3 s"):
        Client(silent.path, "w", "both", [pool], timeout=0.3)


def test_refusals_are_events(tmp_path: Path, pool: SharedPool) -> None:
    def script(peer: Peer) -> None:
        peer.attach()

        def refuse(peer: Peer, frame: Any) -> None:
            if isinstance(frame, worker.Open) and frame.room == "good":
                peer.send(worker.Ok(frame.req))
            else:
                peer.send(worker.Rejected(frame.req, "room_reused", f"about {frame.room}"))

        peer.serve(refuse)

    with Sidecar(tmp_path / "s", script) as sidecar, Client(sidecar.path, "w", "both", [pool]) as client:
        bad = client.open("bad")
        good = client.open("good")
        number = good.push([1])
        client.receive("bad", "p", [1])
        client.abort("bad")
        events = wait_for(client, Rejected, 4)
        assert [(e.request, e.room, e.code) for e in events if isinstance(e, Rejected)] == [
            ("open", "bad", "room_reused"), ("push", "good", "room_reused"), ("receive", "bad", "room_reused"),
            ("abort", "bad", "room_reused"),
        ]  # fmt: skip
        assert isinstance(events[1], Rejected) and events[1].number == number and events[1].detail == "about good"
        with pytest.raises(PdxferRefused, match="its open was refused") as caught:
            bad.push([1])
        assert caught.value.code == "unknown_room"
        client.open("bad")  # a refused open left nothing behind here


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda c: c.open(""), "bad_room_id"),
        (lambda c: c.open("x" * 129), "bad_room_id"),
        (lambda c: c.open("r", epoch=-1), "bad_room_id"),
        (lambda c: (c.open("r"), c.open("r")), "room_exists"),
        (lambda c: (c.receive("r", "p", [1]), c.receive("r", "p", [2])), "room_exists"),
        (lambda c: c.receive("r", "", [1]), "bad_engine_id"),
        (lambda c: c.receive("r", "p", [99]), "pages_out_of_range"),
        (lambda c: c.receive("r", "p", {"x": []}), "pools_unequal"),
        (lambda c: c.open("r").push([1], layers=(0, 9)), "planes_out_of_range"),
        (lambda c: c.open("r").finish(bytes(65537)), "aux_too_large"),
        (lambda c: c.abort("\n"), "bad_room_id"),
    ],
)
def test_requests_that_cannot_be_right_are_raised_where_they_are_made(
    tmp_path: Path, pool: SharedPool, call: Callable[[Client], object], code: str
) -> None:
    with Sidecar(tmp_path / "s", normal) as sidecar, Client(sidecar.path, "w", "both", [pool]) as client:
        with pytest.raises(PdxferRefused) as caught:
            call(client)
        assert caught.value.code == code


def test_late_repeated_and_unknown_frames_mean_nothing(tmp_path: Path, pool: SharedPool) -> None:
    def script(peer: Peer) -> None:
        peer.attach()
        opened = peer.read()
        assert isinstance(opened, worker.Open)
        peer.send(
            worker.Ok(opened.req), worker.Ok(opened.req), worker.Ok(999), worker.Rejected(998, "bad_frame", ""),
            worker.Matched("r", 0, True), worker.Matched("r", 0, True), worker.Matched("other", 0, True),
            worker.Released(777, "r", 0), worker.Released(1, "other", 0), worker.Attached(5, 1, "evil", 9, 1.0),
            ended("r", False), ended("r"), ended("r"), worker.Matched("r", 0, True), ended("other"),
        )  # fmt: skip
        peer.serve()

    with Sidecar(tmp_path / "s", script) as sidecar, Client(sidecar.path, "w", "both", [pool]) as client:
        client.open("r")
        events = wait_for(client, Ended)
        events += client.poll(0.1)
        assert [type(e) for e in events] == [Matched, Ended]
        assert client.node == "n" and client._link.rooms.ignored >= 9


def test_pings_go_out_while_polled(tmp_path: Path, pool: SharedPool) -> None:
    at: list[float] = []

    def script(peer: Peer) -> None:
        peer.attach()
        with contextlib.suppress(BrokenPipeError):
            while peer.read(pings=True) is not None:
                at.append(time.monotonic())
                peer.send(worker.Ok(0))

    with Sidecar(tmp_path / "s", script) as sidecar, Client(sidecar.path, "w", "both", [pool]) as client:
        end = time.monotonic() + 1.3
        while time.monotonic() < end:
            client.poll(0.05)
    assert len(at) >= 3 and max(b - a for a, b in itertools.pairwise(at)) < 0.9


def test_fileno_is_for_epoll_and_stays_the_same(tmp_path: Path, pool: SharedPool) -> None:
    go = threading.Event()

    def later(peer: Peer) -> None:
        peer.attach()
        assert isinstance(peer.read(), worker.Open)
        go.wait(PATIENCE)
        peer.send(ended("r"))
        peer.read()

    with Sidecar(tmp_path / "s", later) as sidecar, Client(sidecar.path, "w", "both", [pool]) as client:
        client.open("r")
        client.poll()
        before = client.fileno()
        assert select.select([client], [], [], 0.05)[0] == []
        go.set()
        assert select.select([client], [], [], PATIENCE)[0] == [client]
        assert isinstance(client.poll()[0], Ended) and client.fileno() == before


# loss and return -----------------------------------------------------------------------------------------------------


def test_every_room_ends_once_and_the_client_comes_back(tmp_path: Path, pool: SharedPool) -> None:
    die = threading.Event()

    def first(peer: Peer) -> None:
        peer.attach()
        for _ in range(4):
            peer.read()
        peer.send(ended("done before"))
        die.wait(PATIENCE)

    def refuses(peer: Peer) -> None:
        frame = peer.read()
        peer.send(worker.Rejected(frame.req, "draining", "not yet"))  # type: ignore[union-attr]

    def second(peer: Peer) -> None:
        peer.attach(incarnation=8)
        peer.serve(answer)

    sidecar = Sidecar(tmp_path / "s", first, refuses, second)
    with sidecar, Client(sidecar.path, "w", "both", [pool]) as client:
        client.open("done before")
        send = client.open("open")
        send.push([1, 2])
        client.receive("open", "p", [3])
        assert [e.room for e in wait_for(client, Ended)] == ["done before"]  # type: ignore[union-attr]
        die.set()
        events = wait_for(client, Ended, 2)
        assert isinstance(events[0], Disconnected) and "closed the connection" in events[0].detail
        ends = [e.end for e in events if isinstance(e, Ended)]
        assert {(e.room, e.sending) for e in ends} == {("open", True), ("open", False)}
        assert {(e.state, e.reason, e.retriable, e.epoch) for e in ends} == {("FAILED", "sidecar_lost", True, 0)}
        assert all("node n" in e.detail for e in ends)
        if not client.connected:
            for call in (
                lambda: client.open("x"),
                lambda: client.receive("x", "p", [1]),
                lambda: client.abort("x"),
            ):
                with pytest.raises(SidecarUnavailable):
                    call()
        with pytest.raises(PdxferRefused, match="it has ended: sidecar_lost"):
            send.push([1])
        send.abort()  # of what has ended: nothing
        events += wait_for(client, Reconnected)
        assert (client.incarnation, client.connected, client.problem) == (8, True, "")
        again = client.open("open", epoch=1)
        again.finish()
        client.open("x").finish()
        events += wait_for(client, Ended)
        names = [(e.end.room, e.end.epoch, e.end.sending) for e in events if isinstance(e, Ended)]
        assert len(names) == len(set(names))
    assert sidecar.peers[2].said[0].pools == (pool.at(),)  # type: ignore[union-attr]


def test_no_page_comes_home_while_a_dying_engine_holds_it(tmp_path: Path, pool: SharedPool) -> None:
    """The sidecar's connection closes first, its engine dies a moment later: until then no room ends."""
    held: list[int] = []

    def script(peer: Peer) -> None:
        peer.attach()
        peer.read()
        held.append(memory.hold(peer.fds[0]))

    with Sidecar(tmp_path / "s", script) as sidecar, Client(sidecar.path, "w", "both", [pool]) as client:
        client.receive("r", "p", [1])
        assert isinstance(wait_for(client, Disconnected)[0], Disconnected)
        assert not any(isinstance(e, Ended) for e in client.poll(0.3))
        with pytest.raises(SidecarUnavailable):
            client.open("x")
        client.abort("r")  # it is ending already
        os.close(held[0])
        (event,) = wait_for(client, Ended)
        assert isinstance(event, Ended) and event.end.pages_safe


def test_but_a_room_ends_even_if_the_engine_never_lets_go(
    tmp_path: Path, pool: SharedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "HOLD_LIMIT", 0.2)
    held: list[int] = []

    def script(peer: Peer) -> None:
        peer.attach()
        peer.read()
        held.append(memory.hold(peer.fds[0]))

    with (
        Sidecar(tmp_path / "s", script, normal) as sidecar,
        Client(sidecar.path, "w", "both", [pool]) as client,
    ):
        client.receive("r", "p", [1])
        event = wait_for(client, Ended)[-1]
        assert isinstance(event, Ended) and not event.end.pages_safe
        assert "its engine still has pools ['kv'] mapped" in event.end.detail
        assert client.poll(0.3) == [] and not client.connected, "it stays away while the pages are in doubt"
        assert "frozen" in client.problem
        os.close(held[0])
        wait_for(client, Reconnected)
        client.receive("r", "p", [1], epoch=1)
    assert event.end.reason == "sidecar_lost"


def test_a_stopped_sidecar_is_noticed(tmp_path: Path, pool: SharedPool) -> None:
    leave = threading.Event()

    def stopped(peer: Peer) -> None:
        peer.attach(stall=0.4)
        leave.wait(PATIENCE)

    with Sidecar(tmp_path / "s", stopped) as sidecar, Client(sidecar.path, "w", "both", [pool]) as client:
        client.open("r")
        started = time.monotonic()
        events = wait_for(client, Ended)
        assert 0.3 < time.monotonic() - started < 3
        assert isinstance(events[0], Disconnected) and "stopped or stuck" in events[0].detail
        leave.set()


def test_a_client_that_was_itself_stopped_does_not_blame_the_sidecar(tmp_path: Path, pool: SharedPool) -> None:
    def script(peer: Peer) -> None:
        peer.attach(stall=0.2)
        peer.serve(answer)

    with Sidecar(tmp_path / "s", script) as sidecar, Client(sidecar.path, "w", "both", [pool]) as client:
        client.poll(0.05)
        time.sleep(0.8)
        assert client.poll(0.1) == [] and client.connected


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"\x03\x00\x00\x00\xc1\xc1\xc1", "a frame that is not understood"),
        (b"\xff\xff\xff\xff", "a frame of 4294967295 bytes"),
        (worker.encode(worker.Ok(1))[:-1], "in the middle of a frame"),
        (worker.encode(worker.Rejected(0, "too_slow", "does not read")), "too_slow: does not read"),
    ],
)
def test_a_sidecar_that_talks_nonsense(tmp_path: Path, pool: SharedPool, raw: bytes, said: str) -> None:
    def script(peer: Peer) -> None:
        peer.attach()
        peer.read()
        peer.socket.sendall(raw)

    with Sidecar(tmp_path / "s", script) as sidecar, Client(sidecar.path, "w", "both", [pool]) as client:
        client.open("r")
        events = wait_for(client, Ended)
        assert isinstance(events[0], Disconnected) and said in events[0].detail


def test_a_sidecar_that_does_not_read(tmp_path: Path, pool: SharedPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_UNSENT", 1 << 20)
    leave = threading.Event()

    def script(peer: Peer) -> None:
        peer.attach()
        leave.wait(PATIENCE)
        peer.serve(answer)

    with Sidecar(tmp_path / "s", script) as sidecar, Client(sidecar.path, "w", "both", [pool]) as client:
        send = client.open("r")
        with pytest.raises(PdxferRefused, match="does not read") as caught:
            for _ in range(100):
                send.finish(bytes(60000))
        assert caught.value.code == "overloaded"
        leave.set()
        wait_for(client, Ended)  # what was queued goes out later
        assert client.connected


def test_the_loss_may_be_met_in_a_request(tmp_path: Path, pool: SharedPool) -> None:
    def script(peer: Peer) -> None:
        peer.attach()
        peer.read()

    with Sidecar(tmp_path / "s", script) as sidecar, Client(sidecar.path, "w", "both", [pool]) as client:
        client.open("r")
        sidecar.thread.join(PATIENCE)
        with pytest.raises(SidecarUnavailable):
            for i in range(3):
                client.open(f"more {i}")
        events = wait_for(client, Ended)
        assert isinstance(events[0], Disconnected)
        assert next(e.end.room for e in events if isinstance(e, Ended)) == "r"


def test_close_leaves_nothing_behind(tmp_path: Path, pool: SharedPool) -> None:
    gc.collect()
    with Sidecar(tmp_path / "s", normal, normal) as sidecar:
        before = len(os.listdir("/proc/self/fd"))
        client = Client(sidecar.path, "w", "both", [pool])
        client.close()
        client.close()
        with pytest.raises(SidecarUnavailable, match="the client is closed"):
            client.open("r")
        Client(sidecar.path, "w", "both", [pool]).close()
    assert len(os.listdir("/proc/self/fd")) == before - 1, "all but the sidecar's listener"
    assert pool.fds, "the pools stay the caller's"


# asyncio -------------------------------------------------------------------------------------------------------------


def arun(sidecar: Sidecar, pool: SharedPool, test: Callable[[AsyncClient], Any], **options: Any) -> list[Event]:
    events: list[Event] = []

    async def main() -> None:
        async with asyncio.timeout(PATIENCE):
            client = await AsyncClient.connect(
                sidecar.path, "w", "both", [pool], on_event=events.append, **options
            )  # fmt: skip
            async with client:
                await test(client)
            assert client._rooms == {} and client._answers == {}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with sidecar:
            asyncio.run(main())
        gc.collect()
    return events


def test_async_send_and_receive(tmp_path: Path, pool: SharedPool) -> None:
    async def test(client: AsyncClient) -> None:
        assert (client.node, client.incarnation, client.connected) == ("n", 7, True)
        send = await client.open("r")
        assert await send.matched()
        number = await send.push([1, 2])
        await send.released(number)
        await send.finish(b"aux")
        end = await send.ended()
        assert end.done and await send.ended() is end and send.end is end
        await send.released(number)
        receive = await client.receive("r", "p", [4])
        assert (await receive.ended()).aux == b"first token"
        assert await receive.matched()
        with pytest.raises(PdxferRefused, match="it has ended: done"):
            await send.push([1])
        ends = await asyncio.gather(*[one(client, f"m{i}") for i in range(50)])
        assert all(e.done for e in ends)

    async def one(client: AsyncClient, room: str) -> Any:
        send = await client.open(room)
        await send.push([1])
        await send.finish()
        return await send.ended()

    events = arun(Sidecar(tmp_path / "s", normal), pool, test)
    assert sum(isinstance(e, Ended) for e in events) == 52


def test_async_refusals_raise(tmp_path: Path, pool: SharedPool) -> None:
    def script(peer: Peer) -> None:
        peer.attach()

        def refuse(peer: Peer, frame: Any) -> None:
            if frame.room == "good" and not isinstance(frame, worker.Push):
                return answer(peer, frame)
            return peer.send(worker.Rejected(frame.req, "pages_not_owned", "page 1 is lent to room z"))

        peer.serve(refuse)

    async def test(client: AsyncClient) -> None:
        for call in (client.open("bad"), client.receive("bad", "p", [1]), client.abort("bad")):
            with pytest.raises(PdxferRefused, match="room bad: pages_not_owned: page 1 is lent to room z") as caught:
                await call
            assert (caught.value.code, caught.value.room) == ("pages_not_owned", "bad")
        good = await client.open("good")
        with pytest.raises(PdxferRefused):
            await good.push([1])
        await good.finish()
        assert (await good.ended()).done

    arun(Sidecar(tmp_path / "s", script), pool, test)


def test_async_abort(tmp_path: Path, pool: SharedPool) -> None:
    def script(peer: Peer) -> None:
        peer.attach()
        peer.serve(lambda p, f: answer(p, f) if isinstance(f, worker.Abort) else p.send(worker.Ok(f.req)))

    async def test(client: AsyncClient) -> None:
        receive = await client.receive("r", "p", [1])
        waiting = asyncio.create_task(receive.matched())
        await receive.abort("the client went away")
        assert (await receive.ended()).reason == "aborted"
        assert await waiting is False
        await receive.abort()

    arun(Sidecar(tmp_path / "s", script), pool, test)


def test_a_cancelled_open_ends_its_room(tmp_path: Path, pool: SharedPool) -> None:
    go = threading.Event()

    def script(peer: Peer) -> None:
        peer.attach()
        received = peer.read()
        go.wait(PATIENCE)
        peer.send(worker.Ok(received.req))  # type: ignore[union-attr]
        peer.serve(answer)

    async def test(client: AsyncClient) -> None:
        task = asyncio.create_task(client.receive("r", "p", [1]))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        handle = client.find("r", sending=False)
        assert handle is not None
        go.set()
        assert (await handle.ended()).reason == "aborted"
        assert client.find("r", sending=False) is None

    arun(Sidecar(tmp_path / "s", script), pool, test)


def test_a_cancelled_open_that_is_refused_leaves_nothing(tmp_path: Path, pool: SharedPool) -> None:
    go = threading.Event()

    def script(peer: Peer) -> None:
        peer.attach()
        opened = peer.read()
        go.wait(PATIENCE)
        peer.send(worker.Rejected(opened.req, "too_many_rooms", "limit"))  # type: ignore[union-attr]
        peer.serve(lambda p, f: p.send(worker.Ok(f.req)))

    async def test(client: AsyncClient) -> None:
        task = asyncio.create_task(client.open("r"))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])
        handle = client.find("r", sending=True)
        assert handle is not None
        go.set()
        with pytest.raises(PdxferRefused, match="too_many_rooms"):
            await handle.ended()

    arun(Sidecar(tmp_path / "s", script), pool, test)


def test_cancelling_one_waiter_does_not_cancel_the_others(tmp_path: Path, pool: SharedPool) -> None:
    go = threading.Event()

    def script(peer: Peer) -> None:
        peer.attach()
        opened = peer.read()
        peer.send(worker.Ok(opened.req))  # type: ignore[union-attr]
        go.wait(PATIENCE)
        peer.send(ended("r"))
        peer.serve()

    async def test(client: AsyncClient) -> None:
        send = await client.open("r")
        one, two = asyncio.create_task(send.ended()), asyncio.create_task(send.ended())
        await asyncio.sleep(0.01)
        one.cancel()
        go.set()
        assert (await two).done

    arun(Sidecar(tmp_path / "s", script), pool, test)


def test_async_loss_and_return(tmp_path: Path, pool: SharedPool) -> None:
    die = threading.Event()

    def first(peer: Peer) -> None:
        peer.attach()
        for _ in range(3):
            frame = peer.read()
            peer.send(worker.Ok(frame.req))  # type: ignore[union-attr]
        peer.read()  # this one is never answered
        die.wait(PATIENCE)

    def second(peer: Peer) -> None:
        time.sleep(0.2)
        peer.attach(incarnation=8)
        peer.serve(answer)

    async def test(client: AsyncClient) -> None:
        send = await client.open("s")
        number = await send.push([1])
        receive = await client.receive("r", "p", [2])
        waiting = [asyncio.create_task(c) for c in (send.ended(), receive.ended())]
        released, pending = asyncio.create_task(send.released(number)), asyncio.create_task(client.open("pending"))
        await asyncio.sleep(0.05)
        die.set()
        for end in await asyncio.gather(*waiting):
            assert (end.reason, end.state, end.retriable) == ("sidecar_lost", "FAILED", True)
        await released
        with pytest.raises(SidecarUnavailable):
            await pending
        with pytest.raises(SidecarUnavailable):
            await client.open("too early")
        await client.wait_connected()
        assert client.incarnation == 8
        again = await client.open("s", epoch=1)
        await again.abort()

    events = arun(Sidecar(tmp_path / "s", first, second), pool, test)
    kinds = [type(e) for e in events]
    assert kinds.count(Disconnected) == kinds.count(Reconnected) == 1
    ends = [(e.end.room, e.end.epoch, e.end.sending) for e in events if isinstance(e, Ended)]
    assert len(ends) == len(set(ends)) == 4


def test_async_attach_errors(tmp_path: Path, pool: SharedPool) -> None:
    async def main() -> None:
        with pytest.raises(SidecarUnavailable, match="no such socket"):
            await AsyncClient.connect(str(tmp_path / "none"), "w", "both", [pool])
        with pytest.raises(AttachRefused) as caught:
            await AsyncClient.connect(sidecar.path, "w", "both", [pool])
        assert caught.value.code == "engine_id_taken"
        late = asyncio.create_task(AsyncClient.connect(str(tmp_path / "late"), "w", "both", [pool], wait=True))
        await asyncio.sleep(0.1)
        with Sidecar(tmp_path / "late", normal):
            async with await late as client:
                assert client.connected

    def script(peer: Peer) -> None:
        frame = peer.read()
        peer.send(worker.Rejected(frame.req, "engine_id_taken", "held"))  # type: ignore[union-attr]

    with Sidecar(tmp_path / "s", script) as sidecar:
        asyncio.run(main())


def test_an_event_hook_that_raises_stops_nothing(tmp_path: Path, pool: SharedPool) -> None:
    seen: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context))

        def fail(event: Event) -> None:
            raise RuntimeError("the engine's own defect")

        async with await AsyncClient.connect(sidecar.path, "w", "both", [pool], on_event=fail) as client:
            send = await client.open("r")
            await send.finish()
            assert (await send.ended()).done

    with Sidecar(tmp_path / "s", normal) as sidecar:
        asyncio.run(main())
    assert len(seen) == 2


def test_async_pings_without_traffic(tmp_path: Path, pool: SharedPool) -> None:
    count: list[int] = []

    def script(peer: Peer) -> None:
        peer.attach()
        with contextlib.suppress(BrokenPipeError):
            while peer.read(pings=True) is not None:
                count.append(1)
                peer.send(worker.Ok(0))

    async def test(client: AsyncClient) -> None:
        await asyncio.sleep(1.2)

    arun(Sidecar(tmp_path / "s", script), pool, test)
    assert len(count) >= 2


def test_a_closed_client_ends_its_rooms_and_polls_quietly(tmp_path: Path, pool: SharedPool) -> None:
    def script(peer: Peer) -> None:
        peer.attach()
        peer.serve(lambda p, f: p.send(worker.Ok(f.req)))

    with Sidecar(tmp_path / "s", script) as sidecar:
        client = Client(sidecar.path, "w", "both", [pool])
        client.open("r")
        client.close()
        (event,) = client.poll(1.0)
        assert isinstance(event, Ended) and event.end.detail == "the client was closed" and event.end.pages_safe
        assert client.poll(1.0) == []
