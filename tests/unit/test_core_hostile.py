"""An authorised peer, or a worker, that means harm: what it says is refused or answered, and costs nobody else anything."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from core_harness import SPECS, Net, Side, attach, pair, table

from pdxfer.core import events, jobs, messages, worker
from pdxfer.core.geometry import MAX_CELLS, Coverage, PoolSpec
from pdxfer.core.limits import Limits
from pdxfer.core.messages import EngineInfo, Envelope
from pdxfer.core.reasons import Refused
from pdxfer.core.state import agent_name

GOOD = EngineInfo(1, agent_name("x", 1, 1), "1.5.1", b"meta", b"digest", 1 << 20, 4096, 4)


def hello(engine: EngineInfo | None = GOOD, revision: int = 1) -> messages.Hello:
    return messages.Hello(1, revision, "tcp://x", "0", engine)


def frame(*body: messages.Message) -> bytes:
    return messages.encode(Envelope(messages.PROTOCOL, "x", 1, "p", 0, body))


def said(side: Side, *body: messages.Message) -> list[events.Action]:
    return side.handle(events.PeerSaid("x", 1, side.node.state.incarnation, body))


def home(*sides: Side) -> bool:
    return all(not side.lent() and not side.busy_slots() for side in sides)


@pytest.mark.parametrize(
    "change",
    [
        {"slot_base": 2**64 - 1},
        {"slot_base": 2**63 - 4096},
        {"slot_base": -1},
        {"slot_bytes": 0},
        {"slot_bytes": 1 << 40},
        {"slots": 0},
        {"slots": 1 << 20},
        {"incarnation": 0},
        {"metadata": b"x" * (messages.MAX_METADATA + 1)},
        {"agent": "x" * 1000},
    ],
)
def test_an_engine_that_cannot_be_is_a_bad_frame(change: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="bad_frame: Hello"):
        messages.decode(frame(hello(msgspec.structs.replace(GOOD, **change))))
    assert messages.decode(frame(hello())).body == (hello(),)


def test_an_engine_does_not_change_under_its_incarnation() -> None:
    _, p, _ = pair()
    said(p, hello())
    for change in ({"slot_bytes": 64}, {"slot_base": 4096}, {"metadata": b"other"}):
        said(p, hello(msgspec.structs.replace(GOOD, **change), revision=2))
        assert p.refusals()[-1] == "bad_frame"
        assert p.node.state.peers["x"].engine == GOOD


def test_a_new_engine_with_smaller_slots_ends_what_was_cut_for_the_old_one() -> None:
    net, p, d = pair()
    p.hold.add(jobs.AddPeer)
    d.receive("decode", "prefill", table(0), table(0))
    p.open("prefill")
    p.push("prefill", table(0), table(0))
    room = p.node.state.sends["r", 0]
    peer = p.node.state.peers["d"]
    assert room.plans and room.plans[0].granted
    assert peer.hello is not None and peer.engine is not None
    peer.hello = msgspec.structs.replace(peer.hello, engine=msgspec.structs.replace(peer.engine, slot_bytes=8))
    p.report(jobs.PeerAdded(peer.engine.agent, ""))  # type: ignore[union-attr]
    end = p.end("prefill")
    assert end.reason == "engine_lost"
    assert "the slots of the new engine 8" in end.detail
    net.sleep(1.0)
    assert home(p, d)


@pytest.mark.parametrize(
    "message",
    [
        lambda i: messages.Finish(f"r{i}", 0, 1, b""),
        lambda i: messages.Need(f"r{i}", 0, 1),
        lambda i: messages.Accept(f"r{i}", 0),
    ],
)
def test_talk_to_rooms_that_never_were_is_answered_and_not_remembered(message: Any) -> None:
    _, p, _ = pair()
    said(p, hello())
    timers = len(p.node.state.timers)
    for at in range(0, 2000, 200):
        actions = said(p, *(message(i) for i in range(at, at + 200)))
        answers = [a.message for a in actions if isinstance(a, events.ToPeer) and isinstance(a.message, messages.Ended)]
        assert len(answers) == 200
    assert not p.node.ends.closing
    assert len(p.node.state.timers) <= timers + 1


def test_one_peer_may_park_its_share_of_wants() -> None:
    net = Net("p", limits=Limits(park_limit=40))
    (p,) = net
    said(p, hello())
    for i in range(30):
        said(p, messages.Want(f"r{i}", 0, "prefill", "decode", SPECS, (1, 1)))
    assert len(p.node.state.parked) == 10
    assert p.refusals() == ["overloaded"] * 20
    said(p, messages.Ended("r0", 0, False, "aborted", ""))
    said(p, messages.Want("r40", 0, "prefill", "decode", SPECS, (1, 1)))
    assert len(p.node.state.parked) == 10


def test_explanations_and_pools_have_a_limit() -> None:
    long = PoolSpec("n" * 9000, "t" * 9000, "1", 1, 1, 1)
    for message in (
        messages.Ended("r", 0, True, "aborted", "x" * (messages.MAX_DETAIL + 1)),
        messages.Want("r", 0, "a", "b", (long,), (1,)),
    ):
        with pytest.raises(Refused, match="bad_frame"):
            messages.decode(frame(message))


def test_a_peer_whose_metadata_kills_the_engine_is_not_loaded_for_ever() -> None:
    _, p, d = pair()
    p.hold.add(jobs.AddPeer)
    for n in range(5):
        d.receive("decode", "prefill", table(0), table(0), room=f"r{n}")
        p.open("prefill", room=f"r{n}")
        p.push("prefill", table(0), table(0), room=f"r{n}")
        if n < 3:
            assert [j for j in p.held if isinstance(j, jobs.AddPeer)], "it was being added"
            p.kill_engine()
            p.start_engine()
    added = [j for j in p.jobs if isinstance(j, jobs.AddPeer)]
    assert len(added) == 3
    assert {e.reason for e in p.ends("prefill")} >= {"metadata_refused"}
    assert home(p, d)


def test_planes_that_lie_on_each_other_are_refused() -> None:
    _, p, _ = pair()
    spec = PoolSpec("kv", "uint8", "1", 1, 65536, 1)
    at = worker.PoolAt(spec, 65536, tuple(worker.PlaneAt(0, 0, 1) for _ in range(65536)))
    p.handle(events.WorkerAttached(99, attach("bomb", pools=(at,), fd_bytes=(4 << 20,))))
    refused = p.frames[99][-1]
    assert isinstance(refused, worker.Rejected)
    assert refused.code == "bad_layout"
    assert "planes overlap" in refused.detail


def test_a_room_too_large_to_account_for_changes_nothing() -> None:
    spec = msgspec.structs.replace(SPECS[0], planes=MAX_CELLS // 2)
    with pytest.raises(Refused, match="room_too_large"):
        Coverage([spec], [3])
    covered = Coverage([spec], [2])
    with pytest.raises(Refused, match="room_too_large"):
        covered.grow([3])
    assert covered.left == MAX_CELLS
