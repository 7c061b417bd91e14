"""Cutting and covering: every page of every plane once, in slots that hold it, in order."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdxfer.core.geometry import MAX_PIECES, Coverage, Piece, PoolSpec, cut, difference, page_array, piece_bytes
from pdxfer.core.reasons import Refused


@st.composite
def rooms(draw: st.DrawFn) -> tuple[list[PoolSpec], list[Piece], int]:
    specs = [
        PoolSpec(f"pool{i}", "bf16", "row", 16, draw(st.integers(1, 70)), draw(st.integers(1, 50)))
        for i in range(draw(st.integers(1, 3)))
    ]
    pieces = []
    for i, spec in enumerate(specs):
        plane0 = draw(st.integers(0, spec.planes - 1))
        planes = draw(st.integers(0, spec.planes - plane0))
        pieces.append(Piece(i, plane0, planes, draw(st.integers(0, 20)), draw(st.integers(0, 12))))
    return specs, pieces, draw(st.integers(50, 2000))


def cells(piece: Piece) -> list[tuple[int, int, int]]:
    return [
        (piece.pool, plane, page)
        for plane in range(piece.plane0, piece.plane0 + piece.planes)
        for page in range(piece.page0, piece.page0 + piece.pages)
    ]


@given(rooms())
def test_cut_covers_everything_once_in_order_and_fits(case: tuple[list[PoolSpec], list[Piece], int]) -> None:
    specs, wanted, slot = case
    segments = list(cut(specs, wanted, slot))
    for pieces, size in segments:
        assert 0 < size <= slot
        assert size == piece_bytes(specs, pieces)
        assert 0 < len(pieces) <= MAX_PIECES
        assert all(p.pages > 0 and p.planes > 0 for p in pieces)
    found = [cell for pieces, _ in segments for piece in pieces for cell in cells(piece)]
    assert found == [cell for piece in wanted for cell in cells(piece)]


@given(rooms())
def test_slots_are_filled_as_far_as_a_page_fits(case: tuple[list[PoolSpec], list[Piece], int]) -> None:
    specs, wanted, slot = case
    segments = list(cut(specs, wanted, slot))
    for (pieces, size), (following, _) in itertools.pairwise(segments):
        assert len(pieces) == MAX_PIECES or slot - size < specs[following[0].pool].page_bytes


def test_a_page_larger_than_a_slot_is_refused_and_says_what_to_do() -> None:
    spec = PoolSpec("kv", "bf16", "row", 16, 1, 100)
    with pytest.raises(Refused, match=r"100 bytes, a staging slot 99; raise engine\.slot_bytes"):
        list(cut([spec], [Piece(0, 0, 1, 0, 1)], 99))
    assert list(cut([spec], [Piece(0, 0, 1, 0, 0)], 99)) == []


@given(rooms())
def test_coverage_takes_each_cell_once(case: tuple[list[PoolSpec], list[Piece], int]) -> None:
    specs, wanted, slot = case
    pages = [w.page0 + w.pages for w in wanted]
    coverage = Coverage(specs, pages)
    total = coverage.left
    assert total == sum(s.planes * n for s, n in zip(specs, pages, strict=True))
    taken = 0
    for pieces, _ in cut(specs, wanted, slot):
        for piece in pieces:
            assert coverage.take_checked(piece) is None
            taken += piece.planes * piece.pages
            assert coverage.take_checked(piece) is not None
    assert coverage.left == total - taken


@pytest.mark.parametrize(
    "piece",
    [
        Piece(2, 0, 1, 0, 1), Piece(-1, 0, 1, 0, 1), Piece(0, 0, 4, 0, 1), Piece(0, -1, 1, 0, 1), Piece(0, 0, 0, 0, 1),
        Piece(0, 0, 1, 5, 1), Piece(0, 0, 1, 0, 6), Piece(0, 0, 1, -1, 1), Piece(0, 0, 1, 0, 0), Piece(0, 0, 1, 0, 2**62),
        Piece(0, 2**62, 2**62, 0, 1),
    ],
)  # fmt: skip
def test_coverage_names_a_piece_that_is_not_in_the_room(piece: Piece) -> None:
    specs = [PoolSpec("a", "bf16", "row", 16, 3, 8), PoolSpec("b", "bf16", "row", 16, 2, 8)]
    coverage = Coverage(specs, [5, 5])
    assert coverage.take_checked(piece) is not None
    assert coverage.left == 25


def test_coverage_grows_and_keeps_what_was_taken() -> None:
    specs = [PoolSpec("a", "bf16", "row", 16, 3, 8)]
    coverage = Coverage(specs, [0])
    coverage.grow([2])
    coverage.take([Piece(0, 0, 3, 0, 2)])
    assert coverage.left == 0
    assert coverage.overlap([Piece(0, 0, 3, 2, 1)]) is None
    assert coverage.overlap([Piece(0, 1, 1, 1, 3)]) is not None
    coverage.grow([4])
    coverage.grow([1])
    assert coverage.left == 6


@pytest.mark.parametrize("field", ["dtype", "row", "page_tokens", "planes", "page_bytes"])
def test_difference_names_the_field_and_both_values(field: str) -> None:
    ours = {"name": "kv", "dtype": "bf16", "row": "x", "page_tokens": 16, "planes": 3, "page_bytes": 256}
    theirs = ours | {field: "fp8" if isinstance(ours[field], str) else 132}
    a, b = PoolSpec(**ours), PoolSpec(**theirs)  # type: ignore[arg-type]
    assert difference([a], [b]) == ("kv", field, ours[field], theirs[field])
    assert difference([a], [a]) is None
    assert difference([a], []) == ("*", "pools", ["kv"], [])


@pytest.mark.parametrize(
    "change", [{"planes": 0}, {"page_bytes": -1}, {"page_tokens": 2**40}, {"name": ""}, {"name": "x" * 65}]
)
def test_specs_that_cannot_be_right_are_refused(change: dict[str, object]) -> None:
    fields: dict[str, object] = {
        "name": "kv",
        "dtype": "bf16",
        "row": "x",
        "page_tokens": 16,
        "planes": 3,
        "page_bytes": 256,
    }
    with pytest.raises(Refused, match="bad_layout"):
        PoolSpec(**fields | change).check()  # type: ignore[arg-type]


def test_torn_page_tables_are_refused() -> None:
    assert list(page_array(b"\x01\0\0\0\xff\xff\xff\xff")) == [1, 2**32 - 1]
    with pytest.raises(Refused, match="bad_frame"):
        page_array(b"\x01\0\0")
