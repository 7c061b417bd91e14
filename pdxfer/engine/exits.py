"""How an engine child can end: its exit statuses, in words.

Owns: the statuses and their meaning. Must not: exit. Death by SIGSEGV or SIGABRT is an ordinary end of an engine (native
code lives there): the supervisor respawns it with backoff.
"""

from __future__ import annotations

import signal
from typing import Final

ORDERLY: Final = 0
NO_NIXL: Final = 69
DEFECT: Final = 70
NO_MEMORY: Final = 71
NIXL_FAILED: Final = 72

_WORDS: Final = {
    ORDERLY: "ended in order",
    NO_NIXL: "NIXL is not installed",
    DEFECT: "a defect",
    NO_MEMORY: "the staging slots could not be had",
    NIXL_FAILED: "NIXL did not start",
}


class Fault(Exception):
    """The engine cannot go on, for a cause that has a name: no traceback, one sentence, one exit status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def permanent(status: int | None, *, ever_ready: bool) -> bool:
    """Whether starting the engine again, unchanged, can only end the same way.

    An engine that has been ready before may have met a shortage that passes; one that never was has been given what cannot work.
    """
    return status == NO_NIXL or (status in (NO_MEMORY, NIXL_FAILED) and not ever_ready)


def words(status: int) -> str:
    """An exit status as subprocess gives it (negative for a signal), for people."""
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        return f"killed by {name}"
    return f"exit status {status} ({_WORDS.get(status, 'unknown')})"
