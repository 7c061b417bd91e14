"""What nodes say to each other: every control message, its envelope, and their strict codec.

Owns: the wire format between sidecars (msgpack by msgspec, tagged, versioned, size-limited). Must not: know sockets or
rooms' states. `docs/protocol.md` describes each message; a test holds the two together.

Every message is idempotent: receiving it twice, late, or after a restart changes nothing that the first one did not.
"""

from __future__ import annotations

from typing import Final

import msgspec

from .geometry import MAX_PIECES, Piece, PoolSpec
from .reasons import Refused

PROTOCOL: Final = 1
MAX_FRAME: Final = 4 << 20  # bytes of one envelope
MAX_NAME: Final = 128  # characters of a room id, an engine id, a node's name
MAX_AUX: Final = 64 << 10  # bytes that travel with a room beside its pages
MAX_PER_FRAME: Final = 256  # messages in one envelope
MAX_DETAIL: Final = 1000  # characters of an explanation
MAX_POOL_TEXT: Final = 16 << 10  # characters of all pools' names and types in a Want
MAX_METADATA: Final = 1 << 20  # bytes of NIXL's metadata
MAX_SLOTS: Final = 1 << 16
MAX_SLOT: Final = 1 << 30  # bytes


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    pass


class EngineInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A transfer engine as its peers must know it.

    ``metadata`` is NIXL's own blob; ``digest`` covers it together with the agent's name (see engine.agent.metadata_digest),
    so that no other engine's or a mutated blob can pass for it. Receive slot i lies at ``slot_base + i * slot_bytes``.
    """

    incarnation: int
    agent: str
    nixl: str  # NIXL's version: both sides must run the same
    metadata: bytes
    digest: bytes
    slot_base: int
    slot_bytes: int
    slots: int


class Hello(_Message, frozen=True):
    """Who I am. Repeated until a Heartbeat shows that its revision was seen; sent again whenever it changes."""

    incarnation: int
    revision: int
    address: str  # where my bootstrap socket can be reached
    release: str  # pdxfer's version, for people
    engine: EngineInfo | None  # None while there is no engine


class Heartbeat(_Message, frozen=True):
    """I live. ``seen`` is the revision of your Hello that I hold, 0 for none."""

    revision: int
    seen: int


class Goodbye(_Message, frozen=True):
    """An orderly shutdown: my rooms have ended, expect no more from this incarnation."""


class Want(_Message, frozen=True, omit_defaults=True):
    """Receiver to sender: the pages of this room, please. Repeated until Accept or Ended."""

    room: str
    epoch: int
    source: str  # the sending worker's engine id
    target: str  # the receiving worker's engine id
    specs: tuple[PoolSpec, ...]
    pages: tuple[int, ...]  # logical pages per pool
    held: tuple[int, ...] = ()  # per pool, how many of them, from the first on, the receiver has already; empty: none


class Accept(_Message, frozen=True):
    """Sender to receiver: the room is matched."""

    room: str
    epoch: int


class Need(_Message, frozen=True):
    """Sender to receiver: I have segments 0 … ``upto``-1 to send; grant a slot for each. Repeated until granted."""

    room: str
    epoch: int
    upto: int


class Grant(_Message, frozen=True):
    """Receiver to sender: write segment ``segment`` into this slot. ``engine`` is the receiver's engine incarnation."""

    room: str
    epoch: int
    segment: int
    slot: int
    generation: int
    engine: int


class Segment(_Message, frozen=True):
    """Sender to receiver, as the WRITE's notification and, until acknowledged, as a message: this segment has landed."""

    room: str
    epoch: int
    segment: int
    slot: int
    generation: int
    engine: int
    bytes: int
    digest: int  # xxh3-64 of the slot's bytes
    pieces: tuple[Piece, ...]


class Ack(_Message, frozen=True):
    """Receiver to sender: all segments below ``below`` and those in ``also`` are scattered and verified."""

    room: str
    epoch: int
    below: int
    also: tuple[int, ...]


