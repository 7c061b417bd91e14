"""The core's driver: order of events, envelopes, descriptors of pools, and a core that raises."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from pdxfer.core import events, jobs, messages, worker
from pdxfer.core.events import Action, Event
from pdxfer.core.geometry import PoolSpec
from pdxfer.core.node import Node
from pdxfer.driver import Driver
from pdxfer.metrics import Metrics
from pdxfer.settings import SupervisorSettings
from pdxfer.supervisor import RestartPolicy

ATTACH = worker.Attach(
    1, 1, "w0", "prefill", 9,
    (worker.PoolAt(PoolSpec("kv", "uint8", "1x16", 16, 1, 256), 4, (worker.PlaneAt(0, 0, 256),)),), (1024,),
)  # fmt: skip
READY = jobs.Ready(messages.EngineInfo(7, "p:5:7", "1.5.1", b"m", b"d", 4096, 4096, 4), 2, 99)


class Parts:
    """Every sink, as a list of what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.on: dict[str, Callable[..., Any]] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def sink(*arguments: Any) -> Any:
            self.told.append((name, *arguments))
            return self.on[name](*arguments) if name in self.on else (3, 4) if name == "fds" else None

        return sink

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.told if call[0] == name]


class FakeNode:
    """Answers each event as the test says, and raises where it says."""

    def __init__(self, answer: Callable[[Event], list[Action]]) -> None:
        self.answer = answer
        self.real = Node("p", 5, "tcp://x", "0")
        self.state = self.real.state
        self.seen: list[Event] = []

    def handle(self, event: Event, now: float) -> list[Action]:
        self.seen.append(event)
        return self.answer(event)

    def next_deadline(self) -> float | None:
        return None


def drive(test: Callable[[Callable[..., Driver], Parts, list[str]], Coroutine[Any, Any, None]]) -> None:
    parts, given_up = Parts(), []

    def make(node: Any = None, budget: int = 5) -> Driver:
        settings = SupervisorSettings(core_error_budget=budget)
        metrics = Metrics("p", 5, "0", ("main",))
        policy = RestartPolicy("core", settings, "core_error_budget")
        return Driver(node or Node("p", 5, "tcp://x", "0"), parts, metrics, policy, given_up.append)

    async def main() -> None:
        await test(make, parts, given_up)

    asyncio.run(asyncio.wait_for(main(), 10))


def test_an_event_caused_by_an_action_waits_its_turn() -> None:
    async def test(make: Any, parts: Parts, given_up: list[str]) -> None:
        node = FakeNode(
            lambda e: (
                [events.DropWorker(1), events.DropWorker(2)] if isinstance(e, events.Drain) else [events.DropWorker(3)]
            )
        )
        driver = make(node)
        parts.on["drop_worker"] = lambda id: driver.deliver(events.Tick()) if id == 1 else None
        driver.deliver(events.Drain())
        assert parts.of("drop_worker") == [(1,), (2,), (3,)]

    drive(test)


def test_messages_of_one_turn_travel_together_and_within_the_frame() -> None:
    async def test(make: Any, parts: Parts, given_up: list[str]) -> None:
        small = [events.ToPeer("d", 6, messages.Done(f"r{i}", 0)) for i in range(300)]
        large = [events.ToPeer("e", 6, messages.Finish(f"r{i}", 0, 1, b"x" * messages.MAX_AUX)) for i in range(200)]
        driver = make(FakeNode(lambda e: [*small, *large]))
        driver.deliver(events.Tick())
        sent = [envelope for (envelope,) in parts.of("to_peer")]
        for envelope in sent:
            assert messages.decode(messages.encode(envelope)) == envelope
        assert [len(e.body) for e in sent if e.target == "d"] == [256, 44]
        assert [m for e in sent if e.target == "e" for m in e.body] == [a.message for a in large]
        assert (sent[0].source, sent[0].incarnation, sent[0].to_incarnation) == ("p", 5, 6)

    drive(test)


def test_a_timer_rings_for_the_core() -> None:
    async def test(make: Any, parts: Parts, given_up: list[str]) -> None:
        loop = asyncio.get_running_loop()
        node = FakeNode(lambda e: [])
        deadlines = [loop.time() + 0.1, loop.time() + 0.02]
        node.next_deadline = lambda: deadlines[-1] if deadlines else None  # type: ignore[method-assign]
        driver = make(node)
        driver.deliver(events.Drain())
        deadlines.clear()
        await asyncio.sleep(0.08)
        assert [type(e) for e in node.seen] == [events.Drain, events.Tick]

    drive(test)


