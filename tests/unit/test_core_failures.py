"""What dies, stalls or goes missing: rooms end by name in time, pages come home at once, slots only when it is safe."""

from __future__ import annotations

import pytest
from core_harness import Net, Side, landed, pair, table

from pdxfer.core import events, jobs, messages, worker
from pdxfer.core.ledger import SlotState
from pdxfer.core.limits import Limits


def under_way() -> tuple[Net, Side, Side, jobs.Send]:
    """A room whose only WRITE is posted, with its pages gathered."""
    net, p, d = pair()
    p.hold.add(jobs.Send)
    d.receive("decode", "prefill", table(0), table(0))
    p.open("prefill")
    p.push("prefill", table(0), table(0))
    p.finish("prefill")
    send = next(j for j in p.held if isinstance(j, jobs.Send))
    p.report(jobs.Gathered(send.job))
    return net, p, d, send


def keep_alive(net: Net, seconds: float) -> None:
    """Time passes, and every worker polls."""
    for _ in range(int(seconds * 2)):
        for side in net:
            for id in list(side.node.state.workers):
                side.handle(events.WorkerSaid(id, worker.Ping()))
        net.sleep(0.5)


def slot(side: Side, index: int = 0) -> SlotState:
    return side.node.state.engine.recv.all[index].state


# quarantine --------------------------------------------------------------------------------------------------------


def test_an_aborted_receive_gives_pages_back_at_once_and_its_slot_when_the_writer_is_done() -> None:
    net, p, d, send = under_way()
    d.abort("decode")
    assert d.end("decode").reason == p.end("prefill").reason == "aborted"
    assert d.lent() == p.lent() == 0
    index = send.segment.slot
    assert slot(d, index) is SlotState.QUARANTINED
    keep_alive(net, 5.0)
    assert slot(d, index) is SlotState.QUARANTINED, "its WRITE may land at any time"
    assert p.node.state.engine.send.all[send.slot].state is SlotState.DOUBTFUL
    p.report(jobs.Sent(send.job, 77, "", 0.0))
    keep_alive(net, 1.0)
    assert net.at_baseline()


def test_a_landed_notification_frees_a_quarantined_slot() -> None:
    _, _, d, send = under_way()
    d.abort("decode")
    d.report(jobs.Landed("p:1:1", landed(send)))
    assert slot(d, send.segment.slot) is SlotState.FREE


def test_a_quarantined_slot_is_free_when_the_writers_node_has_restarted() -> None:
    net, _, d, send = under_way()
    d.abort("decode")
    new = net.restart("p")
    new.handle(events.PeerSaid("d", 1, 1, (messages.Heartbeat(1, 1),)))
    net.settle()
    assert slot(d, send.segment.slot) is SlotState.FREE


def test_the_death_of_the_writers_engine_alone_frees_nothing_by_itself() -> None:
    """A grant outlives the engine that it was made under: the next one may be writing under it.

    The receiver grants while engine 1 is known to it; the sender uses the grant with engine 2, whose Hello is late.
    """
    net, p, d = pair()
    d.receive("decode", "prefill", table(0), table(0))
    p.open("prefill")
    net.delay = {messages.Grant}
    p.push("prefill", table(0), table(0))
    p.kill_engine()
    net.delay = {messages.Grant, messages.Hello, messages.SlotFate}
    p.hold.add(jobs.Send)
    p.start_engine()
    hellos = [i for i in net.delayed if isinstance(i[1][2], messages.Hello)]
    net.delayed = [i for i in net.delayed if not isinstance(i[1][2], messages.Hello)]
    late, net.delayed = net.delayed, []
    net.delay = {messages.Hello, messages.SlotFate}
    for side, item in late:
        net.carry(side, item, late=True)
    net.settle()
    send = next(j for j in p.held if isinstance(j, jobs.Send))
    assert send.agent == "d:1:1"
    d.abort("decode")
    net.delay = set()
    for side, item in hellos:
        net.carry(side, item, late=True)
    net.settle()
    assert slot(d, send.segment.slot) is SlotState.QUARANTINED
    p.report(jobs.Sent(send.job, 77, "", 0.0))
    net.sleep(1.0)
    assert net.at_baseline()


