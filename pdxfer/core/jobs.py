"""What a parent and its engine child say to each other.

Owns: jobs and completions, and their codec. Must not: know NIXL or sockets. Frames are as on the worker socket: a
little-endian uint32 length, then msgpack; MapPools carries the pools' file descriptors beside it.

The engine remembers nothing that the parent cannot say again: after a respawn the parent repeats MapPools and AddPeer.
"""

from __future__ import annotations

from typing import Final

import msgspec

from .geometry import Piece
from .messages import EngineInfo, Segment
from .worker import PoolAt

MAX_ENGINE_FRAME: Final = 64 << 20


class _Frame(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


class Rows(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One piece as the engine copies it: planes ``plane0 … plane0+planes`` of pool ``pool``, at these pool pages."""

    pool: int
    plane0: int
    planes: int
    pages: bytes  # little-endian uint32 page indices, in slot order


# parent to engine --------------------------------------------------------------------------------------------------


class MapPools(_Frame, frozen=True):
    """Map a worker's pools. ``worker`` is the parent's number for the attachment; never reused."""

    worker: int
    pools: tuple[PoolAt, ...]
    fd_bytes: tuple[int, ...]


class UnmapPools(_Frame, frozen=True):
    """No job of this worker is under way: forget its pools."""

    worker: int


class AddPeer(_Frame, frozen=True):
    """Load a peer engine's metadata; answered by PeerAdded."""

    info: EngineInfo


class RemovePeer(_Frame, frozen=True):
    """The peer engine is gone: release what is terminal, forget the rest when it becomes so."""

    agent: str


class Send(_Frame, frozen=True):
    """Gather pages into send slot ``slot``, WRITE ``bytes`` bytes to ``address`` of ``agent``, notify with ``segment``.

    ``segment.digest`` is 0 here: the engine computes it. Answered by Gathered, then Sent.
    """

    job: int
    worker: int
    rows: tuple[Rows, ...]
    slot: int
    bytes: int
    agent: str
    address: int
    segment: Segment


class Scatter(_Frame, frozen=True):
    """Verify receive slot ``slot`` against ``digest`` and scatter it into pages. Answered by Scattered."""

    job: int
    worker: int
    rows: tuple[Rows, ...]
    slot: int
    bytes: int
    digest: int


class Copy(_Frame, frozen=True):
    """Copy pages to pages, both pools being on this node. Answered by Copied."""

    job: int
    bytes: int
    source: int
    source_rows: tuple[Rows, ...]
    target: int
    target_rows: tuple[Rows, ...]


class MapMirror(_Frame, frozen=True):
    """Map the host mirror; its descriptor comes beside this. What lies in it stays: engines come and go."""

    bytes: int


class MirrorEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One entry: where it begins in the mirror, the digest that its bytes must have (0 for a store), and its pages."""

    offset: int
    digest: int
    rows: tuple[Rows, ...]


class MirrorStore(_Frame, frozen=True):
    """Gather pages into entries of ``entry_bytes`` bytes. Answered by MirrorStored."""

    job: int
    worker: int
    entry_bytes: int
    entries: tuple[MirrorEntry, ...]


class MirrorLoad(_Frame, frozen=True):
    """Verify entries and scatter them into pages. Answered by MirrorLoaded."""

    job: int
    worker: int
    entry_bytes: int
    entries: tuple[MirrorEntry, ...]


class Expect(_Frame, frozen=True):
    """How many receive slots a peer may be writing into now: while it is not 0 the engine polls for notifications."""

    slots: int


class Close(_Frame, frozen=True):
    """Orderly end: finish or drop what is under way, then exit."""


EngineJob = (
    MapPools | UnmapPools | AddPeer | RemovePeer | Send | Scatter | Copy | MapMirror | MirrorStore | MirrorLoad | Expect | Close
)  # fmt: skip


# engine to parent --------------------------------------------------------------------------------------------------


class Ready(_Frame, frozen=True):
    """The engine serves."""

    info: EngineInfo
    send_slots: int
    pid: int


class Mapped(_Frame, frozen=True):
    """Answer to MapPools; ``error`` is empty on success."""

    worker: int
    error: str


class PeerAdded(_Frame, frozen=True):
    agent: str
    error: str


class Gathered(_Frame, frozen=True):
    """The pages of this Send have been read."""

    job: int


class Sent(_Frame, frozen=True):
    """The Send is terminal: no byte of its slot moves any more. ``error`` is empty on success."""

    job: int
    digest: int
    error: str
    seconds: float


class Scattered(_Frame, frozen=True):
    """``mismatch``: the digest did not fit and no page was touched."""

    job: int
    error: str
    mismatch: bool


class Copied(_Frame, frozen=True):
    job: int
    error: str


class MirrorMapped(_Frame, frozen=True):
    """Answer to MapMirror; ``error`` is empty on success."""

    error: str


class MirrorStored(_Frame, frozen=True):
    """``digests``: one for each entry. With an ``error`` none of the entries may be used."""

    job: int
    digests: tuple[int, ...]
    error: str


class MirrorLoaded(_Frame, frozen=True):
    """``bad``: which entries, counted within the job, have another digest; their pages were not touched."""

    job: int
    bad: tuple[int, ...]
    error: str


class Landed(_Frame, frozen=True):
    """A notification arrived from ``agent``."""

    agent: str
    segment: Segment


class Counters(_Frame, frozen=True):
    """Totals since the engine started, for metrics; sent at most once a second while they change."""

    values: dict[str, float]


EngineReport = (
    Ready | Mapped | PeerAdded | Gathered | Sent | Scattered | Copied | MirrorMapped | MirrorStored | MirrorLoaded | Landed
    | Counters
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_job_decoder = msgspec.msgpack.Decoder(EngineJob, strict=True)
_report_decoder = msgspec.msgpack.Decoder(EngineReport, strict=True)


def encode(frame: EngineJob | EngineReport) -> bytes:
    """A frame with its length in front."""
    body = _encoder.encode(frame)
    return len(body).to_bytes(4, "little") + body


def decode_job(body: bytes) -> EngineJob:
    """Raises msgspec.MsgspecError: parent and engine are of one release, so that is a defect."""
    return _job_decoder.decode(body)


def decode_report(body: bytes) -> EngineReport:
    """Raises msgspec.MsgspecError, likewise."""
    return _report_decoder.decode(body)


def rows_of(pieces: tuple[Piece, ...], tables: list[bytes]) -> tuple[Rows, ...]:
    """Pieces as rows: ``tables`` holds a room's page table per pool, little-endian uint32."""
    return tuple(
        Rows(p.pool, p.plane0, p.planes, tables[p.pool][4 * p.page0 : 4 * (p.page0 + p.pages)]) for p in pieces
    )
