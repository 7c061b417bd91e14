"""What waits to be said to each peer: one bounded queue each, so that a dead or slow peer delays nobody.

Owns: encoded frames on their way to a socket, and the count of those that were given up. Must not: know sockets. It
outlives the bootstrap thread, so that a restart loses none of them. Used from the main loop and from that thread.

A frame that waits too long is given up, the oldest first: all that it says is said again by the core while it matters.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import Final

FRAME_LIFE: Final = 5.0  # seconds; a multiple of limits.retry_most, so younger frames say the same
MAX_BYTES: Final = 64 << 20  # that wait for one peer


class Outbox:
    """The frames for one peer."""

    __slots__ = ("bytes", "frames")

    def __init__(self) -> None:
        self.frames: deque[tuple[float, bytes]] = deque()  # (since when, frame)
        self.bytes = 0


class Outboxes:
    def __init__(self, most: int) -> None:
        self._most = most  # frames that wait for one peer
        self._lock = threading.Lock()
        self._boxes: dict[str, Outbox] = {}
        self._fresh: set[str] = set()  # nodes with frames that were put since the last look
        self.dropped = 0

    def put(self, node: str, frame: bytes, now: float) -> None:
        """From any thread; never blocks."""
        with self._lock:
            box = self._boxes.get(node)
            if box is None:
                box = self._boxes[node] = Outbox()
            while box.frames and (len(box.frames) >= self._most or box.bytes + len(frame) > MAX_BYTES):
                box.bytes -= len(box.frames.popleft()[1])
                self.dropped += 1
            box.frames.append((now, frame))
            box.bytes += len(frame)
            self._fresh.add(node)

    def touch(self, nodes: Iterable[str]) -> None:
        """Something changed for these peers: look at their frames again."""
        with self._lock:
            self._fresh.update(node for node in nodes if node in self._boxes)

    def fresh(self) -> set[str]:
        """The nodes to look at; each is named once."""
        with self._lock:
            fresh, self._fresh = self._fresh, set()
            return fresh

    def waiting(self) -> list[str]:
        """All nodes with frames that wait."""
        with self._lock:
            return list(self._boxes)

    def take(self, node: str, now: float) -> tuple[float, bytes] | None:
        """The next frame with its time; stale ones are given up on the way."""
        with self._lock:
            box = self._boxes.get(node)
            while box is not None and box.frames:
                since, frame = box.frames.popleft()
                box.bytes -= len(frame)
                if not box.frames:
                    del self._boxes[node]
                if now - since <= FRAME_LIFE:
                    return since, frame
                self.dropped += 1
            return None

    def put_back(self, node: str, taken: tuple[float, bytes]) -> None:
        """The socket did not take it."""
        with self._lock:
            box = self._boxes.setdefault(node, Outbox())
            box.frames.appendleft(taken)
            box.bytes += len(taken[1])

    def expire(self, now: float) -> None:
        """Give up what has waited too long, for all peers."""
        with self._lock:
            for node, box in list(self._boxes.items()):
                while box.frames and now - box.frames[0][0] > FRAME_LIFE:
                    box.bytes -= len(box.frames.popleft()[1])
                    self.dropped += 1
                if not box.frames:
                    del self._boxes[node]

    def clear(self, node: str) -> None:
        """Give up all that waits for a peer."""
        with self._lock:
            box = self._boxes.pop(node, None)
            if box is not None:
                self.dropped += len(box.frames)
