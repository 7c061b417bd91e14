"""What the core knows of a pool: its geometry, how a push is cut into segments, and how a room's pages are covered.

Owns: PoolSpec and the arithmetic on rectangles of (planes × logical pages). Must not: know addresses, tensors or
file descriptors; those are `pools/` and the engine's.

A *plane* is one run of equal pages in a pool: usually the K and V of one layer, or one layer's index keys. A *logical
page* is the n-th page of a room, whatever page of the pool it lies in on either side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from .reasons import Refused

Pages = npt.NDArray[np.uint32]

MAX_PIECES = 64  # per segment: bounds the notification that names them
MAX_CELLS = 1 << 24  # planes × pages of a room: what is remembered of each is a byte


class PoolSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of a pool that two workers must agree on.

    ``page_bytes`` is the size of one page in one plane, in bytes; ``page_tokens`` the tokens that it holds.
    """

    name: str
    dtype: str
    row: str  # what one token's row in one plane is made of, e.g. "2x3x64" or "512+4s+64r"
    page_tokens: int
    planes: int
    page_bytes: int

    def check(self) -> None:
        """Raise Refused('bad_layout') when a field cannot be right."""
        for field in ("page_tokens", "planes", "page_bytes"):
            value = getattr(self, field)
            if not 0 < value < 2**40:
                raise Refused("bad_layout", f"pool {self.name!r}: {field} is {value}, expected a positive number")
        if not self.name or len(self.name) > 64:
            raise Refused("bad_layout", f"pool name {self.name!r}: expected 1 to 64 characters")


def difference(ours: Sequence[PoolSpec], theirs: Sequence[PoolSpec]) -> tuple[str, str, object, object] | None:
    """The first field in which two workers' pools differ: (pool, field, ours, theirs), or None when they agree."""
    if [p.name for p in ours] != [p.name for p in theirs]:
        return ("*", "pools", [p.name for p in ours], [p.name for p in theirs])
    for a, b in zip(ours, theirs, strict=True):
        for field in ("dtype", "row", "page_tokens", "planes", "page_bytes"):
            if getattr(a, field) != getattr(b, field):
                return (a.name, field, getattr(a, field), getattr(b, field))
    return None


