"""Rooms that go well: between nodes, within a node, in pieces, layer by layer, empty, and with every message lost once."""

from __future__ import annotations

import pytest
from core_harness import PAGES, Net, Side, landed, pair, table

from pdxfer.core import events, jobs, messages, worker


def done(p: Side, d: Side, size: int) -> None:
    sent, received = p.end("prefill"), d.end("decode")
    assert (sent.state, sent.reason, sent.bytes, sent.sending) == ("DONE", "done", size, True)
    assert (received.state, received.reason, received.bytes, received.aux) == ("DONE", "done", size, b"aux")
    assert p.lent() == d.lent() == p.busy_slots() == d.busy_slots() == 0


@pytest.mark.parametrize("receiver_first", [True, False])
def test_a_room_between_two_nodes(receiver_first: bool) -> None:
    net, p, d = pair()
    if receiver_first:
        assert d.receive("decode", "prefill", table(5, 6, 7), table(8, 9)) == worker.Ok(101)
        assert len(p.node.state.parked) == 1
    p.open("prefill")
    assert isinstance(p.push("prefill", table(1, 2, 3), table(4, 5)), worker.Ok)
    if not receiver_first:
        d.receive("decode", "prefill", table(5, 6, 7), table(8, 9))
    assert p.released("prefill") == [p.req], "all pages have been gathered"
    assert p.finish("prefill") == worker.Ok(p.req)
    done(p, d, 3 * 3 * 40 + 2 * 2 * 16)
    kinds = [type(f).__name__ for f in d.frames[d.ids["decode"]]]
    assert kinds == ["Attached", "Ok", "Matched", "RoomEnded"]
    assert net.at_baseline()


def test_rows_name_the_pages_that_the_workers_gave() -> None:
    _, p, d = pair()
    d.receive("decode", "prefill", table(5, 6), table(7, 8))
    p.open("prefill")
    p.push("prefill", table(1, 2), table(3, 4))
    p.finish("prefill")
    sends = [j for j in p.jobs if isinstance(j, jobs.Send)]
    scatters = [j for j in d.jobs if isinstance(j, jobs.Scatter)]
    assert [(j.slot, j.bytes) for j in scatters] == [(j.segment.slot, j.bytes) for j in sends]
    assert [j.digest for j in scatters] == [77, 77]
    assert sends[0].rows == (jobs.Rows(0, 0, 2, table(1, 2)), jobs.Rows(0, 2, 1, table(1)))
    assert scatters[0].rows == (jobs.Rows(0, 0, 2, table(5, 6)), jobs.Rows(0, 2, 1, table(5)))
    assert sends[1].rows == (jobs.Rows(0, 2, 1, table(2)), jobs.Rows(1, 0, 2, table(3, 4)))
    assert sends[0].address == (1 << 20) + sends[0].segment.slot * 200


def test_chunked_prefill() -> None:
    _, p, d = pair()
    d.receive("decode", "prefill", table(*range(6)), table(*range(6)))
    p.open("prefill")
    for i in range(3):
        p.push("prefill", table(2 * i, 2 * i + 1), table(2 * i, 2 * i + 1), page0=(2 * i, 2 * i))
        assert not p.ends("prefill")
    p.finish("prefill")
    assert len(p.released("prefill")) == 3
    done(p, d, 6 * (3 * 40 + 2 * 16))


def test_layer_by_layer_with_pools_of_different_depth() -> None:
    """The index pool has two planes, the KV pool three: the third push leaves the index pool alone."""
    _, p, d = pair()
    d.receive("decode", "prefill", table(0, 1), table(0, 1))
    p.open("prefill")
    for plane in range(3):
        pages = table(4, 5), table(4, 5) if plane < 2 else b""
        assert isinstance(p.push("prefill", *pages, plane0=plane, planes=1), worker.Ok)
    p.finish("prefill")
    done(p, d, 2 * (3 * 40 + 2 * 16))


@pytest.mark.parametrize("pushes", [0, 1, 2])
def test_a_room_without_pages(pushes: int) -> None:
    _, p, d = pair()
    p.open("prefill")
    for _ in range(pushes):
        p.push("prefill", b"", b"")
    assert len(p.released("prefill")) == pushes
    p.finish("prefill")
    d.receive("decode", "prefill", b"", b"")
    done(p, d, 0)