class Finish(_Message, frozen=True):
    """Sender to receiver: the room has ``segments`` segments and this aux. Repeated until Done or Ended."""

    room: str
    epoch: int
    segments: int
    aux: bytes


class Done(_Message, frozen=True):
    """Receiver to sender: everything is scattered and verified. The answer to every Finish of a room that is done."""

    room: str
    epoch: int


class Ended(_Message, frozen=True):
    """Either way: the room has ended here without success. Repeated until EndedAck.

    ``by_sender`` says which of the room's two sides ended it.
    """

    room: str
    epoch: int
    by_sender: bool
    reason: str
    detail: str


class EndedAck(_Message, frozen=True):
    """The answer to every Ended."""

    room: str
    epoch: int
    by_sender: bool


class SlotQuery(_Message, frozen=True):
    """Receiver to sender: will you still write under these grants? Repeated while the slots are quarantined."""

    engine: int
    slots: tuple[tuple[str, int, int, int, int], ...]  # (room, epoch, segment, slot, generation)


class SlotFate(_Message, frozen=True):
    """The answer: these (slot, generation) will never be written again."""

    engine: int
    free: tuple[tuple[int, int], ...]


class Announce(_Message, frozen=True):
    """To the registry's node: I serve these engine ids. A lease: repeated within ``ttl`` seconds."""

    address: str
    public_key: str
    engines: tuple[str, ...]
    ttl: float


class Lookup(_Message, frozen=True):
    """To the registry's node: who serves this engine id?"""

    engine_id: str


class Located(_Message, frozen=True):
    """The answer; ``node`` is empty when nobody does.

    With an empty ``engine_id`` it is an introduction: the registry's node says it, with each answer, to the node that the
    answer names, so that it knows the address and the key of the node that has asked.
    """

    engine_id: str
    node: str
    address: str
    public_key: str
    incarnation: int


SessionMessage = Hello | Heartbeat | Goodbye
RoomMessage = Want | Accept | Need | Grant | Segment | Ack | Finish | Done | Ended | EndedAck
SlotMessage = SlotQuery | SlotFate
RegistryMessage = Announce | Lookup | Located
Message = (
    Hello
    | Heartbeat
    | Goodbye
    | Want
    | Accept
    | Need
    | Grant
    | Segment
    | Ack
    | Finish
    | Done
    | Ended
    | EndedAck
    | SlotQuery
    | SlotFate
    | Announce
    | Lookup
    | Located
)


class Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One frame on the wire. ``to_incarnation`` is 0 while the sender does not know it."""

    version: int
    source: str
    incarnation: int
    target: str
    to_incarnation: int
    body: tuple[Message, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope, strict=True)
_segment_decoder = msgspec.msgpack.Decoder(Segment, strict=True)


def encode(envelope: Envelope) -> bytes:
    return _encoder.encode(envelope)


def decode(frame: bytes) -> Envelope:
    """Decode one frame. Raises Refused: frame_too_large, wrong_version or bad_frame; never anything else."""
    if len(frame) > MAX_FRAME:
        raise Refused("frame_too_large", f"{len(frame)} bytes, expected at most {MAX_FRAME}")
    try:
        envelope = _decoder.decode(frame)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError) as error:
        version = _version_of(frame)
        if version is not None and version != PROTOCOL:
            raise Refused("wrong_version", f"protocol version {version}, expected {PROTOCOL}") from None
        raise Refused("bad_frame", str(error)[:200]) from None
    if envelope.version != PROTOCOL:
        raise Refused("wrong_version", f"protocol version {envelope.version}, expected {PROTOCOL}")
    if len(envelope.body) > MAX_PER_FRAME:
        raise Refused("bad_frame", f"{len(envelope.body)} messages in a frame, expected at most {MAX_PER_FRAME}")
    for message in envelope.body:
        check(message)
    return envelope


def _version_of(frame: bytes) -> int | None:
    """The version of a frame whose rest does not decode, so that a frame from the future is named as such."""
    try:
        loose = msgspec.msgpack.decode(frame)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError):
        return None
    if isinstance(loose, list) and loose and type(loose[0]) is int:
        return loose[0]
    return None


def encode_segment(segment: Segment) -> bytes:
    """A WRITE's notification."""
    return _encoder.encode(segment)


