"""Bootstrap threads that talk over real ZeroMQ sockets: who is heard, who is not, and who is not disturbed by either."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq
from bootstraps import Nodes, acquaint, frame, hello, wait

from pdxfer.bootstrap import flow, keys, peers, resolver
from pdxfer.bootstrap.settings import NodeEntry
from pdxfer.core import messages
from pdxfer.core.events import PeerSaid
from pdxfer.core.messages import Announce, Envelope, Finish, Goodbye, Heartbeat


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    found = Nodes()
    yield found
    found.close()


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# who is heard ------------------------------------------------------------------------------------------------------


def test_three_nodes_talk_in_order(nodes: Nodes) -> None:
    a, b, c = everybody = [nodes(name) for name in "abc"]
    acquaint(*everybody)
    for revision in range(1, 201):
        for source in everybody:
            for target in everybody:
                if source is not target:
                    source.send(target, revision)
    for source in everybody:
        for target in everybody:
            if source is not target:
                wait(lambda s=source, t=target: len(t.heard(s)) == 200, 10, f"{source.name} to {target.name}")
                assert target.heard(source) == list(range(1, 201))
    assert not a.refusals + b.refusals + c.refusals
    said = next(e for e in b.events if isinstance(e, PeerSaid))
    assert (said.incarnation, said.to_incarnation) == (1, 0)


def test_a_long_body_is_split_and_one_message_that_is_too_long_is_not_sent(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = nodes.pair()
    many = tuple(Heartbeat(n, 0) for n in range(100, 700))
    a.thread.send(Envelope(messages.PROTOCOL, "a", 1, "b", 0, many))
    wait(lambda: b.heard(a)[1:] == list(range(100, 700)), 5, "all of them, in order")
    long = tuple(Finish(f"r{n}", 0, n, b"x" * messages.MAX_AUX) for n in range(100))
    a.thread.send(Envelope(messages.PROTOCOL, "a", 1, "b", 0, long))
    wait(lambda: sum(len(e.body) for e in b.events if isinstance(e, PeerSaid)) == 701, 5, "all of them")
    a.thread.send(Envelope(messages.PROTOCOL, "a", 1, "b", 0, (Announce("x" * (5 << 20), "", (), 1.0),)))
    assert "expected at most 4194304: it is not sent" in caplog.text
    a.talks_to(b, 2)
    assert not b.refusals


def test_ipv6(nodes: Nodes) -> None:
    try:
        a, b = nodes("a", listen="tcp://[::1]:*"), nodes("b", listen="tcp://[::1]:*")
    except OSError:
        pytest.skip("no IPv6 here")
    assert a.thread.address.startswith("tcp://[::1]:")
    acquaint(a, b)
    a.talks_to(b, 1)


def test_a_host_name_with_two_addresses_of_which_one_works(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = nodes("a"), nodes("b")
    monkeypatch.setattr(resolver, "_resolve", lambda host: (("[::1]", "127.0.0.1"), ""))
    acquaint(a, b)
    a.directory.configure([NodeEntry("b", f"tcp://gpu7.example:{b.port}", b.pair.public)], ())
    a.talks_to(b, 1, timeout=10)


def test_a_name_server_that_does_not_answer_delays_nobody(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = nodes.pair()

    def resolve(host: str) -> tuple[tuple[str, ...], str]:
        time.sleep(2.0)
        return ("127.0.0.1",), ""

    monkeypatch.setattr(resolver, "_resolve", resolve)
    c = nodes("c")
    far = NodeEntry("c", f"tcp://slow.example:{c.port}", c.pair.public)
    a.directory.configure([b.entry, far], ())
    c.knows(a)
    a.send("c", 5)
    slowest = max(a.talks_to(b, revision) for revision in range(10, 20))
    assert slowest < 0.5
    wait(lambda: 5 in c.heard(a), 10, "heard once the name is resolved, without being said again")


def test_hello_tells_the_address_of_a_peer_whose_key_alone_is_authorised(nodes: Nodes) -> None:
    a, b = nodes("a"), nodes("b")
    a.directory.configure([], [b.pair.public])
    b.knows(a)
    a.send(b, 1)  # nowhere to send it yet
    b.thread.send(Envelope(messages.PROTOCOL, "b", 1, "a", 0, (hello(b.thread.address),)))
    wait(lambda: a.directory.place("b"), 5, "the address is learned")
    a.talks_to(b, 2)
    assert a.directory.place("b") == (b.thread.address, b.pair.public)
    # the name is pinned to the key: the same key cannot take another
    raw = nodes.raw(a, b.pair)
    raw.send(frame("c", "a"))
    wait(lambda: a.refused["wrong_source"] == 1, 5, "refused")
    assert "belongs to node 'b'" in a.refusals[-1][2]


# who is not heard --------------------------------------------------------------------------------------------------


def test_a_stranger_is_refused_counted_and_hears_why(nodes: Nodes) -> None:
    a, b = nodes.pair()
    s = nodes("s")
    s.knows(a)
    s.send(a, 1)
    wait(lambda: a.refused["stranger"] and s.refused["stranger"], 5, "refused on both sides")
    who, _, detail = a.refusals[-1]
    assert who == "127.0.0.1"
    assert s.pair.public in detail and "bootstrap.authorized_keys" in detail
    assert f"node 'a' refuses this node's key: add {s.pair.public}" in s.refusals[-1][2]
    a.talks_to(b, 2)
    assert not a.heard(s)
    assert s.cuts("a") == 0  # it was never connected
    a.directory.configure([b.entry, s.entry], ())  # now it is known, and gets in without a restart of anything
    s.talks_to(a, 2)


def test_authorisation_can_be_taken_away(nodes: Nodes) -> None:
    a, b = nodes.pair()
    a.directory.configure([], [])
    b.send(a, 5)
    wait(lambda: a.refused["wrong_source"], 5, "an open connection is refused, too")
    assert 5 not in a.heard(b)


def test_nobody_can_speak_for_another_node(nodes: Nodes) -> None:
    a, b = nodes.pair()
    c = nodes("c")
    a.directory.configure([b.entry, c.entry], [])
    raw = nodes.raw(a, c.pair)
    raw.send(frame("b", "a", Goodbye()))
    wait(lambda: a.refused["wrong_source"] == 1, 5, "refused")
    assert a.refusals[-1][0] == "c"
    raw.send(frame("a", "a"))  # not even for the node itself
    raw.send(frame("c", "b"))  # and not to somebody else
    raw.send(frame("c" * 200, "a"))
    raw.send(frame("c", "a", incarnation=0))
    raw.send(frame("c", "a", hello("inproc://zeromq.zap.01")))
    wait(lambda: a.refused == {"wrong_source": 3, "bad_frame": 3}, 5, f"refused: {a.refused}")
    raw.send(frame("c", "a"))
    wait(lambda: a.heard(c) == [7], 5, "its own frames are heard")
    a.talks_to(b, 2)


def test_a_copied_key_file(nodes: Nodes) -> None:
    a, _ = nodes.pair()
    raw = nodes.raw(a, a.pair)
    raw.send(frame("a", "a"))
    wait(lambda: a.refused["stranger"], 5, "refused")
    assert "own key" in a.refusals[-1][2]


def test_any_bytes_of_a_peer_cost_nobody_anything(nodes: Nodes) -> None:
    a, b = nodes.pair()
    c = nodes("c")
    a.directory.configure([b.entry, c.entry], [])
    raw = nodes.raw(a, c.pair)
    good = frame("c", "a")
    future = msgspec.msgpack.encode([2, "c", 1, "a", 0, [], {"new": 1}])
    bad = [
        b"",
        b"\xc1",
        b"\x00" * 1000,
        good[:-1],
        good + b"\0",
        b"\x91" * 100_000,
        good.replace(b"Heartbeat", b"Heartbeet"),
    ]
    for junk in bad:
        raw.send(junk)
    raw.send(future)
    raw.send_multipart([good] * 3)
    raw.send(b"x" * (messages.MAX_FRAME + 1))
    wait(lambda: sum(a.refused.values()) == len(bad) + 3, 10, f"refused: {a.refused}")
    assert a.refused == {"bad_frame": len(bad) + 1, "wrong_version": 1, "frame_too_large": 1}
    assert {who for who, *_ in a.refusals} == {"c"}
    raw.send(good)
    wait(lambda: a.heard(c) == [7], 5, "the connection stays")
    raw.send(b"x" * (3 * messages.MAX_FRAME))  # far too large: its connection is closed
    assert max(b.talks_to(a, revision) for revision in range(10, 20)) < 1.0
    assert a.thread.alive
    assert not a.deaths
    raw.send(good)
    wait(lambda: len(a.heard(c)) >= 2, 10, "and opened again")


def test_a_flood_of_one_peer_does_not_drown_another(nodes: Nodes) -> None:
    a, b = nodes.pair()
    c = nodes("c")
    a.directory.configure([b.entry, c.entry], [])
    raw = nodes.raw(a, c.pair)
    end = time.monotonic() + 2.0
    sent, slowest, revision = 0, 0.0, 10
    while time.monotonic() < end:
        for _ in range(500):
            try:
                raw.send(b"junk" * 100, zmq.NOBLOCK)
                sent += 1
            except zmq.Again:
                break
        revision += 1
        slowest = max(slowest, b.talks_to(a, revision), a.talks_to(b, revision))
    assert sent > 1000
    assert slowest < 1.0
    wait(lambda: a.refused["bad_frame"] == sent, 20, f"each of {sent} is counted: {a.refused}")
    assert len(a.refusals) < sent / 2  # and not each is told


def test_connections_that_prove_nothing(nodes: Nodes) -> None:
    """Raw garbage, 300 half-open connections, and a ZeroMQ socket without keys."""
    a, b = nodes("a", handshake_seconds=1.0), nodes("b")
    acquaint(a, b)
    b.talks_to(a, 1)
    opened = [socket.create_connection(("127.0.0.1", a.port)) for _ in range(300)]
    try:
        for n, connection in enumerate(opened[:100]):
            connection.sendall(
                [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + b"\0" * 50][n % 3]
            )
        plain = nodes.context.socket(zmq.DEALER)
        plain.linger = 0
        plain.connect(a.thread.endpoint)
        plain.send(frame("b", "a", Heartbeat(666, 0)))
        slowest = max(b.talks_to(a, revision) for revision in range(10, 30))
        assert slowest < 1.0
        # what ZeroMQ takes for a peer of its first version is closed without a word: a third of the 100
        wait(
            lambda: a.refused["stranger"] >= 266,
            15,
            "the others are thrown out and counted within the handshake's time",
        )
        assert 666 not in a.heard(b)
        b.talks_to(a, 31)
        assert (a.thread.alive, a.deaths) == (True, [])
    finally:
        for connection in opened:
            connection.close()


def test_a_main_loop_that_does_not_keep_up(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for it is bounded in frames and bytes; the rest is dropped and counted, and nothing drifts."""
    a, b = nodes("a", inbox=20), nodes("b")
    acquaint(a, b)
    b.talks_to(a, 1)
    before = len(a.heard(b))
    held = nodes.main.hold()
    for revision in range(100, 200):
        b.send(a, revision)
    beats = a.thread.heartbeat
    wait(lambda: a.thread.heartbeat > beats + 5, 5, "the thread goes on")
    time.sleep(0.3)
    held.set()
    wait(lambda: a.refused["overloaded"] >= 80, 5, f"overloaded: {a.refused}")
    assert len(a.heard(b)) - before == 100 - a.refused["overloaded"] <= 20
    for revision in range(200, 260):
        b.talks_to(a, revision)
    monkeypatch.setattr(flow, "INBOX_BYTES", 1000)
    refused = a.refused["overloaded"]
    held = nodes.main.hold()
    b.thread.send(Envelope(messages.PROTOCOL, "b", 1, "a", 0, (Finish("r", 0, 1, b"x" * 2000),)))
    time.sleep(0.2)
    held.set()
    wait(lambda: a.refused["overloaded"] > refused, 5, "too many bytes")
    b.talks_to(a, 300)


