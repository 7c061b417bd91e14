"""What processes hold: descriptors, threads, memory, shared memory.

Owns: reading that from /proc. Must not: judge; ``judge`` does.
"""

from __future__ import annotations

import os
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
