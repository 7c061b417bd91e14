"""Bad input gets a clear answer, changes nothing and costs nobody else anything."""

from __future__ import annotations

from typing import Any

import pytest
from core_harness import PAGES, SPECS, Net, Side, attach, pair, table

from pdxfer.core import events, jobs, messages, worker
from pdxfer.core.geometry import PoolSpec
from pdxfer.core.limits import Limits
from pdxfer.core.state import agent_name


def refused(answer: Any, code: str, *says: str) -> None:
    assert isinstance(answer, worker.Rejected), answer
    assert answer.code == code, answer
    for words in says:
        assert words in answer.detail, answer.detail


def books(side: Side) -> tuple[Any, ...]:
    st = side.node.state
    return (
        side.lent(), side.busy_slots(), list(st.sends), list(st.recvs), list(st.jobs), list(st.homing),
        [(list(r.counts), r.covered.left, len(r.pushes)) for r in st.sends.values()],
    )  # fmt: skip


# attaching ---------------------------------------------------------------------------------------------------------


def test_a_second_worker_with_a_taken_name() -> None:
    _, p, _ = pair()
    id = p.attach("prefill")
    refused(p.frames[id][0], "engine_id_taken", "'prefill'", "process 42")
    assert events.DropWorker(id) in p.actions
    p.handle(events.WorkerGone(id, "dropped"))
    p.ids["prefill"] = 1
    assert isinstance(p.open("prefill"), worker.Ok), "the first is not touched"


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ({"version": 9}, "wrong_version", "9, expected 1"),
        ({"engine_id": ""}, "bad_engine_id", "''"),
        ({"engine_id": "x" * 129}, "bad_engine_id", "xxx"),
        ({"engine_id": "a\x00b"}, "bad_engine_id", "x00"),
        ({"pools": attach("x").pools * 2}, "bad_layout", "different"),
        ({"pools": (worker.PoolAt(SPECS[0], 4, ()),)}, "bad_layout", "0 planes are placed"),
        ({"pools": attach("x", pages=0).pools}, "bad_layout", "num_pages is 0"),
        ({"pools": attach("x", pages=2**30).pools}, "bad_layout", "num_pages is 1073741824"),
        ({"fd_bytes": ()}, "bad_layout", "file descriptor 0 of 0"),
        ({"fd_bytes": (100,)}, "bad_layout", "its memory has 100"),
        ({"pools": (worker.PoolAt(PoolSpec("kv", "bf16", "r", 16, 1, 40), 2, (worker.PlaneAt(0, 0, 39),)),)}, "bad_layout", "stride 39"),
        ({"pools": (worker.PoolAt(PoolSpec("kv", "bf16", "r", 16, 1, 40), 2, (worker.PlaneAt(0, -1, 40),)),)}, "bad_layout", "bytes -1"),
        ({"pools": (worker.PoolAt(PoolSpec("kv", "bf16", "r", 16, 1, 0), 2, (worker.PlaneAt(0, 0, 40),)),)}, "bad_layout", "page_bytes is 0"),
    ],
)  # fmt: skip
def test_attaches_that_cannot_be(change: dict[str, Any], code: str, says: str) -> None:
    net = Net("p")
    p = net.sides["p"]
    frame = attach("prefill")
    fields = {f: getattr(frame, f) for f in frame.__struct_fields__} | change
    p.handle(events.WorkerAttached(5, worker.Attach(**fields)))
    refused(p.frames[5][0], code, says)
    assert p.actions[-2] == events.DropWorker(5)
    assert not p.node.state.workers
    assert not p.node.state.pages.counts()


def test_pools_that_the_engine_cannot_map() -> None:
    net = Net("p")
    p = net.sides["p"]
    p.hold.add(jobs.MapPools)
    id = p.attach("prefill")
    assert id not in p.frames
    p.report(jobs.Mapped(id, "mmap: Permission denied"))
    refused(p.frames[id][0], "map_failed", "Permission denied")
    assert events.DropWorker(id) in p.actions


def test_what_a_worker_says_after_it_is_gone_is_nothing() -> None:
    _, p, _ = pair()
    p.gone("prefill")
    assert p.open("prefill") is None
    p.handle(events.WorkerGone(p.ids["prefill"], "twice"))
    p.handle(events.WorkerGone(12345, "never was"))


