"""The network between sidecars, and between engines: delay, loss, repetition, reordering, cuts.

Owns: each directed link's state and the frames on it, through the real codec. Must not: know rooms.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdxfer.core import messages
from pdxfer.core.events import PeerCut, PeerSaid
from pdxfer.core.reasons import Refused

from .world import World


@dataclass
class Link:
    """One direction between two nodes."""

    delay: float = 0.002
    jitter: float = 0.002
    drop: float = 0.0
    repeat: float = 0.0
    late: float = 0.0  # chance that a frame takes up to a second longer
    corrupt: float = 0.0
    cut: bool = False
    generation: int = 0  # frames of an older generation are lost: the connection was reset


class Network:
    def __init__(self, world: World) -> None:
        self.world = world
        self._links: dict[tuple[str, str], Link] = {}

    def link(self, source: str, target: str) -> Link:
        key = (source, target)
        if key not in self._links:
            self._links[key] = Link()
        return self._links[key]

    def send(self, source: str, incarnation: int, target: str, to_incarnation: int, body: tuple[messages.Message, ...]) -> None:
        world, wire = self.world, self.world.wire
        link = self.link(source, target)
        chances = [wire.random() for _ in range(5)]  # always as many, whatever the link is like
        frame = messages.encode(messages.Envelope(messages.PROTOCOL, source, incarnation, target, to_incarnation, body))
        if chances[0] < link.drop:
            world.note(source, f"LOST to {target}: {body}")
            return
        if chances[1] < link.corrupt:
            self._corrupt(frame, chances[2])
            return
        delay = link.delay + link.jitter * chances[2]
        if chances[3] < link.late:
            delay += 1.0 * chances[2]
        self._carry(source, target, frame, delay, link.generation)
        if chances[4] < link.repeat:
            self._carry(source, target, frame, delay + 0.4 * chances[2] ** 2, link.generation)

    def _corrupt(self, frame: bytes, chance: float) -> None:
        """A frame that was changed on its way must be refused or still decode; it is lost either way (CURVE sees it)."""
        where = int(chance * len(frame))
        torn = frame[:where] + bytes([frame[where] ^ 0x41]) + frame[where + 1 :]
        try:
            messages.decode(torn)
        except Refused:
            return

    def _carry(self, source: str, target: str, frame: bytes, delay: float, generation: int) -> None:
        def arrive() -> None:
            link = self.link(source, target)
            if link.cut or link.generation != generation:
                return
            side = self.world.sidecars.get(target)
            if side is not None:
                e = messages.decode(frame)
                side.deliver(PeerSaid(e.source, e.incarnation, e.to_incarnation, e.body))

        self.world.after(delay, arrive)

    def reset(self, node: str) -> None:
        """Every connection of the node closes; what is on its way is lost."""
        for (source, target), link in self._links.items():
            if node in (source, target):
                link.generation += 1
        for other in self.world.sidecars.values():
            if other.name != node:
                self.world.after(0.001, lambda other=other: other.deliver(PeerCut(node)))  # type: ignore[misc]
                mine = self.world.sidecars[node]
                self.world.after(0.001, lambda mine=mine, other=other: mine.deliver(PeerCut(other.name)))  # type: ignore[misc]

    def data_open(self, source: str, target: str) -> bool:
        """Do bytes of a WRITE flow from one engine to the other?"""
        return not self.link(source, target).cut

    def calm(self) -> None:
        """All links are well again."""
        for link in self._links.values():
            link.drop = link.repeat = link.late = link.corrupt = 0.0
            link.cut = False


