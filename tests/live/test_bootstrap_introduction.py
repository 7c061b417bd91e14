"""Nodes that know none but the registry's node are introduced to each other by it, over real sockets with CURVE."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from pdxfer.bootstrap import keys
from pdxfer.bootstrap.settings import BootstrapSettings, NodeEntry, RegistrySettings
from pdxfer.config import Config
from pdxfer.core import messages
from pdxfer.core.events import Event, PeerSaid, Resolved
from pdxfer.core.messages import Envelope, Heartbeat, Hello, Located, Message
from pdxfer.peerlink import BootstrapService
from pdxfer.settings import NodeSettings


class Node:
    """A sidecar's bootstrap service, and in place of its core a list of what the core was told."""

    def __init__(
        self,
        directory: Path,
        name: str,
        engines: tuple[str, ...],
        known: list[NodeEntry],
        authorized: list[str] | None = None,
    ) -> None:
        self.name = name
        self.engines = engines
        self.incarnation = 1000 + ord(name)
        self.path = directory / f"{name}.key"
        self.pair = keys.load_or_make(self.path)
        self.events: list[Event] = []
        self.refused: list[tuple[str, str, str]] = []
        config = Config(
            node=NodeSettings(name=name),
            bootstrap=BootstrapSettings(
                "tcp://127.0.0.1:*", key_file=str(self.path), authorized_keys=tuple(authorized or ())
            ),
            registry=RegistrySettings("embedded", tuple(known), server="r", ttl=2.0),
        )
        self.service = BootstrapService(
            config, self.incarnation, make_keys=False, deliver=self.take, refused=self.refuse,
            died=lambda why: None, attached=lambda: self.engines,
        )  # fmt: skip
        self.service.start()

    def take(self, events: Iterable[Event]) -> None:
        self.events.extend(events)

    def refuse(self, origin: str, who: str, code: str, detail: str, count: int) -> None:
        self.refused.append((who, code, detail))

    @property
    def entry(self) -> NodeEntry:
        return NodeEntry(self.name, self.service.address, self.pair.public)

    def say(self, target: str, message: Message) -> None:
        self.service.send(Envelope(messages.PROTOCOL, self.name, self.incarnation, target, 0, (message,)))

    def hello(self, target: str) -> None:
        self.say(target, Hello(self.incarnation, 1, self.service.address, "0", None))

    def heard(self, source: str, kind: type) -> bool:
        said = [event for event in self.events if isinstance(event, PeerSaid) and event.node == source]
        return any(isinstance(message, kind) for event in said for message in event.body)

    def resolved(self, engine_id: str) -> Resolved | None:
        found = [event for event in self.events if isinstance(event, Resolved) and event.engine_id == engine_id]
        return found[-1] if found else None


async def until(reached: Callable[[], object], timeout: float, what: str) -> None:
    end = time.monotonic() + timeout
    while not reached():
        assert time.monotonic() < end, f"not within {timeout} s: {what}"
        await asyncio.sleep(0.02)


async def meet(p: Node, d: Node) -> None:
    """d resolves p's engine, says hello, and is answered."""
    began = time.monotonic()
    d.service.resolve("prefill-0")
    await until(lambda: d.resolved("prefill-0"), 5, "resolved")
    assert d.resolved("prefill-0") == Resolved("prefill-0", "p", p.incarnation, "")

    def answered() -> bool:  # all is repeated, as the core does
        d.hello("p")
        if p.heard("d", Hello):
            p.say("d", Heartbeat(1, 1))
        return d.heard("p", Heartbeat)

    await until(answered, 5, f"they talk: {p.refused[-2:]} {d.refused[-2:]}")
    assert time.monotonic() - began < 5.0


class Three:
    """The registry's node has every key; p and d have its entry, and nothing of each other."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        public = [keys.load_or_make(directory / f"{name}.key").public for name in "pd"]
        self.r = Node(directory, "r", (), [], public)
        self.p = Node(directory, "p", ("prefill-0",), [self.r.entry])
        self.d = Node(directory, "d", ("decode-0",), [self.r.entry])

    async def settled(self) -> None:
        for node in (self.p, self.d):
            await until(lambda node=node: node.service.problem() is None, 5, "the registry answers")

    async def stop(self) -> None:
        for node in (self.r, self.p, self.d):
            await node.service.stop()


@pytest.mark.parametrize("lost", [0, 3], ids=["introduced", "first introductions lost"])
def test_nodes_without_each_others_keys_are_introduced(tmp_path: Path, lost: int) -> None:
    async def run() -> None:
        three = Three(tmp_path)
        introductions = 0
        pass_on = three.r.service._thread.send

        def send(envelope: Envelope) -> None:
            nonlocal introductions
            if any(
                isinstance(message, Located) and not message.engine_id and message.node for message in envelope.body
            ):
                introductions += 1
                if introductions <= lost:
                    return
            pass_on(envelope)

        three.r.service._thread.send = send  # type: ignore[method-assign]
        try:
            await three.settled()
            assert three.p.service._directory.place("d") is None
            await meet(three.p, three.d)
            assert three.p.service._directory.place("d") == (three.d.service.address, three.d.pair.public)
            said = introductions
            assert said > lost
            await asyncio.sleep(0.8)
            assert introductions <= said + 1  # once they have met it is not said again
            assert not any(isinstance(e, Resolved) and not e.engine_id for e in three.p.events)
        finally:
            await three.stop()

    asyncio.run(run())


def test_a_restarted_node_is_introduced_again(tmp_path: Path) -> None:
    """It has forgotten everybody that the registry had told it of."""

    async def run() -> None:
        three = Three(tmp_path)
        try:
            await three.settled()
            await meet(three.p, three.d)
            await three.p.service.stop()
            three.p = Node(tmp_path, "p", ("prefill-0",), [three.r.entry])
            three.p.incarnation += 1
            three.d.events.clear()
            await three.settled()
            await asyncio.sleep(2.1)  # registry.cache
            three.d.service.resolve("prefill-0")

            def answered() -> bool:
                three.d.hello("p")
                if three.p.heard("d", Hello):
                    three.p.say("d", Heartbeat(1, 1))
                return three.d.heard("p", Heartbeat)

            await until(answered, 8, f"they talk again: {three.p.refused[-2:]} {three.d.refused[-2:]}")
        finally:
            await three.stop()

    asyncio.run(run())


def test_nobody_but_the_registry_may_introduce_and_nobody_announces_anothers_key(tmp_path: Path) -> None:
    async def run() -> None:
        three = Three(tmp_path)
        try:
            await three.settled()
            await meet(three.p, three.d)
            evil = keys.generate().public
            three.d.say("p", Located("", "x", "tcp://127.0.0.1:9", evil, 1))
            three.d.say("r", messages.Announce("tcp://127.0.0.1:9", evil, ("prefill-0",), 5.0))
            await until(lambda: three.p.refused and three.r.refused, 5, "both are refused")
            assert three.p.service._directory.place("x") is None
            assert not three.p.service._directory.authorised(evil)
            assert any("registry is kept by 'r'" in detail for _, _, detail in three.p.refused)
            assert any("expected its own" in detail for _, _, detail in three.r.refused)
        finally:
            await three.stop()

    asyncio.run(run())