# rooms -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("room", "epoch"), [("", 0), ("x" * 129, 0), ("a\nb", 0), ("r", -1), ("r", 2**31)])
def test_bad_room_ids(room: str, epoch: int) -> None:
    _, p, _ = pair()
    refused(p.open("prefill", room, epoch), "bad_room_id")
    refused(p.receive("prefill", "x", table(0), table(0), room=room, epoch=epoch), "bad_room_id")
    refused(p.abort("prefill", room, epoch), "bad_room_id")
    assert books(p)[0] == 0


def test_a_room_twice() -> None:
    _, p, d = pair()
    assert isinstance(p.open("prefill"), worker.Ok)
    refused(p.open("prefill"), "room_exists", "send of room r/0 is open (state open)")
    assert isinstance(d.receive("decode", "prefill", table(0), table(0)), worker.Ok)
    before = books(d)
    refused(d.receive("decode", "prefill", table(1), table(1)), "room_exists", "receive of room r/0", "receiving")
    assert books(d) == before


def test_a_room_reused_after_its_end() -> None:
    _, p, d = pair()
    p.open("prefill")
    d.receive("decode", "prefill", b"", b"")
    p.finish("prefill")
    refused(p.open("prefill"), "room_reused", "done")
    refused(d.receive("decode", "prefill", b"", b""), "room_reused", "done")
    assert isinstance(p.open("prefill", epoch=1), worker.Ok), "the next epoch is another room"


BAD_PUSHES: list[tuple[dict[str, Any], tuple[bytes, ...], str, str]] = [
    ({}, (table(PAGES), b""), "pages_out_of_range", f"page {PAGES}, expected 0 to {PAGES - 1}"),
    ({}, (table(3, 3), b""), "pages_repeated", "page 3 is named twice"),
    ({}, (table(9), b""), "pages_not_owned", "page 9 is lent (write)"),
    ({}, (table(1),), "pools_unequal", "1 page tables"),
    ({"page0": (0,)}, (table(1), b""), "pools_unequal", "1 first pages"),
    ({}, (b"\x01", b""), "bad_frame", "1 bytes"),
    ({"page0": (-1, 0)}, (table(1), b""), "pages_out_of_range", "logical pages -1"),
    ({"page0": (PAGES, 0)}, (table(1), b""), "pages_out_of_range", f"at most {PAGES}"),
    ({"plane0": 3, "planes": 1}, (table(1), b""), "planes_out_of_range", "planes 3 to 3, expected 0 to 2"),
    ({"plane0": 1}, (table(1), b""), "planes_out_of_range", "planes 1 to 3"),
    ({"plane0": -1, "planes": 1}, (table(1), b""), "planes_out_of_range", "-1"),
    ({"planes": -1}, (table(1), b""), "planes_out_of_range", "expected 0 to 2"),
    ({}, (table(1), table(5)), "planes_repeated", "a second time"),
]


@pytest.mark.parametrize(("how", "tables", "code", "says"), BAD_PUSHES)
def test_bad_pushes_change_nothing(how: dict[str, Any], tables: tuple[bytes, ...], code: str, says: str) -> None:
    _, p, d = pair()
    p.open("prefill")
    assert isinstance(p.push("prefill", table(0), b""), worker.Ok)
    p.net.where["elsewhere"] = "!silence"
    p.receive("prefill", "elsewhere", table(9), table(9), room="other")
    before = books(p)
    refused(p.push("prefill", *tables, **how), code, says)
    assert books(p) == before
    p.abort("prefill", "other")
    assert isinstance(p.push("prefill", b"", table(2)), worker.Ok)
    d.receive("decode", "prefill", table(1), table(1))
    assert isinstance(p.finish("prefill"), worker.Ok)
    assert d.end("decode").reason == "done"


