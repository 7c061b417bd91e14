"""What a worker brings to its attach: is it what it says, and can it hurt anybody?

Owns: checking an Attach frame against the descriptors that came with it, and turning those into descriptors of the
sidecar's own. Must not: know connections, or whether an engine id is taken (the core's). Everything wrong is
Refused by name, with the field, what was found and what was expected.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Sequence
from typing import Final

from pdxfer.core import messages, worker
from pdxfer.core.reasons import Refused
from pdxfer.pools import memory

MAX_FDS: Final = 253  # what one SCM_RIGHTS message can carry
MAX_POOLS: Final = 256
MAX_PLANES: Final = 65536


def check_attach(frame: worker.Attach, fds: Sequence[int]) -> None:
    """Raise Refused unless the frame is in itself right and its memory is there."""
    if frame.version != worker.WORKER_PROTOCOL:
        raise Refused("wrong_version", f"worker protocol {frame.version}, expected {worker.WORKER_PROTOCOL}")
    if not messages.good_name(frame.engine_id):
        raise Refused("bad_engine_id", f"{frame.engine_id[:40]!r}")
    if len(fds) != len(frame.fd_bytes):
        raise Refused(
            "bad_layout",
            f"fd_bytes: sizes of {len(frame.fd_bytes)} descriptors, {len(fds)} came with the frame"
            " (if there were more, the sidecar may be out of descriptors: see ulimit -n)",
        )
    for i, (fd, size) in enumerate(zip(fds, frame.fd_bytes, strict=True)):
        _check_memory(i, fd, size)
    if not 0 < len(frame.pools) <= MAX_POOLS:
        raise Refused("bad_layout", f"pools: {len(frame.pools)}, expected 1 … {MAX_POOLS}")
    names = [pool.spec.name for pool in frame.pools]
    if len(set(names)) != len(names):
        raise Refused("bad_layout", f"pools: names {names[:20]}, expected different ones")
    if sum(len(pool.planes) for pool in frame.pools) > MAX_PLANES:
        raise Refused("bad_layout", f"planes: more than {MAX_PLANES} in all pools")
    for pool in frame.pools:
        _check_pool(pool, frame.fd_bytes)


def own_descriptors(fds: Sequence[int]) -> tuple[int, ...]:
    """The same memory under descriptors that mark it as held by this sidecar. Raises Refused; ``fds`` stay open.

    The mark (see pools.memory.held) goes with every duplicate and every mapping that is made of them, also in the
    engine: so a worker whose sidecar was killed knows when the last copy into its pages is over.
    """
    out: list[int] = []
    try:
        for fd in fds:
            out.append(memory.hold(fd))
    except OSError as error:
        for fd in out:
            os.close(fd)
        raise Refused(
            "map_failed", f"descriptor {len(out)}: cannot open the worker's memory again: {error.strerror}"
        ) from error
    return tuple(out)


def _check_memory(i: int, fd: int, size: int) -> None:
    who = f"fd_bytes[{i}]"
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise Refused("bad_layout", f"{who}: the descriptor is no memory, expected a memfd (SharedPool makes one)")
    if not 0 < size <= found.st_size:
        raise Refused("bad_layout", f"{who}: {size} bytes, the memory has {found.st_size}")
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
        raise Refused("bad_layout", f"{who}: the descriptor is not open for reading and writing")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if not seals & fcntl.F_SEAL_SHRINK:
        raise Refused(
            "bad_layout",
            f"{who}: the memory is not sealed against shrinking (F_SEAL_SHRINK); truncated under a copy, it would kill"
            " the engine. Use SharedPool, or a memfd with this seal",
        )
    if found.st_blocks * 512 < size:
        raise Refused(
            "bad_layout",
            f"{who}: {size} bytes are stated, the machine has reserved {found.st_blocks * 512}; reserve them with"
            " posix_fallocate, or a full machine would kill the engine",
        )


def _check_pool(pool: worker.PoolAt, fd_bytes: Sequence[int]) -> None:
    spec = pool.spec
    spec.check()
    who = f"pool {spec.name!r}"
    if not 0 < pool.num_pages < 2**31:
        raise Refused("bad_layout", f"{who}: num_pages is {pool.num_pages}, expected 1 … 2**31-1")
    if len(pool.planes) != spec.planes:
        raise Refused("bad_layout", f"{who}: {len(pool.planes)} planes are placed, its layout has {spec.planes}")
    for n, plane in enumerate(pool.planes):
        where = f"{who}, plane {n}"
        if not 0 <= plane.fd < len(fd_bytes):
            raise Refused("bad_layout", f"{where}: fd is {plane.fd}, expected 0 … {len(fd_bytes) - 1}")
        if plane.offset < 0:
            raise Refused("bad_layout", f"{where}: offset is {plane.offset}, expected 0 or more")
        if plane.stride < spec.page_bytes:
            raise Refused(
                "bad_layout", f"{where}: stride is {plane.stride}, expected at least page_bytes ({spec.page_bytes})"
            )
        end = plane.offset + (pool.num_pages - 1) * plane.stride + spec.page_bytes
        if end > fd_bytes[plane.fd]:
            raise Refused(
                "bad_layout",
                f"{where}: its {pool.num_pages} pages reach to byte {end}, descriptor {plane.fd} has"
                f" {fd_bytes[plane.fd]}",
            )
