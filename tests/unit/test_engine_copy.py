"""Gather, scatter and copy against the slowest and plainest way to do the same."""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdxfer.core.geometry import PoolSpec
from pdxfer.core.jobs import Rows
from pdxfer.core.worker import PlaneAt, PoolAt
from pdxfer.engine import copy
from pdxfer.engine.planes import MappedPool, map_pools


def make_pool(page_bytes: int, planes: int, pages: int, gap: int, offset: int, layout: str, seed: int) -> MappedPool:
    """layout: "apart" (plane after plane), "woven" (page by page, the planes of a page side by side), "split" (uneven)."""
    if layout == "woven":
        stride = page_bytes * planes + gap
        at = [PlaneAt(0, offset + i * page_bytes, stride) for i in range(planes)]
    else:
        stride = page_bytes + gap
        pitch = stride * pages
        odd = 64 if layout == "split" else 0
        at = [PlaneAt(0, offset + i * pitch + odd * i * i, stride) for i in range(planes)]
    size = max(p.offset + (pages - 1) * p.stride + page_bytes for p in at)
    buffer = mmap.mmap(-1, size)
    buffer[:] = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8).tobytes()
    return MappedPool(PoolAt(PoolSpec("kv", "uint8", "x", 16, planes, page_bytes), pages, tuple(at)), [buffer])