@pytest.mark.parametrize(
    ("tables", "source", "code"),
    [
        ((table(PAGES), b""), "x", "pages_out_of_range"), ((table(1, 1), b""), "x", "pages_repeated"),
        ((table(9), b""), "x", "pages_not_owned"), ((table(1),), "x", "pools_unequal"), ((b"\0", b""), "x", "bad_frame"),
        ((table(1), b""), "", "bad_engine_id"), ((table(1), b""), "a\nb", "bad_engine_id"),
    ],
)  # fmt: skip
def test_bad_receives_change_nothing(tables: tuple[bytes, ...], source: str, code: str) -> None:
    _, _, d = pair()
    d.net.where["far"] = "!silence"
    d.receive("decode", "far", table(9), table(9), room="other")
    before = books(d)
    refused(d.receive("decode", source, *tables), code)
    assert books(d) == before


def test_nothing_is_pushed_after_finish_and_nothing_finished_twice() -> None:
    _, p, _ = pair()
    p.open("prefill")
    refused(p.finish("prefill", aux=b"x" * (messages.MAX_AUX + 1)), "aux_too_large", "65537")
    p.push("prefill", table(1), table(1))
    assert isinstance(p.finish("prefill"), worker.Ok)
    before = books(p)
    refused(p.push("prefill", table(2), table(2), page0=(1, 1)), "push_after_finish", "2 pages")
    refused(p.finish("prefill"), "push_after_finish")
    assert books(p) == before


def test_rooms_that_are_not_open_and_rooms_of_others() -> None:
    _, p, _ = pair()
    p.attach("second")
    refused(p.push("prefill", table(1), table(1)), "unknown_room", "it was never opened")
    p.open("prefill")
    refused(p.push("second", table(1), table(1)), "not_your_room", "'prefill'")
    refused(p.finish("second"), "not_your_room", "'prefill'")
    p.abort("prefill")
    refused(p.push("prefill", table(1), table(1)), "unknown_room", "it has ended: aborted")
    assert p.lent() == 0


def test_too_many_rooms() -> None:
    _, p, _ = pair(Limits(max_rooms=2))
    p.open("prefill", "a")
    p.open("prefill", "b")
    refused(p.open("prefill", "c"), "too_many_rooms", "2 rooms")
    p.abort("prefill", "a")
    assert isinstance(p.open("prefill", "c"), worker.Ok)


def test_an_unknown_engine_id() -> None:
    _, _, d = pair()
    d.receive("decode", "nobody", table(0), table(0))
    end = d.end("decode")
    assert (end.reason, end.state, end.retriable) == ("unknown_engine", "FAILED", True)
    assert "'nobody'" in end.detail
    assert d.lent() == 0


def test_a_registry_that_does_not_answer() -> None:
    net, _, d = pair()
    net.where["far"] = "!silence"
    d.receive("decode", "far", table(0), table(0))
    net.sleep(net.limits.resolve_timeout + 0.1)
    assert d.end("decode").reason == "registry_unavailable"
    net.where["far"] = "!registry_unavailable"
    d.receive("decode", "far", table(0), table(0), room="s")
    assert d.ends("decode")[1].reason == "registry_unavailable"


def test_a_source_of_another_incarnation() -> None:
    _net, p, d = pair()
    d.receive("decode", "prefill", table(0), table(0), incarnation=7)
    end = d.end("decode")
    assert end.reason == "peer_restarted"
    assert "7" in end.detail and "it is 1 now" in end.detail
    p.attach("local")
    p.receive("local", "prefill", table(0), table(0), room="s", incarnation=9)
    assert p.end("local").reason == "peer_restarted"


def test_a_room_of_another_sender_than_the_one_asked_for() -> None:
    _net, p, d = pair()
    p.attach("other")
    p.open("other")
    d.receive("decode", "prefill", table(0), table(0))
    end = d.end("decode")
    assert end.reason == "unknown_engine"
    assert "'other'" in end.detail and "'prefill'" in end.detail
    assert not p.ends("other")


def test_a_second_receiver_of_the_same_room() -> None:
    net, p, d = pair()
    e = net.sides["e"] = Side(net, "e", 1, net.limits)
    e.start_engine()
    e.attach("decode-2")
    p.open("prefill")
    d.receive("decode", "prefill", table(0), table(0))
    e.receive("decode-2", "prefill", table(0), table(0))
    assert e.end("decode-2").reason == "protocol_error"
    assert "'d'" in e.end("decode-2").detail
    e.abort("decode-2")
    p.push("prefill", table(0), table(0))
    p.finish("prefill")
    assert d.end("decode").reason == p.end("prefill").reason == "done"