def test_a_late_fate_does_not_free_the_slots_next_generation() -> None:
    _net, _, d, send = under_way()
    d.abort("decode")
    generation = send.segment.generation
    d.handle(events.PeerSaid("p", 1, 1, (messages.SlotFate(1, ((send.segment.slot, generation + 1), (99, 1))),)))
    d.handle(events.PeerSaid("p", 1, 1, (messages.SlotFate(2, ((send.segment.slot, generation),)),)))
    assert slot(d, send.segment.slot) is SlotState.QUARANTINED
    d.handle(events.PeerSaid("p", 1, 1, (messages.SlotFate(1, ((send.segment.slot, generation),)),)))
    assert slot(d, send.segment.slot) is SlotState.FREE


def test_a_late_segment_is_not_taken_for_the_slots_next_generation() -> None:
    _net, _, d, send = under_way()
    d.abort("decode")
    old = landed(send)
    fields = {f: getattr(old, f) for f in old.__struct_fields__}
    d.report(jobs.Landed("p:1:1", messages.Segment(**fields | {"generation": old.generation + 1})))
    assert slot(d, old.slot) is SlotState.QUARANTINED
    d.report(jobs.Landed("p:1:1", messages.Segment(**fields | {"engine": 2})))
    assert slot(d, old.slot) is SlotState.QUARANTINED
    d.report(jobs.Landed("p:1:1", old))
    assert slot(d, old.slot) is SlotState.FREE


def test_a_late_grant_of_a_dead_engine_is_not_used() -> None:
    net, p, d = pair()
    net.delay = {messages.Grant, messages.Ended}
    d.receive("decode", "prefill", table(0), table(0))
    p.open("prefill")
    p.push("prefill", table(0), table(0))
    d.kill_engine()
    d.start_engine()
    assert d.end("decode").reason == "engine_lost"
    grants = [i for i in net.delayed if isinstance(i[1][2], messages.Grant)]
    net.delayed = [i for i in net.delayed if i not in grants]
    for side, item in grants:
        net.carry(side, item, late=True)
    net.settle()
    assert not [j for j in p.jobs if isinstance(j, jobs.Send)], "that slot is another engine's now"
    net.release()
    assert p.end("prefill").reason == "engine_lost"
    assert net.at_baseline()


def test_quarantine_that_nobody_resolves_ends_by_killing_our_own_engine() -> None:
    net, _, d, _ = under_way()
    net.deaf = {("p", "d")}
    d.abort("decode")
    keep_alive(net, net.limits.quarantine_limit + 1)
    assert len(d.killed()) == 1
    assert "1 receive slots in quarantine" in d.killed()[0]
    d.kill_engine()
    d.start_engine()
    assert d.busy_slots() == 0


def test_a_write_past_its_deadline_ends_its_room_and_keeps_its_slots() -> None:
    net, p, d, send = under_way()
    keep_alive(net, net.limits.transfer_deadline + 1)
    assert p.end("prefill").reason == d.end("decode").reason == "transfer_deadline"
    assert p.lent() == d.lent() == 0
    assert not p.killed()
    assert slot(d, send.segment.slot) is SlotState.QUARANTINED
    keep_alive(net, net.limits.quarantine_limit)
    assert p.killed(), "a WRITE that never ends is ended by the death of its engine"
    p.kill_engine()
    keep_alive(net, 1.0)
    assert net.at_baseline()


def test_a_gather_that_hangs_is_ended_by_the_death_of_the_engine() -> None:
    net, p, d = pair()
    p.hold.add(jobs.Send)
    d.receive("decode", "prefill", table(0), table(0))
    p.open("prefill")
    p.push("prefill", table(0), table(0))
    keep_alive(net, net.limits.transfer_deadline + 1)
    assert not p.ends("prefill"), "its pages may still be read"
    assert "is not over after its deadline" in p.killed()[0]
    p.kill_engine()
    assert p.end("prefill").reason == "transfer_deadline"
    assert p.lent() == 0


