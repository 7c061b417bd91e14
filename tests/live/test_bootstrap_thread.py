"""Real bootstrap threads over real sockets with CURVE: who is heard, who is refused, and what a death of the thread costs."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from bootstrap_nodes import Loop, Node, Raw, meet, open_fds, talk
from sidecars import until

from pdxfer.bootstrap import generation, keys, thread
from pdxfer.bootstrap.thread import Unstoppable
from pdxfer.core import messages

Make = Callable[..., Node]


@pytest.fixture
def loop() -> Iterator[Loop]:
    one = Loop()
    yield one
    one.close()


@pytest.fixture
def make(loop: Loop) -> Iterator[Make]:
    """Makes and starts nodes, and stops them after the test."""
    nodes: list[Node] = []

    def node(name: str, **settings: Any) -> Node:
        nodes.append(Node(loop, name, **settings))
        nodes[-1].bootstrap.start()
        return nodes[-1]

    yield node
    for one in nodes:
        try:
            one.bootstrap.stop()
        finally:
            one.bootstrap.close()


@pytest.fixture
def pair(make: Make) -> tuple[Node, Node]:
    a, b = make("a"), make("b")
    meet(a, b)
    return a, b


# talking -----------------------------------------------------------------------------------------------------------


def test_two_nodes_hear_each_other_whole_and_in_order(pair: tuple[Node, Node]) -> None:
    a, b = pair
    words = [f"room-{n}" for n in range(200)]
    for word in words:
        a.tell("b", word, f"{word}-again")
        b.tell("a", word)
    until(lambda: len(b.heard()) >= 400 and len(a.heard()) >= 200, 5, "all is heard")
    assert b.heard() == [w for word in words for w in (word, f"{word}-again")]
    assert a.heard() == words
    assert {(e.node, e.incarnation, e.to_incarnation) for e in b.said} == {("a", a.incarnation, 0)}
    assert not a.refusals and not b.refusals and not a.bootstrap.dropped


def test_three_nodes_hear_each_other(make: Make) -> None:
    nodes = [make(name) for name in "abc"]
    meet(*nodes)
    for one, other in itertools.permutations(nodes, 2):
        one.tell(other.name, f"{one.name}{other.name}")
    for one, other in itertools.permutations(nodes, 2):
        until(lambda one=one, other=other: other.heard(one.name) == [f"{one.name}{other.name}"], 5, "each hears each")


def test_a_frame_of_the_largest_size_arrives(pair: tuple[Node, Node]) -> None:
    a, b = pair
    finish = messages.Finish("r", 0, 1, b"x" * messages.MAX_AUX)
    body = (finish,) * (messages.MAX_FRAME // (messages.MAX_AUX + 100))
    a.bootstrap.send(messages.Envelope(messages.PROTOCOL, "a", 1, "b", 0, body))
    until(lambda: b.said, 5, "it arrives")
    assert b.said[0].body == body


def test_a_hello_moves_its_node_but_not_one_whose_address_is_configured(make: Make) -> None:
    a, b = make("a"), make("b")
    a.directory.configure([], [b.keys.public])
    b.directory.configure([a.entry], [])
    hello = messages.Hello(1, 1, b.bootstrap.address, "0", None)
    b.bootstrap.send(messages.Envelope(messages.PROTOCOL, "b", 1, "a", 0, (hello,)))
    until(lambda: a.directory.place("b") == (b.bootstrap.address, b.keys.public), 5, "a knows where b is")
    talk(a, b, "found")
    lie = messages.Hello(1, 1, "tcp://127.0.0.1:9", "0", None)
    a.bootstrap.send(messages.Envelope(messages.PROTOCOL, "a", 1, "b", 0, (lie,)))
    until(lambda: any(lie in event.body for event in b.said), 5, "b hears it")
    assert b.directory.place("a") == (a.bootstrap.address, a.keys.public)


# bad bytes and strangers -------------------------------------------------------------------------------------------

GOOD = messages.Envelope(messages.PROTOCOL, "raw", 7, "a", 0, (messages.Accept("good", 0),))
FRAME = messages.encode(GOOD)
BAD: dict[str, tuple[tuple[bytes, ...], str]] = {
    "garbage": ((b"\xc1 no msgpack \xff" * 9,), "bad_frame"),
    "empty": ((b"",), "bad_frame"),
    "truncated": ((FRAME[:-2],), "bad_frame"),
    "trailing": ((FRAME + b"\0",), "bad_frame"),
    "deep": ((b"\x91" * 100_000,), "bad_frame"),
    "too long": ((b"\0" * (messages.MAX_FRAME + 1),), "frame_too_large"),
    "two parts": ((FRAME, FRAME), "bad_frame"),
    "many parts": ((b"",) * 1000, "bad_frame"),
    "future": ((messages.encode(GOOD)[:1] + b"\x02" + FRAME[2:],), "wrong_version"),
    "other source": ((messages.encode(messages.Envelope(1, "b", 7, "a", 0, ())),), "wrong_source"),
    "other target": ((messages.encode(messages.Envelope(1, "raw", 7, "b", 0, ())),), "wrong_source"),
    "own name": ((messages.encode(messages.Envelope(1, "a", 7, "a", 0, ())),), "wrong_source"),
    "no name": ((messages.encode(messages.Envelope(1, "", 7, "a", 0, ())),), "bad_frame"),
    "no incarnation": ((messages.encode(messages.Envelope(1, "raw", 0, "a", 0, ())),), "bad_frame"),
}


@pytest.fixture
def trio(pair: tuple[Node, Node]) -> Iterator[tuple[Node, Node, Raw]]:
    """Two nodes, and a raw socket to a with the key of a node that a knows as raw."""
    a, b = pair
    raw_keys = keys.generate()
    entry = b.entry.__class__("raw", "tcp://127.0.0.1:9", raw_keys.public)
    a.directory.configure([b.entry, entry], [])
    raw = Raw(a, raw_keys)
    yield a, b, raw
    raw.close()


def test_bad_frames_are_refused_by_name_and_their_connection_stays(trio: tuple[Node, Node, Raw]) -> None:
    a, b, raw = trio
    for number, (what, (parts, code)) in enumerate(BAD.items()):
        before = a.refusals[code]
        raw.send(*parts)
        until(lambda code=code, before=before: a.refusals[code] == before + 1, 5, f"{what}: {code}, {a.refusals}")
        raw.send(FRAME)
        until(lambda number=number: len(a.heard("raw")) == number + 1, 5, f"{what}: a good frame after it")
    assert sum(a.refusals.values()) == len(BAD)
    assert all(detail for _, _, detail in a.details)
    talk(b, a, "undisturbed")
    assert not a.deaths and not a.cuts


def test_a_frame_beyond_every_limit_costs_its_own_connection(trio: tuple[Node, Node, Raw]) -> None:
    a, b, raw = trio
    talk(b, a, "before")
    raw.send(b"\0" * (2 * messages.MAX_FRAME + (1 << 20)))
    raw.send(FRAME)

    def heard() -> bool:
        raw.send(FRAME)
        return bool(a.heard("raw"))

    until(heard, 5, "it connects again and is heard")
    talk(b, a, "after")
    assert not a.deaths and not a.cuts


def test_garbage_and_silence_on_tcp_disturb_nobody(make: Make) -> None:
    import socket

    a, b = make("a", handshake_seconds=0.5), make("b")
    meet(a, b)
    talk(b, a, "before")
    talk(a, b, "before")
    port = int(a.bootstrap.address.rpartition(":")[2])
    fds = open_fds()
    silent = [socket.create_connection(("127.0.0.1", port), 5) for _ in range(300)]
    for one, junk in zip(silent, itertools.cycle([b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" + b"\0" * 8 + b"\x7f", os.urandom(4000)])):
        one.send(junk)
    began = time.monotonic()
    talk(b, a, "during")
    talk(a, b, "during")
    assert time.monotonic() - began < 2
    until(lambda: open_fds() <= fds + len(silent), 8, "the node has closed them all")
    for one in silent:
        one.close()
    talk(b, a, "after")
    assert not a.deaths and not a.cuts and not b.cuts


def test_a_strangers_key_is_refused_and_counted(pair: tuple[Node, Node]) -> None:
    a, b = pair
    stranger = keys.generate()
    raw = Raw(a, stranger)
    raw.send(FRAME)
    try:
        until(lambda: a.refusals["stranger"], 5, "it is counted")
    finally:
        raw.close()
    assert any(stranger.public in detail for _, code, detail in a.details if code == "stranger")
    talk(b, a, "undisturbed")
    assert a.heard("raw") == []


def test_a_node_that_is_a_stranger_there_is_told_and_is_let_in_once_it_is_known(make: Make) -> None:
    a, b = make("a"), make("b")
    b.directory.configure([a.entry], [])
    b.tell("a", "hello")
    until(lambda: b.refusals["stranger"] and a.refusals["stranger"], 5, "both say so")
    assert any(b.keys.public in detail for _, _, detail in b.details)
    a.directory.configure([], [b.keys.public])
    talk(b, a, "let in", 5)


def test_a_key_that_loses_its_right_is_heard_no_more(pair: tuple[Node, Node]) -> None:
    a, b = pair
    talk(b, a, "allowed")
    a.directory.configure([], [])
    before = len(a.said)
    for _ in range(20):
        b.tell("a", "late")
    until(lambda: a.refusals, 5, "it is refused")
    assert len(a.said) == before


def test_a_keys_name_is_pinned_at_its_first_use(make: Make) -> None:
    a = make("a")
    one, two = keys.generate(), keys.generate()
    a.directory.configure([], [one.public, two.public])
    first, second = Raw(a, one), Raw(a, two)
    try:
        first.send(FRAME)
        until(lambda: a.heard("raw"), 5, "the first is raw")
        second.send(FRAME)
        first.send(messages.encode(messages.Envelope(1, "another", 7, "a", 0, (messages.Accept("r", 0),))))
        until(lambda: a.refusals["wrong_source"] == 2, 5, "neither a second key nor a second name")
        second.send(messages.encode(messages.Envelope(1, "another", 7, "a", 0, (messages.Accept("r", 0),))))
        until(lambda: a.heard("another"), 5, "the second has its own name")
    finally:
        first.close()
        second.close()


# slow and dead peers -----------------------------------------------------------------------------------------------


def test_dead_peers_delay_nobody_and_their_queues_are_bounded(make: Make) -> None:
    import socket

    a, b = make("a", outbox=16), make("b")
    with socket.socket() as mute, socket.socket() as closed:
        mute.bind(("127.0.0.1", 0))
        mute.listen(8)
        closed.bind(("127.0.0.1", 0))
        entries = [
            b.entry.__class__(name, f"tcp://127.0.0.1:{one.getsockname()[1]}", keys.generate().public)
            for name, one in (("mute", mute), ("closed", closed))
        ]
        a.directory.configure([b.entry, *entries], [])
        b.directory.configure([a.entry], [])
        talk(a, b, "before")
        for n in range(100):
            for name in ("mute", "closed", "nobody"):
                a.tell(name, f"lost-{n}")
            a.tell("b", f"live-{n}") if n % 8 == 0 else None
        until(lambda: f"live-{96}" in b.heard(), 2, "the live peer hears all")
        until(lambda: a.bootstrap.dropped >= 2 * (100 - 16), 8, "what is too much is dropped")
        began = time.monotonic()
        talk(a, b, "after")
        assert time.monotonic() - began < 1
        for name in ("mute", "closed", "nobody"):
            a.bootstrap.forget(name)
        talk(a, b, "still")


def test_a_peer_that_comes_up_late_is_reached(make: Make) -> None:
    a, b = make("a"), make("b")
    meet(a, b)
    b.bootstrap.kill()
    a.tell("b", "early")
    time.sleep(0.3)
    b.bootstrap.start()
    talk(a, b, "late")


def test_a_peers_end_is_noticed_at_once(pair: tuple[Node, Node]) -> None:
    a, b = pair
    talk(a, b, "alive")
    talk(b, a, "alive")
    b.bootstrap.kill()
    until(lambda: a.cuts == ["b"], 2, "the cut is noticed")
    b.bootstrap.start()
    talk(a, b, "again")


def test_a_forgotten_peer_is_connected_anew(pair: tuple[Node, Node]) -> None:
    a, b = pair
    talk(a, b, "before")
    a.bootstrap.forget("b")
    a.bootstrap.forget("nobody")
    talk(a, b, "after")
    assert a.cuts == []


def test_an_overloaded_main_loop_costs_frames_by_name_and_then_all_is_well(loop: Loop, make: Make) -> None:
    a, b = make("a", inbox=32), make("b")
    meet(a, b)
    talk(b, a, "before")
    before = len(a.said)
    with loop.blocked():
        for n in range(300):
            b.tell("a", f"flood-{n}")
        time.sleep(0.5)
    until(lambda: a.refusals["overloaded"] > 0, 5, "it is named")
    until(lambda: len(a.said) - before + a.refusals["overloaded"] >= 300, 5, "each is delivered or named")
    assert 0 < len(a.said) - before <= 32
    for n in range(200):  # the bound does not wear out
        talk(b, a, f"after-{n}") if n % 50 == 0 else b.tell("a", f"more-{n}")
    until(lambda: "more-199" in a.heard(), 5, "all is well")


def test_a_peer_that_floods_takes_no_room_from_another(loop: Loop, trio: tuple[Node, Node, Raw]) -> None:
    a, b, raw = trio
    talk(b, a, "before")
    with loop.blocked():
        for _ in range(20_000):
            raw.send(FRAME)
        until(lambda: a.bootstrap.heartbeat > 0, 5, "it lives")
        time.sleep(1.0)
        for n in range(50):
            b.tell("a", f"quiet-{n}")
        time.sleep(0.5)
    until(lambda: "quiet-49" in a.heard("b"), 5, "the quiet one is heard")
    assert a.heard("b")[-50:] == [f"quiet-{n}" for n in range(50)]
    assert a.refusals["overloaded"] > 0


def test_refusals_without_end_do_not_swamp_the_main_loop(loop: Loop, trio: tuple[Node, Node, Raw]) -> None:
    a, b, raw = trio
    with loop.blocked():
        for _ in range(20_000):
            raw.send(b"junk")
        time.sleep(0.5)
        waiting = len(loop.loop._ready)  # type: ignore[attr-defined]
    assert waiting < 2000
    until(lambda: a.refusals["bad_frame"] == 20_000, 20, "each is counted")
    talk(b, a, "undisturbed")


# death and restart -------------------------------------------------------------------------------------------------


def test_a_thread_that_raises_is_restarted_in_place_and_nothing_that_waits_is_lost(pair: tuple[Node, Node]) -> None:
    a, b = pair
    talk(a, b, "before")
    talk(b, a, "before")
    address = a.bootstrap.address
    for n in range(3):
        a.bootstrap.inject("exception")
        until(lambda n=n: len(a.deaths) == n + 1, 5, "the death is reported")
        assert "injected by the debug hook" in a.deaths[n]
        assert not a.bootstrap.alive
        a.tell("b", f"meanwhile-{n}")
        a.bootstrap.restart()
        assert a.bootstrap.address == address
        until(lambda n=n: f"meanwhile-{n}" in b.heard("a"), 5, "what waited is heard")
        talk(b, a, f"after-{n}")
    assert b.deaths == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_restarts_leak_nothing(pair: tuple[Node, Node]) -> None:
    a, b = pair
    process = psutil.Process()
    talk(b, a, "warm")
    a.bootstrap.restart()
    talk(b, a, "warmer")
    fds, threads = open_fds(), process.num_threads()
    for n in range(20):
        if n % 2:
            a.bootstrap.inject("exception")
            until(lambda: not a.bootstrap.alive, 5, "it is dead")
        a.bootstrap.restart()
        talk(b, a, f"{n}")
    until(lambda: open_fds() <= fds + 2 and process.num_threads() <= threads, 5, f"{open_fds()} fds, {fds} before")


def test_an_endless_loop_is_ended_and_replaced(pair: tuple[Node, Node]) -> None:
    a, b = pair
    talk(b, a, "before")
    a.bootstrap.inject("loop")
    time.sleep(0.1)
    beat = a.bootstrap.heartbeat
    time.sleep(0.3)
    assert a.bootstrap.heartbeat == beat and a.bootstrap.alive
    a.bootstrap.restart()
    talk(b, a, "after")
    talk(a, b, "after")


def test_a_thread_that_hangs_outside_of_python_is_called_unstoppable(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _ = pair
    monkeypatch.setattr(generation, "HANG_SECONDS", 2.0)
    monkeypatch.setattr(thread, "PATIENCE", 0.2)
    a.bootstrap.inject("hang")
    time.sleep(0.2)
    with pytest.raises(Unstoppable):
        a.bootstrap.kill()
    until(lambda: not a.bootstrap.alive, 5, "it ends by itself once it can")
    a.bootstrap.start()


def test_an_address_that_is_taken_is_an_error_that_names_it(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "BIND_PATIENCE", 0.2)
    a = make("a")
    with pytest.raises(OSError, match=r"tcp://127\.0\.0\.1:\d+"):
        make("b", listen=a.bootstrap.address)


def test_hooks_are_off_by_default(loop: Loop) -> None:
    one = Node(loop, "a")
    one.bootstrap._debug_hooks = False
    with pytest.raises(LookupError):
        one.bootstrap.inject("exception")
    one.bootstrap.close()


def test_the_end_leaves_nothing(loop: Loop) -> None:
    fds, threads = open_fds(), threading.active_count()
    for _ in range(3):
        a, b = Node(loop, "a"), Node(loop, "b")
        a.bootstrap.start()
        b.bootstrap.start()
        meet(a, b)
        talk(a, b, "x")
        a.tell("b", "goodbye")
        a.bootstrap.stop()
        until(lambda b=b: "goodbye" in b.heard(), 2, "what waited has left")
        b.bootstrap.stop()
        for one in (a, b):
            one.bootstrap.close()
            one.tell("a", "after the end")
    until(lambda: (open_fds(), threading.active_count()) == (fds, threads), 5, f"{open_fds()} fds, {fds} before")