def decode_segment(raw: bytes) -> Segment:
    """Raises Refused('bad_frame')."""
    try:
        segment = _segment_decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError) as error:
        raise Refused("bad_frame", str(error)[:200]) from None
    check(segment)
    return segment


def good_name(name: str) -> bool:
    return 0 < len(name) <= MAX_NAME and name.isprintable()


def check(message: Message) -> None:
    """Limits that types do not express. Raises Refused('bad_frame')."""
    if isinstance(message, RoomMessage):
        if not good_name(message.room) or not 0 <= message.epoch < 2**31:
            raise Refused(
                "bad_frame", f"{type(message).__name__}: room id {message.room[:40]!r}, epoch {message.epoch}"
            )
    if isinstance(message, Want):
        if not good_name(message.source) or not good_name(message.target):
            raise Refused("bad_frame", "Want: bad engine id")
        if len(message.specs) != len(message.pages) or len(message.specs) > 256:
            raise Refused("bad_frame", f"Want: {len(message.specs)} pools, {len(message.pages)} page counts")
        if any(not 0 <= n < 2**31 for n in message.pages):
            raise Refused("bad_frame", "Want: page count out of range")
        if sum(len(s.name) + len(s.dtype) + len(s.row) for s in message.specs) > MAX_POOL_TEXT:
            raise Refused("bad_frame", "Want: the pools' names and types are too long")
    elif isinstance(message, Ended):
        if len(message.detail) > MAX_DETAIL or len(message.reason) > MAX_NAME:
            raise Refused(
                "bad_frame", f"Ended: {len(message.detail)} characters of detail, expected at most {MAX_DETAIL}"
            )
    elif isinstance(message, Hello):
        _check_hello(message)
    elif isinstance(message, Finish):
        if len(message.aux) > MAX_AUX or not 0 <= message.segments < 2**31:
            raise Refused("bad_frame", f"Finish: {message.segments} segments, {len(message.aux)} bytes of aux")
    elif isinstance(message, Segment):
        if len(message.pieces) > MAX_PIECES or not 0 <= message.segment < 2**31:
            raise Refused("bad_frame", f"Segment: {len(message.pieces)} pieces, number {message.segment}")
    elif isinstance(message, Need):
        if not 0 <= message.upto < 2**31:
            raise Refused("bad_frame", f"Need: upto {message.upto}")
    elif isinstance(message, Announce):
        if not 0 < message.ttl <= 3600 or len(message.engines) > 1024 or not all(map(good_name, message.engines)):
            raise Refused("bad_frame", "Announce: bad lease or engine id")


def _check_hello(hello: Hello) -> None:
    """An engine's numbers go into addresses: they must make sense together."""
    if len(hello.address) > MAX_DETAIL or len(hello.release) > MAX_NAME or not 0 < hello.revision < 2**63:
        raise Refused("bad_frame", "Hello: address or release too long, or a bad revision")
    engine = hello.engine
    if engine is None:
        return
    if not 0 < engine.slots <= MAX_SLOTS or not 0 < engine.slot_bytes <= MAX_SLOT or not 0 < engine.incarnation < 2**63:
        raise Refused("bad_frame", f"Hello: {engine.slots} slots of {engine.slot_bytes} bytes")
    if not 0 < engine.slot_base < 2**63 or engine.slot_base + engine.slots * engine.slot_bytes >= 2**63:
        raise Refused("bad_frame", f"Hello: slots at {engine.slot_base:#x} are outside of any memory")
    if len(engine.metadata) > MAX_METADATA or len(engine.digest) > 64 or len(engine.agent) > 3 * MAX_NAME:
        raise Refused("bad_frame", f"Hello: {len(engine.metadata)} bytes of metadata, expected at most {MAX_METADATA}")