@pytest.mark.parametrize("kind", [jobs.Scatter, jobs.Copy])
def test_a_copy_that_hangs_is_ended_by_the_death_of_the_engine(kind: type) -> None:
    local = kind is jobs.Copy
    net = Net("p") if local else Net("p", "d")
    net.where["prefill"] = "p"
    p, d = net.sides["p"], net.sides["p" if local else "d"]
    p.attach("prefill")
    d.attach("decode")
    d.hold.add(kind)
    d.receive("decode", "prefill", table(0), table(0))
    p.open("prefill")
    p.push("prefill", table(0), table(0))
    d.abort("decode")
    assert not d.ends("decode"), "its pages are being written"
    assert d.lent() > 0
    keep_alive(net, net.limits.transfer_deadline + 1)
    assert d.killed()
    d.kill_engine()
    assert d.end("decode").reason == "aborted"
    assert d.lent() == 0


# errors of jobs ----------------------------------------------------------------------------------------------------


def test_a_write_that_fails() -> None:
    net, p, d, send = under_way()
    p.report(jobs.Sent(send.job, 0, "nixlRemoteDisconnectError", 0.1))
    assert p.end("prefill").reason == d.end("decode").reason == "transfer_error"
    assert "nixlRemoteDisconnectError" in p.end("prefill").detail
    net.sleep(1.0)
    assert net.at_baseline()


@pytest.mark.parametrize(
    ("error", "mismatch", "reason"),
    [("digest 1, expected 77", True, "digest_mismatch"), ("SIGBUS", False, "copy_error")],
)
def test_a_scatter_that_fails(error: str, mismatch: bool, reason: str) -> None:
    net, p, d = pair()
    d.hold.add(jobs.Scatter)
    d.receive("decode", "prefill", table(0), table(0))
    p.open("prefill")
    p.push("prefill", table(0), table(0))
    p.finish("prefill")
    job = next(j for j in d.held if isinstance(j, jobs.Scatter))
    d.report(jobs.Scattered(job.job, error, mismatch))
    assert p.end("prefill").reason == d.end("decode").reason == reason
    assert error in d.end("decode").detail and error in p.end("prefill").detail
    net.sleep(1.0)
    assert net.at_baseline()


def test_a_copy_within_a_node_that_fails() -> None:
    net = Net("p")
    p = net.sides["p"]
    p.attach("prefill")
    p.attach("decode")
    p.hold.add(jobs.Copy)
    p.open("prefill")
    p.receive("decode", "prefill", table(0), table(0))
    p.push("prefill", table(0), table(0))
    p.report(jobs.Copied(p.held[0].job, "SIGBUS"))  # type: ignore[union-attr]
    assert p.end("prefill").reason == p.end("decode").reason == "copy_error"
    assert net.at_baseline()


def test_metadata_that_nixl_refuses() -> None:
    net, p, d = pair()
    p.hold.add(jobs.AddPeer)
    d.receive("decode", "prefill", table(0), table(0))
    p.open("prefill")
    p.push("prefill", table(0), table(0))
    p.report(jobs.PeerAdded("d:1:1", "bad blob"))
    assert p.end("prefill").reason == d.end("decode").reason == "metadata_refused"
    assert "bad blob" in p.end("prefill").detail
    net.sleep(1.0)
    assert net.at_baseline()


