"""What a client reports to its engine.

Owns: the event types. Must not: know how they come about.

Every room that was not rejected at its open ends with exactly one Ended, every store and load of the mirror likewise with
one MirrorEnd.
"""

from __future__ import annotations

import msgspec

Aux = bytes  # for the struct below, whose field `bytes` is a number


class RoomEnd(msgspec.Struct, frozen=True):
    """How a room ended on this side. Its pages are the worker's again, unless ``pages_safe`` is False.

    ``pages_safe`` is False when a copy into the pages of a receive may still go on: the sidecar was lost and its
    engine, frozen rather than dead, has the pools mapped (leave the pages alone until the client is Reconnected,
    which it will not be before), or the client was closed with the room open (until ``pool.held()`` is False).

    ``state`` is DONE, ABORTED or FAILED; ``reason`` a name in reasons.ENDS (`pdxfer explain REASON`); ``retriable``
    says whether the same request may help under the next epoch. ``bytes`` were moved in ``age`` seconds. ``aux`` is
    what the sender gave to finish(), for a receive that is done.
    """

    room: str
    epoch: int
    sending: bool
    state: str
    reason: str
    retriable: bool
    detail: str
    bytes: int = 0
    age: float = 0.0
    aux: Aux = b""
    pages_safe: bool = True

    @property
    def done(self) -> bool:
        return self.state == "DONE"


class Matched(msgspec.Struct, frozen=True):
    """A send has found its receiver, or a receive its sender."""

    room: str
    epoch: int
    sending: bool


class Released(msgspec.Struct, frozen=True):
    """The pages of push ``push`` were read: the worker may use them again."""

    room: str
    epoch: int
    push: int


class Ended(msgspec.Struct, frozen=True):
    end: RoomEnd

    @property
    def room(self) -> str:
        return self.end.room

    @property
    def epoch(self) -> int:
        return self.end.epoch


class MirrorHeld(msgspec.Struct, frozen=True):
    """Answer to lookup ``number``: the mirror holds the first ``blocks`` blocks of ``block_tokens`` tokens of the prompt.

    ``lease`` is what load() and unpin() are called with; 0 when nothing is held or it was not asked to hold.
    """

    number: int
    lease: int
    blocks: int
    block_tokens: int

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_tokens


class MirrorEvicted(msgspec.Struct, frozen=True):
    """Answer to evict ``number``: so many blocks were forgotten."""

    number: int
    blocks: int


class MirrorEnd(msgspec.Struct, frozen=True):
    """How store or load ``number`` ended. Its pages are the worker's again, unless ``pages_safe`` is False (see RoomEnd).

    ``blocks`` of the ``asked`` ones, from the first on, are stored, or are in the pages; ``asked`` leaves out those that a store
    found there already. Pages of a load behind them may hold anything. ``bytes`` are theirs, ``age`` is in seconds.
    """

    number: int
    loading: bool
    state: str
    reason: str
    retriable: bool
    detail: str
    blocks: int = 0
    asked: int = 0
    bytes: int = 0
    age: float = 0.0
    pages_safe: bool = True

    @property
    def done(self) -> bool:
        return self.state == "DONE"


class Rejected(msgspec.Struct, frozen=True):
    """The sidecar refused a request and nothing was changed by it.

    ``request`` is open, push, finish, receive, abort, or of the mirror (``room`` is empty then) lookup, store, load, cancel, unpin, evict; ``number`` what the call was numbered (for a push: what push()
    returned). After a refused open or receive the room does not exist: no Ended follows.
    """

    room: str
    epoch: int
    sending: bool
    request: str
    number: int
    code: str
    detail: str


class Disconnected(msgspec.Struct, frozen=True):
    """The sidecar is gone. Every open room ends with sidecar_lost; the client goes on trying to attach again."""

    detail: str


class Reconnected(msgspec.Struct, frozen=True):
    """Attached again."""

    node: str
    incarnation: int


Event = (
    Matched | Released | Ended | MirrorHeld | MirrorEvicted | MirrorEnd | Rejected | Disconnected | Reconnected
)  # fmt: skip