@pytest.mark.parametrize(
    ("field", "value"), [("dtype", "fp8"), ("row", "128+4"), ("page_tokens", 64), ("page_bytes", 132)]
)
@pytest.mark.parametrize("local", [False, True])
def test_layouts_that_disagree_name_the_field_and_both_values(field: str, value: Any, local: bool) -> None:
    fields = {f: getattr(SPECS[1], f) for f in SPECS[1].__struct_fields__}
    other = (SPECS[0], PoolSpec(**fields | {field: value}))
    net = Net("p") if local else Net("p", "d")
    net.where["prefill"] = "p"
    p, d = net.sides["p"], net.sides["p" if local else "d"]
    p.attach("prefill")
    d.attach("decode", specs=other)
    p.open("prefill")
    d.receive("decode", "prefill", table(0), table(0))
    for end in (p.end("prefill"), d.end("decode")):
        assert (end.reason, end.state, end.retriable) == ("layout_mismatch", "FAILED", False)
        for words in ("'index_k'", repr(field), repr(getattr(SPECS[1], field)), repr(value), "'prefill'", "'decode'"):
            assert words in end.detail, end.detail
    assert net.at_baseline()


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize(("have", "want"), [((2, 2), (1, 1)), ((1, 1), (2, 2)), ((2, 1), (2, 2)), ((0, 0), (1, 1))])
def test_page_counts_that_disagree(have: tuple[int, int], want: tuple[int, int], local: bool) -> None:
    net = Net("p") if local else Net("p", "d")
    net.where["prefill"] = "p"
    p, d = net.sides["p"], net.sides["p" if local else "d"]
    p.attach("prefill")
    d.attach("decode")
    d.receive("decode", "prefill", *(table(*range(n)) for n in want))
    p.open("prefill")
    p.push("prefill", *(table(*range(n)) for n in have))
    p.finish("prefill")
    for end in (p.end("prefill"), d.end("decode")):
        assert (end.reason, end.retriable) == ("page_count_mismatch", False)
        assert "prefill has" in end.detail and "decode asked for" in end.detail
    assert net.at_baseline()


def test_planes_that_were_never_pushed() -> None:
    _, p, d = pair()
    d.receive("decode", "prefill", table(0), table(0))
    p.open("prefill")
    p.push("prefill", table(0), table(0), planes=1)
    p.finish("prefill")
    assert p.end("prefill").reason == d.end("decode").reason == "page_count_mismatch"
    assert "never pushed" in p.end("prefill").detail


# aborts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_abort_of_an_unknown_room_kills_it_on_arrival_and_is_twice_the_same(side: str) -> None:
    _, p, d = pair()
    one = p if side == "prefill" else d
    refused(one.abort(side), "unknown_room", "if it comes within 600 s it ends as aborted_early")
    assert isinstance(one.abort(side), worker.Ok)
    answer = p.open(side) if one is p else d.receive(side, "prefill", table(0), table(0))
    assert isinstance(answer, worker.Ok)
    assert (one.end(side).reason, one.end(side).state) == ("aborted_early", "ABORTED")
    assert isinstance(one.abort(side), worker.Ok)
    assert one.lent() == 0


def test_an_abort_before_its_room_kills_the_want_that_is_parked() -> None:
    _, p, d = pair()
    d.receive("decode", "prefill", table(0), table(0))
    p.abort("prefill")
    assert d.end("decode").reason == "aborted"
    assert not p.node.state.parked
    p.open("prefill")
    assert p.end("prefill").reason == "aborted_early"