# engines -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["p", "d"])
def test_an_engine_dies_with_a_room_under_way_and_the_next_one_serves(which: str) -> None:
    net, p, d, _ = under_way()
    net.sides[which].kill_engine()
    net.sleep(1.0)
    assert p.end("prefill").reason == d.end("decode").reason == "engine_lost"
    if which == "d":  # a WRITE to a dead process fails
        p.report(jobs.Sent(1, 0, "nixlRemoteDisconnectError", 0.1))
    p.hold.clear()
    p.held.clear()
    d.receive("decode", "prefill", table(0), table(0), room="s")
    p.open("prefill", "s")
    p.push("prefill", table(0), table(0), room="s")
    p.finish("prefill", "s")
    assert len(p.ends("prefill")) == 1, "it waits for the new engine"
    net.sides[which].start_engine()
    net.sleep(2.0)
    assert p.ends("prefill")[1].reason == d.ends("decode")[1].reason == "done"
    assert isinstance(net.sides[which].jobs[-1], jobs.Expect) or net.sides[which].jobs
    assert net.at_baseline()
    old = "p:1:1" if which == "p" else "d:1:1"
    other = net.sides["d" if which == "p" else "p"]
    if which == "d":
        assert jobs.RemovePeer(old) in other.jobs


def test_rooms_without_anything_under_way_outlive_an_engine() -> None:
    net, p, d = pair()
    d.receive("decode", "prefill", table(0, 1), table(0, 1))
    p.open("prefill")
    p.push("prefill", table(0), table(0))
    net.sleep(1.0)
    for side in (p, d):
        side.kill_engine()
        side.start_engine()
        assert any(isinstance(j, jobs.MapPools) for j in side.jobs[-6:])
    p.push("prefill", table(1), table(1), page0=(1, 1))
    p.finish("prefill")
    net.sleep(1.0)
    assert p.end("prefill").reason == d.end("decode").reason == "done"


@pytest.mark.parametrize("which", ["p", "d"])
def test_an_engine_that_does_not_come_back(which: str) -> None:
    net, p, d = pair()
    d.receive("decode", "prefill", table(0), table(0))
    p.open("prefill")
    net.sides[which].kill_engine()
    p.push("prefill", table(0), table(0))
    keep_alive(net, net.limits.engine_timeout + 2)
    assert p.end("prefill").reason == d.end("decode").reason == "engine_unavailable"
    assert p.lent() == d.lent() == 0


def test_a_worker_may_attach_while_there_is_no_engine() -> None:
    net = Net("p")
    p = net.sides["p"]
    p.kill_engine()
    id = p.attach("late")
    assert isinstance(p.frames[id][0], worker.Attached)
    p.start_engine()
    assert [j.worker for j in p.jobs if isinstance(j, jobs.MapPools)] == [id]
    p.hold.add(jobs.MapPools)
    second = p.attach("later")
    p.kill_engine()
    assert isinstance(p.frames[second][0], worker.Attached)


# workers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["prefill", "decode"])
@pytest.mark.parametrize("early", [True, False])
def test_a_worker_dies(who: str, early: bool) -> None:
    if early:
        _, p, d = pair()
        d.receive("decode", "prefill", table(0), table(0))
    else:
        _net, p, d, _ = under_way()
    (p if who == "prefill" else d).gone(who)
    if who == "prefill":
        assert d.end("decode").reason == "worker_lost"
    else:
        if early:
            p.open("prefill")
        assert p.end("prefill").reason == "worker_lost"
    assert p.lent() == d.lent() == 0


def test_a_dead_workers_pools_are_unmapped_when_no_job_touches_them() -> None:
    net, _, d = pair()
    p = net.sides["p"]
    d.hold.add(jobs.Scatter)
    d.receive("decode", "prefill", table(0), table(0))
    p.open("prefill")
    p.push("prefill", table(0), table(0))
    d.gone("decode")
    assert not any(isinstance(j, jobs.UnmapPools) for j in d.jobs)
    net.unhold(d, jobs.Scatter)
    assert jobs.UnmapPools(d.ids["decode"]) in d.jobs
    assert not d.node.state.workers
    assert p.end("prefill").reason == "worker_lost"


def test_a_worker_that_comes_back_begins_when_its_last_life_is_over() -> None:
    """It brings the same memory, in which a scatter of its old attachment may still be writing."""
    net, p, d = pair()
    d.hold.add(jobs.Scatter)
    d.receive("decode", "prefill", table(0), table(0))
    p.open("prefill")
    p.push("prefill", table(0), table(0))
    d.gone("decode")
    id = d.attach("decode")
    assert id not in d.frames
    net.unhold(d, jobs.Scatter)
    assert isinstance(d.frames[id][0], worker.Attached)