def test_more_pages_than_slots() -> None:
    _net, p, d = pair()
    d.receive("decode", "prefill", table(*range(PAGES)), table(*range(PAGES)))
    p.open("prefill")
    p.push("prefill", table(*range(PAGES)), table(*range(PAGES)))
    p.finish("prefill")
    done(p, d, PAGES * (3 * 40 + 2 * 16))
    assert len([j for j in p.jobs if isinstance(j, jobs.Send)]) > 2 * 4


def test_two_workers_of_one_node_use_neither_slots_nor_messages() -> None:
    net = Net("p")
    p = net.sides["p"]
    p.attach("prefill")
    p.attach("decode")
    p.open("prefill")
    p.push("prefill", table(1, 2), table(3, 4))
    p.receive("decode", "prefill", table(5, 6), table(7, 8))
    assert [f for f in p.frames[p.ids["decode"]] if isinstance(f, worker.Matched)]
    p.finish("prefill")
    done(p, p, 2 * (3 * 40 + 2 * 16))
    copies = [j for j in p.jobs if isinstance(j, jobs.Copy)]
    assert copies[0].source_rows == (jobs.Rows(0, 0, 3, table(1, 2)), jobs.Rows(1, 0, 2, table(3, 4)))
    assert copies[0].target_rows == (jobs.Rows(0, 0, 3, table(5, 6)), jobs.Rows(1, 0, 2, table(7, 8)))
    assert not any(isinstance(a, events.ToPeer) for a in p.actions)
    assert not [j for j in p.jobs if isinstance(j, (jobs.Send, jobs.Scatter))]


def test_a_source_that_attaches_here_while_the_registry_is_asked() -> None:
    net = Net("p")
    p = net.sides["p"]
    p.attach("decode")
    net.where["prefill"] = "!silence"
    p.receive("decode", "prefill", table(1), table(1))
    p.attach("prefill")
    p.handle(events.Resolved("prefill", "p", 0, ""))
    p.open("prefill")
    p.push("prefill", table(2), table(2))
    p.finish("prefill")
    assert p.end("decode").reason == "done"


def test_pages_of_a_common_prefix_are_lent_to_two_rooms_at_once() -> None:
    net, p, d = pair()
    p.hold.add(jobs.Send)
    for room in ("a", "b"):
        p.open("prefill", room)
        assert isinstance(p.push("prefill", table(1), table(1), room=room), worker.Ok)
        p.finish("prefill", room)
    d.receive("decode", "prefill", table(1), table(1), room="a")
    d.receive("decode", "prefill", table(2), table(2), room="b")
    assert p.lent() == 2
    net.unhold(p, jobs.Send)
    assert [e.reason for e in p.ends("prefill")] == ["done", "done"]
    assert net.at_baseline()


LOST = [
    messages.Hello, messages.Heartbeat, messages.Want, messages.Accept, messages.Need, messages.Grant, messages.Segment,
    messages.Ack, messages.Finish, messages.Done,
]  # fmt: skip


@pytest.mark.parametrize("kind", LOST, ids=lambda k: k.__name__)
def test_any_message_may_be_lost_until_the_link_is_well(kind: type) -> None:
    net, p, d = pair()
    net.drop, net.notify = {kind}, kind is not messages.Segment
    d.receive("decode", "prefill", table(*range(8)), table(*range(8)))
    p.open("prefill")
    p.push("prefill", table(*range(4)), table(*range(4)))
    net.sleep(1.0)
    p.push("prefill", table(*range(4, 8)), table(*range(4, 8)), page0=(4, 4))
    p.finish("prefill")
    net.sleep(1.0)
    net.drop = set()
    net.sleep(3.0)
    done(p, d, 8 * (3 * 40 + 2 * 16))