# the dead and the slow ---------------------------------------------------------------------------------------------


def test_dead_peers_delay_nobody(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "FRAME_LIFE", 2.0)
    a, b = nodes("a"), nodes("b")
    dead = [NodeEntry(f"dead{n}", f"tcp://127.0.0.1:{closed_port()}", keys.generate().public) for n in range(30)]
    nowhere = [NodeEntry(f"gone{n}", f"tcp://192.0.2.{n}:7971", keys.generate().public) for n in range(5)]
    a.directory.configure([b.entry, *dead, *nowhere], ())
    b.knows(a)
    a.talks_to(b, 1)
    slowest = 0.0
    for revision in range(10, 40):
        for entry in dead + nowhere:
            a.send(entry.node, revision)
        slowest = max(slowest, a.talks_to(b, revision))
    assert slowest < 0.5
    assert not any(a.cuts(entry.node) for entry in dead)
    wait(lambda: a.thread.dropped >= 30 * 35, 10, "what waited too long is given up")
    assert a.thread.outboxes.waiting() == []


def test_a_peer_that_never_reads_delays_nobody_and_costs_bounded_memory(nodes: Nodes) -> None:
    a, b = nodes("a", outbox=50), nodes("b")
    with socket.socket() as deaf:  # as a stopped process: the kernel accepts, nobody reads
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(64)
        entry = NodeEntry("deaf", f"tcp://127.0.0.1:{deaf.getsockname()[1]}", keys.generate().public)
        a.directory.configure([b.entry, entry], ())
        b.knows(a)
        slowest = 0.0
        for revision in range(1, 40):
            for n in range(10):
                a.send("deaf", n)
            slowest = max(slowest, a.talks_to(b, revision))
        assert slowest < 0.5
        assert a.thread.dropped >= 300


