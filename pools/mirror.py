"""The memory of the host mirror.

Owns: making it, all of it, at the start. Must not: know what lies in it.

The parent makes it and keeps the descriptor; engines map it and go. So it outlives every engine, and ends with the parent.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from pdxfer.core.reasons import Refused

from . import memory


def allocate(size: int) -> int:
    """A sealed memfd of at least ``size`` reserved bytes, in huge pages where enough of them are free.

    Raises Refused('no_shm'), which says what was asked for and what there is.
    """
    huge = huge_page()
    if huge and size >= huge:
        rounded = -(-size // huge) * huge
        try:
            fd = os.memfd_create("mirror", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
        except OSError:
            fd = -1  # none for this process
        if fd >= 0:
            try:
                os.ftruncate(fd, rounded)
                os.posix_fallocate(fd, 0, rounded)
                memory.seal(fd)
                return fd
            except OSError:
                os.close(fd)  # fewer than were asked for: plain ones then
    fd = memory.create("mirror", memory.align(size))
    try:
        memory.reserve(fd, 0, memory.align(size), "mirror")
        memory.seal(fd)
    except Refused:
        os.close(fd)
        raise
    return fd


def huge_page(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes of a huge page; 0 while none is free."""
    try:
        found = dict(re.findall(r"^(HugePages_Free|Hugepagesize):\s+(\d+)", meminfo.read_text(), re.MULTILINE))
    except OSError:
        return 0
    return int(found.get("Hugepagesize", 0)) * 1024 if int(found.get("HugePages_Free", 0)) else 0
