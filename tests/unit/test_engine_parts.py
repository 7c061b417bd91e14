"""The engine's small parts, without NIXL and without a process."""

from __future__ import annotations

import array
import os
import socket
import threading
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdxfer.core import jobs
from pdxfer.core.messages import EngineInfo
from pdxfer.engine import agent as agents
from pdxfer.engine import exits
from pdxfer.engine.agent import Agent, PeerLost, metadata_digest
from pdxfer.engine.copier import Copier
from pdxfer.engine.frames import Frames, TooLong
from pdxfer.engine.link import Link, close_all
from pdxfer.engine.nixl import Nixl
from pdxfer.engine.pace import IDLE, Pace
from pdxfer.engine.settings import EngineSettings
from pdxfer.engine.vitals import Vitals


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 17))
def test_frames_are_whole_however_the_stream_is_cut(bodies: list[bytes], step: int) -> None:
    stream = b"".join(len(b).to_bytes(4, "little") + b for b in bodies)
    frames = Frames(40)
    found = [f for at in range(0, len(stream), step) for f in frames.feed(stream[at : at + step])]
    assert found == bodies


def test_a_frame_that_is_too_long() -> None:
    with pytest.raises(TooLong, match="41 bytes, expected at most 40"):
        list(Frames(40).feed((41).to_bytes(4, "little")))


@given(
    st.text(max_size=8),
    st.text(max_size=8),
    st.binary(max_size=16),
    st.text(max_size=8),
    st.text(max_size=8),
    st.binary(max_size=16),
)
def test_the_digest_binds_every_part(a1: str, n1: str, m1: bytes, a2: str, n2: str, m2: bytes) -> None:
    same = (a1, n1, m1) == (a2, n2, m2)
    assert (metadata_digest(a1, n1, m1) == metadata_digest(a2, n2, m2)) == same


@pytest.mark.parametrize(
    ("key", "value"),
    [("backend", "OBJ"), ("slot_bytes", 0), ("slot_bytes", 5000), ("slot_bytes", 128 << 20), ("send_slots", 0),
     ("recv_slots", 5000), ("copy_threads", -2), ("copy_stall", 0.0), ("nice", -5)],
)  # fmt: skip
def test_settings_that_cannot_work_name_their_key(key: str, value: Any) -> None:
    EngineSettings().check()
    with pytest.raises(ValueError, match=f"^engine.{key} is "):
        msgspec.structs.replace(EngineSettings(), **{key: value}).check()


def test_a_users_variable_wins_and_is_shown() -> None:
    settings = EngineSettings(tls="tcp", devices="lo")
    base = {"UCX_TLS": "cma", "UCX_TCP_USER_TIMEOUT": "9s", "PATH": "/bin"}
    shown = {v.name: (v.value, v.origin) for v in settings.variables(base)}
    assert shown["UCX_TLS"] == ("cma", "user")
    assert shown["UCX_TCP_USER_TIMEOUT"] == ("9s", "user")
    assert shown["UCX_NET_DEVICES"] == ("lo", "config")
    assert shown["UCX_TCP_CONN_NB"] == ("y", "default")
    assert "PATH" not in shown
    environment = settings.environment(base)
    assert environment["PATH"] == "/bin" and environment["UCX_TLS"] == "cma" and environment["UCX_TCP_KEEPCNT"] == "3"


def test_pace_looks_often_after_progress_and_then_ever_less() -> None:
    pace = Pace()
    assert pace.pause(100.0, waiting=False) == IDLE
    pace.stir(100.0)
    pauses = [pace.pause(100.0 + n * 1e-4, waiting=True) for n in range(100_000)]
    assert pauses[0] == 0.0
    spent = [p for p in pauses if p]
    assert spent == sorted(spent) and spent[-1] <= 0.01
    assert pace.pause(110.0, waiting=False) == IDLE