def test_descriptors_go_with_mappools_and_are_closed_when_nobody_has_a_claim() -> None:
    async def test(make: Any, parts: Parts, given_up: list[str]) -> None:
        driver = make()
        driver.deliver(events.WorkerAttached(1, ATTACH))
        driver.deliver(events.EngineSaid(READY))
        ((job, fds),) = parts.of("to_engine")
        assert isinstance(job, jobs.MapPools)
        assert fds == (3, 4)
        driver.deliver(events.WorkerGone(1, "closed"))
        assert isinstance(parts.of("to_engine")[-1][0], jobs.UnmapPools)
        assert parts.of("forget_worker") == [(1,)]

    drive(test)


def test_descriptors_of_a_gone_worker_are_closed_when_the_engine_is_gone() -> None:
    async def test(make: Any, parts: Parts, given_up: list[str]) -> None:
        driver = make()
        driver.deliver(events.WorkerAttached(1, ATTACH))
        driver.deliver(events.EngineSaid(READY))
        driver.deliver(events.EngineGone("killed"))
        assert parts.of("forget_worker") == []  # the worker lives: the next engine needs them
        driver.deliver(events.WorkerGone(1, "closed"))
        assert parts.of("forget_worker") == [(1,)]

    drive(test)


def test_a_core_that_raises_costs_one_event_and_the_worker_is_answered() -> None:
    async def test(make: Any, parts: Parts, given_up: list[str]) -> None:
        def answer(event: Event) -> list[Action]:
            if isinstance(event, events.WorkerSaid):
                node.state.out.append(events.ToWorker(8, worker.Released(1, "other", 0)))
                raise AssertionError("books do not balance")
            return [events.DropWorker(5)]

        node = FakeNode(answer)
        driver = make(node)
        driver.deliver(events.WorkerSaid(1, worker.Open(17, "r", 0)))
        (rejected, released) = parts.of("to_worker")
        assert (rejected[0], rejected[1].req, rejected[1].code) == (1, 17, "internal")
        assert "books do not balance" in rejected[1].detail
        assert released[0] == 8  # what was decided before it raised is told
        driver.deliver(events.Tick())
        assert parts.of("drop_worker") == [(5,)]
        assert given_up == []

    drive(test)


def test_a_core_that_keeps_raising_is_over_budget() -> None:
    async def test(make: Any, parts: Parts, given_up: list[str]) -> None:
        def answer(event: Event) -> list[Action]:
            raise ValueError("x")

        driver = make(FakeNode(answer), budget=2)
        for _ in range(3):
            driver.deliver(events.Tick())
        assert len(given_up) == 1
        assert "supervisor.core_error_budget = 2" in given_up[0]

    drive(test)


def test_a_sink_that_raises_does_not_lose_the_actions_after_it() -> None:
    async def test(make: Any, parts: Parts, given_up: list[str]) -> None:
        def broken(id: int) -> None:
            raise OSError("no")

        parts.on["drop_worker"] = broken
        driver = make(FakeNode(lambda e: [events.DropWorker(1), events.ForgetPeer("d")]))
        driver.deliver(events.Tick())
        assert parts.of("forget_peer") == [("d",)]

    drive(test)


def test_a_room_that_the_core_raises_on_ends_and_no_other() -> None:
    async def test(make: Any, parts: Parts, given_up: list[str]) -> None:
        node = Node("p", 5, "tcp://x", "0")
        driver = make(node)
        driver.deliver(events.WorkerAttached(1, ATTACH))
        for req, room in ((2, "good"), (3, "bad")):
            driver.deliver(events.WorkerSaid(1, worker.Open(req, room, 0)))
        finish = node.sender.finish

        def broken(room: Any, aux: bytes) -> None:
            if room.room == "bad":
                raise AssertionError("books do not balance")
            finish(room, aux)

        node.sender.finish = broken  # type: ignore[method-assign]
        driver.deliver(events.WorkerSaid(1, worker.Finish(4, "bad", 0, b"")))
        driver.deliver(events.WorkerSaid(1, worker.Finish(5, "good", 0, b"")))
        frames = [frame for _, frame in parts.of("to_worker")]
        ends = [f for f in frames if isinstance(f, worker.RoomEnded)]
        assert [(e.room, e.reason) for e in ends] == [("bad", "internal_error")]
        assert "books do not balance" in ends[0].detail
        assert worker.Ok(5) in frames
        assert given_up == []
        node.audit()

    drive(test)
