"""Who serves an engine id: the two back ends, as pure logic.

Owns: the static table, the leases that one sidecar keeps for the others, and what a sidecar asks and announces. Must
not: read a clock, or send; ``now`` is passed in, and what is to be said is returned.

The registry's node also introduces nodes to each other: whoever looks up an engine is about to talk to that engine's node,
which is told the asker's address and key, so that it need not know every peer's key beforehand.
"""

from __future__ import annotations

import heapq
from typing import Final, NamedTuple

from pdxfer.core.messages import Announce, Located, Lookup, RegistryMessage

from .settings import RegistrySettings, good_key, reachable

MAX_LEASES: Final = 100_000
UNHEARD_PAUSE: Final = 0.5  # seconds between announcements that the registry does not answer


class Answer(NamedTuple):
    """Who serves ``engine_id``: ``node`` is empty when nobody does, and ``error`` then names the reason (core.reasons).

    ``engine_id`` is empty in an introduction: it answers no question, but the node's address and key are to be learned.
    """

    engine_id: str
    node: str
    incarnation: int
    error: str
    address: str = ""
    public_key: str = ""


class Said(NamedTuple):
    """A message to send to a node."""

    node: str
    message: RegistryMessage


class _Holder(NamedTuple):
    """What a node has announced of itself."""

    until: float
    incarnation: int
    address: str
    public_key: str
    engines: frozenset[str]


class _Kept(NamedTuple):
    """An answer of the registry, and when it came."""

    at: float
    answer: Answer