def test_vitals() -> None:
    fd = Vitals.create()
    ours, theirs = Vitals(fd), Vitals(fd)
    os.close(fd)
    assert (ours.heartbeat(), ours.words()) == (0, "")
    theirs.tick()
    theirs.tick()
    theirs.say("é" * 5000)
    assert ours.heartbeat() == 2
    assert ours.words().startswith("é" * 2000)
    theirs.say("")
    assert ours.words() == ""


def test_a_copy_that_hangs_shows() -> None:
    copier = Copier(1, stall=0.2)
    go, done = threading.Event(), []
    copier.submit(lambda: (go.wait(), copier.report(lambda: done.append(1)))[0])
    time.sleep(0.05)
    assert not copier.hung(time.monotonic())
    assert copier.hung(time.monotonic() + 0.3)
    go.set()
    deadline = time.monotonic() + 5
    while not copier.step():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert done == [1]
    time.sleep(0.05)
    assert not copier.hung(time.monotonic() + 10)


def test_without_threads_the_engines_own_runs_the_tasks_one_at_a_time() -> None:
    copier = Copier(0, stall=1.0)
    done: list[int] = []
    for n in range(3):
        copier.submit(lambda n=n: copier.report(lambda: done.append(n)))  # type: ignore[misc]
    assert copier.pending and not done
    assert copier.step() and done == [0]
    assert copier.step() and copier.step() and done == [0, 1, 2]
    assert not copier.step() and not copier.pending


def test_exits_in_words() -> None:
    assert exits.words(-9) == "killed by SIGKILL" and exits.words(-11) == "killed by SIGSEGV"
    assert exits.words(69) == "exit status 69 (NIXL is not installed)"
    assert "unknown" in exits.words(3)
    hopeless = {s for s in (None, -11, 0, 69, 70, 71, 72) if exits.permanent(s, ever_ready=True)}
    at_the_start = {s for s in (None, -11, 0, 69, 70, 71, 72) if exits.permanent(s, ever_ready=False)}
    assert (hopeless, at_the_start) == ({69}, {69, 71, 72})


class FakeNixl:
    """Stands in for nixl_agent where a fault of NIXL cannot be had at will."""

    def __init__(self) -> None:
        self.states: dict[int, Any] = {}
        self.calls: list[tuple[str, Any]] = []
        self.serial = 0
        self.add: Any = "peer"
        self.post: Any = "PROC"

    def nixl_agent_config(self, **_: Any) -> None: ...
    def nixl_agent(self, *_: Any) -> FakeNixl:
        return self

    def create_backend(self, *_: Any) -> None: ...
    def register_memory(self, *_: Any) -> None: ...
    def get_agent_metadata(self) -> bytes:
        return b"mine"

    def add_remote_agent(self, metadata: bytes) -> Any:
        self.calls.append(("add", metadata))
        return raise_or(self.add)

    def remove_remote_agent(self, name: str) -> None:
        self.calls.append(("remove", name))

    def get_xfer_descs(self, found: Any, _: str) -> Any:
        return found

    def initialize_xfer(self, *_: Any) -> Any:
        self.serial += 1
        fake, number = self, self.serial
        self.states[number] = "PROC"

        class Handle:
            id = number

            def release(self) -> None:
                fake.calls.append(("release", number))

        return Handle()

    def transfer(self, handle: Any) -> Any:
        return raise_or(self.post)

    def check_xfer_state(self, handle: Any) -> Any:
        return raise_or(self.states[handle.id])

    def get_new_notifs(self) -> Any:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "a name that is no text")


def raise_or(value: Any) -> Any:
    if isinstance(value, Exception):
        raise value
    return value


def info_of(name: str, metadata: bytes = b"theirs") -> EngineInfo:
    return EngineInfo(1, name, "1.5.1", metadata, metadata_digest(name, "1.5.1", metadata), 1 << 20, 4096, 4)


def agent_on(fake: FakeNixl) -> Agent:
    return Agent(Nixl(fake, None, "1.5.1", "fake"), "me:1:1", "UCX", 0, 4096)


