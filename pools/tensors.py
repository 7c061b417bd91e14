"""What a tensor says of itself: where its pages lie, and how many bytes each has.

Owns: reading shape, strides, item size and storage of a torch or numpy tensor. Must not: assume a dtype, copy a byte,
or import torch (a torch tensor brings torch with it).

A pool's tensor is ``[…planes…, num_pages, …page…]``: the dimensions before ``page_dim`` count planes, those after it
make up one page. A page must be one dense run of bytes; in which order its dimensions lie does not matter, and what
lies between two pages does not matter either.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np

from pdxfer.core.reasons import Refused


class TensorPages(NamedTuple):
    """One tensor, seen as planes of pages. Offsets are bytes from the start of the tensor's storage."""

    dtype: str
    itemsize: int
    num_pages: int
    page_shape: tuple[int, ...]  # in the order in which it lies in memory, slowest first
    page_bytes: int  # dense bytes of one page
    stride: int  # bytes from one page to the next
    offsets: tuple[int, ...]  # first page of each plane
    storage: int  # the same number for tensors of the same storage
    storage_bytes: int


def is_torch(tensor: object) -> bool:
    return type(tensor).__module__.partition(".")[0] == "torch" or hasattr(tensor, "untyped_storage")


def pages_of(tensor: Any, page_dim: int, who: str) -> TensorPages:
    """Read ``tensor``. Raises Refused('bad_layout'), naming ``who``, when its pages are not dense runs of bytes."""
    if is_torch(tensor):
        return _pages_of(*_read_torch(tensor, who), page_dim, who)
    if isinstance(tensor, np.ndarray):
        return _pages_of(*_read_numpy(tensor, who), page_dim, who)
    raise Refused("bad_layout", f"{who}: a {type(tensor).__name__}, expected a torch tensor or a numpy array")


_SAFETENSORS: Final = {  # what the safetensors format calls them: torch's names
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
}  # fmt: skip


def torch_name(dtype: str) -> str:
    """Torch's name of a dtype that is given by it or by the safetensors format's."""
    return _SAFETENSORS.get(dtype, dtype)


def dense(dtype: str, itemsize: int, shape: tuple[int, ...], page_dim: int, who: str) -> TensorPages:
    """A tensor that nobody has at hand, as one dense block. Raises Refused('bad_layout') as ``pages_of`` does."""
    strides: list[int] = []
    step = itemsize
    for n in reversed(shape):
        strides.insert(0, step)
        step *= n
    return _pages_of(dtype, itemsize, shape, tuple(strides), _Storage(0, 0, step), page_dim, who)


class _Storage(NamedTuple):
    offset: int  # bytes from the storage's start to the tensor's first element
    identity: int
    size: int


def _read_torch(tensor: Any, who: str) -> tuple[str, int, tuple[int, ...], tuple[int, ...], _Storage]:
    if tensor.layout.__str__() != "torch.strided" or tensor.is_quantized:
        raise Refused("bad_layout", f"{who}: layout {tensor.layout}, expected a plain strided tensor")
    itemsize = tensor.element_size()
    storage = tensor.untyped_storage()
    where = _Storage(tensor.storage_offset() * itemsize, storage._cdata, storage.nbytes())
    strides = tuple(s * itemsize for s in tensor.stride())
    return str(tensor.dtype).removeprefix("torch."), itemsize, tuple(tensor.shape), strides, where


def _read_numpy(array: np.ndarray[Any, Any], who: str) -> tuple[str, int, tuple[int, ...], tuple[int, ...], _Storage]:
    root: Any = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    start, end = np.lib.array_utils.byte_bounds(root)
    first = array.__array_interface__["data"][0]
    if array.dtype.hasobject:
        raise Refused("bad_layout", f"{who}: dtype {array.dtype}, expected numbers")
    return array.dtype.name, array.itemsize, array.shape, array.strides, _Storage(first - start, start, end - start)


def _pages_of(
    dtype: str,
    itemsize: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    where: _Storage,
    page_dim: int,
    who: str,
) -> TensorPages:
    if not 0 <= page_dim < len(shape):
        raise Refused("bad_layout", f"{who}: page_dim is {page_dim}, expected 0 … {len(shape) - 1} for shape {shape}")
    if 0 in shape:
        raise Refused("bad_layout", f"{who}: shape {shape}, expected no dimension of 0")
    if any(s < 0 for s in strides):
        raise Refused("bad_layout", f"{who}: strides of {strides} bytes, expected none below 0")
    inner = sorted(
        ((stride, n) for stride, n in zip(strides[page_dim + 1 :], shape[page_dim + 1 :], strict=True) if n > 1),
        reverse=True,
    )
    dense = itemsize
    for stride, n in reversed(inner):
        if stride != dense:
            raise Refused(
                "bad_layout",
                f"{who}: a page is not one dense run of bytes: shape {shape}, strides of {strides} bytes, page_dim"
                f" {page_dim}; within a page found a step of {stride} bytes, expected {dense}. Pass the tensor before"
                " it was sliced, or another page_dim",
            )
        dense *= n
    stride = strides[page_dim] if shape[page_dim] > 1 else max(strides[page_dim], dense)
    if stride < dense:
        raise Refused(
            "bad_layout",
            f"{who}: pages overlap: {stride} bytes from one page to the next, a page has {dense} (shape {shape},"
            f" page_dim {page_dim}); pass another page_dim",
        )
    offsets = [where.offset]
    for step, n in zip(strides[:page_dim], shape[:page_dim], strict=True):
        offsets = [offset + i * step for offset in offsets for i in range(n)]
    last = max(offsets) + (shape[page_dim] - 1) * stride + dense
    if last > where.size:
        raise Refused(
            "bad_layout",
            f"{who}: its pages reach to byte {last} of a storage of {where.size} bytes; was the storage resized?",
        )
    order = tuple(n for _, n in inner) or (1,)
    assert math.prod(order) * itemsize == dense
    return TensorPages(
        dtype, itemsize, shape[page_dim], order, dense, stride, tuple(offsets), where.identity, where.size
    )  # fmt: skip


def check_apart(places: list[tuple[str, int, int, int, int]], page_bytes: int) -> None:
    """Raise Refused('bad_layout') when two planes share a byte. ``places``: (who, storage, offset, stride, num_pages).

    Planes with the same stride may be interleaved; with different strides their spans must be apart.
    """
    by_start = sorted(places, key=lambda p: (p[1], p[2]))
    for i, (who, storage, offset, stride, num_pages) in enumerate(by_start):
        end = offset + (num_pages - 1) * stride + page_bytes
        for other, other_storage, other_offset, other_stride, _ in by_start[i + 1 :]:
            if other_storage != storage or other_offset >= end:
                break
            ahead = (other_offset - offset) % stride
            if other_stride != stride or ahead < page_bytes or stride - ahead < page_bytes:
                raise Refused(
                    "bad_layout",
                    f"{who} and {other} lie in the same bytes; pass a tensor that layers share once only",
                )
