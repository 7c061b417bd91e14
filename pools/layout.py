"""PoolLayout: the one statement of a pool's geometry, from which every size is derived.

Owns: name, dtype, page geometry and planes of a pool, and its fingerprint. Must not: hold memory.

A layout is read off the tensors themselves (``from_tensors``), so it cannot disagree with them; it is written down by
hand only for memory that is allocated from it. A *plane* is one run of equal pages: one layer's, or the K or the V of
one layer. Planes are numbered layer by layer.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from pdxfer.core.geometry import PoolSpec
from pdxfer.core.reasons import Refused

from .tensors import TensorPages, pages_of

# Types that numpy does not know: their bytes, under torch's names.
_EXTRA_ITEMSIZE: Final = {
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}


def itemsize_of(dtype: str) -> int:
    """Bytes of one element. Raises Refused('bad_layout') for a name that nobody knows."""
    if dtype in _EXTRA_ITEMSIZE:
        return _EXTRA_ITEMSIZE[dtype]
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = np.dtype(object)
    if found.kind not in "biufc" or found.name != dtype:
        raise Refused("bad_layout", f"dtype {dtype!r}: expected a name like bfloat16, float8_e4m3fn, float32 or uint8")
    return found.itemsize


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy dtype of a view; types that numpy lacks are seen as unsigned integers of the same size."""
    if dtype in _EXTRA_ITEMSIZE:
        return np.dtype(f"uint{8 * _EXTRA_ITEMSIZE[dtype]}")
    return np.dtype(dtype)


@dataclass(frozen=True)
class PoolLayout:
    """``page_shape`` is one page of one plane, slowest dimension first, e.g. ``(16, 3, 64)``.

    ``row`` and ``page_bytes`` may be left out: they follow from shape and dtype. ``page_bytes`` may be larger than the
    shape says when padding belongs to the page. ``planes_per_layer`` maps layers to planes.
    """

    name: str
    dtype: str
    page_shape: tuple[int, ...]
    page_tokens: int
    planes: int
    planes_per_layer: int = 1
    row: str = ""
    page_bytes: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "page_shape", tuple(self.page_shape))
        who = f"pool {self.name!r}"
        if not self.page_shape or any(type(n) is not int or n < 1 for n in self.page_shape):
            raise Refused("bad_layout", f"{who}: page_shape is {self.page_shape}, expected positive whole numbers")
        content = math.prod(self.page_shape) * itemsize_of(self.dtype)
        if not self.page_bytes:
            object.__setattr__(self, "page_bytes", content)
        if self.page_bytes < content:
            raise Refused(
                "bad_layout",
                f"{who}: page_bytes is {self.page_bytes}, expected at least {content}"
                f" ({self.page_shape} of {self.dtype})",
            )
        if not self.row:
            object.__setattr__(self, "row", "x".join(map(str, self.page_shape)))
        if self.planes_per_layer < 1 or self.planes % self.planes_per_layer:
            raise Refused(
                "bad_layout",
                f"{who}: planes_per_layer is {self.planes_per_layer}, expected a divisor of {self.planes} planes",
            )
        self.spec().check()

    @property
    def layers(self) -> int:
        return self.planes // self.planes_per_layer

    @property
    def itemsize(self) -> int:
        return itemsize_of(self.dtype)

    def spec(self) -> PoolSpec:
        """The fields that both workers must agree on."""
        return PoolSpec(self.name, self.dtype, self.row, self.page_tokens, self.planes, self.page_bytes)

    def bytes_for(self, num_pages: int) -> int:
        """Bytes that so many pages have in all planes."""
        return self.planes * num_pages * self.page_bytes

    def fingerprint(self) -> str:
        """16 hex digits, equal for two layouts that fit together."""
        return hashlib.blake2b(msgspec.json.encode(self.spec()), digest_size=8).hexdigest()

    @classmethod
    def from_tensors(
        cls,
        name: str,
        tensors: Sequence[Any],
        page_tokens: int,
        *,
        page_dim: int = 0,
        row: str = "",
        padded: bool = False,
    ) -> PoolLayout:
        """The layout of one tensor per layer, ``[…planes…, num_pages, …page…]`` with the pages at ``page_dim``.

        ``padded`` says that the bytes between two pages belong to the page, so that they travel with it.
        Raises Refused('bad_layout'), naming tensor, field and both values, when the tensors disagree.
        """
        return read_tensors(name, tensors, page_tokens, page_dim=page_dim, row=row, padded=padded)[0]


def read_tensors(
    name: str, tensors: Sequence[Any], page_tokens: int, *, page_dim: int = 0, row: str = "", padded: bool = False
) -> tuple[PoolLayout, list[TensorPages]]:
    """A layout, and where each tensor's pages lie."""
    if not tensors:
        raise Refused("bad_layout", f"pool {name!r}: no tensors, expected one per layer")
    seen = [pages_of(tensor, page_dim, f"pool {name!r}, tensor {i}") for i, tensor in enumerate(tensors)]
    return layout_of(name, seen, page_tokens, row=row, padded=padded), seen


def layout_of(
    name: str, seen: Sequence[TensorPages], page_tokens: int, *, row: str = "", padded: bool = False
) -> PoolLayout:
    """The layout of tensors that were read. Raises Refused('bad_layout') when they disagree."""
    first = seen[0]
    for i, other in enumerate(seen):
        pairs: list[tuple[str, object, object]] = [
            ("dtype", other.dtype, first.dtype),
            ("num_pages", other.num_pages, first.num_pages),
            ("page_shape", other.page_shape, first.page_shape),
            ("planes", len(other.offsets), len(first.offsets)),
        ]
        if padded:
            pairs.append(("stride", other.stride, first.stride))
        for field, found, expected in pairs:
            if found != expected:
                raise Refused(
                    "bad_layout",
                    f"pool {name!r}, tensor {i}: {field} is {found}, expected {expected} as in tensor 0;"
                    " tensors of different shapes belong in pools of their own",
                )
    return PoolLayout(
        name,
        first.dtype,
        first.page_shape,
        page_tokens,
        planes=len(first.offsets) * len(seen),
        planes_per_layer=len(first.offsets),
        row=row,
        page_bytes=first.stride if padded else first.page_bytes,
    )