@pytest.mark.parametrize("who", ["prefill", "decode"])
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("phase", ["opened", "matched", "pushed", "finished", "done"])
def test_an_abort_in_each_phase_ends_both_sides_at_once(who: str, local: bool, phase: str) -> None:
    net = Net("p") if local else Net("p", "d")
    net.where["prefill"] = "p"
    p, d = net.sides["p"], net.sides["p" if local else "d"]
    p.attach("prefill")
    d.attach("decode")
    d.receive("decode", "prefill", table(0), table(0))
    if phase != "opened":
        p.open("prefill")
    if phase == "finished":
        p.hold |= {jobs.Send, jobs.Copy}
    if phase in ("pushed", "finished", "done"):
        p.push("prefill", table(0), table(0))
    if phase in ("finished", "done"):
        p.finish("prefill")
    one = p if who == "prefill" else d
    for _ in range(2):
        one.abort(who)
    if phase == "opened":
        p.open("prefill")
    if phase == "finished":
        assert not p.ends("prefill"), "its pages are being read"
        assert local != bool(d.ends("decode"))
        net.unhold(p, jobs.Send if not local else jobs.Copy)
    ends = {p.end("prefill").reason, d.end("decode").reason}
    assert ends <= {"done"} if phase == "done" else ends <= {"aborted", "aborted_early"}
    net.sleep(2.0)
    assert net.at_baseline()


def test_only_its_own_workers_may_abort_a_room() -> None:
    net = Net("p")
    p = net.sides["p"]
    for name in ("prefill", "decode", "third"):
        p.attach(name)
    p.open("prefill")
    p.receive("decode", "prefill", table(0), table(0))
    refused(p.abort("third"), "not_your_room", "'prefill'")
    assert not p.ends("prefill")


def test_an_operator_aborts() -> None:
    net, p, d = pair()
    p.open("prefill")
    d.receive("decode", "prefill", table(0), table(0))
    p.handle(events.OperatorAbort("r", 0, ""))
    p.handle(events.OperatorAbort("r", 0, ""))
    p.handle(events.OperatorAbort("nothing", 0, ""))
    net.settle()
    assert p.end("prefill").reason == d.end("decode").reason == "operator_abort"


# peers -------------------------------------------------------------------------------------------------------------


def said(
    side: Side, *body: messages.Message, node: str = "x", incarnation: int = 1, to: int = 1
) -> list[events.Action]:
    return side.handle(events.PeerSaid(node, incarnation, to, body))


def test_messages_before_the_handshake() -> None:
    _, p, _ = pair()
    actions = said(p, messages.Want("r", 0, "prefill", "decode", SPECS, (1, 1)))
    assert p.refusals() == ["no_session"]
    assert any(isinstance(a, events.ToPeer) and isinstance(a.message, messages.Hello) for a in actions), (
        "it is told who we are"
    )
    assert not p.node.state.parked


def test_messages_for_another_incarnation() -> None:
    net, p, d = pair()
    d.receive("decode", "prefill", table(0), table(0))
    net.sleep(0.5)
    actions = said(p, messages.Want("q", 0, "prefill", "decode", SPECS, (1, 1)), node="d", to=9)
    assert p.refusals() == ["wrong_incarnation"]
    assert [type(a.message) for a in actions if isinstance(a, events.ToPeer)] == [messages.Hello]
    assert list(p.node.state.parked) == [("r", 0)]


def test_an_old_incarnation_and_one_that_names_itself_wrong() -> None:
    _, p, _ = pair()
    said(p, messages.Hello(5, 1, "tcp://x", "0", None), incarnation=5)
    said(p, messages.Hello(4, 9, "tcp://x", "0", None), incarnation=4)
    said(p, messages.Hello(7, 1, "tcp://x", "0", None), incarnation=6)
    assert p.refusals() == ["wrong_incarnation", "bad_frame"]
    assert p.node.state.peers["x"].incarnation == 5


def test_a_peer_with_another_nodes_engine_or_with_our_name() -> None:
    _, p, _ = pair()
    info = messages.EngineInfo(1, agent_name("d", 1, 1), "1.5.1", b"m", b"d", 0, 200, 4)
    said(p, messages.Hello(1, 1, "tcp://x", "0", info))
    said(p, messages.Hello(1, 1, "tcp://p", "0", None), node="p")
    assert p.refusals() == ["bad_frame", "wrong_source"]
    assert "x" not in p.node.state.peers