class Leases:
    """The registry that one sidecar keeps: each node's announcement, and with it its engine ids, until it runs out."""

    def __init__(self) -> None:
        self._holders: dict[str, _Holder] = {}
        self._engines: dict[str, str] = {}  # engine id -> node
        self._ends: list[tuple[float, str]] = []  # (until, node), a heap; superseded entries are skipped

    def announce(self, node: str, incarnation: int, message: Announce, now: float) -> None:
        """Take a node's leases. An older incarnation cannot overwrite a newer one's; a live lease of another node stays."""
        self._expire(now)
        held = self._holders.get(node)
        if held is not None and held.incarnation > incarnation:
            return
        self._drop(node)
        room = MAX_LEASES - len(self._engines)
        engines = frozenset([e for e in dict.fromkeys(message.engines) if e not in self._engines][: max(room, 0)])
        until = now + message.ttl
        self._holders[node] = _Holder(until, incarnation, message.address, message.public_key, engines)
        self._engines.update(dict.fromkeys(engines, node))
        heapq.heappush(self._ends, (until, node))
        if len(self._ends) > 2 * len(self._holders) + 1024:  # renewed again and again
            self._ends = [(held.until, node) for node, held in self._holders.items()]
            heapq.heapify(self._ends)

    def lookup(self, engine_id: str, now: float) -> Located:
        self._expire(now)
        return self._located(engine_id, self._engines.get(engine_id, ""))

    def introduce(self, node: str, now: float) -> Located | None:
        """Who this node is, for a peer that it is about to talk to."""
        self._expire(now)
        return self._located("", node) if node in self._holders else None

    def count(self, now: float) -> int:
        self._expire(now)
        return len(self._engines)

    def _located(self, engine_id: str, node: str) -> Located:
        held = self._holders.get(node)
        if held is None:
            return Located(engine_id, "", "", "", 0)
        return Located(engine_id, node, held.address, held.public_key, held.incarnation)

    def _expire(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            until, node = heapq.heappop(self._ends)
            held = self._holders.get(node)
            if held is not None and held.until == until:
                self._drop(node)

    def _drop(self, node: str) -> None:
        held = self._holders.pop(node, None)
        for engine_id in held.engines if held is not None else ():
            del self._engines[engine_id]


class Registry:
    """What one sidecar knows and asks. ``resolve`` answers at once where it can; else the answer comes by ``on_located``."""

    def __init__(self, settings: RegistrySettings, node: str, incarnation: int, public_key: str) -> None:
        self._settings = settings
        self._node = node
        self._incarnation = incarnation
        self._public_key = public_key
        self.leases = Leases() if self.serves else None
        self._static = {engine: entry for entry in settings.nodes for engine in entry.engines}
        self._cache: dict[str, _Kept] = {}
        self._spoke: dict[str, float] = {}  # nodes of kept answers -> when they were last heard
        self._unanswered: float | None = None  # since when the registry owes an answer
        self._asked: dict[str, float] = {}  # engine id -> since when
        self._meeting: dict[str, tuple[float, str]] = {}  # node -> (since when, the engine id that led to it)
        self._heard = float("-inf")
        self._announced = float("-inf")
        self._last: tuple[str, ...] | None = None
        self._began: float | None = None  # when this node began to keep the registry

    def reload(self, settings: RegistrySettings) -> None:
        """Take over the static entries; leases and what was asked stay."""
        self._settings = settings
        self._static = {engine: entry for entry in settings.nodes for engine in entry.engines}

    @property
    def serves(self) -> bool:
        """Does this node keep the registry?"""
        return self._settings.kind == "embedded" and self._settings.server == self._node

    def resolve(self, engine_id: str, now: float) -> tuple[Answer | None, list[Said]]:
        """Returns the answer, or None and what to ask."""
        entry = self._static.get(engine_id)
        if entry is not None:
            return Answer(engine_id, entry.node, 0, "", entry.address, entry.public_key), []
        if self._settings.kind == "static":
            return Answer(engine_id, "", 0, "unknown_engine"), []
        if self.leases is not None:
            found = _answer(self.leases.lookup(engine_id, now))
            if found.node or not self._gathering(now):
                return found, []
            self._asked.setdefault(engine_id, now)
            return None, []
        kept = self._cache.get(engine_id)
        fresh = kept is not None and now - kept.at < self._settings.cache
        if kept is not None and (fresh or (self._silent(now) and self._usable(kept, now))):
            self._meet(kept.answer.node, engine_id, now)
            return kept.answer, [] if fresh else [self._ask(engine_id, now)]
        self._asked.setdefault(engine_id, now)
        return None, [self._ask(engine_id, now)]

    def _ask(self, engine_id: str, now: float) -> Said:
        self._unanswered = now if self._unanswered is None else self._unanswered
        return Said(self._settings.server, Lookup(engine_id))

    def _silent(self, now: float) -> bool:
        return self._unanswered is not None and now - self._unanswered >= UNHEARD_PAUSE

    def _usable(self, kept: _Kept, now: float) -> bool:
        """While the registry is silent, its last word holds for as long as a lease would, and for as long as that node itself
        is heard. If it is wrong by now, the node says so at once (unknown engine, peer restarted)."""
        return now - max(kept.at, self._spoke[kept.answer.node]) <= self._settings.ttl

    def on_message(
        self, node: str, incarnation: int, message: RegistryMessage, now: float, *, key: str
    ) -> tuple[Answer | None, list[Said]]:
        """A registry message of an authenticated node; ``key`` is what its connection has proven.

        Raises ValueError for one that it had no right to send, or that cannot be true.
        """
        if isinstance(message, Located):
            return self._located(node, message, now), []
        if self.leases is None:
            raise ValueError(
                f"node {node!r} takes this node for the registry; it is kept by {self._settings.server or 'nobody'!r}"
            )
        if isinstance(message, Announce):
            if message.public_key != key:
                raise ValueError(
                    f"node {node!r} announces public key {message.public_key[:50]!r}, expected its own, {key}"
                )
            if not reachable(message.address):
                raise ValueError(
                    f"node {node!r} announces address {message.address[:100]!r}, expected one that peers can connect to"
                )
            self.leases.announce(node, incarnation, message, now)
            return None, []
        found = self.leases.lookup(message.engine_id, now)
        if not found.node and message.engine_id and self._gathering(now):
            return None, []  # it is asked again
        said = [Said(node, found)]
        asker = self.leases.introduce(node, now)
        if asker is not None and found.node not in ("", node, self._node):
            said.append(Said(found.node, asker))
        return None, said

    def _located(self, node: str, message: Located, now: float) -> Answer | None:
        if node != self._settings.server or self._settings.kind != "embedded":
            raise ValueError(
                f"node {node!r} answers a lookup, the registry is kept by {self._settings.server or 'nobody'!r}"
            )
        if message.node and not (good_key(message.public_key) and reachable(message.address)):
            raise ValueError(
                f"node {message.node[:40]!r} is said to be at {message.address[:100]!r} with public key"
                f" {message.public_key[:50]!r}, expected an address that peers can connect to and a key"
            )
        self._heard = now
        self._unanswered = None
        answer = _answer(message)
        if not message.engine_id:
            return answer if answer.node else None
        asked = self._asked.pop(message.engine_id, None) is not None
        if not asked and message.engine_id not in self._cache:
            return None
        self._cache.pop(message.engine_id, None)
        if answer.node:
            self._cache[message.engine_id] = _Kept(now, answer)
            self._spoke.setdefault(answer.node, float("-inf"))
            self._meet(answer.node, message.engine_id, now)
        return answer if asked else None

    def due(self, engines: tuple[str, ...], address: str, now: float) -> list[Said]:
        """What is to be said now: the lease in time or when the engines changed, and lookups again."""
        if self._settings.kind != "embedded":
            return []
        self._cache = {engine_id: kept for engine_id, kept in self._cache.items() if self._usable(kept, now)}
        nodes = {kept.answer.node for kept in self._cache.values()}
        self._spoke = {node: self._spoke.get(node, float("-inf")) for node in nodes}
        self._asked = {k: since for k, since in self._asked.items() if now - since <= self._settings.ttl}
        self._meeting = {k: v for k, v in self._meeting.items() if now - v[0] <= self._settings.ttl}
        announce = None
        if engines != self._last or now - self._announced >= self._pause():
            self._last, self._announced = engines, now
            announce = Announce(address, self._public_key, engines, self._settings.ttl)
        if self.leases is not None:
            self._began = now if self._began is None else self._began
            if announce is not None:
                self.leases.announce(self._node, self._incarnation, announce, now)
            return []
        again = dict.fromkeys([*self._asked, *(engine_id for _, engine_id in self._meeting.values())])
        said: list[RegistryMessage] = [Lookup(engine_id) for engine_id in again]
        if announce is not None:
            said += [announce, Lookup("")]  # its answer shows that the registry lives
        if said and self._unanswered is None:
            self._unanswered = now
        return [Said(self._settings.server, message) for message in said]

    def settled(self, now: float) -> list[Answer]:
        """What was asked and can be answered without another word: at the registry's node, once leases have come in; at
        another's, once the registry is silent and what it said before still holds.
        """
        if self.leases is not None:
            answers = [_answer(self.leases.lookup(engine_id, now)) for engine_id in self._asked]
            settled = [answer for answer in answers if answer.node or not self._gathering(now)]
        else:
            kept = [self._cache[engine_id] for engine_id in self._asked if engine_id in self._cache]
            settled = [k.answer for k in kept if self._silent(now) and self._usable(k, now)]
        for answer in settled:
            del self._asked[answer.engine_id]
        return settled

    def _pause(self) -> float:
        """Between two announcements: the lease is renewed in time, and soon while the registry does not answer."""
        third = self._settings.ttl / 3
        return third if self.leases is not None or self._heard >= self._announced else min(third, UNHEARD_PAUSE)

    def _gathering(self, now: float) -> bool:
        """Just started, the registry's node does not know yet who serves what: an unknown engine id has no answer yet."""
        return self._began is None or now - self._began < self._settings.ttl / 3 + UNHEARD_PAUSE

    def _meet(self, node: str, engine_id: str, now: float) -> None:
        """Until this node is heard, what led to it is looked up again: the introduction that goes with each answer, or the
        announcement that it needs, may have been lost."""
        if node not in (self._node, self._settings.server):
            self._meeting.setdefault(node, (now, engine_id))

    def heard(self, node: str, now: float) -> None:
        """This node has spoken to this one, so they have been introduced."""
        self._meeting.pop(node, None)
        if node in self._spoke:
            self._spoke[node] = now

    def forget(self, engine_id: str) -> None:
        """The answer turned out to be wrong: ask anew."""
        self._cache.pop(engine_id, None)

    def problem(self, now: float) -> str | None:
        """Why the registry cannot be used, or None."""
        if self._settings.kind != "embedded" or self.leases is not None:
            return None
        silence = now - self._heard
        if silence <= self._settings.ttl:
            return None
        what = "has not answered yet" if self._heard == float("-inf") else f"has not answered for {silence:.0f} s"
        return f"node {self._settings.server!r} {what}"


def _answer(located: Located) -> Answer:
    if not located.node:
        return Answer(located.engine_id, "", 0, "unknown_engine")
    return Answer(located.engine_id, located.node, located.incarnation, "", located.address, located.public_key)
