"""Messages on their way from the bootstrap thread to the main loop: how many, and whose.

Owns: the counts and the bounds. Must not: hold them. Each life of the thread has its own, so nothing that a dying
one did not count to its end is missing later. Each dictionary has one writer and so needs no lock: ``handed`` the thread,
``taken`` the main loop.

A peer may fill no more than its share of the inbox, so that one that floods leaves room for the others.
"""

from __future__ import annotations

from typing import Final, NamedTuple

INBOX_BYTES: Final = 256 << 20  # of frames that wait for the main loop
SHARE: Final = 4  # a single peer may have a quarter of it


class Load(NamedTuple):
    messages: int = 0
    size: int = 0

    def plus(self, other: Load) -> Load:
        return Load(self.messages + other.messages, self.size + other.size)


NONE: Final = Load()
ALL: Final = ""  # beside the peers' keys


class Flow:
    def __init__(self) -> None:
        self.reporting = False  # refusals are on their way, too
        self._handed: dict[str, Load] = {}
        self._taken: dict[str, Load] = {}

    def waiting(self, key: str = ALL) -> Load:
        """What has been handed over by the peer with this key, or by all, and not been taken."""
        handed, taken = self._handed.get(key, NONE), self._taken.get(key, NONE)
        return Load(handed.messages - taken.messages, handed.size - taken.size)

    def full(self, key: str, length: int, inbox: int) -> str:
        """Why there is no room for a frame of this length, or ""."""
        for whose, of, share in (("of all peers", ALL, 1), ("of this peer", key, SHARE)):
            waits = self.waiting(of)
            most, most_bytes = max(inbox // share, 1), INBOX_BYTES // share
            if waits.messages >= most or waits.size + length > most_bytes:
                return (
                    f"{waits.messages} messages, {waits.size} bytes {whose} wait for the main loop,"
                    f" expected at most {most} and {most_bytes}"
                )
        return ""

    def hand(self, key: str, load: Load) -> None:
        """In the thread."""
        for of in (ALL, key):
            self._handed[of] = self._handed.get(of, NONE).plus(load)

    def take(self, loads: dict[str, Load]) -> None:
        """In the main loop."""
        for key, load in loads.items():
            for of in (ALL, key):
                self._taken[of] = self._taken.get(of, NONE).plus(load)