class Piece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A rectangle of a room: planes ``plane0 … plane0+planes`` × logical pages ``page0 … page0+pages`` of one pool.

    In a slot its bytes lie plane by plane, page by page.
    """

    pool: int
    plane0: int
    planes: int
    page0: int
    pages: int


def piece_bytes(specs: Sequence[PoolSpec], pieces: Sequence[Piece]) -> int:
    return sum(p.planes * p.pages * specs[p.pool].page_bytes for p in pieces)


def cut(specs: Sequence[PoolSpec], wanted: Sequence[Piece], slot_bytes: int) -> Iterator[tuple[tuple[Piece, ...], int]]:
    """Cut rectangles into segments of at most ``slot_bytes`` bytes: yields (pieces, bytes).

    A page is never cut, so every ``page_bytes`` must be at most ``slot_bytes``; raises Refused('bad_layout') else.
    """
    out: list[Piece] = []
    room = slot_bytes
    for piece in wanted:
        size = specs[piece.pool].page_bytes
        if not piece.pages or not piece.planes:
            continue
        if size > slot_bytes:
            raise Refused(
                "bad_layout",
                f"pool {specs[piece.pool].name!r}: a page has {size} bytes, a staging slot {slot_bytes};"
                " raise engine.slot_bytes on both nodes",
            )
        plane, page = piece.plane0, piece.page0
        plane_end, page_end = piece.plane0 + piece.planes, piece.page0 + piece.pages
        while plane < plane_end:
            if room < size or len(out) == MAX_PIECES:
                yield tuple(out), slot_bytes - room
                out, room = [], slot_bytes
            whole = room // (piece.pages * size) if page == piece.page0 else 0
            if whole:
                n_planes, n_pages = min(whole, plane_end - plane), piece.pages
            else:
                n_planes, n_pages = 1, min(room // size, page_end - page)
            out.append(Piece(piece.pool, plane, n_planes, page, n_pages))
            room -= n_planes * n_pages * size
            page += n_pages
            if page == page_end:
                plane, page = plane + n_planes, piece.page0
    if out:
        yield tuple(out), slot_bytes - room


def _check_cells(specs: Sequence[PoolSpec], pages: Sequence[int]) -> None:
    cells = sum(s.planes * n for s, n in zip(specs, pages, strict=True))
    if cells > MAX_CELLS:
        raise Refused("room_too_large", f"{cells} planes × pages, expected at most {MAX_CELLS}")


class Coverage:
    """Which (plane, logical page) cells of a room have been taken, each at most once."""

    __slots__ = ("cells", "left", "specs")

    def __init__(self, specs: Sequence[PoolSpec], pages: Sequence[int]) -> None:
        """Raises Refused('room_too_large')."""
        _check_cells(specs, pages)
        self.specs = specs
        self.cells = [np.zeros((s.planes, n), dtype=np.bool_) for s, n in zip(specs, pages, strict=True)]
        self.left = sum(c.size for c in self.cells)

    def grow(self, pages: Sequence[int]) -> None:
        """Make room for logical pages 0 … ``pages[i]``-1 of pool i.

        Raises Refused('room_too_large'), having changed nothing.
        """
        _check_cells(self.specs, [max(n, cells.shape[1]) for n, cells in zip(pages, self.cells, strict=True)])
        for i, n in enumerate(pages):
            planes, had = self.cells[i].shape
            if n > had:
                grown = np.zeros((planes, n), dtype=np.bool_)
                grown[:, :had] = self.cells[i]
                self.cells[i] = grown
                self.left += planes * (n - had)

    def problem(self, pieces: Sequence[Piece]) -> str | None:
        """Why these pieces cannot be taken, or None."""
        for p in pieces:
            if not 0 <= p.pool < len(self.cells):
                return f"pool {p.pool} of {len(self.cells)}"
            planes, pages = self.cells[p.pool].shape
            if p.planes < 1 or p.plane0 < 0 or p.plane0 + p.planes > planes:
                return f"planes {p.plane0}+{p.planes} of {planes} in pool {p.pool}"
            if p.pages < 1 or p.page0 < 0 or p.page0 + p.pages > pages:
                return f"pages {p.page0}+{p.pages} of {pages} in pool {p.pool}"
        return self.overlap(pieces)

    def overlap(self, pieces: Sequence[Piece]) -> str | None:
        """Which of these pieces has a cell that is taken, as far as the cells reach; or None."""
        for p in pieces:
            if self.cells[p.pool][p.plane0 : p.plane0 + p.planes, p.page0 : p.page0 + p.pages].any():
                return f"planes {p.plane0}+{p.planes}, pages {p.page0}+{p.pages} of pool {p.pool} a second time"
        return None

    def take(self, pieces: Sequence[Piece]) -> None:
        for p in pieces:
            self.cells[p.pool][p.plane0 : p.plane0 + p.planes, p.page0 : p.page0 + p.pages] = True
            self.left -= p.planes * p.pages

    def take_checked(self, piece: Piece) -> str | None:
        """Take one piece, or say why it cannot be taken."""
        problem = self.problem((piece,))
        if problem is None:
            self.take((piece,))
        return problem


def check_held(names: Sequence[str], pages: Sequence[int], held: Sequence[int]) -> None:
    """``held`` of so many logical pages per pool are there already: raise Refused unless that can be."""
    if len(held) != len(pages):
        raise Refused("pools_unequal", f"held pages for {len(held)} pools, expected {len(pages)}")
    for name, have, most in zip(names, held, pages, strict=True):
        if not 0 <= have <= most:
            raise Refused("pages_out_of_range", f"pool {name!r}: {have} pages are held, of {most} that are wanted")


def without(pieces: Sequence[Piece], held: Sequence[int]) -> list[Piece]:
    """What of these rectangles lies behind the first ``held`` logical pages of each pool."""
    out = []
    for p in pieces:
        first = max(p.page0, held[p.pool])
        if first < p.page0 + p.pages:
            out.append(Piece(p.pool, p.plane0, p.planes, first, p.page0 + p.pages - first))
    return out


def page_array(raw: bytes) -> Pages:
    """Page indices as they travel: little-endian uint32. Raises Refused('bad_frame') on a torn array."""
    if len(raw) % 4:
        raise Refused("bad_frame", f"a page table has {len(raw)} bytes, expected a multiple of 4")
    return np.frombuffer(raw, dtype="<u4")
