"""What processes hold: descriptors, threads, memory, shared memory.

Owns: reading that from /proc. Must not: judge; ``judge`` does.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from .world import World

MIB = float(1 << 20)


def of_process(pid: int) -> dict[str, float]:
    """Empty when there is no such process."""
    try:
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
        )
        return {
            "fds": float(len(os.listdir(f"/proc/{pid}/fd"))),
            "threads": float(status["Threads"]),
            "rss_mib": float(status["VmRSS"].split()[0]) * 1024 / MIB,
        }
    except (FileNotFoundError, ProcessLookupError, KeyError):
        return {}


def shared_memory() -> float:
    """Bytes used in /dev/shm, in MiB."""
    found = os.statvfs("/dev/shm")
    return (found.f_blocks - found.f_bfree) * found.f_frsize / MIB


async def take(world: World) -> dict[str, dict[str, float]]:
    """Of every sidecar's parent and engine, and of the machine."""
    found: dict[str, dict[str, float]] = {"machine": {"dev_shm_mib": shared_memory()}}
    for node in world.nodes:
        found[f"sidecar {node}"] = of_process(world.pid(f"sidecar {node}"))
        view = await world.look(node)
        found[f"engine of {node}"] = of_process(view.engine_pid) if view is not None and view.engine_pid else {}
    return found


class Crowding:
    """How often processes had to wait for a processor, by the kernel's own account (pressure stall information)."""

    PATH = Path("/proc/pressure/cpu")

    def __init__(self) -> None:
        self._before, self._at = self._stalled(), time.monotonic()

    def share(self) -> float:
        """Of the time since the last call, the part in which some process waited for a processor; 0 where no kernel tells."""
        stalled, now = self._stalled(), time.monotonic()
        found = (stalled - self._before) / max(now - self._at, 0.01)
        self._before, self._at = stalled, now
        return min(1.0, max(0.0, found))

    def _stalled(self) -> float:
        """Seconds since the machine's start."""
        try:
            some = self.PATH.read_text().splitlines()[0]
        except OSError:
            return 0.0
        return int(some.rpartition("total=")[2]) / 1e6


class Busy:
    """Which part of the machine's processors computed, for whomever."""

    PATH = Path("/proc/stat")

    def __init__(self) -> None:
        self._before = self._ticks()

    def share(self) -> float:
        """Since the last call, 0 to 1."""
        before, self._before = self._before, self._ticks()
        idle, total = (now - then for now, then in zip(self._before, before, strict=True))
        return min(1.0, max(0.0, 1.0 - idle / total)) if total > 0 else 0.0

    def _ticks(self) -> tuple[int, int]:
        """Idle ones, and all, of all processors since the machine's start."""
        fields = [int(n) for n in self.PATH.read_text().splitlines()[0].split()[1:9]]  # guest time is part of user time
        return fields[3] + fields[4], sum(fields)


class Others:
    """How much of the machine's processor time goes to processes that are not this run's.

    Every process of a run is in a session of its own or of one of those; everything else is somebody else's.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._before = self._ticks()
        self._at = time.monotonic()

    def cores(self) -> float:
        """Cores that others have used since the last call."""
        ticks, now = self._ticks(), time.monotonic()
        used = sum(max(0, n - self._before.get(key, 0)) for key, n in ticks.items())
        seconds = max(now - self._at, 0.01)
        self._before, self._at = ticks, now
        return used / os.sysconf("SC_CLK_TCK") / seconds

    def _ticks(self) -> dict[tuple[int, str], int]:
        """(pid, birth) -> ticks, of all that are not ours."""
        ours = {os.getsid(0)} if os.getsid(0) == os.getpid() else set()
        starts = (h for h in self._world.manager.happened if h.kind in ("start", "restart"))
        ours |= {int(h.detail.removeprefix("pid ")) for h in starts}
        found = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) != os.getpid():
                try:
                    fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                except (FileNotFoundError, ProcessLookupError):
                    continue
                if int(fields[3]) not in ours:
                    found[int(entry), fields[19]] = int(fields[11]) + int(fields[12])
        return found
