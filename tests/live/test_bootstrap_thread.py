"""What a death of the bootstrap thread costs, what it leaves behind, and how much of the inbox one peer can have."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
import zmq
from bootstraps import MainLoop, Nodes, Peer, acquaint, frame, wait

from pdxfer.bootstrap import generation, thread
from pdxfer.bootstrap.thread import Unstoppable
from pdxfer.core.messages import Heartbeat


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    found = Nodes()
    yield found
    found.close()


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


# death and restart -------------------------------------------------------------------------------------------------


def test_a_thread_that_raises_is_replaced_in_place_and_what_waits_is_sent(nodes: Nodes) -> None:
    a, b = nodes.pair()
    endpoint = a.thread.endpoint
    for n in range(3):
        a.thread.inject("exception")
        wait(lambda n=n: len(a.deaths) == n + 1, 5, "its death is reported")
        assert a.deaths[n] == "RuntimeError: injected by the debug hook"
        assert not a.thread.alive
        a.send(b, 100 + n)
        began = time.monotonic()
        a.thread.restart()
        assert a.thread.endpoint == endpoint
        wait(lambda n=n: 100 + n in b.heard(a), 5, "what waited is heard")
        b.talks_to(a, 200 + n)
        assert time.monotonic() - began < 1.0
    assert (b.deaths, a.refused, b.refused) == ([], {}, {})
    assert b.cuts("a") >= 1


def test_a_thread_that_is_alive_is_not_started_twice(nodes: Nodes) -> None:
    a, b = nodes.pair()
    with pytest.raises(RuntimeError, match="runs already"):
        a.thread.start()
    b.talks_to(a, 2)
    a.thread.kill()
    a.thread.kill()
    assert not a.deaths  # it was asked to
    a.thread.start()
    b.talks_to(a, 3)


def test_restarts_leak_neither_descriptors_nor_threads(nodes: Nodes) -> None:
    a, b = nodes.pair()
    process = psutil.Process()
    a.thread.restart()
    b.talks_to(a, 10)
    a.talks_to(b, 10)
    fds, threads = open_fds(), process.num_threads()
    for n in range(20):
        if n % 2:
            a.thread.inject("exception")
            wait(lambda: not a.thread.alive, 5, "it is dead")
        a.thread.restart()
        b.talks_to(a, 100 + n)
        a.talks_to(b, 100 + n)
    wait(lambda: open_fds() <= fds and process.num_threads() <= threads, 5, f"{open_fds()} descriptors, {fds} before")


def test_an_endless_loop_is_ended_and_replaced(nodes: Nodes) -> None:
    a, b = nodes.pair()
    a.thread.inject("loop")
    time.sleep(0.15)
    beat = a.thread.heartbeat
    time.sleep(0.25)
    assert (a.thread.heartbeat, a.thread.alive) == (beat, True)
    a.thread.restart()
    b.talks_to(a, 2)
    a.talks_to(b, 2)
    assert a.thread.heartbeat > beat


def test_a_thread_that_hangs_in_native_code_is_called_unstoppable_and_harms_no_successor(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = nodes.pair()
    monkeypatch.setattr(generation, "HANG", 1.5)
    monkeypatch.setattr(thread, "PATIENCE", 0.2)
    a.thread.inject("hang")
    time.sleep(0.2)
    with pytest.raises(Unstoppable, match="only a new process helps"):
        a.thread.restart()
    wait(lambda: not a.thread.alive, 5, "once it can, it ends")
    monkeypatch.undo()
    a.thread.start()
    b.talks_to(a, 2)
    assert not a.deaths


def test_a_taken_port_is_named_with_what_to_do(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = nodes.pair()
    monkeypatch.setattr(generation, "BIND_PATIENCE", 0.1)
    with pytest.raises(OSError, match=f"port {a.port} of 127.0.0.1: Address already in use.*bootstrap.listen"):
        nodes("c", listen=a.thread.endpoint)
    b.talks_to(a, 2)


def test_the_end_leaves_nothing(nodes: Nodes) -> None:
    fds, threads = open_fds(), threading.active_count()
    for _ in range(3):
        a, b = nodes.pair()
        for one in (a, b):
            one.end()
            one.send("a", 1)  # after its end: nobody is harmed
            one.thread.forget("a")
            one.end()
        nodes.peers.clear()
    wait(lambda: (open_fds(), threading.active_count()) == (fds, threads), 5, f"{open_fds()} descriptors, {fds} before")


def test_faults_cannot_be_injected_unless_the_configuration_allows_it() -> None:
    main = MainLoop()
    one = Peer(main, "a")
    try:
        with pytest.raises(ValueError, match="expected exception, loop, hang"):
            one.thread.inject("fire")
        one.thread._debug_hooks = False
        with pytest.raises(LookupError):
            one.thread.inject("exception")
    finally:
        one.end()
        main.close()


# bounds ------------------------------------------------------------------------------------------------------------


def test_what_is_said_to_nobody_is_dropped_counted_and_not_kept(nodes: Nodes) -> None:
    a, b = nodes.pair()
    dropped = a.thread.dropped
    for n in range(500):
        a.send(f"nobody-{n}", n)
    wait(lambda: a.thread.dropped - dropped == 500, 5, "dropped")
    assert not a.thread.outboxes.waiting()
    a.talks_to(b, 2)


def test_while_the_thread_is_dead_what_waits_is_bounded(nodes: Nodes) -> None:
    a, b = nodes("a", outbox=20), nodes("b")
    acquaint(a, b)
    a.talks_to(b, 1)
    a.thread.kill()
    dropped = a.thread.dropped
    for n in range(100, 200):
        a.send(b, n)
    assert a.thread.dropped - dropped == 80
    a.thread.start()
    wait(lambda: b.heard(a)[-20:] == list(range(180, 200)), 5, "the youngest are sent")


def test_a_peer_that_floods_leaves_room_in_the_inbox_for_the_others(nodes: Nodes) -> None:
    a, b = nodes("a", inbox=80), nodes("b")
    c = nodes("c")
    acquaint(a, b, c)
    b.talks_to(a, 1)
    raw = nodes.raw(a, c.pair)
    held = nodes.main.hold()
    try:
        for _ in range(2000):
            raw.send(frame("c", "a", Heartbeat(5, 0)))
        time.sleep(0.5)
        for revision in range(100, 115):
            b.send(a, revision)
        time.sleep(0.5)
    finally:
        held.set()
    wait(lambda: a.heard(b)[-15:] == list(range(100, 115)), 5, f"the quiet one is heard: {a.refused}")
    wait(lambda: len(a.heard(c)) + a.refused["overloaded"] == 2000, 5, "each is delivered or counted")
    assert 0 < len(a.heard(c)) <= 20
    assert {who for who, code, _ in a.refusals if code == "overloaded"} == {"c"}
    for revision in range(200, 260):  # the bounds do not wear out
        b.talks_to(a, revision)
        c.talks_to(a, revision)


def test_refusals_without_end_do_not_pile_up_for_the_main_loop(nodes: Nodes) -> None:
    a, b = nodes.pair()
    c = nodes("c")
    a.directory.configure([b.entry, c.entry], ())
    raw = nodes.raw(a, c.pair)
    raw.setsockopt(zmq.SNDTIMEO, 5000)
    held = nodes.main.hold()
    try:
        for _ in range(10_000):
            raw.send(b"junk")
        time.sleep(0.3)
        assert len(nodes.main.loop._ready) < 50  # type: ignore[attr-defined]
    finally:
        held.set()
    wait(lambda: a.refused["bad_frame"] == 10_000, 10, f"each is counted: {a.refused}")
    b.talks_to(a, 2)
