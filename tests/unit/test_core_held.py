"""A receive that holds the beginning of its prompt: only the rest is lent, sent and written."""

from __future__ import annotations

from typing import Any

import pytest
from core_harness import Net, Side, pair, table
from test_core_refusals import refused

from pdxfer.core import events, jobs, messages, worker

FOUR = (table(0, 1, 2, 3), table(0, 1, 2, 3))


def receive(side: Side, who: str, held: tuple[int, ...], *tables: bytes, source: str = "prefill") -> Any:
    return side.say(who, worker.Receive, "r", 0, source, 0, tables or FOUR, held)


def written(side: Side, kind: type = jobs.Scatter) -> set[tuple[int, int]]:
    """(pool, page) of everything that was written."""
    rows = [
        r for j in side.jobs if isinstance(j, kind) for r in getattr(j, "rows", ()) or getattr(j, "target_rows", ())
    ]
    return {(r.pool, int.from_bytes(r.pages[i : i + 4], "little")) for r in rows for i in range(0, len(r.pages), 4)}


@pytest.mark.parametrize("first", ["receive", "push"])
def test_only_the_rest_is_lent_sent_and_written(first: str) -> None:
    net, p, d = pair()
    p.open("prefill")
    if first == "push":
        p.push("prefill", *FOUR)
    assert isinstance(receive(d, "decode", (2, 3)), worker.Ok)
    if first == "receive":
        p.push("prefill", *FOUR)
    p.finish("prefill")
    assert (d.end("decode").reason, p.end("prefill").reason) == ("done", "done")
    assert written(d) == {(0, 2), (0, 3), (1, 3)}
    assert d.end("decode").bytes == 3 * 2 * 40 + 2 * 1 * 16 == p.end("prefill").bytes
    assert net.at_baseline()


def test_held_pages_stay_the_workers_own() -> None:
    _, _, d = pair()
    receive(d, "decode", (2, 3))
    assert d.lent() == 2 + 1
    d.open("decode", "other")
    assert isinstance(d.push("decode", table(0, 1), table(0, 1, 2), room="other"), worker.Ok)
    refused(d.push("decode", table(2), b"", room="other", page0=(2, 0)), "pages_not_owned")


def test_all_is_held() -> None:
    net, p, d = pair()
    receive(d, "decode", (4, 4))
    p.open("prefill")
    p.push("prefill", *FOUR)
    assert p.released("prefill"), "nobody has to read them"
    p.finish("prefill")
    assert d.end("decode").reason == "done" and d.end("decode").aux == b"aux" and d.end("decode").bytes == 0
    assert not written(d) and net.at_baseline()


def test_within_one_node() -> None:
    net = Net("p")
    p = net.sides["p"]
    p.attach("prefill")
    p.attach("decode")
    p.open("prefill")
    p.push("prefill", *FOUR)
    receive(p, "decode", (1, 4))
    p.finish("prefill")
    assert p.end("decode").reason == "done"
    assert written(p, jobs.Copy) == {(0, 1), (0, 2), (0, 3)}
    assert net.at_baseline()


def test_layer_by_layer_and_in_pieces() -> None:
    net, p, d = pair()
    p.open("prefill")
    receive(d, "decode", (3, 1))
    for plane in range(3):
        for first in (0, 2):
            kv = table(first, first + 1)
            p.push("prefill", kv, kv if plane < 2 else b"", page0=(first, first), plane0=plane, planes=1)
    p.finish("prefill")
    assert d.end("decode").reason == "done"
    assert written(d) == {(0, 3), (1, 1), (1, 2), (1, 3)}
    assert len(p.released("prefill")) == 6 and net.at_baseline()


@pytest.mark.parametrize(
    ("held", "code", "says"),
    [
        ((1,), "pools_unequal", "held pages for 1 pools, expected 2"),
        ((5, 0), "pages_out_of_range", "pool 'kv': 5 pages are held, of 4"),
        ((0, -1), "pages_out_of_range", "pool 'index_k': -1 pages are held"),
    ],
)
def test_what_cannot_be_held(held: tuple[int, ...], code: str, says: str) -> None:
    _, _, d = pair()
    refused(receive(d, "decode", held), code, says)
    assert not d.lent()


def test_a_page_that_is_held_and_named_twice() -> None:
    _, _, d = pair()
    refused(receive(d, "decode", (1, 0), table(5, 5), table(0, 1)), "pages_repeated", "pool 'kv'")
    assert not d.lent()


def test_a_peer_that_wants_what_cannot_be() -> None:
    net, p, d = pair()
    p.open("prefill")
    specs = p.node.state.by_engine_id["prefill"].specs
    d.say("decode", worker.Receive, "other", 0, "prefill", 0, FOUR)  # so that the nodes know each other
    d.abort("decode", room="other")
    want = messages.Want("r", 0, "prefill", "decode", specs, (4, 4), (9, 0))
    p.handle(events.PeerSaid("d", 1, 1, (want,)))
    net.settle()
    assert p.end("prefill").reason == "protocol_error" and "9 pages are held, of 4" in p.end("prefill").detail
