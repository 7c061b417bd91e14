"""How long the engine's loop may sleep before it looks again.

Owns: that one decision. Must not: read a clock or sleep.

NIXL gives no descriptor to wait for, so what arrives is found by looking. Looking without pause burns a core that a copy
needs; sleeping long makes a small room slow. So: look at once after something happened, then ever more rarely.
"""

from __future__ import annotations

from typing import Final

IDLE: Final = 0.05  # nothing is expected: only peers' wire-up and the heartbeat need us
_SPINS: Final = 4  # looks without a pause after the last progress
# seconds since the last progress: pause
# (a look costs about 20 µs; what a WRITE brings meanwhile waits in the socket's buffer, so 200 µs do not stall a stream)
_LADDER: Final = ((0.0005, 20e-6), (0.002, 50e-6), (0.02, 200e-6), (0.2, 500e-6), (1.0, 2e-3), (float("inf"), 5e-3))


class Pace:
    def __init__(self) -> None:
        self._last = float("-inf")
        self._spins = 0

    def stir(self, now: float) -> None:
        """Something happened, or is about to."""
        self._last = now
        self._spins = _SPINS

    def pause(self, now: float, *, waiting: bool) -> float:
        """Seconds to sleep at most; ``waiting``: a transfer of ours or a peer's may be under way."""
        if not waiting:
            return IDLE
        if self._spins:
            self._spins -= 1
            return 0.0
        quiet = now - self._last
        return next(pause for limit, pause in _LADDER if quiet <= limit)
