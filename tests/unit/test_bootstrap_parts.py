"""Directory, outboxes, resolver, settings and the decoder: the parts of bootstrap that need no socket."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdxfer.bootstrap import keys, peers, resolver
from pdxfer.bootstrap.directory import Directory, Place
from pdxfer.bootstrap.peers import FRAME_LIFE, Outboxes
from pdxfer.bootstrap.resolver import Resolver
from pdxfer.bootstrap.settings import BootstrapSettings, NodeEntry, RegistrySettings, good_key, reachable
from pdxfer.core import messages
from pdxfer.core.messages import Announce, EngineInfo, Envelope, Finish, Heartbeat, Hello, Segment, Want
from pdxfer.core.reasons import Refused

K = [keys.generate().public for _ in range(6)]
HERE, THERE = "tcp://10.0.0.1:7971", "tcp://10.0.0.2:7971"


# directory ---------------------------------------------------------------------------------------------------------


def test_configured_nodes() -> None:
    d = Directory("me", K[0])
    d.configure([NodeEntry("a", HERE, K[1]), NodeEntry("me", HERE, K[0])], [])
    assert d.authorised(K[1]) and not d.authorised(K[0]) and d.own(K[0])
    assert d.identify(K[1], "a") and not d.identify(K[1], "b") and not d.identify(K[2], "a") and not d.identify("", "")
    assert d.place("a") == Place(HERE, K[1]) and d.place("me") is None and d.place("b") is None
    assert d.name_of(K[1]) == "a" and d.name_of(K[2]) == K[2] and d.key_of("a") == K[1] and d.key_of("b") == ""


def test_the_configuration_knows_better_than_anybody() -> None:
    d = Directory("me", K[0])
    d.configure([NodeEntry("a", HERE, K[1])], [])
    assert d.learn("a", THERE)  # it is allowed to say so
    assert not d.learn("a", THERE, K[2])
    assert d.place("a") == Place(HERE, K[1]) and not d.authorised(K[2])


def test_a_name_is_pinned_to_the_key_that_uses_it_first() -> None:
    d = Directory("me", K[0])
    d.configure([], [K[1], K[2]])
    assert d.authorised(K[1]) and d.place("a") is None
    assert not d.identify(K[1], "me")
    assert d.identify(K[1], "a") and not d.identify(K[1], "b") and not d.identify(K[2], "a") and d.identify(K[2], "b")
    assert d.learn("a", HERE) and d.place("a") == Place(HERE, K[1])
    d.configure([], [K[2]])
    assert not d.authorised(K[1]) and d.place("a") is None
    d.configure([NodeEntry("b", HERE, K[3])], [K[2]])  # the name is given to another key
    assert d.identify(K[3], "b") and not d.identify(K[2], "b") and d.identify(K[2], "c")


def test_what_the_registry_says_is_learned_and_replaced() -> None:
    d = Directory("me", K[0])
    d.configure([], [])
    assert d.learn("a", HERE, K[1]) and d.identify(K[1], "a") and d.place("a") == Place(HERE, K[1])
    assert d.learn("a", THERE, K[2]) and not d.authorised(K[1]) and d.place("a") == Place(THERE, K[2])
    assert not d.learn("b", HERE, K[2])  # one key, one name
    assert not d.learn("b", HERE, K[0]) and not d.learn("me", HERE, K[3]) and not d.learn("b", HERE)
    d.configure([NodeEntry("c", HERE, K[4])], [])  # a reload takes nothing of it away
    assert d.identify(K[2], "a")


@pytest.mark.parametrize(
    "address", ["", "ipc:///x", "inproc://zeromq.zap.01", "tcp://*:1", "tcp://0.0.0.0:1", "tcp://h:0", "tcp://h:70000"]
)
def test_addresses_that_nobody_can_connect_to(address: str) -> None:
    d = Directory("me", K[0])
    assert not reachable(address) and not d.learn("a", address, K[1]) and not d.authorised(K[1])


def test_learned_nodes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdxfer.bootstrap.directory.MAX_LEARNED", 3)
    d = Directory("me", K[0])
    for n in range(1, 5):
        assert d.learn(f"n{n}", HERE, K[n])
    assert [d.authorised(k) for k in K[1:5]] == [False, True, True, True]


# outboxes ----------------------------------------------------------------------------------------------------------


def test_an_outbox_is_bounded_and_drops_the_oldest() -> None:
    boxes = Outboxes(3)
    for n in range(5):
        boxes.put("a", b"%d" % n, 0.0)
    boxes.put("b", b"x", 0.0)
    assert boxes.dropped == 2 and boxes.fresh() == {"a", "b"} and boxes.fresh() == set()
    assert [boxes.take("a", 0.0) for _ in range(4)] == [(0.0, b"2"), (0.0, b"3"), (0.0, b"4"), None]
    assert boxes.waiting() == ["b"]


def test_an_outbox_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "MAX_BYTES", 100)
    boxes = Outboxes(1000)
    for _ in range(10):
        boxes.put("a", b"x" * 40, 0.0)
    assert boxes.dropped == 8
    boxes.put("a", b"y" * 500, 0.0)  # alone, it may
    assert boxes.dropped == 10 and boxes.take("a", 0.0) == (0.0, b"y" * 500)


def test_stale_frames_are_given_up() -> None:
    boxes = Outboxes(10)
    for now in (0.0, 1.0, FRAME_LIFE + 1.0):
        boxes.put("a", b"%d" % now, now)
    boxes.put("b", b"", 0.0)
    boxes.expire(FRAME_LIFE + 0.5)
    assert boxes.dropped == 2 and boxes.waiting() == ["a"]
    assert boxes.take("a", FRAME_LIFE + 1.5) == (FRAME_LIFE + 1.0, b"6")
    assert boxes.dropped == 3 and boxes.waiting() == []


@given(
    st.lists(st.tuples(st.sampled_from(["put", "take", "back", "expire", "clear"]), st.sampled_from("ab")), max_size=60)
)
def test_every_frame_is_taken_once_or_dropped(steps: list[tuple[str, str]]) -> None:
    boxes = Outboxes(4)
    put = taken = 0
    for now, (step, node) in enumerate(steps):
        if step == "put":
            boxes.put(node, b"x" * now, float(now))
            put += 1
        elif step == "expire":
            boxes.expire(float(now))
        elif step == "clear":
            boxes.clear(node)
        elif (found := boxes.take(node, float(now))) is not None:
            if step == "back":
                boxes.put_back(node, found)
            else:
                taken += 1
    waiting = [frame for node in boxes.waiting() for frame in boxes._boxes[node].frames]
    assert put == taken + boxes.dropped + len(waiting)
    assert sum(box.bytes for box in boxes._boxes.values()) == sum(len(frame) for _, frame in waiting)


# resolver ----------------------------------------------------------------------------------------------------------


def test_numbers_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "_resolve", lambda host: pytest.fail(host))
    r = Resolver(lambda host, trouble: None)
    for address in ("tcp://10.0.0.1:1", "tcp://[::1]:1", "tcp://[fe80::1%eth0]:1"):
        assert r.endpoints(address, 0.0) == (address,)
    assert r.endpoints("nonsense", 0.0) == ()


def test_names_are_asked_for_elsewhere_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"a": (("10.0.0.1", "[::1]"), ""), "b": ((), "no such name")}
    asked: list[str] = []
    heard: list[tuple[str, str]] = []
    go = threading.Event()

    def resolve(host: str) -> tuple[tuple[str, ...], str]:
        asked.append(host)
        assert go.wait(5)
        return answers[host]

    def settle(count: int) -> None:
        end = time.monotonic() + 5
        while len(heard) < count and time.monotonic() < end:
            time.sleep(0.002)
        assert len(heard) == count

    monkeypatch.setattr(resolver, "_resolve", resolve)
    r = Resolver(lambda host, trouble: heard.append((host, trouble)))
    assert r.endpoints("tcp://a:1", 0.0) == r.endpoints("tcp://a:1", 0.1) == r.endpoints("tcp://b:1", 0.1) == ()
    go.set()
    settle(2)
    assert sorted(heard) == [("a", ""), ("b", "no such name")] and sorted(asked) == ["a", "b"]
    assert r.endpoints("tcp://a:7", 1.0) == ("tcp://10.0.0.1:7", "tcp://[::1]:7")
    assert r.endpoints("tcp://b:1", 1.0) == ()  # too soon
    assert r.endpoints("tcp://b:1", 3.0) == ()
    settle(3)
    assert heard[-1] == ("b", "")  # that it fails was said
    answers["a"] = ((), "the name server is down")
    assert len(r.endpoints("tcp://a:1", 3.0, again=True)) == 2
    settle(4)
    assert len(r.endpoints("tcp://a:1", 3.1)) == 2  # the last answer holds


def test_a_real_name() -> None:
    heard = threading.Event()
    r = Resolver(lambda host, trouble: heard.set())
    r.endpoints("tcp://localhost:5", 0.0)
    assert heard.wait(10)
    assert set(r.endpoints("tcp://localhost:5", 0.0)) & {"tcp://127.0.0.1:5", "tcp://[::1]:5"}


# settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "listen", ["tcp://10.0.0.1:7971", "tcp://[::1]:0", "tcp://eth0:*", "tcp://gpu-1.example.org:65535"]
)
def test_good_bootstrap_settings(listen: str) -> None:
    BootstrapSettings(listen=listen).check()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"listen": "udp://h:1"}, "bootstrap.listen is 'udp://h:1', expected tcp://HOST:PORT"),
        ({"listen": "tcp://h:65536"}, "expected tcp://HOST:PORT"),
        ({"listen": "tcp://*:1"}, "bootstrap.advertise is empty"),
        ({"listen": "tcp://[::]:1"}, "bootstrap.advertise is empty"),
        ({"advertise": "tcp://*:1"}, "bootstrap.advertise is 'tcp://.:1', expected one address"),
        ({"advertise": "tcp://h:0"}, "expected one address and port"),
        ({"authorized_keys": ("x" * 39,)}, "bootstrap.authorized_keys is 'xxx.*pdxfer keygen"),
        ({"authorized_keys": ("\\" * 40,)}, "expected a public key"),
        ({"inbox": 0}, "bootstrap.inbox is 0"),
    ],
)
def test_bad_bootstrap_settings(change: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        BootstrapSettings(**change).check()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (RegistrySettings(nodes=(NodeEntry("a", "tcp://h:*", K[1]),)), r"registry.nodes\[0\].address"),
        (RegistrySettings(nodes=(NodeEntry("a", HERE, "x"),)), r"registry.nodes\[0\].public_key"),
        (RegistrySettings(nodes=(NodeEntry("a", HERE, K[1]), NodeEntry("a", HERE, K[2]))), "named twice"),
        (RegistrySettings(nodes=(NodeEntry("a", HERE, K[1]), NodeEntry("b", HERE, K[1]))), "named twice"),
        (
            RegistrySettings(nodes=(NodeEntry("a", HERE, K[1], ("e",)), NodeEntry("b", HERE, K[2], ("e",)))),
            "served by node 'a'",
        ),
        (RegistrySettings(kind="embedded"), "registry.server is empty"),
    ],
)
def test_bad_registry_settings(settings: RegistrySettings, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        settings.check()


def test_good_keys() -> None:
    assert all(map(good_key, K))
    for bad in ("", K[0][:-1], K[0] + "a", "#" * 40, "é" * 40, K[0][:-1] + " "):
        assert not good_key(bad)


# the decoder -------------------------------------------------------------------------------------------------------

ENGINE = EngineInfo(1, "agent", "1.5.1", b"meta", b"digest", 2**40, 1 << 21, 32)
FRAMES = [
    messages.encode(Envelope(messages.PROTOCOL, "a", 1, "b", 0, body))
    for body in (
        (Hello(1, 2, HERE, "0.1", ENGINE), Heartbeat(1, 0)),
        (Want("r", 0, "p", "d", (), ()), Finish("r", 0, 3, b"aux")),
        (Segment("r", 0, 1, 2, 3, 4, 5, 2**63, ()), Announce(HERE, K[1], ("e",), 10.0)),
    )
]


def decodes_or_is_refused(frame: bytes) -> None:
    try:
        envelope = messages.decode(frame)
    except Refused as refused:
        assert refused.code in ("bad_frame", "wrong_version", "frame_too_large")
        return
    assert envelope.version == messages.PROTOCOL
    assert len(envelope.body) <= messages.MAX_PER_FRAME


@settings(max_examples=500)
@given(st.binary(max_size=400))
def test_random_bytes_are_refused_and_never_raise(junk: bytes) -> None:
    decodes_or_is_refused(junk)


@settings(max_examples=1000)
@given(st.data())
def test_mutated_frames_are_refused_or_decode(data: st.DataObject) -> None:
    frame = bytearray(data.draw(st.sampled_from(FRAMES)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(frame) - 1))
        match data.draw(st.sampled_from(["set", "cut", "insert", "repeat"])):
            case "set":
                frame[at] = data.draw(st.integers(0, 255))
            case "cut":
                del frame[at : at + data.draw(st.integers(1, 8))]
            case "insert":
                frame[at:at] = data.draw(st.binary(min_size=1, max_size=8))
            case "repeat":
                frame[at:at] = frame[at : at + 16]
        if not frame:
            return
    decodes_or_is_refused(bytes(frame))


@pytest.mark.parametrize("frame", FRAMES)
def test_every_prefix_is_refused(frame: bytes) -> None:
    for end in range(len(frame)):
        with pytest.raises(Refused):
            messages.decode(frame[:end])
