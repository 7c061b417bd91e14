"""Two real sidecars with an embedded registry: a room from end to end, and what restarts and strangers do to it."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from sidecars import Sidecar, until

from pdxfer.bootstrap import keys
from pdxfer.client import Client, Ended, RoomEnd
from pdxfer.pools import PoolLayout, SharedPool

PAGES = 16
LAYOUT = PoolLayout("kv", "uint8", (16, 256), 16, planes=4)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Pair:
    """Sidecars p (which keeps the registry) and d, a prefill worker on p and a decode worker on d."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        pairs = {name: keys.generate() for name in "pd"}
        ports = {name: free_port() for name in "pd"}
        self.sidecars = {}
        for name, peer in (("p", "d"), ("d", "p")):
            keys.save(directory / f"{name}.key", pairs[name])
            entry = {"node": peer, "address": f"tcp://127.0.0.1:{ports[peer]}", "public_key": pairs[peer].public}
            self.sidecars[name] = Sidecar(
                directory,
                name,
                bootstrap__listen=f"tcp://127.0.0.1:{ports[name]}",
                bootstrap__key_file=directory / f"{name}.key",
                registry__kind="embedded",
                registry__server="p",
                registry__nodes=json.dumps([entry]),
            )
        self.p, self.d = self.sidecars["p"], self.sidecars["d"]
        self.p.start(wait=False)
        self.d.start(wait=False)
        self.p.wait_ready()
        self.d.wait_ready()
        self.pools = {name: SharedPool.allocate(LAYOUT, PAGES) for name in "pd"}
        self.prefill = Client(self.p.socket, "prefill-0", "prefill", [self.pools["p"]])
        self.decode = Client(self.d.socket, "decode-0", "decode", [self.pools["d"]])
        self.numbers = itertools.count()

    def until_known(self) -> None:
        """The prefill worker's lease has reached the registry."""
        until(lambda: self.transfer().reason == "done", 10, "a room is done")

    def transfer(self, timeout: float = 20.0, held: int = 0) -> RoomEnd:
        """One room; returns the receiver's end. If it is done, every byte is compared. ``held``: pages that are not sent."""
        name = f"room-{next(self.numbers)}"
        source, target = [3, 9, 1, 12], [0, 5, 15, 2]
        rng = np.random.default_rng(next(self.numbers))
        for plane in self.pools["p"].pages():
            plane[:] = rng.integers(0, 256, plane.shape, dtype=np.uint8)
        for plane in self.pools["d"].pages():
            plane[:] = 0
        send = self.prefill.open(name)
        send.push(source)
        send.finish(b"first token")
        for plane in self.pools["d"].pages():
            plane[target[:held]] = 0x77
        self.decode.receive(name, "prefill-0", target, held=held)
        end = self.ended(name, timeout)
        if end.reason == "done":
            assert end.aux == b"first token"
            for ours, theirs in zip(self.pools["p"].pages(), self.pools["d"].pages(), strict=True):
                assert np.array_equal(ours[source[held:]], theirs[target[held:]])
                assert (theirs[target[:held]] == 0x77).all(), "what is held is not touched"
                assert not theirs[[n for n in range(PAGES) if n not in target]].any()
        return end

    def ended(self, name: str, timeout: float) -> RoomEnd:
        """Both sides have ended; returns the receiver's."""
        ends: dict[bool, RoomEnd] = {}
        deadline = time.monotonic() + timeout
        while len(ends) < 2:
            assert time.monotonic() < deadline, f"{name}: only {ends} after {timeout} s"
            for client in (self.prefill, self.decode):
                for event in client.poll(0.01):
                    if isinstance(event, Ended) and event.end.room == name:
                        ends[event.end.sending] = event.end
        return ends[False]

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()
        for sidecar in self.sidecars.values():
            sidecar.end()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    one = Pair(tmp_path)
    yield one
    one.close()


def both(pair: Pair, check: Callable[[Sidecar], bool], timeout: float, what: str) -> None:
    for sidecar in (pair.p, pair.d):
        until(lambda sidecar=sidecar: check(sidecar), timeout, f"{sidecar.name}: {what}")


def at_baseline(sidecar: Sidecar) -> bool:
    status = sidecar.status()
    pages = status["pages"]
    slots = status["slots"].values()
    rooms = [sum(states.values()) for states in status["rooms_by_state"].values()]
    return (
        pages["home"] == PAGES
        and not pages["read"] + pages["write"]
        and not any(rooms)
        and all(n == 0 for states in slots for state, n in states.items() if state != "free")
    )


def test_a_room_goes_from_worker_to_worker_and_everything_comes_home(pair: Pair) -> None:
    pair.until_known()
    for _ in range(5):
        assert pair.transfer().reason == "done"
    for held in range(5):
        end = pair.transfer(held=held)
        assert (end.reason, end.bytes) == ("done", (4 - held) * LAYOUT.planes * LAYOUT.page_bytes)
    both(pair, at_baseline, 10, "pages, slots and rooms at their baseline")
    for sidecar, side in ((pair.p, "send"), (pair.d, "receive")):
        assert sidecar.metric(f'pdxfer_room_ends_total{{reason="done",side="{side}"}}') >= 6
        assert sidecar.metric(f'pdxfer_payload_bytes_total{{side="{side}"}}') >= 6 * 4 * 4 * 4096
    assert [peer["state"] for peer in pair.d.status()["peers"]] == ["up"]