def test_an_exception_ends_a_generation_only_after_its_transfers_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(agents.time, "monotonic", lambda: now[0])
    fake = FakeNixl()
    agent = agent_on(fake)
    assert agent.add(info_of("peer")) == ""
    for tag in (1, 2, 3):
        agent.post("peer", 0, 1 << 20, 100, b"n", tag)
    assert agent.busy and list(agent.poll()) == []
    fake.states[2] = RuntimeError("cut")
    assert [(t.tag, "RuntimeError: cut" in e) for t, e in agent.poll()] == [(2, True)]
    assert ("release", 2) in fake.calls and ("release", 1) not in fake.calls, "released in PROC"
    assert ("remove", "peer") not in fake.calls, "removed with transfers under way"
    with pytest.raises(PeerLost, match="2 transfers of its last generation"):
        agent.post("peer", 0, 1 << 20, 100, b"n", 4)
    assert agent.add(info_of("peer")) == "", "an orderly peer was refused because its last generation is ending"
    fake.states[1], fake.states[3] = "DONE", "ERR"
    assert sorted((t.tag, bool(e)) for t, e in agent.poll()) == [(1, False), (3, True)]
    assert fake.calls[-1] == ("remove", "peer") and not agent.busy
    with pytest.raises(PeerLost, match="ended just now"):
        agent.post("peer", 0, 1 << 20, 100, b"n", 5)
    now[0] += 1.0
    agent.post("peer", 0, 1 << 20, 100, b"n", 6)  # the next generation
    assert [c for c in fake.calls if c[0] == "add"] == [("add", b"theirs")] * 2


def test_a_refused_name_is_burned_and_a_removed_peer_is_forgotten_when_idle() -> None:
    fake = FakeNixl()
    agent = agent_on(fake)
    fake.add = RuntimeError("no")
    assert "refused its metadata" in agent.add(info_of("bad"))
    fake.add = "bad"
    assert "burned" in agent.add(info_of("bad"))
    assert len([c for c in fake.calls if c[0] == "add"]) == 1
    assert "burned" not in agent.usable("never") and "no such peer" in agent.usable("never")
    fake.add = "peer"
    assert agent.add(info_of("peer")) == ""
    agent.post("peer", 0, 1 << 20, 100, b"n", 1)
    agent.remove("peer")
    agent.remove("peer")
    assert "removed" in agent.usable("peer") and ("remove", "peer") not in fake.calls
    fake.states[1] = "DONE"
    assert [t.tag for t, _ in agent.poll()] == [1]
    assert fake.calls[-1] == ("remove", "peer") and "no such peer" in agent.usable("peer")
    assert agent.add(info_of("peer")) == ""


def test_a_post_that_fails_is_over_at_once() -> None:
    fake = FakeNixl()
    agent = agent_on(fake)
    agent.add(info_of("peer"))
    for answer in ("ERR", RuntimeError("disconnected")):
        fake.post = answer
        with pytest.raises(PeerLost):
            agent.post("peer", 0, 1 << 20, 100, b"n", 1)
    assert not agent.busy
    with pytest.raises(PeerLost):
        agent.post("peer", 0, (1 << 20) + 4 * 4096, 1, b"n", 1)
    assert agent.notifications() == {} and agent.errors >= 2


def test_each_job_gets_its_own_descriptors() -> None:
    """Two workers are mapped one behind the other, as after a restart: one read holds the end of the first job and the
    byte of the second that carries its descriptors.
    """
    ours, theirs = socket.socketpair()
    link = Link(theirs)
    files = [os.memfd_create(f"pool-{number}") for number in range(4)]
    try:
        for worker, fds in ((1, files[:2]), (2, files[2:])):
            data = jobs.encode(jobs.MapPools(worker, (), (4096, 4096)))
            ours.sendmsg([data[:1]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
            ours.send(data[1:])
        found = list(link.receive())
        assert [[os.fstat(fd).st_ino for fd in fds] for _, fds in found] == [
            [os.fstat(fd).st_ino for fd in files[:2]],
            [os.fstat(fd).st_ino for fd in files[2:]],
        ]
        for _, fds in found:
            close_all(fds)
    finally:
        for fd in files:
            os.close(fd)
        ours.close()
        theirs.close()