def test_a_worker_that_stalls_and_comes_back() -> None:
    net, p, d, _ = under_way()
    for _ in range(24):
        p.handle(events.WorkerSaid(p.ids["prefill"], worker.Ping()))
        net.sleep(0.5)
    assert d.end("decode").reason == "worker_stalled"
    assert p.end("prefill").reason in ("worker_stalled", "transfer_deadline")
    assert d.lent() == 0
    assert isinstance(d.receive("decode", "prefill", table(0), table(0), room="s"), worker.Ok)


def test_who_waits_for_a_worker_that_stalls_is_told() -> None:
    net, p, d = pair()
    d.receive("decode", "prefill", table(0), table(0))
    for _ in range(26):
        d.handle(events.WorkerSaid(d.ids["decode"], worker.Ping()))
        net.sleep(0.5)
    assert d.end("decode").reason == "worker_stalled"
    assert "'prefill'" in d.end("decode").detail
    assert not p.node.state.parked


# peers -------------------------------------------------------------------------------------------------------------


def test_a_peer_that_is_cut_off_is_lost_on_both_sides_and_comes_back() -> None:
    net, p, d, send = under_way()
    net.deaf = {("p", "d"), ("d", "p")}
    p.report(jobs.Sent(send.job, 0, "timeout", 5.0))
    keep_alive(net, net.limits.stall_deadline + 1)
    assert p.end("prefill").reason == "transfer_error"
    assert d.end("decode").reason == "peer_lost"
    assert "silent for 10 s" in d.end("decode").detail
    assert slot(d, send.segment.slot) is SlotState.QUARANTINED
    net.deaf = set()
    keep_alive(net, 3.0)
    assert net.at_baseline()
    p.hold.clear()
    d.receive("decode", "prefill", table(0), table(0), room="s")
    p.open("prefill", "s")
    p.finish("prefill", "s")
    assert d.ends("decode")[1].reason == "page_count_mismatch"


def test_a_link_that_is_cut_one_way() -> None:
    net, p, d = pair()
    d.receive("decode", "prefill", table(0), table(0))
    p.open("prefill")
    net.deaf = {("d", "p")}
    keep_alive(net, net.limits.stall_deadline + 1)
    assert p.end("prefill").reason == "peer_lost"
    assert d.end("decode").reason == "peer_lost", "it is told by the side that hears nothing"


def test_a_closed_connection_means_death_unless_the_peer_is_heard_again() -> None:
    net, p, d = pair()
    d.receive("decode", "prefill", table(0), table(0))
    p.open("prefill")
    p.handle(events.PeerCut("d"))
    net.settle()
    keep_alive(net, net.limits.cut_grace + 1)
    assert not p.ends("prefill")
    net.deaf = {("p", "d"), ("d", "p")}
    p.handle(events.PeerCut("d"))
    p.handle(events.PeerCut("d"))
    p.handle(events.PeerCut("never seen"))
    keep_alive(net, net.limits.cut_grace + 0.5)
    assert p.end("prefill").reason == "peer_lost"
    assert "connection closed" in p.end("prefill").detail


@pytest.mark.parametrize("which", ["p", "d"])
def test_a_peer_restarts(which: str) -> None:
    net, p, d = pair()
    d.receive("decode", "prefill", table(0), table(0))
    p.open("prefill")
    net.restart(which)
    net.sleep(1.0)
    left, who = (d, "decode") if which == "p" else (p, "prefill")
    end = left.end(who)
    assert (end.reason, end.retriable) == ("peer_restarted", True)
    assert "incarnation 1 is over, 2 is up" in end.detail
    assert left.lent() == left.busy_slots() == 0


