"""What the host did not give: descriptors, space, memory, threads. In words for people instead of a traceback.

Owns: telling such an exception from a defect, and the least that a sidecar needs. Must not: log, or end anything.
"""

from __future__ import annotations

import errno
import resource
from typing import Final, NamedTuple

LEAST_DESCRIPTORS: Final = 64  # about 30 at rest; ZeroMQ aborts the process when it finds none for its own

_ELSEWHERE: Final = "or move it (node.runtime_dir, bootstrap.key_file, worker.socket)"
_ADVICE: Final = {
    errno.EMFILE: "the limit is {files} (ulimit -n, LimitNOFILE=), of which a peer takes about four: raise it",
    errno.ENFILE: "the whole host has no open file left (sysctl fs.file-max): close some, or raise that",
    errno.ENOSPC: f"free space there, {_ELSEWHERE}",
    errno.EDQUOT: f"free space there, raise the user's quota, {_ELSEWHERE}",
    errno.EFBIG: "the process may not write files of that size (ulimit -f, LimitFSIZE=): raise that",
    errno.ENOMEM: "give it more memory (the host's, the container's limit, ulimit -v, LimitAS=)",
    errno.ENOBUFS: "the kernel has no buffers left: give the host more memory",
    errno.EAGAIN: "allow more processes and threads (ulimit -u, TasksMax=, the container's pids limit)",
}
_LIMITS: Final = (errno.EFBIG,)  # of this process: another try ends the same way until somebody raises them
_THREADS: Final = (
    "allow more threads (ulimit -u, TasksMax=, the container's pids limit)"
    " or memory for their stacks (ulimit -v, LimitAS=)"
)


class Shortage(NamedTuple):
    words: str  # what is short, and what to do
    passes: bool  # another start may find enough


def of(error: BaseException) -> Shortage | None:
    """None: it is something else."""
    if isinstance(error, MemoryError):
        return Shortage(f"no memory left: {_ADVICE[errno.ENOMEM]}", True)
    if isinstance(error, ImportError) and ("failed to map segment" in str(error) or "allocate memory" in str(error)):
        return Shortage(f"no memory left for a library: {_ADVICE[errno.ENOMEM]}", True)
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return Shortage(f"no thread can be started: {_THREADS}", True)
    if isinstance(error, OSError) and error.errno in _ADVICE:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        where = f"{error.filename}: " if error.filename else ""
        advice = _ADVICE[error.errno].format(files=files)
        return Shortage(f"{where}{error.strerror}: {advice}", error.errno not in _LIMITS)
    return None


def chain(error: BaseException, told: tuple[type[BaseException], ...]) -> list[BaseException]:
    """What came first, comes first: an exception, and what was under way when it was raised.

    What lies behind one of ``told`` is in its words already.
    """
    found: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in found:
        found.append(at)
        at = None if isinstance(at, told) else at.__cause__ or at.__context__
    return found[::-1]
