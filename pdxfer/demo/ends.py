"""How a request of the demo's workers and gateway can end, beyond the ends of a room.

Owns: Failure, its reasons, and its shape in JSON. Must not: know HTTP servers, engines or pages.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from pdxfer.client import PdxferRefused, RoomEnd
from pdxfer.core.reasons import ENDS

DONE: Final = "done"
ABORTED: Final = "aborted"


class Own(NamedTuple):
    """An end that no room knows, since it is the engine's or the gateway's."""

    state: str
    retriable: bool
    status: int  # of an HTTP answer that has not begun


OWN: Final = {
    "bad_request": Own("FAILED", False, 400),
    "unsupported": Own("FAILED", False, 400),
    "model_not_found": Own("FAILED", False, 404),
    "context_length_exceeded": Own("FAILED", False, 400),
    "no_pages": Own("FAILED", True, 503),  # waited too long for pages
    "cache_mismatch": Own("FAILED", False, 502),  # the cache that arrived is not the one that was sent
    "engine_error": Own("FAILED", True, 502),  # the model raised
    "no_worker": Own("FAILED", True, 503),  # the gateway knows no healthy worker
}
_REFUSALS_TO_RETRY: Final = {"draining", "too_many_rooms", "overloaded"}


class Failure(Exception):
    """A request's end that is not DONE. ``reason`` is a name in OWN, in reasons.ENDS or in reasons.REFUSALS."""

    def __init__(self, reason: str, detail: str, *, state: str = "", retriable: bool | None = None) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        if reason in OWN:
            known_state, known_retriable, self.status = OWN[reason]
        elif reason in ENDS:
            known_state, known_retriable = ENDS[reason].state, ENDS[reason].retriable
            self.status = 503 if known_retriable else 502
        else:
            known_state, known_retriable = "FAILED", reason in _REFUSALS_TO_RETRY
            self.status = 503 if known_retriable else 502
        self.state = state or known_state
        self.retriable = known_retriable if retriable is None else retriable

    @classmethod
    def of_room(cls, end: RoomEnd) -> Failure:
        return cls(end.reason, end.detail, state=end.state, retriable=end.retriable)

    @classmethod
    def of_refusal(cls, error: PdxferRefused) -> Failure:
        return cls(error.code, error.detail)

    @classmethod
    def of_json(cls, found: Any) -> Failure:
        """The other direction of ``json``. What is not its work becomes an engine_error, not an exception."""
        if not isinstance(found, dict) or not isinstance(found.get("reason"), str):
            return cls("engine_error", f"a worker answered {str(found)[:200]!r}, expected an error with a reason")
        return cls(
            found["reason"],
            str(found.get("detail", "")),
            state=str(found.get("state", "")),
            retriable=found.get("retriable") if isinstance(found.get("retriable"), bool) else None,
        )

    def json(self) -> dict[str, Any]:
        return {"reason": self.reason, "state": self.state, "retriable": self.retriable, "detail": self.detail}
