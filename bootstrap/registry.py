"""Who serves an engine id: the two back ends, as pure logic.

Owns: the static table, the leases that one sidecar keeps for the others, and what a sidecar asks and announces. Must
not: read a clock, or send; ``now`` is passed in, and what is to be said is returned.
"""

from __future__ import annotations

from typing import NamedTuple

from pdxfer.core.messages import Announce, Located, Lookup, RegistryMessage

from .settings import RegistrySettings

MAX_LEASES = 100_000


class Answer(NamedTuple):
    """Who serves ``engine_id``: ``node`` is empty when nobody does, and ``error`` then names the reason (core.reasons)."""

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


class Leases:
    """The registry that one sidecar keeps: a lease for each engine id, until it runs out."""

    def __init__(self) -> None:
        self._leases: dict[str, tuple[float, Located]] = {}

    def announce(self, node: str, incarnation: int, message: Announce, now: float) -> None:
        """Take a node's leases. An older incarnation cannot overwrite a newer one's; a live lease of another node stays."""
        for engine_id, (until, lease) in list(self._leases.items()):
            if lease.node == node and engine_id not in message.engines and lease.incarnation <= incarnation:
                del self._leases[engine_id]
            elif until <= now:
                del self._leases[engine_id]
        for engine_id in message.engines:
            held = self._leases.get(engine_id)
            if held is not None and held[1].node == node and held[1].incarnation > incarnation:
                continue
            if held is not None and held[1].node != node and held[0] > now:
                continue
            if held is None and len(self._leases) >= MAX_LEASES:
                continue
            lease = Located(engine_id, node, message.address, message.public_key, incarnation)
            self._leases[engine_id] = (now + message.ttl, lease)

    def lookup(self, engine_id: str, now: float) -> Located:
        held = self._leases.get(engine_id)
        if held is None or held[0] <= now:
            return Located(engine_id, "", "", "", 0)
        return held[1]

    def count(self, now: float) -> int:
        return sum(until > now for until, _ in self._leases.values())


class Registry:
    """What one sidecar knows and asks. ``resolve`` answers at once where it can; else the answer comes by ``on_located``."""

    def __init__(self, settings: RegistrySettings, node: str, incarnation: int, public_key: str) -> None:
        self._settings = settings
        self._node = node
        self._incarnation = incarnation
        self._public_key = public_key
        self.leases = Leases() if self.serves else None
        self._static = {engine: entry for entry in settings.nodes for engine in entry.engines}
        self._cache: dict[str, tuple[float, Answer]] = {}
        self._asked: dict[str, float] = {}  # engine id -> since when
        self._heard = float("-inf")
        self._announced = float("-inf")
        self._last: tuple[str, ...] | None = None

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
            return _answer(self.leases.lookup(engine_id, now)), []
        cached = self._cache.get(engine_id)
        if cached is not None and cached[0] > now:
            return cached[1], []
        self._asked.setdefault(engine_id, now)
        return None, [Said(self._settings.server, Lookup(engine_id))]

    def on_message(self, node: str, incarnation: int, message: RegistryMessage, now: float) -> tuple[Answer | None, list[Said]]:
        """A registry message of an authenticated node. Raises ValueError for one that it had no right to send."""
        if isinstance(message, Located):
            if node != self._settings.server or self._settings.kind != "embedded":
                raise ValueError(f"node {node!r} answers a lookup, the registry is kept by {self._settings.server!r}")
            self._heard = now
            answer = _answer(message)
            if message.engine_id not in self._asked:
                return None, []
            del self._asked[message.engine_id]
            if answer.node:
                self._cache[message.engine_id] = (now + self._settings.cache, answer)
            return answer, []
        if self.leases is None:
            raise ValueError(f"node {node!r} takes this node for the registry; it is kept by {self._settings.server or 'nobody'!r}")
        if isinstance(message, Announce):
            self.leases.announce(node, incarnation, message, now)
            return None, []
        return None, [Said(node, self.leases.lookup(message.engine_id, now))]

    def due(self, engines: tuple[str, ...], address: str, now: float) -> list[Said]:
        """What is to be said now: the lease in time or when the engines changed, and lookups again."""
        if self._settings.kind != "embedded":
            return []
        self._cache = {k: v for k, v in self._cache.items() if v[0] > now}
        said: list[Said] = []
        if engines != self._last or now - self._announced >= self._settings.ttl / 3:
            self._last, self._announced = engines, now
            announce = Announce(address, self._public_key, engines, self._settings.ttl)
            if self.leases is not None:
                self.leases.announce(self._node, self._incarnation, announce, now)
            else:
                said.append(Said(self._settings.server, announce))
                said.append(Said(self._settings.server, Lookup(self._node)))  # its answer shows that the registry lives
                self._asked.setdefault(self._node, now)
        for engine_id, since in list(self._asked.items()):
            if now - since > self._settings.ttl:
                del self._asked[engine_id]
            elif engine_id != self._node:
                said.append(Said(self._settings.server, Lookup(engine_id)))
        return said

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
