"""SharedPool: a pool in memory that a worker shares with its sidecar.

Owns: the memfd and its mapping in this process, and moving CPU tensors into it. Must not: know rooms or sockets.

The memory stays mapped for as long as any view or tensor uses it, also after ``close``.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from pdxfer.core.reasons import Refused
from pdxfer.core.worker import PlaneAt, PoolAt

from . import memory, presets
from .layout import PoolLayout, numpy_dtype, read_tensors
from .moving import check_movable, move_storage, storages_of
from .tensors import check_apart

if TYPE_CHECKING:
    import torch


class SharedPool:
    """Make one with ``allocate`` or ``adopt``."""

    def __init__(
        self, layout: PoolLayout, num_pages: int, planes: tuple[PlaneAt, ...], fd: int, mapping: mmap.mmap
    ) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self.fd_bytes = (os.fstat(fd).st_size,)
        self._planes = planes
        self._fd = fd
        self._guard = memory.reopen(fd)
        self._mapping: mmap.mmap | None = mapping

    @classmethod
    def allocate(cls, layout: PoolLayout, num_pages: int) -> Self:
        """New memory, zeroed. Raises Refused: no_shm when the machine has too little, bad_layout."""
        if not 0 < num_pages < 2**31:
            raise Refused("bad_layout", f"pool {layout.name!r}: num_pages is {num_pages}, expected 1 … 2**31-1")
        pitch = memory.align(num_pages * layout.page_bytes)
        size = layout.planes * pitch
        fd = memory.create(layout.name, size)
        try:
            memory.reserve(fd, 0, size, layout.name)
            memory.seal(fd)
            mapping = _map(fd, size, layout.name)
            planes = tuple(PlaneAt(0, i * pitch, layout.page_bytes) for i in range(layout.planes))
            return cls(layout, num_pages, planes, fd, mapping)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def adopt(
        cls,
        name: str,
        tensors: Sequence[torch.Tensor],
        page_tokens: int,
        page_dim: int = 0,
        *,
        row: str = "",
        padded: bool = False,
        preset: str = "",
    ) -> Self:
        """Move CPU tensors, one per layer, into shared memory in place: the objects and their content stay the same.

        ``preset`` names the format that the tensors are said to have (see ``pools.presets``); they are checked against it.

        Whole storages are moved, so tensors that share one go on sharing it. It takes the memory of one storage more
        than before while it runs. Raises Refused: no_shm, bad_layout; after no_shm the tensors hold what they held.
        """
        who = f"pool {name!r}"
        for i, tensor in enumerate(tensors):
            check_movable(tensor, f"{who}, tensor {i}")
        format = presets.preset(preset) if preset else None
        if format is not None:
            row, padded = row or format.row, padded or format.page_multiple > 1
        layout, seen = read_tensors(name, tensors, page_tokens, page_dim=page_dim, row=row, padded=padded)
        if format is not None:
            format.check(layout)
        storages = storages_of(tensors)
        base: dict[int, int] = {}
        size = 0
        for key, group in storages.items():
            base[key] = size
            size += memory.align(group[0].untyped_storage().nbytes())
        planes = tuple(
            PlaneAt(0, base[pages.storage] + offset, pages.stride) for pages in seen for offset in pages.offsets
        )
        check_apart(
            [
                (f"{who}, tensor {i} (plane {n})", pages.storage, offset, pages.stride, pages.num_pages)
                for i, pages in enumerate(seen)
                for n, offset in enumerate(pages.offsets)
            ],
            layout.page_bytes,
        )
        num_pages = seen[0].num_pages
        end = max(p.offset + (num_pages - 1) * p.stride for p in planes) + layout.page_bytes
        if end > size:
            raise Refused("bad_layout", f"{who}: padded is set, but the last page's padding is not in its storage")
        fd = memory.create(name, size)
        try:
            mapping = _map(fd, size, name)
            for key, group in storages.items():
                nbytes = group[0].untyped_storage().nbytes()
                memory.reserve(fd, base[key], memory.align(nbytes), name)
                move_storage(group, mapping, base[key], who)
            memory.seal(fd)
            return cls(layout, num_pages, planes, fd, mapping)
        except BaseException:
            os.close(fd)
            raise

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def fds(self) -> tuple[int, ...]:
        """What the sidecar must be sent; empty after ``close``."""
        return () if self._fd < 0 else (self._fd,)

    def at(self, first_fd: int = 0) -> PoolAt:
        """The pool as an attach frame states it; ``first_fd`` is the place of ``fds[0]`` among the frame's."""
        planes = tuple(PlaneAt(first_fd + p.fd, p.offset, p.stride) for p in self._planes)
        return PoolAt(self.layout.spec(), self.num_pages, planes)

    def held(self) -> bool:
        """Whether a sidecar or its engine, alive or dying, can still touch this memory (see memory.held)."""
        return self._guard >= 0 and memory.held(self._guard)

    def views(self) -> list[npt.NDArray[Any]]:
        """One array ``[num_pages, *page_shape]`` per plane. Types that numpy lacks are seen as unsigned integers."""
        dtype = numpy_dtype(self.layout.dtype)
        shape = (self.num_pages, *self.layout.page_shape)
        inner = [dtype.itemsize * int(np.prod(self.layout.page_shape[i + 1 :])) for i in range(len(shape) - 1)]
        mapping = self._live()
        return [
            np.ndarray(shape, dtype, buffer=mapping, offset=p.offset, strides=(p.stride, *inner)) for p in self._planes
        ]

    def pages(self) -> list[npt.NDArray[np.uint8]]:
        """One array of raw bytes ``[num_pages, page_bytes]`` per plane."""
        mapping = self._live()
        shape = (self.num_pages, self.layout.page_bytes)
        return [
            np.ndarray(shape, np.uint8, buffer=mapping, offset=p.offset, strides=(p.stride, 1)) for p in self._planes
        ]

    def torch(self, *, by_layer: bool = False) -> list[torch.Tensor]:
        """One tensor ``[num_pages, *page_shape]`` per plane, or one ``[planes_per_layer, num_pages, *page_shape]``
        per layer."""
        import torch  # only a caller that has torch asks for this

        dtype = getattr(torch, self.layout.dtype)
        whole = torch.frombuffer(self._live(), dtype=torch.uint8).view(dtype)
        itemsize = self.layout.itemsize
        count = self.layout.planes_per_layer if by_layer else 1
        out = []
        for n in range(0, self.layout.planes, count):
            group = self._planes[n : n + count]
            steps = {b.offset - a.offset for a, b in itertools.pairwise(group)}
            if len(steps) > 1 or len({p.stride for p in group}) > 1:
                raise Refused(
                    "bad_layout", f"pool {self.name!r}: the planes of layer {n // count} are not evenly spaced"
                )
            shape = [self.num_pages, *self.layout.page_shape]
            strides = [group[0].stride // itemsize]
            strides += [int(np.prod(self.layout.page_shape[i + 1 :])) for i in range(len(self.layout.page_shape))]
            if by_layer:
                shape.insert(0, count)
                strides.insert(0, steps.pop() // itemsize if steps else strides[0] * self.num_pages)
            out.append(torch.as_strided(whole, shape, strides, group[0].offset // itemsize))
        return out

    def close(self) -> None:
        """Give up the descriptors. Twice is once. Views and tensors go on living, and with them the memory."""
        for fd in (self._fd, self._guard):
            if fd >= 0:
                os.close(fd)
        self._fd = self._guard = -1
        self._mapping = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()

    def __repr__(self) -> str:
        return (
            f"SharedPool({self.name!r}, {self.num_pages} pages, {self.layout.planes} planes, {self.fd_bytes[0]} bytes)"
        )

    def _live(self) -> mmap.mmap:
        if self._mapping is None:
            raise ValueError(f"pool {self.name!r} is closed")
        return self._mapping


def _map(fd: int, size: int, name: str) -> mmap.mmap:
    try:
        return mmap.mmap(fd, size)
    except OSError as error:
        raise memory.no_room(name, size, error) from error
