"""What a worker and its sidecar say to each other over the unix socket.

Owns: the frames, their codec and limits. Must not: know sockets. A frame is a little-endian uint32 length and that many
bytes of msgpack. The frame that attaches carries the pools' file descriptors beside it (SCM_RIGHTS).

Page tables travel as bytes: little-endian uint32 indices, one table per pool in the order of the attach.
"""

from __future__ import annotations

from typing import Final

import msgspec

from .geometry import PoolSpec
from .reasons import Refused

WORKER_PROTOCOL: Final = 1
MAX_WORKER_FRAME: Final = 16 << 20

Aux = bytes  # for the struct below, whose field `bytes` is a number


class _Frame(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


class PlaneAt(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a plane lies: file descriptor number ``fd`` of the frame, first page at ``offset``, pages ``stride`` bytes apart."""

    fd: int
    offset: int
    stride: int


class PoolAt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pool in shared memory: its geometry, how many pages it has, and where its planes lie."""

    spec: PoolSpec
    num_pages: int
    planes: tuple[PlaneAt, ...]


# worker to sidecar -------------------------------------------------------------------------------------------------


class Attach(_Frame, frozen=True):
    """The first frame of a connection."""

    req: int
    version: int
    engine_id: str
    role: str  # prefill, decode or both: for people, and checked by nobody
    pid: int
    pools: tuple[PoolAt, ...]
    fd_bytes: tuple[int, ...]  # size of each file descriptor's memory


class Open(_Frame, frozen=True):
    """Open a send."""

    req: int
    room: str
    epoch: int


class Push(_Frame, frozen=True):
    """Lend pages to a send until Released: ``pages[i]`` become logical pages ``page0[i]`` … of pool i, in the planes
    ``plane0 … plane0+planes``. ``planes`` of 0 means all planes of every pool. A pool's table may be empty.
    """

    req: int
    room: str
    epoch: int
    page0: tuple[int, ...]  # one per pool
    plane0: int
    planes: int
    pages: tuple[bytes, ...]


class Finish(_Frame, frozen=True):
    """Nothing more will be pushed."""

    req: int
    room: str
    epoch: int
    aux: bytes


class Receive(_Frame, frozen=True, omit_defaults=True):
    """Lend pages to a receive until it ends. The first ``held`` pages of a pool's table stay the worker's: it has their content
    already, and they are neither lent nor sent.
    """

    req: int
    room: str
    epoch: int
    source: str  # the sending worker's engine id
    source_incarnation: int  # of its node; 0 for any
    pages: tuple[bytes, ...]
    held: tuple[int, ...] = ()  # one for each pool; empty: none


class Abort(_Frame, frozen=True):
    """End this worker's sides of a room, now. An unknown room is killed when it arrives."""

    req: int
    room: str
    epoch: int
    detail: str


class Lookup(_Frame, frozen=True):
    """How much of a prompt does the mirror hold? Answered by Held. ``hold``: pin it, under a lease.

    ``tokens``: little-endian uint32 token ids of the whole prompt. Prompts of another ``model`` or ``tenant`` are never found.
    """

    req: int
    model: str
    tenant: str
    tokens: bytes
    hold: bool


class Unpin(_Frame, frozen=True):
    """Let a lease go, before it runs out. One that is not held any more is let go already."""

    req: int
    lease: int


class Store(_Frame, frozen=True):
    """Lend the pages of the prompt's whole blocks from ``first_block`` on, until MirrorEnded; what is missing is stored."""

    req: int
    model: str
    tenant: str
    tokens: bytes
    first_block: int
    pages: tuple[bytes, ...]  # one table per pool, whole blocks


class Load(_Frame, frozen=True):
    """Lend pages for ``blocks`` blocks of a lease, until MirrorEnded."""

    req: int
    lease: int
    first_block: int
    blocks: int
    pages: tuple[bytes, ...]


class Cancel(_Frame, frozen=True):
    """End a store or load, which is request ``operation``, now. MirrorEnded follows, if that has not come yet."""

    req: int
    operation: int


class Evict(_Frame, frozen=True):
    """Forget all that a tenant has stored for a model. Answered by Evicted."""

    req: int
    model: str
    tenant: str


class Ping(_Frame, frozen=True):
    """A sign of life, answered by Ok with number 0: so a worker can tell a stopped sidecar from a quiet one."""


RoomRequest = Open | Push | Finish | Receive | Abort
MirrorRequest = Lookup | Unpin | Store | Load | Cancel | Evict
WorkerRequest = RoomRequest | MirrorRequest
WorkerFrame = Attach | Open | Push | Finish | Receive | Abort | Lookup | Unpin | Store | Load | Cancel | Evict | Ping


# sidecar to worker -------------------------------------------------------------------------------------------------


class Attached(_Frame, frozen=True):
    """``stall_deadline``: a worker with live rooms that is silent for so many seconds is taken for hung."""

    req: int
    version: int
    node: str
    incarnation: int
    stall_deadline: float


class Ok(_Frame, frozen=True):
    """The request with this number was taken."""

    req: int


class Rejected(_Frame, frozen=True):
    """The request was refused; nothing was changed by it. ``code`` is a name in reasons.REFUSALS."""

    req: int
    code: str
    detail: str


class Released(_Frame, frozen=True):
    """The pages of push ``req`` have been read: the worker may use them again."""

    req: int
    room: str
    epoch: int


class RoomEnded(_Frame, frozen=True):
    """The room's one end on this side; its pages are home. ``reason`` is a name in reasons.ENDS.

    ``bytes``: payload bytes moved. ``age``: seconds since the room was opened here. ``aux``: from finish(), only for a
    receive that is done.
    """

    room: str
    epoch: int
    sending: bool
    state: str
    reason: str
    retriable: bool
    detail: str
    bytes: int
    age: float
    aux: Aux


class Matched(_Frame, frozen=True):
    """A send was matched with its receiver, or a receive with its sender."""

    room: str
    epoch: int
    sending: bool


class Held(_Frame, frozen=True):
    """Answer to Lookup, before its Ok: the mirror holds so many blocks of ``block_tokens`` tokens, from the prompt's beginning.

    ``lease`` pins them; 0 when nothing is held or none was asked for.
    """

    req: int
    lease: int
    blocks: int
    block_tokens: int


class Evicted(_Frame, frozen=True):
    """Answer to Evict, before its Ok: so many blocks were forgotten."""

    req: int
    blocks: int


class MirrorEnded(_Frame, frozen=True):
    """The one end of a store or load; its pages are home. ``reason`` is a name in reasons.ENDS.

    ``blocks``: how many of ``asked``, counted from the first, are stored, or are in the pages. ``bytes``: theirs. ``age``: seconds.
    """

    operation: int
    loading: bool
    state: str
    reason: str
    retriable: bool
    detail: str
    blocks: int
    asked: int
    bytes: int
    age: float


SidecarFrame = Attached | Ok | Rejected | Released | RoomEnded | Matched | Held | Evicted | MirrorEnded

_encoder = msgspec.msgpack.Encoder()
_worker_decoder = msgspec.msgpack.Decoder(WorkerFrame, strict=True)
_sidecar_decoder = msgspec.msgpack.Decoder(SidecarFrame, strict=True)


def encode(frame: WorkerFrame | SidecarFrame) -> bytes:
    """A frame with its length in front."""
    body = _encoder.encode(frame)
    return len(body).to_bytes(4, "little") + body


def decode_from_worker(body: bytes) -> WorkerFrame:
    """Decode a frame's body. Raises Refused('bad_frame')."""
    try:
        return _worker_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError) as error:
        raise Refused("bad_frame", str(error)[:200]) from None


def decode_from_sidecar(body: bytes) -> SidecarFrame:
    """Decode a frame's body. Raises Refused('bad_frame')."""
    try:
        return _sidecar_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError) as error:
        raise Refused("bad_frame", str(error)[:200]) from None
