"""What the client raises.

Owns: the exceptions. Must not: know sockets or rooms' states.
"""

from __future__ import annotations

from pdxfer.core.reasons import REFUSALS


class PdxferError(Exception):
    """The base of everything that the client raises by name."""


class PdxferRefused(PdxferError):
    """A request was refused, here or by the sidecar; nothing was changed by it. ``code`` is a name in
    reasons.REFUSALS."""

    def __init__(self, code: str, detail: str, room: str = "") -> None:
        advice = REFUSALS[code].advice if code in REFUSALS else "run the same pdxfer release on both sides"
        where = f"room {room}: " if room else ""
        super().__init__(f"{where}{code}: {detail} ({advice})")
        self.code = code
        self.detail = detail
        self.room = room


class AttachRefused(PdxferRefused):
    """The sidecar is there and did not take this worker."""


class SidecarUnavailable(PdxferError):
    """No sidecar serves the socket now."""

    def __init__(self, path: str, found: str) -> None:
        super().__init__(
            f"no sidecar at {path}: {found}; start it with `pdxfer serve`, or pass the socket that its configuration"
            " names (worker.socket)"
        )
        self.path = path
        self.found = found


class ConnectionLost(PdxferError):
    """Inside the client: this connection is over. It becomes a Disconnected event."""
