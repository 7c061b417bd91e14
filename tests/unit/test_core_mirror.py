"""Stores and loads of the mirror in the core: pages and entries have one owner, whatever happens in between."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from core_harness import SPECS, Net, Side, table
from test_core_refusals import refused

from pdxfer.core import events, jobs, worker
from pdxfer.core.geometry import PoolSpec
from pdxfer.core.limits import Limits, MirrorSettings
from pdxfer.core.mirror import MAX_TOKEN

ENTRY = 2 * (3 * 40 + 2 * 16)  # two pages of 16 tokens of each pool
MIRROR = MirrorSettings(bytes=8 * 4096, block_tokens=32)  # 8 entries
PROMPT = np.arange(1, 32 * 4 + 8, dtype="<u4").tobytes()  # four blocks and a bit


def one(mirror: MirrorSettings = MIRROR, limits: Limits | None = None) -> tuple[Net, Side]:
    net = Net("p", mirror=mirror, limits=limits)
    p = net.sides["p"]
    p.attach("w")
    return net, p


def store(
    p: Side, who: str = "w", *, pages: int = 8, first: int = 0, tokens: bytes = PROMPT, tenant: str = "", **say: Any
) -> Any:
    t = table(*range(say.get("page0", 0), say.get("page0", 0) + pages))
    return p.say(who, worker.Store, say.get("model", "m"), tenant, tokens, first, (t, t))


def lookup(
    p: Side, who: str = "w", *, tokens: bytes = PROMPT, tenant: str = "", hold: bool = True, model: str = "m"
) -> worker.Held:
    held = p.say(who, worker.Lookup, model, tenant, tokens, hold)
    assert isinstance(held, worker.Held), held
    return held


def load(p: Side, lease: int, who: str = "w", *, first: int = 0, blocks: int = 4, page0: int = 0) -> Any:
    t = table(*range(page0, page0 + 2 * blocks))
    return p.say(who, worker.Load, lease, first, blocks, (t, t))


def ends(p: Side, who: str = "w") -> list[worker.MirrorEnded]:
    return [f for f in p.frames[p.ids[who]] if isinstance(f, worker.MirrorEnded)]


def index(p: Side) -> Any:
    return p.node.mirrors.regions[0].index  # type: ignore[union-attr]


def at_rest(p: Side) -> None:
    p.node.audit()
    assert not p.lent() and not p.node.mirrors.operations and not p.node.mirrors.jobs


def test_what_was_stored_is_found_and_loaded() -> None:
    _, p = one()
    assert lookup(p) == worker.Held(p.req, 0, 0, 32)
    assert isinstance(store(p), worker.Ok)
    (end,) = ends(p)
    assert (end.loading, end.reason, end.blocks, end.asked, end.bytes) == (False, "done", 4, 4, 4 * ENTRY)
    held = lookup(p)
    assert held.blocks == 4 and held.lease
    assert isinstance(load(p, held.lease), worker.Ok)
    assert (ends(p)[1].loading, ends(p)[1].reason, ends(p)[1].blocks) == (True, "done", 4)
    job = next(j for j in p.jobs if isinstance(j, jobs.MirrorLoad))
    assert job.entry_bytes == ENTRY
    assert job.entries[1].rows == (jobs.Rows(0, 0, 3, table(2, 3)), jobs.Rows(1, 0, 2, table(2, 3)))
    p.say("w", worker.Unpin, held.lease)
    at_rest(p)
    assert not p.node.mirrors.leases and index(p).counts == [4, 0, 4, 0]


def test_only_what_is_missing_is_copied() -> None:
    _, p = one()
    store(p, pages=4, tokens=PROMPT[: 4 * 64])
    store(p)
    assert [(e.blocks, e.asked) for e in ends(p)] == [(2, 2), (2, 2)]
    rows = [e.rows[0].pages for j in p.jobs if isinstance(j, jobs.MirrorStore) for e in j.entries]
    assert rows == [table(0, 1), table(2, 3), table(4, 5), table(6, 7)]
    store(p)
    assert (ends(p)[2].reason, ends(p)[2].asked) == ("done", 0), "all of it is there"
    store(p, pages=4, first=2)
    assert ends(p)[3].reason == "done"
    at_rest(p)


def test_tenants_and_models_are_apart() -> None:
    _, p = one()
    store(p, tenant="a")
    assert lookup(p, tenant="b").blocks == 0 and lookup(p, tenant="a", model="n").blocks == 0
    assert lookup(p, tenant="a").blocks == 4
    assert p.say("w", worker.Evict, "m", "b") == worker.Evicted(p.req, 0)
    assert p.say("w", worker.Evict, "m", "a") == worker.Evicted(p.req, 4)
    assert lookup(p, tenant="a").blocks == 0
    # names that would be equal if they were only put side by side
    store(p, tenant="c", model="m")
    assert lookup(p, tenant="", model="mc").blocks == 0


def test_two_workers_store_the_same_prefix_at_once() -> None:
    net, p = one()
    p.attach("v")
    p.hold.add(jobs.MirrorStore)
    store(p)
    store(p, "v")
    assert [(e.reason, e.asked) for e in ends(p, "v")] == [("done", 0)], "the first is at it"
    assert lookup(p, "v").blocks == 0, "half a block is none"
    net.unhold(p, jobs.MirrorStore)
    assert [(e.reason, e.blocks) for e in ends(p)] == [("done", 4)]
    assert lookup(p, "v").blocks == 4
    p.node.audit()


def test_a_store_whose_blocks_have_no_room_stores_the_first_ones() -> None:
    _, p = one(MirrorSettings(bytes=3 * 4096, block_tokens=32))
    store(p)
    (end,) = ends(p)
    assert (end.reason, end.blocks, end.asked) == ("done", 3, 4) and "no room for 1 of 4" in end.detail
    held = lookup(p)
    assert held.blocks == 3
    refused(store(p, tenant="b"), "mirror_full", "4 blocks to store", "3 entries")
    p.say("w", worker.Unpin, held.lease)
    assert isinstance(store(p, tenant="b"), worker.Ok)
    assert lookup(p).blocks == 0 and lookup(p, tenant="b").blocks == 3


@pytest.mark.parametrize(
    ("frame", "code", "says"),
    [
        (lambda t: (worker.Store, "m", "", PROMPT[:7], 0, t), "bad_tokens", "7 bytes"),
        (lambda t: (worker.Store, "m", "", b"", 0, t), "bad_tokens", "0 tokens are 0 whole blocks"),
        (lambda t: (worker.Store, "m", "", PROMPT[:80], 0, t), "bad_tokens", "20 tokens are 0 whole blocks"),
        (lambda t: (worker.Store, "m", "", PROMPT, 4, t), "bad_tokens", "from block 4 on"),
        (lambda t: (worker.Store, "m", "", PROMPT, -1, t), "bad_tokens", "from block -1 on"),
        (lambda t: (worker.Store, "m", "", b"\xff" * 400, 0, t), "bad_tokens", f"4294967295, expected 0 to {MAX_TOKEN}"),
        (lambda t: (worker.Store, "m" * 200, "", PROMPT, 0, t), "bad_tokens", "model 'mmm"),
        (lambda t: (worker.Store, "m", "a\nb", PROMPT, 0, t), "bad_tokens", "tenant"),
        (lambda t: (worker.Store, "m", "", PROMPT, 0, t[:1]), "pools_unequal", "1 page tables"),
        (lambda t: (worker.Store, "m", "", PROMPT, 0, (t[0], t[1][:-4])), "pools_unequal", "7 pages for 4 blocks, expected 2"),
        (lambda t: (worker.Store, "m", "", PROMPT, 0, (t[0], t[1][:-1])), "bad_frame", "31 bytes"),
        (lambda t: (worker.Store, "m", "", PROMPT, 0, (t[0], t[1][:-4] + table(99))), "pages_out_of_range", "page 99"),
        (lambda t: (worker.Store, "m", "", PROMPT, 0, (t[0], t[1][:-4] + table(0))), "pages_repeated", "page 0"),
        (lambda t: (worker.Load, 77, 0, 4, t), "mirror_miss", "lease 77 is not held"),
        (lambda t: (worker.Lookup, "m", "", b"abc", True), "bad_tokens", "3 bytes"),
    ],
)  # fmt: skip
def test_bad_requests_are_refused_by_name_and_change_nothing(frame: Any, code: str, says: str) -> None:
    _, p = one()
    t = table(*range(8))
    kind, *rest = frame((t, t))
    refused(p.say("w", kind, *rest), code, says)
    at_rest(p)
    assert p.node.mirrors.regions == [None], "nothing was given up for it"
    store(p)
    assert ends(p)[0].reason == "done"


def test_a_load_beyond_its_lease() -> None:
    _, p = one()
    store(p)
    held = lookup(p)
    for first, blocks in ((0, 5), (4, 1), (-1, 1), (0, 0), (2, 3)):
        refused(
            load(p, held.lease, first=first, blocks=blocks), "mirror_miss", f"blocks {first}+{blocks}, the lease has 4"
        )
    p.attach("v")
    refused(load(p, held.lease, "v"), "mirror_miss", "is not held")
    p.say("v", worker.Unpin, held.lease)
    assert isinstance(load(p, held.lease, first=2, blocks=2), worker.Ok), "another worker cannot let it go"


def test_pages_are_lent_while_they_are_copied() -> None:
    net, p = one()
    p.hold |= {jobs.MirrorStore, jobs.MirrorLoad}
    store(p)
    assert p.lent() == 16
    refused(p.receive("w", "x", table(0), table(0)), "pages_not_owned", "page 0 is lent (read)")
    p.open("w")
    assert isinstance(p.push("w", table(0), table(0)), worker.Ok), "a send reads the same page"
    p.abort("w")
    net.unhold(p, jobs.MirrorStore)
    held = lookup(p)
    load(p, held.lease)
    refused(store(p, tenant="z"), "pages_not_owned", "page 0 is lent (write)")
    refused(load(p, held.lease), "pages_not_owned", "page 0 is lent (write)")
    net.unhold(p, jobs.MirrorLoad)
    p.say("w", worker.Unpin, held.lease)
    at_rest(p)


def test_a_cancelled_operation_ends_when_no_job_is_left() -> None:
    net, p = one()
    p.hold.add(jobs.MirrorStore)
    store(p)
    number = p.req
    p.say("w", worker.Cancel, number)
    assert not ends(p) and p.lent() == 16, "the engine reads these pages"
    p.say("w", worker.Cancel, number)
    net.unhold(p, jobs.MirrorStore)
    (end,) = ends(p)
    assert (end.operation, end.state, end.reason, end.blocks) == (number, "ABORTED", "aborted", 0)
    assert lookup(p).blocks == 0
    p.say("w", worker.Cancel, number)
    p.say("w", worker.Cancel, 12345)
    at_rest(p)
    assert index(p).counts == [8, 0, 0, 0]


def test_a_worker_that_goes_leaves_nothing_behind() -> None:
    net, p = one()
    store(p)
    lookup(p)
    held = lookup(p)
    p.hold |= {jobs.MirrorStore, jobs.MirrorLoad}
    load(p, held.lease)
    store(p, tenant="b", page0=8)
    p.gone("w")
    p.node.audit()
    assert p.lent() == 32 and not any(isinstance(j, jobs.UnmapPools) for j in p.jobs), "the engine is still at it"
    assert not p.node.mirrors.leases
    first, second = p.held
    p.held = [second]
    net.queue.append(("job", p, first))
    net.settle()
    assert not any(isinstance(j, jobs.UnmapPools) for j in p.jobs)
    net.unhold(p, jobs.MirrorStore)
    assert any(isinstance(j, jobs.UnmapPools) for j in p.jobs)
    assert not p.node.state.workers and not p.node.mirrors.operations
    p.attach("w")
    assert lookup(p).blocks == 4, "what it had stored stays"
    assert lookup(p, tenant="b").blocks == 0, "nobody vouches for what a dead worker's pages held"


def test_the_mirror_outlives_an_engine() -> None:
    _net, p = one()
    store(p)
    p.hold |= {jobs.MirrorStore, jobs.MirrorLoad}
    held = lookup(p)
    store(p, tenant="b")
    p.kill_engine()
    assert ends(p)[1].reason == "engine_lost" and ends(p)[1].retriable
    p.node.audit()
    assert index(p).counts == [4, 0, 4, 0]
    load(p, held.lease)
    p.hold.clear()
    p.jobs.clear()
    p.start_engine()
    kinds = [type(j) for j in p.jobs]
    assert kinds.index(jobs.MapMirror) < kinds.index(jobs.MirrorLoad) and kinds.index(jobs.MapPools) < kinds.index(
        jobs.MirrorLoad
    )
    assert ends(p)[2].reason == "done", "it waited for the new engine"
    store(p, tenant="b")
    assert ends(p)[3].reason == "done"
    p.say("w", worker.Unpin, held.lease)
    at_rest(p)


def test_an_operation_has_a_deadline_and_a_job_that_hangs_costs_its_engine() -> None:
    net, p = one()
    p.kill_engine()
    store(p)
    net.sleep(29)
    p.handle(events.WorkerSaid(p.ids["w"], worker.Ping()))
    assert not ends(p)
    net.sleep(2)
    assert ends(p)[0].reason == "transfer_deadline"
    at_rest(p)
    p.start_engine()
    p.hold.add(jobs.MirrorStore)
    store(p)
    net.sleep(31)
    assert len(ends(p)) == 1 and len(p.killed()) == 1, "the engine is killed, as the only fence"
    assert p.lent() == 16
    p.kill_engine()
    assert ends(p)[1].reason == "transfer_deadline"
    at_rest(p)


def test_a_lease_runs_out() -> None:
    net, p = one()
    store(p)
    held = lookup(p)
    assert index(p).pins(0) == 1
    net.sleep(31)
    assert not p.node.mirrors.leases and index(p).pins(0) == 0
    refused(load(p, held.lease), "mirror_miss", "ran out after 30 s")
    assert isinstance(p.say("w", worker.Unpin, held.lease), worker.Ok)


def test_a_block_that_has_changed_is_dropped_and_never_served() -> None:
    _, p = one()
    store(p)
    held = lookup(p)
    entry = p.node.mirrors.leases[held.lease].entries[2]
    p.bad.add(entry * 4096)
    load(p, held.lease)
    end = ends(p)[1]
    assert (end.state, end.reason, end.retriable, end.blocks) == ("FAILED", "mirror_corrupt", False, 2)
    assert "block 2" in end.detail
    assert lookup(p, hold=False).blocks == 2
    refused(load(p, held.lease), "mirror_miss", "block 2 was dropped")
    p.say("w", worker.Unpin, held.lease)
    at_rest(p)
    p.bad.clear()
    store(p)
    assert lookup(p, hold=False).blocks == 4
    assert index(p).dropped["corrupt"] == 1


def test_an_engine_that_cannot_copy() -> None:
    _net, p = one()
    p.hold |= {jobs.MirrorStore, jobs.MirrorLoad}
    store(p)
    p.report(jobs.MirrorStored(p.held.pop().job, (), "no such memory"))  # type: ignore[union-attr]
    assert ends(p)[0].reason == "copy_error" and "no such memory" in ends(p)[0].detail
    assert index(p).counts == [8, 0, 0, 0]
    store(p)
    p.report(jobs.MirrorStored(p.held.pop().job, (1,), ""))  # type: ignore[union-attr]
    assert "1 digests for 4 entries" in ends(p)[1].detail
    at_rest(p)
    p.report(jobs.MirrorStored(999, (1,), ""))
    assert "bad_frame" in p.refusals()


def test_many_batches_take_turns() -> None:
    net, p = one(limits=Limits(local_chunk=ENTRY))
    p.hold.add(jobs.MirrorStore)
    store(p, tenant="a")
    store(p, tenant="b")
    assert len(p.held) == 2, "two copies under way"
    assert {len(j.entries) for j in p.held} == {1}  # type: ignore[union-attr]
    net.unhold(p, jobs.MirrorStore)
    order = [j.entries[0].offset for j in p.jobs if isinstance(j, jobs.MirrorStore)]
    assert len(order) == 8
    assert [e.reason for e in ends(p)] == ["done", "done"]
    at_rest(p)


def test_no_mirror_and_no_room_in_it() -> None:
    _, p = one(MirrorSettings())
    refused(store(p), "mirror_off", "mirror.bytes is 0")
    assert not any(isinstance(j, jobs.MapMirror) for j in p.jobs)
    _, p = one(MirrorSettings(bytes=8 * 4096, block_tokens=24))
    refused(store(p), "mirror_off", "pages of 16 tokens, mirror.block_tokens is 24")
    _, p = one(MirrorSettings(bytes=4096, block_tokens=32 * 64))
    refused(store(p), "mirror_off", "a block of 2048 tokens has", "the mirror has 4096")


def test_another_layout_has_another_part_and_takes_the_place_of_one_that_nobody_uses() -> None:
    _, p = one()
    store(p)
    other = (PoolSpec("kv", "fp8", "2x3x64", 16, 3, 20), SPECS[1])
    p.attach("v", specs=other)
    refused(store(p, "v"), "mirror_off", "mirror.layouts is 1")
    p.gone("w")
    assert isinstance(store(p, "v"), worker.Ok)
    assert lookup(p, "v").blocks == 4
    p.attach("w")
    refused(store(p), "mirror_off", "1 other layouts")
    p.gone("v")
    assert lookup(p).blocks == 0, "a layout that has changed finds nothing of the old one"
    p.node.audit()


def test_the_end_of_the_sidecar() -> None:
    net, p = one()
    store(p)
    held = lookup(p)
    p.hold.add(jobs.MirrorLoad)
    load(p, held.lease)
    p.handle(events.Drain())
    refused(store(p, tenant="b"), "draining")
    refused(load(p, held.lease), "draining")
    p.handle(events.Shutdown())
    assert len(ends(p)) == 1
    net.unhold(p, jobs.MirrorLoad)
    assert ends(p)[1].reason == "shutdown"


def test_snapshot_counts() -> None:
    _, p = one()
    store(p)
    load(p, lookup(p).lease)
    seen = p.node.snapshot()["mirror"]
    assert seen["entries"] == {"empty": 4, "filling": 0, "ready": 4, "doomed": 0}
    assert seen["totals"]["blocks_stored"] == seen["totals"]["blocks_loaded"] == 4
    assert seen["totals"]["bytes_loaded"] == 4 * ENTRY
    assert seen["ends"]["store"]["done"] == seen["ends"]["load"]["done"] == 1
    assert seen["leases"] == 1 and seen["regions"][0]["entry_bytes"] == ENTRY


def test_a_block_is_stored_when_it_comes_for_the_nth_time() -> None:
    _, p = one(MirrorSettings(bytes=8 * 4096, block_tokens=32, store_after=2))
    store(p, pages=4, tokens=PROMPT[: 4 * 64])
    assert (ends(p)[0].reason, ends(p)[0].asked, ends(p)[0].loading) == (
        "done",
        0,
        False,
    ) and "2 blocks came fewer than 2 times" in ends(p)[0].detail
    store(p)
    assert (ends(p)[1].blocks, ends(p)[1].asked) == (2, 2) and "2 blocks came fewer" in ends(p)[1].detail
    assert lookup(p, hold=False).blocks == 2
    store(p, first=2, pages=4)
    assert ends(p)[2].blocks == 2
    assert lookup(p, hold=False).blocks == 4
    store(p, tenant="b")
    assert lookup(p, tenant="b", hold=False).blocks == 0, "tenants are counted apart"
    at_rest(p)


def test_a_refused_request_does_not_take_the_place_of_a_layout_that_was_stored() -> None:
    _, p = one()
    store(p)
    p.gone("w")
    other = (PoolSpec("kv", "fp8", "2x3x64", 16, 3, 20), SPECS[1])
    p.attach("v", specs=other)
    assert lookup(p, "v").blocks == 0
    assert isinstance(p.say("v", worker.Unpin, 99), worker.Ok)
    refused(p.say("v", worker.Store, "m", "", PROMPT[:20], 0, (b"", b"")), "bad_tokens")
    p.gone("v")
    p.attach("w")
    assert lookup(p).blocks == 4


def test_blocks_behind_a_gap_are_refused() -> None:
    _, p = one()
    refused(store(p, first=2, pages=4), "mirror_miss", "block 1 is not there")
    store(p, pages=2, tokens=PROMPT[: 4 * 32])
    refused(store(p, first=2, pages=4), "mirror_miss", "block 1 is not there")
    assert isinstance(store(p, first=1, pages=6), worker.Ok)
    assert lookup(p, hold=False).blocks == 4


def test_one_worker_has_half_of_what_may_be_live() -> None:
    _, p = one(limits=Limits(max_rooms=4))
    p.attach("v")
    store(p)
    for _ in range(2):
        lookup(p)
    refused(p.say("w", worker.Lookup, "m", "", PROMPT, True), "too_many_rooms", "2 of this worker")
    assert lookup(p, "v").lease


def test_what_ended_in_the_queue_is_gone_from_it() -> None:
    _, p = one()
    p.kill_engine()
    for _ in range(5):
        store(p)
        p.say("w", worker.Cancel, p.req)
    assert [e.reason for e in ends(p)] == ["aborted"] * 5 and not p.node.mirrors.queue


def test_a_job_has_so_many_entries_and_a_prompt_so_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from pdxfer.core import mirrors

    monkeypatch.setattr(mirrors, "MOST_ENTRIES", 3)
    _, p = one()
    store(p)
    assert [len(j.entries) for j in p.jobs if isinstance(j, jobs.MirrorStore)] == [3, 1]
    monkeypatch.setattr(mirrors, "MOST_BLOCKS", 3)
    refused(store(p), "bad_tokens", "4 blocks, expected at most 3")
