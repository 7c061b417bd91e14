"""How long a room may stay in each of its phases (R5).

Owns: the deadline of each phase of either side, and a room's one timer. Must not: move a room on; it can only end it.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from .ends import Ends
from .state import RecvRoom, Room, SendRoom, State

Deadline = tuple[float, str, str]  # when, reason (core.reasons.ENDS), detail

R = TypeVar("R", bound=Room)


class Patience(Generic[R]):
    """One side's rooms and their timers."""

    state: State
    ends: Ends

    def deadline(self, room: R) -> Deadline:
        raise AssertionError("each side has its own")

    def arm(self, room: R) -> None:
        """Set the room's timer, unless it rings earlier anyway (it then looks again)."""
        if not room.live:
            return
        when = self.deadline(room)[0]
        if when < room.timer_at:
            room.timer_at = when
            self.state.timers.set(("room", room.key, room.serial), when)

    def timeout(self, room: R) -> None:
        """The room's timer rang: its phase is over its deadline, or had progress meanwhile."""
        when, reason, detail = self.deadline(room)
        room.timer_at = float("inf")
        if when <= self.state.now:
            self.ends.end(room, reason, detail)
        else:
            self.arm(room)


def send_deadline(st: State, room: SendRoom) -> Deadline:
    """(when, reason, detail) of the phase that the room is in."""
    lim = st.limits
    latest = (room.opened + lim.room_timeout, "room_timeout", f"{lim.room_timeout:g} s in all")
    if not room.peer and room.local is None:
        phase = (room.opened + lim.open_timeout, "open_timeout", f"no want within {lim.open_timeout:g} s")
    elif room.jobs:
        phase = (room.progress + lim.transfer_deadline * 2, "transfer_deadline", f"{len(room.jobs)} jobs under way")
    elif not st.engine.up or (room.peer and st.peers[room.peer].engine is None):
        which = "this node's" if not st.engine.up else f"node {room.peer!r}'s"
        since = st.engine.since if not st.engine.up else st.peers[room.peer].engine_since
        phase = (
            max(room.progress, since) + lim.engine_timeout,
            "engine_unavailable",
            f"{which} engine is not ready",
        )
    elif room.local is None and len(room.plans) > room.granted:
        phase = (
            room.progress + lim.credit_timeout,
            "credit_timeout",
            f"{room.granted} of {len(room.plans)} segments granted",
        )
    elif room.finished is not None:
        phase = (
            room.progress + lim.ack_timeout,
            "ack_timeout",
            f"{room.acked} of {len(room.plans)} segments acknowledged",
        )
    elif any(p.sent and not p.acked for p in room.plans[room.acked : room.high]):
        phase = (
            room.progress + lim.ack_timeout,
            "ack_timeout",
            f"{room.acked} of {len(room.plans)} segments acknowledged",
        )
    else:
        phase = (room.progress + lim.push_timeout, "push_timeout", f"nothing pushed for {lim.push_timeout:g} s")
    return min(latest, phase)


def receive_deadline(st: State, room: RecvRoom) -> Deadline:
    """(when, reason, detail) of the phase that the room is in.

    While it receives, the sender's deadlines are the narrow ones: its node says how they end, or is lost.
    """
    lim = st.limits
    latest = (room.opened + lim.room_timeout, "room_timeout", f"{lim.room_timeout:g} s in all")
    if room.state == RecvRoom.RESOLVING:
        phase = (room.opened + lim.resolve_timeout, "registry_unavailable", f"no answer about {room.source!r}")
    elif room.state == RecvRoom.WANTING:
        phase = (room.opened + lim.want_timeout, "want_timeout", f"prefill worker {room.source!r} did not open it")
    elif not st.engine.up:
        since = max(room.progress, st.engine.since)
        phase = (since + lim.engine_timeout, "engine_unavailable", "this node's engine is not ready")
    else:
        return latest
    return min(latest, phase)