def test_a_peer_that_cannot_be_reached() -> None:
    net, _, d = pair()
    net.where["far"] = "nowhere"
    d.receive("decode", "far", table(0), table(0))
    keep_alive(net, net.limits.connect_timeout + 1)
    assert d.end("decode").reason == "peer_unreachable"
    assert "nowhere" not in d.node.state.peers
    assert events.ForgetPeer("nowhere") in d.actions


def test_a_peer_that_has_forgotten_us_is_greeted_until_it_answers() -> None:
    net, p, d = pair()
    d.receive("decode", "prefill", b"", b"")
    d.abort("decode")
    net.deaf = {("p", "d"), ("d", "p")}
    keep_alive(net, net.limits.stall_deadline + 1)
    p.node.state.now = net.now
    p.node.peers.forget(p.node.state.peers["d"])
    net.deaf = set()
    net.drop = {messages.Hello}
    net.wire.clear()
    d.receive("decode", "prefill", b"", b"", room="s")
    net.sleep(1.0)
    assert len([w for w in net.wire if w[0] == "d" and isinstance(w[2], messages.Hello)]) > 2
    net.drop = set()
    net.sleep(1.5)
    assert p.node.state.peers["d"].state == "up"
    p.open("prefill", "s")
    p.finish("prefill", "s")
    assert d.ends("decode")[-1].reason == "done"


@pytest.mark.parametrize("forgetful", ["p", "d"])
def test_a_session_that_one_side_has_forgotten_is_set_up_again_without_a_storm(forgetful: str) -> None:
    net, p, d = pair()
    d.receive("decode", "prefill", b"", b"")
    d.abort("decode")
    net.sleep(2.0)
    side, other = net.sides[forgetful], net.sides["d" if forgetful == "p" else "p"]
    side.node.peers.forget(side.node.state.peers[other.name])
    net.wire.clear()
    net.sleep(1.0)
    d.receive("decode", "prefill", b"", b"", room="s")
    net.sleep(1.0)
    p.open("prefill", "s")
    p.finish("prefill", "s")
    net.sleep(1.0)
    assert d.ends("decode")[-1].reason == "done"
    assert len(net.wire) < 60


def test_silent_peers_without_rooms_are_forgotten() -> None:
    net, p, d = pair()
    d.receive("decode", "prefill", b"", b"")
    d.abort("decode")
    net.deaf = {("p", "d"), ("d", "p")}
    net.sleep(net.limits.peer_ttl * 1.5)
    assert not p.node.state.peers and not d.node.state.peers


# waiting -----------------------------------------------------------------------------------------------------------


def test_every_phase_has_its_deadline() -> None:
    lim = Limits()
    for reason, seconds in (
        ("open_timeout", lim.open_timeout),
        ("want_timeout", lim.want_timeout),
        ("push_timeout", lim.push_timeout),
    ):
        net, p, d = pair()
        if reason != "want_timeout":
            p.open("prefill")
        if reason != "open_timeout":
            d.receive("decode", "prefill", table(0), table(0))
        keep_alive(net, seconds - 1)
        assert not p.ends("prefill") and not d.ends("decode")
        keep_alive(net, 3)
        ends = p.ends("prefill") + d.ends("decode")
        assert {e.reason for e in ends} == {reason}, reason
        assert net.at_baseline()


def test_no_credit() -> None:
    net, p, d = pair()
    net.drop = {messages.Grant}
    d.receive("decode", "prefill", table(0), table(0))
    p.open("prefill")
    p.push("prefill", table(0), table(0))
    p.finish("prefill")
    keep_alive(net, net.limits.credit_timeout - 1)
    assert not p.ends("prefill")
    keep_alive(net, 3)
    assert p.end("prefill").reason == d.end("decode").reason == "credit_timeout", "repeated messages are no progress"


def test_no_acknowledgement() -> None:
    net, p, d = pair()
    net.drop = {messages.Ack, messages.Done}
    d.hold.add(jobs.Scatter)
    d.receive("decode", "prefill", table(0), table(0))
    p.open("prefill")
    p.push("prefill", table(0), table(0))
    p.finish("prefill")
    net.unhold(d, jobs.Scatter)
    assert d.end("decode").reason == "done"
    keep_alive(net, net.limits.ack_timeout + 2)
    assert p.end("prefill").reason == "ack_timeout"
    assert p.lent() == 0