@pytest.mark.parametrize("kind", [*LOST[2:], messages.Ended, messages.EndedAck], ids=lambda k: k.__name__)
def test_any_message_may_come_again_long_after(kind: type) -> None:
    net, p, d = pair()
    d.receive("decode", "prefill", table(0, 1), table(0, 1))
    p.open("prefill")
    p.push("prefill", table(0, 1), table(0, 1))
    p.open("prefill", "dead")
    d.receive("decode", "prefill", table(3), table(3), room="dead")
    p.abort("prefill", "dead")
    p.finish("prefill")
    before = [len(s.frames[1]) if 1 in s.frames else 0 for s in net]
    assert {e.reason for e in p.ends("prefill")} == {"done", "aborted"}
    net.sleep(5.0)
    for source, target, message in [w for w in net.wire if type(w[2]) is kind]:
        net.carry(net.sides[source], (target, 1, message), late=True)
    net.settle()
    net.sleep(5.0)
    assert [len(s.frames[1]) if 1 in s.frames else 0 for s in net] == before
    assert net.at_baseline()
    assert not net.sides["p"].node.ends.closing
    assert not net.sides["d"].node.ends.closing


def test_landed_is_as_good_as_the_message_and_both_are_one() -> None:
    net, p, d = pair()
    net.drop, net.notify = {messages.Segment}, False
    d.receive("decode", "prefill", table(0), table(0))
    p.open("prefill")
    p.push("prefill", table(0), table(0))
    p.finish("prefill")
    send = next(j for j in p.jobs if isinstance(j, jobs.Send))
    for _ in range(2):
        d.report(jobs.Landed("p:1:1", landed(send)))
    net.drop = set()
    net.sleep(1.0)
    done(p, d, 3 * 40 + 2 * 16)
    assert len([j for j in d.jobs if isinstance(j, jobs.Scatter)]) == 1


def test_done_that_overtakes_our_own_engines_reports() -> None:
    net, p, d = pair()
    p.hold.add(jobs.Send)
    d.receive("decode", "prefill", table(0), table(0))
    p.open("prefill")
    p.push("prefill", table(0), table(0))
    p.finish("prefill")
    send = next(j for j in p.held if isinstance(j, jobs.Send))
    d.report(jobs.Landed("p:1:1", landed(send)))
    assert d.end("decode").reason == "done"
    assert not p.ends("prefill"), "its pages are not known to be read"
    p.report(jobs.Gathered(send.job))
    assert p.end("prefill").reason == "done"
    assert p.busy_slots() == 1, "the slot waits for its own report"
    p.report(jobs.Sent(send.job, 77, "", 0.0))
    assert net.at_baseline()


def test_done_and_then_our_engine_dies_before_it_reports() -> None:
    _net, p, d = pair()
    p.hold.add(jobs.Send)
    d.receive("decode", "prefill", table(0), table(0))
    p.open("prefill")
    p.push("prefill", table(0), table(0))
    p.finish("prefill")
    send = next(j for j in p.held if isinstance(j, jobs.Send))
    d.report(jobs.Landed("p:1:1", landed(send)))
    p.kill_engine()
    assert p.end("prefill").reason == "done"


def test_expect_tells_the_engine_when_writes_may_come() -> None:
    net, p, d = pair()
    p.hold.add(jobs.Send)
    d.receive("decode", "prefill", table(0), table(0))
    p.open("prefill")
    p.push("prefill", table(0), table(0))
    assert [j.slots > 0 for j in d.jobs if isinstance(j, jobs.Expect)] == [True]
    net.unhold(p, jobs.Send)
    assert [j.slots > 0 for j in d.jobs if isinstance(j, jobs.Expect)] == [True, False]


def test_no_peer_takes_all_slots() -> None:
    net, p, d = pair()
    q = net.sides["q"] = Side(net, "q", 1, net.limits)
    q.start_engine()
    q.attach("prefill-2")
    net.where["prefill-2"] = "q"
    p.hold.add(jobs.Send)
    for room in "abcd":
        p.open("prefill", room)
        d.receive("decode", "prefill", table(ord(room) - 97), table(ord(room) - 97), room=room)
        p.push("prefill", table(0), table(0), room=room)
    held = d.node.state.engine.recv
    assert held.held_by("p") == 3
    q.open("prefill-2", "z")
    q.push("prefill-2", table(0), table(0), room="z")
    q.finish("prefill-2", "z")
    d.receive("decode", "prefill-2", table(9), table(9), room="z")
    assert d.end("decode").room == "z"
    net.unhold(p, jobs.Send)