def test_a_peer_whose_thread_stands_still(nodes: Nodes) -> None:
    """It has proven its key and reads no more: the socket takes a little, the outbox the rest, others notice nothing."""
    a, b = nodes.pair()
    c = nodes("c", inbox=10**6)
    acquaint(a, b, c)
    a.talks_to(c, 1)
    c.thread.inject("loop")
    big = (Finish("r", 0, 1, b"x" * messages.MAX_AUX),) * 10
    slowest = 0.0
    for revision in range(10, 60):
        for _ in range(10):
            a.thread.send(Envelope(messages.PROTOCOL, "a", 1, "c", 0, big))
        slowest = max(slowest, a.talks_to(b, revision))
    assert slowest < 0.5
    assert a.thread.outboxes.waiting() == ["c"]
    c.thread.restart()
    assert a.talks_to(c, 2, timeout=10) < 10


def test_a_closing_peer_is_a_cut_and_its_last_words_arrive(nodes: Nodes) -> None:
    a, b = nodes.pair()
    for n in range(50):
        b.send(a, 1000 + n)
    b.thread.send(Envelope(messages.PROTOCOL, "b", 1, "a", 0, (Goodbye(),)))
    b.thread.stop()
    wait(lambda: a.cuts("b"), 5, "the cut is noticed")
    last = [e for e in a.events if isinstance(e, PeerSaid)][-1]
    assert last.body == (Goodbye(),)
    assert a.heard(b)[-50:] == [1000 + n for n in range(50)]
    time.sleep(0.7)  # it connects again and again, in vain
    assert a.cuts("b") == 1
    b.thread.start()
    a.talks_to(b, 2)


def test_a_forgotten_peer_is_connected_to_again_when_needed(nodes: Nodes) -> None:
    a, b = nodes.pair()
    a.thread.forget("b")
    a.thread.forget("nobody")
    wait(lambda: not a.thread.closing, 5, "closed")
    a.talks_to(b, 2)
    assert a.cuts("b") == 0  # its own doing
