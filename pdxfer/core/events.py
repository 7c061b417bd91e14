"""What the core is told and what it asks for: the only two doors of ``Node``.

Owns: event and action types. Must not: do anything.
"""

from __future__ import annotations

import msgspec

from . import jobs, messages, worker


class _Event(msgspec.Struct, frozen=True):
    pass


# events ------------------------------------------------------------------------------------------------------------


class WorkerAttached(_Event, frozen=True):
    """A worker passed the attach frame; ``id`` is new for every connection."""

    id: int
    frame: worker.Attach


class WorkerSaid(_Event, frozen=True):
    id: int
    frame: worker.WorkerRequest | worker.Ping


class WorkerGone(_Event, frozen=True):
    """Its connection closed, for whatever cause."""

    id: int
    detail: str


class PeerSaid(_Event, frozen=True):
    """Messages of one authenticated envelope."""

    node: str
    incarnation: int
    to_incarnation: int
    body: tuple[messages.Message, ...]


class PeerCut(_Event, frozen=True):
    """The connection to this peer closed: it is dead unless it is heard again soon."""

    node: str


class Resolved(_Event, frozen=True):
    """The registry's answer for an engine id; ``node`` is empty when there is none and ``error`` says why."""

    engine_id: str
    node: str
    incarnation: int  # 0: not known
    error: str  # a name in reasons.ENDS when node is empty


class EngineSaid(_Event, frozen=True):
    report: jobs.EngineReport


class EngineGone(_Event, frozen=True):
    """The engine is proven dead (waitpid has returned)."""

    detail: str


class OperatorAbort(_Event, frozen=True):
    room: str
    epoch: int
    detail: str


class RoomBroken(_Event, frozen=True):
    """The core raised while it handled this room (``State.handling``): a defect. The room ends, the others go on."""

    room: str
    epoch: int
    detail: str


class Drain(_Event, frozen=True):
    """Take no new rooms."""


class Shutdown(_Event, frozen=True):
    """End every room now, by name."""


class Tick(_Event, frozen=True):
    """Time has passed."""


Event = (
    WorkerAttached | WorkerSaid | WorkerGone | PeerSaid | PeerCut | Resolved | EngineSaid | EngineGone
    | OperatorAbort
    | RoomBroken | Drain | Shutdown | Tick
)  # fmt: skip


# actions -----------------------------------------------------------------------------------------------------------


class _Action(msgspec.Struct, frozen=True):
    pass


class ToWorker(_Action, frozen=True):
    id: int
    frame: worker.SidecarFrame


class DropWorker(_Action, frozen=True):
    """Close this worker's connection, after what was sent to it."""

    id: int


class ToPeer(_Action, frozen=True):
    node: str
    to_incarnation: int
    message: messages.Message


class ForgetPeer(_Action, frozen=True):
    """No session with this peer is needed any more: its connection may be closed."""

    node: str


class ToEngine(_Action, frozen=True):
    job: jobs.EngineJob


class KillEngine(_Action, frozen=True):
    """Kill the engine, as the only fence that there is against its writes, or against a peer's into it."""

    detail: str


class Resolve(_Action, frozen=True):
    """Ask the registry; answered by Resolved."""

    engine_id: str


class RoomClosed(_Action, frozen=True):
    """For logs and metrics: a room ended. Exactly one for each side of each room."""

    room: str
    epoch: int
    sending: bool
    reason: str
    detail: str
    bytes: int
    age: float
    peer: str


class Refuse(_Action, frozen=True):
    """For logs and metrics: a frame or message was refused and dropped."""

    origin: str  # "peer", "worker" or "engine"
    who: str
    code: str
    detail: str


Action = (
    ToWorker | DropWorker | ToPeer | ForgetPeer | ToEngine | KillEngine | Resolve | RoomClosed | Refuse
)  # fmt: skip