def whole(pool: MappedPool) -> np.ndarray[Any, Any]:
    return np.stack([plane.pages for plane in pool.planes])


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, Any], list[Rows], int]:
    pages = draw(st.integers(1, 40))
    planes = draw(st.integers(1, 5))
    shape = {
        "page_bytes": draw(st.sampled_from([1, 3, 8, 13, 64, 256, 257, 768, 1024, 4096])),
        "planes": planes,
        "pages": pages,
        "gap": draw(st.sampled_from([0, 0, 1, 8, 256, 768])),
        "offset": draw(st.sampled_from([0, 1, 8, 4096])),
        "layout": draw(st.sampled_from(["apart", "woven", "split"])),
    }
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        plane0 = draw(st.integers(0, planes - 1))
        if draw(st.booleans()):
            first = draw(st.integers(0, pages - 1))
            table = list(range(first, draw(st.integers(first + 1, pages))))
        else:
            table = draw(st.lists(st.integers(0, pages - 1), min_size=1, max_size=pages, unique=True))
        rows.append(Rows(0, plane0, draw(st.integers(1, planes - plane0)), np.array(table, "<u4").tobytes()))
    size = sum(r.planes * len(r.pages) // 4 * shape["page_bytes"] for r in rows)
    return shape, rows, size


def plainly(pool: MappedPool, rows: list[Rows]) -> bytes:
    out = b""
    for r in rows:
        for plane in range(r.plane0, r.plane0 + r.planes):
            for page in np.frombuffer(r.pages, "<u4"):
                out += pool.planes[plane].pages[page].tobytes()
    return out


@settings(max_examples=300, deadline=None)
@given(cases(), st.integers(0, 7))
def test_gather_then_scatter(case: tuple[dict[str, Any], list[Rows], int], shift: int) -> None:
    shape, rows, size = case
    source, target = make_pool(**shape, seed=1), make_pool(**shape, seed=2)
    slot = np.zeros(size + 8, np.uint8)[shift : shift + size]
    copy.gather([source], rows, slot)
    assert slot.tobytes() == plainly(source, rows)
    expected = whole(target).copy()
    for r in rows:
        index = np.frombuffer(r.pages, "<u4")
        for plane in range(r.plane0, r.plane0 + r.planes):
            expected[plane, index] = source.planes[plane].pages[index]
    copy.scatter([target], rows, slot)
    assert (whole(target) == expected).all()


@settings(max_examples=200, deadline=None)
@given(cases(), st.sampled_from(["apart", "woven", "split"]), st.randoms(use_true_random=False))
def test_copy_between_pools(case: tuple[dict[str, Any], list[Rows], int], layout: str, random: Any) -> None:
    shape, rows, size = case
    source, target = make_pool(**shape, seed=1), make_pool(**{**shape, "layout": layout, "gap": 0}, seed=2)
    rows, there, expected = rows[:1], [], whole(target).copy()
    size = rows[0].planes * len(rows[0].pages) // 4 * shape["page_bytes"]
    for r in rows:
        index = np.frombuffer(r.pages, "<u4")
        to = np.array(random.sample(range(shape["pages"]), len(index)), "<u4")
        there.append(Rows(0, r.plane0, r.planes, to.tobytes()))
        for plane in range(r.plane0, r.plane0 + r.planes):
            expected[plane, to] = source.planes[plane].pages[index]
    copy.copy([source], rows, [target], there, size)
    assert (whole(target) == expected).all()


def test_the_bytes_between_pages_are_not_touched() -> None:
    pool = make_pool(64, 1, 8, 32, 16, "apart", 3)
    raw = np.frombuffer(pool.planes[0].pages.base, np.uint8)
    before = raw.copy()
    copy.scatter([pool], [Rows(0, 0, 1, np.array([3, 1, 6], "<u4").tobytes())], np.zeros(192, np.uint8))
    changed = np.flatnonzero(raw != before)
    inside = {16 + page * 96 + n for page in (1, 3, 6) for n in range(64)}
    assert set(changed.tolist()) <= inside


def test_bad_rows_touch_nothing() -> None:
    pool = make_pool(64, 2, 8, 0, 0, "apart", 3)
    before = whole(pool).copy()

    def table(*pages: int) -> bytes:
        return np.array(pages, "<u4").tobytes()

    good = Rows(0, 0, 1, table(0))
    for rows, size, text in [
        ([good, Rows(0, 0, 1, table(8))], 128, "page 8 of 8"),
        ([good, Rows(0, 0, 1, table(2**32 - 1))], 128, f"page {2**32 - 1} of 8"),
        ([good, Rows(1, 0, 1, table(0))], 128, "pool 1, the worker has 1"),
        ([good, Rows(-1, 0, 1, table(0))], 128, "pool -1"),
        ([good, Rows(0, 1, 2, table(0))], 192, "planes 1+2 of 2"),
        ([good, Rows(0, -1, 1, table(0))], 128, "planes -1+1"),
        ([good, Rows(0, 0, 0, table(0))], 64, "planes 0+0"),
        ([good, Rows(0, 0, 1, b"\0\0\0")], 128, "page table of 3 bytes"),
        ([good, Rows(0, 0, 1, b"")], 64, "page table of 0 bytes"),
        ([good], 128, "the rows have 64 bytes, the job says 128"),
    ]:
        with pytest.raises(ValueError, match=text.replace("+", r"\+")):
            copy.scatter([pool], rows, np.zeros(size, np.uint8))
        with pytest.raises(ValueError, match=text.replace("+", r"\+")):
            copy.gather([pool], rows, np.zeros(size, np.uint8))
    other = make_pool(32, 2, 8, 0, 0, "apart", 3)
    with pytest.raises(ValueError, match="page bytes"):
        copy.copy([pool], [good], [other], [Rows(0, 0, 1, table(0, 1))], 64)
    with pytest.raises(ValueError, match="1 rows to copy from, 2 to copy to"):
        copy.copy(
            [other], [Rows(0, 0, 1, table(0, 1))], [other], [Rows(0, 0, 1, table(0)), Rows(0, 0, 1, table(1))], 64
        )
    assert (whole(pool) == before).all()


def test_a_strided_pool_is_never_copied_whole() -> None:
    """numpy's take copies memory with gaps in full first; the planes must be cut so that it never has any."""
    for layout, gap in (("woven", 0), ("apart", 4096), ("apart", 64)):
        pool = make_pool(4096, 2, 16, gap, 0, layout, 1)
        for plane in pool.planes:
            assert plane.units is None or plane.units.flags.c_contiguous
    assert make_pool(4096, 2, 16, 0, 0, "woven", 1).planes[0].units is not None


def test_digest_is_xxh3() -> None:
    assert copy.digest(np.zeros(0, np.uint8)) == 0x2D06800538D394C2
    a = np.arange(256, dtype=np.uint8)
    b = a.copy()
    b[100] ^= 1
    assert copy.digest(a) != copy.digest(b)


def test_a_descriptor_that_is_read_only_is_refused() -> None:
    path = "/dev/shm"
    fd = os.open(path, os.O_TMPFILE | os.O_RDWR)
    os.ftruncate(fd, 4096)
    readonly = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    at = PoolAt(PoolSpec("kv", "uint8", "x", 16, 1, 64), 8, (PlaneAt(0, 0, 64),))
    assert map_pools([at], [4096], [fd])[0].num_pages == 8  # no memfd: it cannot be sealed, and is accepted
    with pytest.raises(ValueError, match="cannot be mapped for reading and writing"):
        map_pools([at], [4096], [readonly])
    with pytest.raises(ValueError, match="1 descriptors for 2 sizes"):
        map_pools([at], [4096, 4096], [fd])
    os.close(fd)
    os.close(readonly)
