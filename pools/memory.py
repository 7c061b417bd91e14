"""Memory that can be shared: sealed memfds whose every byte is reserved.

Owns: creating, reserving, sealing and locking a memfd. Must not: know pools or tensors.

Why reserve: ftruncate alone promises nothing, and the first touch of a page that the machine cannot provide is a
SIGBUS in whoever touched it. Why seal: a worker that shrank its memory would kill the engine that copies from it.
Why lock: see ``held``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import struct
from pathlib import Path
from typing import Final

from pdxfer.core.reasons import Refused

PAGE: Final = os.sysconf("SC_PAGE_SIZE")
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_FLOCK: Final = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length (0: all of it), process
_NO_ROOM: Final = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT, errno.EMFILE, errno.ENFILE)


def align(size: int) -> int:
    """``size`` rounded up to whole pages of the machine."""
    return -(-size // PAGE) * PAGE


def create(name: str, size: int) -> int:
    """A memfd of ``size`` bytes, none of them reserved yet. Raises Refused('no_shm')."""
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise no_room(name, size, error) from error
    try:
        os.ftruncate(fd, size)
    except OSError as error:
        os.close(fd)
        raise no_room(name, size, error) from error
    return fd


def reserve(fd: int, offset: int, size: int, name: str) -> None:
    """Make the machine provide these bytes now. Raises Refused('no_shm')."""
    try:
        left = available()
        if left is not None and size > left:
            # Asked for more than its memory cgroup has, a process is killed rather than told: so do not ask.
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        os.posix_fallocate(fd, offset, size)
    except OSError as error:
        raise no_room(name, size, error) from error


def seal(fd: int) -> None:
    """From now on the memory has this size for ever."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)


def no_room(name: str, size: int, error: OSError) -> Refused:
    """The named error for memory that the machine does not give; any other OSError is a defect and is raised as it
    is."""
    if error.errno not in _NO_ROOM:
        raise error
    left = available()
    have = "unknown" if left is None else f"{left / 2**20:.1f} MiB"
    advice = {
        errno.EFBIG: "raise the file size limit (ulimit -f)",
        errno.EMFILE: "raise the limit of open files (ulimit -n)",
        errno.ENFILE: "raise the limit of open files of the machine (fs.file-max)",
    }.get(error.errno or 0, "make the pool smaller, or give the process or container more memory")
    return Refused(
        "no_shm",
        f"pool {name!r}: {size / 2**20:.1f} MiB of shared memory asked for, {have} available: {error.strerror};"
        f" {advice}",
    )


def available() -> int | None:
    """Bytes that can still be had, as far as machine and memory cgroup tell; None when they do not."""
    found = [n for n in (_of_machine(), _of_cgroup()) if n is not None]
    return min(found, default=None)


def _of_machine() -> int | None:
    with contextlib.suppress(OSError):
        match = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        return int(match[1]) * 1024 if match else None
    return None


def _of_cgroup(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Of cgroup v2: the tightest limit above this process, page cache counted as free since it is given up first."""
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        own = Path("/proc/self/cgroup").read_text()
        match = re.search(r"^0::/(.*)$", own, re.MULTILINE)
        here = root / match[1] if match else root
        while here.is_relative_to(root):
            with contextlib.suppress(OSError, ValueError):
                limit = int((here / "memory.max").read_text())  # "max" is no number: no limit here
                stat = dict(line.split() for line in (here / "memory.stat").read_text().splitlines())
                cache = int(stat["inactive_file"]) + int(stat["active_file"])
                found.append(limit - int((here / "memory.current").read_text()) + cache)
            if here == root:
                break
            here = here.parent
    return max(0, min(found)) if found else None


def reopen(fd: int) -> int:
    """The same memory under an open file description of its own, which can be locked apart from the others."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def hold(fd: int) -> int:
    """Reopen ``fd`` and mark it as held: until its last duplicate is closed and its last mapping is gone.

    Raises OSError. The mark is what ``held`` asks for.
    """
    own = reopen(fd)
    try:
        fcntl.fcntl(own, fcntl.F_OFD_SETLK, _lock(fcntl.F_RDLCK))
    except OSError:
        os.close(own)
        raise
    return own


def held(guard: int) -> bool:
    """Whether any process still has this memory by way of ``hold``. ``guard`` is a descriptor from ``reopen``.

    The lock belongs to the open file description, and a mapping keeps that open: so it ends exactly when nobody can
    touch the memory any more, be it by unmapping or by death, SIGKILL included.
    """
    found = fcntl.fcntl(guard, fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK))  # asks only, and so disturbs nobody
    return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)


def _lock(kind: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0)
