"""What the mirror's operations work on: its regions, leases, stores and loads.

Owns: their data, and the geometry of an entry, derived from the layouts. Must not: move anything; `mirrors` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .geometry import Pages, PoolSpec
from .limits import MirrorSettings
from .mirror import MirrorIndex
from .reasons import Refused
from .state import Worker

ALIGN: Final = 4096  # bytes: where an entry may begin

Block = tuple[int, int]  # its number in the operation's pages, its entry


class Region:
    """The part of the mirror for workers whose pools agree in every field."""

    def __init__(self, place: int, base: int, room: int, specs: tuple[PoolSpec, ...], settings: MirrorSettings) -> None:
        """Raises Refused('mirror_off') when no block of such pools fits."""
        tokens = settings.block_tokens
        for spec in specs:
            if tokens % spec.page_tokens:
                raise Refused(
                    "mirror_off",
                    f"pool {spec.name!r} has pages of {spec.page_tokens} tokens, mirror.block_tokens is {tokens}: expected a multiple",
                )
        self.place = place
        self.base = base
        self.specs = specs
        self.pages = tuple(tokens // spec.page_tokens for spec in specs)  # of a block, per pool
        self.entry_bytes = sum(s.planes * n * s.page_bytes for s, n in zip(specs, self.pages, strict=True))
        self.stride = -(-self.entry_bytes // ALIGN) * ALIGN
        if self.stride > room:
            raise Refused(
                "mirror_off",
                f"a block of {tokens} tokens has {self.entry_bytes} bytes, the mirror has {room} for these pools",
            )
        self.entries = room // self.stride
        self.share = settings.share
        self.index: MirrorIndex  # once it is opened
        self.users: set[int] = set()  # workers

    def open(self) -> None:
        """It has its place from now on: make the books."""
        self.index = MirrorIndex(self.entries, self.share)

    def offset(self, entry: int) -> int:
        return self.base + entry * self.stride


class Lease:
    """What a lookup has found, pinned until it is let go."""

    def __init__(self, id: int, owner: Worker, region: Region, entries: list[int]) -> None:
        self.id = id
        self.owner = owner
        self.region = region
        self.entries = entries


class Operation:
    """A store or a load."""

    def __init__(
        self, serial: int, req: int, owner: Worker, region: Region, blocks: list[Block], raw: tuple[bytes, ...],
        tables: list[Pages], keys: Sequence[bytes], space: str, now: float, *, loading: bool, asked: int,
    ) -> None:  # fmt: skip
        self.serial = serial
        self.req = req
        self.owner = owner
        self.region = region
        self.loading = loading
        self.asked = asked  # blocks
        self.blocks = blocks
        self.raw = raw
        self.tables = tables  # the pages that are lent
        self.keys = keys  # of a store, the whole prefix
        self.space = space
        self.opened = now
        self.next = 0  # the first block that no job was made for
        self.jobs: dict[int, list[Block]] = {}
        self.left: set[int] = {entry for _, entry in blocks}  # store: not filled. load: not loaded
        self.bad: list[int] = []  # blocks that were not what was stored
        self.reason = ""
        self.detail = ""

    @property
    def kind(self) -> str:
        return "load" if self.loading else "store"