def test_an_unknown_engine_is_named(pair: Pair) -> None:
    pair.until_known()
    pair.decode.receive("nowhere", "no-such-engine", [1])
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for event in pair.decode.poll(0.1):
            if isinstance(event, Ended):
                assert event.end.reason == "unknown_engine"
                assert "no-such-engine" in event.end.detail
                return
    raise AssertionError("the receive did not end")


def test_the_bootstrap_threads_of_both_sides_die_and_no_room_is_lost(pair: Pair) -> None:
    pair.until_known()
    for sidecar in (pair.p, pair.d):
        sidecar.ask("POST", "/debug/bootstrap", {"inject": "exception"})
        assert pair.transfer().reason == "done"
    assert {s.status()["services"]["bootstrap"]["restarts"] for s in (pair.p, pair.d)} == {1}


@pytest.mark.parametrize("victim", ["p", "d"])
def test_a_killed_engine_costs_at_most_the_rooms_under_way(pair: Pair, victim: str) -> None:
    pair.until_known()
    os.kill(pair.sidecars[victim].engine_pid, signal.SIGKILL)
    until(lambda: pair.transfer().reason == "done", 15, "a room is done again")
    both(pair, at_baseline, 15, "baseline")


def test_a_killed_sidecar_comes_back_and_its_worker_attaches_again(pair: Pair) -> None:
    pair.until_known()
    pair.decode.receive("waits", "prefill-0", [1])  # prefill never opens it
    until(lambda: pair.decode.poll(0.05) or pair.d.status()["rooms_by_state"]["receive"]["wanting"] == 1, 5, "it waits")
    pair.p.signal(signal.SIGKILL)
    pair.p.wait()
    began = time.monotonic()
    pair.p.start()
    end: list[RoomEnd] = []
    until(
        lambda: end.extend(e.end for e in pair.decode.poll(0.05) if isinstance(e, Ended)) or end,
        5,
        "the wait has ended",
    )
    assert time.monotonic() - began < 6
    assert end[0].reason in ("peer_lost", "peer_restarted")
    until(lambda: pair.prefill.poll(0.05) is not None and pair.prefill.connected, 10, "prefill attached again")
    until(lambda: pair.transfer().reason == "done", 15, "a room is done again")
    both(pair, at_baseline, 15, "baseline")


def test_a_stranger_is_refused_by_name_and_costs_nobody_else_anything(pair: Pair) -> None:
    pair.until_known()
    entry = {
        "node": "p",
        "address": pair.p.status()["address"],
        "public_key": keys.load(pair.directory / "p.key").public,
    }
    stranger = Sidecar(
        pair.directory, "s", registry__kind="embedded", registry__server="p", registry__nodes=json.dumps([entry])
    )
    try:
        stranger.start(wait=False)
        refused = 'pdxfer_frames_refused_total{origin="peer",reason="stranger"}'
        until(lambda: pair.p.metric(refused) >= 1, 15, "the stranger is refused and counted")
        until(lambda: (stranger.runtime / "admin.json").exists(), 15, "the stranger is up")
        status, answer = stranger.ask("GET", "/readyz")
        assert (status, "registry: node 'p' has not answered yet" in str(answer["reasons"])) == (503, True)
        assert pair.transfer().reason == "done"
    finally:
        stranger.end()


def test_a_peer_is_authorised_by_sighup(tmp_path: Path) -> None:
    pairs = {name: keys.generate() for name in "ps"}
    for name, keypair in pairs.items():
        keys.save(tmp_path / f"{name}.key", keypair)
    port = free_port()
    registry = {"registry__kind": "embedded", "registry__server": "p", "registry__ttl": 2.0}
    p = Sidecar(
        tmp_path,
        "p",
        bootstrap__listen=f"tcp://127.0.0.1:{port}",
        bootstrap__key_file=tmp_path / "p.key",
        **registry,
    )
    p.config = tmp_path / "p.toml"
    p.config.write_text("")
    entry = {"node": "p", "address": f"tcp://127.0.0.1:{port}", "public_key": pairs["p"].public}
    s = Sidecar(tmp_path, "s", bootstrap__key_file=tmp_path / "s.key", registry__nodes=json.dumps([entry]), **registry)
    try:
        p.start()
        s.start(wait=False)
        until(lambda: p.metric('pdxfer_frames_refused_total{origin="peer",reason="stranger"}') >= 1, 15, "refused")
        assert not s.ready()
        p.config.write_text(f"[bootstrap]\nauthorized_keys = [{json.dumps(pairs['s'].public)}]\n")
        p.signal(signal.SIGHUP)
        until(lambda: "SIGHUP: changed: bootstrap.authorized_keys" in p.said(), 5, "reloaded")
        s.wait_ready(15)
    finally:
        p.end()
        s.end()