def test_a_want_that_is_parked_too_long_dooms_its_room() -> None:
    net, p, d = pair()
    d.receive("decode", "prefill", table(0), table(0))
    keep_alive(net, net.limits.want_timeout + 1)
    assert d.end("decode").reason == "want_timeout"
    p.open("prefill")
    assert p.end("prefill").reason == "want_timeout"


def test_tombstones_weather() -> None:
    net, p, _ = pair(Limits(tombstone_ttl=5.0))
    p.open("prefill")
    p.abort("prefill")
    assert len(p.node.state.tombstones) == 1
    net.sleep(3.0)
    p.open("prefill", "s")
    p.abort("prefill", "s")
    net.sleep(3.0)
    assert [k[0] for k in p.node.state.tombstones] == ["s"]
    net.sleep(5.0)
    assert not p.node.state.tombstones


# going down --------------------------------------------------------------------------------------------------------


def test_drain_takes_no_new_rooms_and_lets_the_others_end() -> None:
    net, p, d, send = under_way()
    d.receive("decode", "prefill", table(1), table(1), room="parked")
    p.handle(events.Drain())
    net.settle()
    assert d.end("decode").reason == "shutdown"
    assert d.end("decode").room == "parked"
    answer = p.open("prefill", "s")
    assert isinstance(answer, worker.Rejected) and answer.code == "draining"
    d.receive("decode", "prefill", table(2), table(2), room="s")
    assert d.ends("decode")[1].reason == "shutdown"
    late = p.attach("late")
    assert p.frames[late][0].code == "draining"  # type: ignore[union-attr]
    p.report(jobs.Sent(send.job, 77, "", 0.0))
    net.sleep(1.0)
    assert p.end("prefill").reason == "done"


def test_shutdown_ends_every_room_by_name_and_says_goodbye_when_the_engine_is_closed() -> None:
    net, p, d, _ = under_way()
    d.receive("decode", "prefill", table(1), table(1), room="parked")
    p.handle(events.Shutdown())
    net.settle()
    assert p.end("prefill").reason == "shutdown"
    assert {e.reason for e in d.ends("decode")} == {"shutdown"}
    assert not any(isinstance(w[2], messages.Goodbye) for w in net.wire)
    p.kill_engine()
    assert any(isinstance(w[2], messages.Goodbye) for w in net.wire)
    assert "p" not in d.node.state.peers
    assert net.at_baseline()


def test_shutdown_without_an_engine() -> None:
    net, p, d = pair()
    d.receive("decode", "prefill", table(1), table(1))
    p.open("prefill")
    p.kill_engine()
    p.handle(events.Shutdown())
    net.settle()
    assert d.end("decode").reason == "shutdown"
    assert "p" not in d.node.state.peers


def test_a_want_that_met_a_restarted_peer_ends_its_send_too() -> None:
    """The send was opened in the new incarnation, of which the receiver had not heard: neither side may wait for the other."""
    net, p, d = pair()
    d.receive("decode", "prefill", table(0), table(0), room="before")
    net.deaf |= {("p", "d"), ("d", "p")}
    d.receive("decode", "prefill", table(1), table(1))
    said = p.node.peers.hello()
    fresh = messages.Hello(2, 1, said.address, said.release, None)
    actions = d.handle(events.PeerSaid("p", 2, 0, (fresh,)))
    assert {e.reason for e in d.ends("decode")} == {"peer_restarted"}
    told = [a for a in actions if isinstance(a, events.ToPeer) and isinstance(a.message, messages.Ended)]
    assert {a.message.room for a in told} == {"before", "r"}
    net.now += 0.2
    again = [
        a for a in d.handle(events.Tick()) if isinstance(a, events.ToPeer) and isinstance(a.message, messages.Ended)
    ]
    assert {(a.message.room, a.to_incarnation) for a in again} == {("before", 2), ("r", 2)}
