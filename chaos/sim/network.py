"""The network between sidecars, and between engines: delay, loss, repetition, reordering, cuts.

Owns: each directed link's state and the frames on it, through the real codec. Must not: know rooms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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


@dataclass(frozen=True)
class Pinch:
    """What happens to the next frame of a node that holds a message of one type, and what else at that moment."""

    node: str
    kind: type
    how: str  # "hold", "echo" (now and once more later), "lose"
    seconds: float
    then: Callable[[str, str, messages.Message], None]  # called with source, target and the message
    to: str = ""  # only frames to this node


class Network:
    def __init__(self, world: World) -> None:
        self.world = world
        self.links: dict[tuple[str, str], Link] = {}
        self._neighbours: dict[str, dict[str, None]] = {}
        self._fuses: dict[
            str, tuple[int, float]
        ] = {}  # node -> frames until its bootstrap thread dies, and for how long
        self.pinches: list[Pinch] = []
        self._down: set[str] = set()  # nodes without a bootstrap thread

    def link(self, source: str, target: str) -> Link:
        key = (source, target)
        if key not in self.links:
            self.links[key] = Link()
            self._neighbours.setdefault(source, {})[target] = None
            self._neighbours.setdefault(target, {})[source] = None
        return self.links[key]

    def send(
        self, source: str, incarnation: int, target: str, to_incarnation: int, body: tuple[messages.Message, ...]
    ) -> None:
        world, wire = self.world, self.world.wire
        link = self.link(source, target)
        chances = [wire.random() for _ in range(5)]  # always as many, whatever the link is like
        frame = messages.encode(messages.Envelope(messages.PROTOCOL, source, incarnation, target, to_incarnation, body))
        if not self._thread_serves(source):
            world.note(source, f"LOST with the thread, to {target}: {body}")
            return
        if chances[0] < link.drop:
            world.note(source, f"LOST to {target}: {body}")
            return
        if chances[1] < link.corrupt:
            self._corrupt(frame, chances[2])
            return
        delay = link.delay + link.jitter * chances[2]
        pinch = self._pinched(source, target, body) if self.pinches else None
        if pinch is not None and pinch.how == "lose":
            return
        if pinch is not None:
            if pinch.how == "echo":
                self._carry(source, target, frame, delay, link.generation)
            delay += pinch.seconds
        if chances[3] < link.late:
            delay += 1.0 * chances[2]
        self._carry(source, target, frame, delay, link.generation)
        if chances[4] < link.repeat:
            self._carry(source, target, frame, delay + 0.4 * chances[2] ** 2, link.generation)

    def _pinched(self, source: str, target: str, body: tuple[messages.Message, ...]) -> Pinch | None:
        for pinch in self.pinches:
            if pinch.node not in (source, target) or (pinch.to and pinch.to != target):
                continue
            for message in body:
                if isinstance(message, pinch.kind):
                    self.pinches.remove(pinch)
                    self.world.note(source, f"PINCHED to {target}, {pinch.how} {pinch.seconds:.2f} s: {message}")
                    self.world.after(0.0, partial(pinch.then, source, target, message))
                    return pinch
        return None

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
            if link.cut or link.generation != generation or not self._thread_serves(target):
                return
            side = self.world.sidecars.get(target)
            if side is not None:
                e = messages.decode(frame)
                side.deliver(PeerSaid(e.source, e.incarnation, e.to_incarnation, e.body))

        self.world.after(delay, arrive)

    def reset(self, node: str) -> None:
        """Every connection of the node closes; what is on its way is lost."""
        mine = self.world.sidecars[node]
        for other in map(self.world.sidecars.__getitem__, self._neighbours.get(node, ())):
            self.link(node, other.name).generation += 1
            self.link(other.name, node).generation += 1
            self.world.after(0.001, lambda other=other: other.deliver(PeerCut(node)))  # type: ignore[misc]
            self.world.after(0.001, lambda other=other: mine.deliver(PeerCut(other.name)))  # type: ignore[misc]

    # the bootstrap thread ------------------------------------------------------------------------------------------

    def kill_thread(self, node: str, frames: int, seconds: float) -> None:
        """The node's bootstrap thread dies between two frames, ``frames`` from now; the supervisor starts it again."""
        if node in self._fuses or node in self._down:
            return
        self._fuses[node] = (frames, seconds)
        self.world.after(0.1, lambda: self._die(node) if node in self._fuses else None)  # a quiet thread dies, too

    def _thread_serves(self, node: str) -> bool:
        """Is the thread there for one more frame?"""
        if node in self._fuses:
            frames, seconds = self._fuses[node]
            if frames:
                self._fuses[node] = (frames - 1, seconds)
            else:
                self._die(node)
        return node not in self._down

    def _die(self, node: str) -> None:
        _, seconds = self._fuses.pop(node)
        self.world.note(node, f"THREAD KILLED for {seconds:.2f} s")
        self._down.add(node)
        self.reset(node)
        self.world.after(seconds, lambda: self._down.discard(node))

    def data_open(self, source: str, target: str) -> bool:
        """Do bytes of a WRITE flow from one engine to the other?"""
        return not self.link(source, target).cut

    def calm(self) -> None:
        """All links are well again."""
        self.pinches.clear()
        for link in self.links.values():
            link.drop = link.repeat = link.late = link.corrupt = 0.0
            link.cut = False
