"""Whatever happens, in whatever order: every room ends exactly once, every page and slot has one owner, nothing waits
without a deadline, nothing is done with wrong bytes, and when the faults stop everything comes home.

Each example is one seed of the simulator (pdxfer.chaos.sim): a world of one to three nodes whose workload and faults are
drawn from it. The invariants are checked after every event. A failing seed replays, with its timeline, by

    pdxfer chaos replay N

and the failure names the faults that it takes (``--only 0,2``). PDXFER_SIM_SEEDS and PDXFER_SIM_START choose others.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from core_harness import Net, Side, pair, table
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdxfer.chaos.sim import run
from pdxfer.core import events, jobs, messages, worker
from pdxfer.core.limits import Limits

SEEDS = int(os.environ.get("PDXFER_SIM_SEEDS", "2000"))
START = int(os.environ.get("PDXFER_SIM_START", "0"))
BLOCKS = 10


@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_seeds(block: int) -> None:
    failed = []
    for seed in range(START + block, START + SEEDS, BLOCKS):
        result = run.run(seed, audit_every=2)
        if not result.ok:
            only = ",".join(map(str, run.shrink(seed))) or "none"
            failed.append(f"{result.violation}\n  pdxfer chaos replay {seed} --only {only}")
    assert not failed, "\n".join(failed)


def test_one_seed_is_one_run() -> None:
    for seed in range(20):
        one, two = run.run(seed, trace=True), run.run(seed, trace=True)
        assert one.timeline == two.timeline
        assert one.steps == two.steps


def test_taking_a_fault_away_leaves_the_others() -> None:
    seed = next(s for s in range(100) if len(run.run(s).faults) >= 3)
    assert [str(f) for f in run.run(seed, only=[0, 2]).faults] == [str(run.run(seed).faults[i]) for i in (0, 2)]


ROOMS = st.sampled_from(["a", "b", "c"])
SHORT = Limits(
    open_timeout=6.0, want_timeout=6.0, push_timeout=6.0, credit_timeout=5.0, ack_timeout=4.0, room_timeout=20.0,
    engine_timeout=3.0, transfer_deadline=2.0, stall_deadline=3.0, cut_grace=1.0, quarantine_limit=4.0, tombstone_ttl=60.0,
)  # fmt: skip


class TwoNodes(RuleBasedStateMachine):
    """Two real Nodes; hypothesis draws every event and its place, shrinks what fails, and plays the engines."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.p, self.d = pair(SHORT)
        self.net.drop = set()
        self.free: dict[str, list[int]] = {"prefill": list(range(16)), "decode": list(range(16))}

    def side(self, which: bool) -> tuple[Side, str]:
        return (self.p, "prefill") if which else (self.d, "decode")

    @rule(room=ROOMS, epoch=st.integers(0, 1))
    def open(self, room: str, epoch: int) -> None:
        self.p.open("prefill", room, epoch)

    @rule(room=ROOMS, epoch=st.integers(0, 1), pages=st.lists(st.integers(0, 15), max_size=3), first=st.integers(0, 2))
    def push(self, room: str, epoch: int, pages: list[int], first: int) -> None:
        self.p.push("prefill", table(*pages), table(*pages), room=room, epoch=epoch, page0=(first, first))

    @rule(room=ROOMS, epoch=st.integers(0, 1))
    def finish(self, room: str, epoch: int) -> None:
        self.p.finish("prefill", room, epoch)

    @rule(room=ROOMS, epoch=st.integers(0, 1), first=st.integers(0, 13), n=st.integers(0, 3))
    def receive(self, room: str, epoch: int, first: int, n: int) -> None:
        pages = table(*range(first, first + n))
        self.d.receive("decode", "prefill", pages, pages, room=room, epoch=epoch)

    @rule(which=st.booleans(), room=ROOMS, epoch=st.integers(0, 1))
    def abort(self, which: bool, room: str, epoch: int) -> None:
        side, who = self.side(which)
        side.abort(who, room, epoch)

    @rule(which=st.booleans(), kind=st.sampled_from([jobs.Send, jobs.Scatter, jobs.AddPeer]))
    def engine_waits(self, which: bool, kind: type) -> None:
        self.side(which)[0].hold.add(kind)

    @rule(which=st.booleans(), pick=st.integers(0, 9), how=st.sampled_from(["well", "gathered", "error"]))
    def engine_answers(self, which: bool, pick: int, how: str) -> None:
        side = self.side(which)[0]
        if not side.held:
            return
        job: Any = side.held[pick % len(side.held)]
        if how == "gathered" and isinstance(job, jobs.Send):
            side.report(jobs.Gathered(job.job))
            return
        side.held.remove(job)
        if how == "error" and isinstance(job, jobs.Send):
            side.report(jobs.Sent(job.job, 0, "drawn", 0.0))
        elif how == "error" and isinstance(job, jobs.Scatter):
            side.report(jobs.Scattered(job.job, "drawn", True))
        else:
            self.net.queue.append(("job", side, job))
            self.net.settle()

    @rule(which=st.booleans())
    def engine_dies(self, which: bool) -> None:
        side = self.side(which)[0]
        if side.node.state.engine.up:
            side.kill_engine()

    @rule(which=st.booleans(), slots=st.integers(1, 4))
    def engine_comes(self, which: bool, slots: int) -> None:
        side = self.side(which)[0]
        if not side.node.state.engine.up:
            side.start_engine(slots)

    @rule(which=st.booleans())
    def worker_comes_and_goes(self, which: bool) -> None:
        side, who = self.side(which)
        side.gone(who)
        side.attach(who)

    @rule(kinds=st.sets(st.sampled_from(messages.Message.__args__), max_size=4))
    def messages_are_late(self, kinds: set[type]) -> None:
        self.net.delay |= kinds

    @rule(order=st.randoms(use_true_random=False), lost=st.integers(0, 5), twice=st.booleans())
    def late_messages_come(self, order: Any, lost: int, twice: bool) -> None:
        waiting, self.net.delayed, self.net.delay = self.net.delayed, [], set()
        order.shuffle(waiting)
        for side, item in waiting[lost:]:
            for _ in range(2 if twice else 1):
                self.net.carry(side, item, late=True)
        self.net.settle()

    @rule(seconds=st.sampled_from([0.05, 0.2, 1.0, 2.5]))
    def time_passes(self, seconds: float) -> None:
        self.net.sleep(seconds)

    @rule(which=st.booleans())
    def worker_pings(self, which: bool) -> None:
        side, who = self.side(which)
        side.handle(events.WorkerSaid(side.ids[who], worker.Ping()))

    @rule(which=st.booleans())
    def connection_closes(self, which: bool) -> None:
        self.side(which)[0].handle(events.PeerCut("d" if which else "p"))
        self.net.settle()

    @precondition(lambda self: not self.p.node.state.sends and not self.p.node.state.homing)
    @rule()
    def sender_restarts(self) -> None:
        self.p = self.net.restart("p")
        self.p.attach("prefill")

    @invariant()
    def each_end_is_the_only_one(self) -> None:
        for side in self.net:
            closed = [(a.room, a.epoch, a.sending) for a in side.actions if isinstance(a, events.RoomClosed)]
            assert len(closed) == len(set(closed)), closed
            ended = [
                (id, f.room, f.epoch, f.sending)
                for id, fs in side.frames.items()
                for f in fs
                if isinstance(f, worker.RoomEnded)
            ]
            assert len(ended) == len(set(ended)), ended

    def teardown(self) -> None:
        """The faults stop: everything ends and comes home."""
        net: Net = self.net
        net.delay = set()
        net.release()
        for side in net:
            side.hold.clear()
            if not side.node.state.engine.up:
                side.start_engine()
            held, side.held = side.held, []
            net.queue += [("job", side, job) for job in held if side.node.state.engine.up]
        net.settle()
        for _ in range(60):
            net.sleep(0.5)
            for side in net:
                for one in list(side.node.state.workers):
                    side.handle(events.WorkerSaid(one, worker.Ping()))
                if side.killed() and side.node.state.engine.killing:
                    side.kill_engine()
                    side.start_engine()
        assert net.at_baseline(), [side.node.snapshot()["rooms"] for side in net]
        assert not any(side.node.state.parked or side.node.ends.closing for side in net)


TwoNodes.TestCase.settings = settings(max_examples=2000, stateful_step_count=40, deadline=None, print_blob=True)
TestTwoNodes = TwoNodes.TestCase