def test_messages_of_a_third_node_do_not_touch_a_room() -> None:
    net, p, d = pair()
    d.receive("decode", "prefill", table(0), table(0))
    p.hold.add(jobs.Send)
    p.open("prefill")
    p.push("prefill", table(0), table(0))
    p.finish("prefill")
    for side in (p, d):
        said(side, messages.Hello(1, 1, "tcp://x", "0", None))
        for message in (
            messages.Accept("r", 0), messages.Need("r", 0, 99), messages.Grant("r", 0, 0, 0, 1, 1), messages.Ack("r", 0, 99, ()),
            messages.Finish("r", 0, 0, b""), messages.Done("r", 0), messages.Ended("r", 0, True, "aborted", ""),
            messages.Ended("r", 0, False, "aborted", ""), messages.EndedAck("r", 0, True), messages.SlotFate(1, ((0, 1),)),
            messages.Segment("r", 0, 0, 0, 1, 1, 40, 77, ()), messages.Want("r", 0, "prefill", "z", SPECS, (1, 1)),
            messages.Lookup("prefill"),
        ):  # fmt: skip
            said(side, message)
    net.settle()
    net.unhold(p, jobs.Send)
    assert p.end("prefill").reason == d.end("decode").reason == "done"


def test_a_third_node_does_not_end_a_room_within_a_node() -> None:
    net = Net("p")
    p = net.sides["p"]
    p.attach("prefill")
    p.attach("decode")
    p.open("prefill")
    p.receive("decode", "prefill", table(0), table(0))
    said(p, messages.Hello(1, 1, "tcp://x", "0", None), messages.Ended("r", 0, False, "aborted", ""))
    assert not p.ends("prefill")


@pytest.mark.parametrize(
    "message",
    [
        messages.Grant("r", 0, 99, 0, 1, 1), messages.Grant("r", 0, -1, 0, 1, 1), messages.Grant("r", 0, 0, 99, 1, 1),
        messages.Done("r", 0),
    ],
)  # fmt: skip
def test_a_peer_that_breaks_the_protocol_ends_its_own_room(message: messages.Message) -> None:
    net, p, d = pair()
    net.drop = {messages.Grant}
    d.receive("decode", "prefill", table(0), table(0))
    p.open("prefill")
    p.push("prefill", table(0), table(0))
    said(p, message, node="d")
    net.settle()
    assert p.end("prefill").reason == d.end("decode").reason == "protocol_error"
    net.sleep(3.0)
    assert net.at_baseline()


@pytest.mark.parametrize(
    "change", [{"bytes": 1}, {"pieces": ()}, {"pieces": ((0, 0, 9, 0, 1),)}, {"pieces": ((9, 0, 1, 0, 1),)}]
)
def test_a_segment_that_does_not_fit_its_room(change: dict[str, Any]) -> None:
    from pdxfer.core.geometry import Piece

    net, p, d = pair()
    p.hold.add(jobs.Send)
    d.receive("decode", "prefill", table(0), table(0))
    p.open("prefill")
    p.push("prefill", table(0), table(0))
    segment = next(j.segment for j in p.held if isinstance(j, jobs.Send))
    fields = {f: getattr(segment, f) for f in segment.__struct_fields__} | change
    fields["pieces"] = tuple(Piece(*x) if isinstance(x, tuple) else x for x in fields["pieces"])
    d.report(jobs.Landed("p:1:1", messages.Segment(**fields)))
    assert d.end("decode").reason == "protocol_error"
    net.unhold(p, jobs.Send)
    net.sleep(1.0)
    assert net.at_baseline()


def test_reports_that_make_no_sense_are_refused_and_change_nothing() -> None:
    _, p, _ = pair()
    for report in (
        jobs.Sent(99, 0, "", 0.0), jobs.Gathered(99), jobs.Scattered(99, "", False), jobs.Copied(99, ""),
        jobs.PeerAdded("nobody", ""), jobs.Mapped(99, ""), jobs.Mapped(99, "x"),
        jobs.Landed("nobody", messages.Segment("r", 0, 0, 0, 1, 1, 1, 1, ())),
    ):  # fmt: skip
        p.report(report)
    assert set(p.refusals()) == {"bad_frame", "no_session"}
