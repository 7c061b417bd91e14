"""Faults of what a sidecar needs: descriptors, shared memory, memory, and the network.

Owns: taking them away and giving them back. Must not: touch any process or memory but this run's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import time
from pathlib import Path

from pdxfer.client import AsyncClient, PdxferError
from pdxfer.demo.faults import NotInjected
from pdxfer.pools import PoolLayout, SharedPool

from .faults import Base, Kill
from .netns import netem
from .verdict import Row
from .wire import refused

ATTACH_WITHIN = 5.0
NO_NETEM = "this kernel has no netem: delay and loss cannot be made"


class Descriptors(Base):
    """A sidecar may open no file any more, while workers knock."""

    def __init__(self, node: str, knocks: int = 40) -> None:
        super().__init__()
        self.node = node
        self._knocks = knocks
        self._open: list[socket.socket] = []
        self._limits = (0, 0)
        self._pid = 0
        self._before = 0
        self._told = ""

    async def strike(self) -> None:
        world = self.world
        self._pid = world.pid(f"sidecar {self.node}")
        self._before = await refused(world, self.node, "worker")
        self._limits = resource.prlimit(self._pid, resource.RLIMIT_NOFILE)
        highest = max(int(fd) for fd in os.listdir(f"/proc/{self._pid}/fd"))
        resource.prlimit(self._pid, resource.RLIMIT_NOFILE, (highest + 1, self._limits[1]))
        world.manager.note("kill", f"sidecar {self.node}", f"RLIMIT_NOFILE {highest + 1}")
        for _ in range(self._knocks):
            s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            s.settimeout(0.2)
            with contextlib.suppress(OSError):  # a full backlog is what was wanted
                s.connect(str(world.directory / f"{self.node}.sock"))
            self._open.append(s)
        await asyncio.sleep(3.0)

    async def prove(self) -> str:
        """The limit is the kernel's, and accept() has met it: seen in the log, since /metrics needs a descriptor too."""
        log = self.world.log_of(f"sidecar {self.node}")
        if "accepting paused" not in log and "Too many open files" not in log:
            raise NotInjected(f"sidecar {self.node} (pid {self._pid}) has not met its limit of descriptors")
        limit = resource.prlimit(self._pid, resource.RLIMIT_NOFILE)[0]
        return f"sidecar {self.node} (pid {self._pid}) ran into its limit of {limit} descriptors"

    async def cease(self) -> None:
        for s in self._open:
            s.close()
        resource.prlimit(self._pid, resource.RLIMIT_NOFILE, self._limits)
        row = Row("a worker attaches after descriptors are there again", f"{ATTACH_WITHIN:g} s", ATTACH_WITHIN)
        began = time.monotonic()
        pool = SharedPool.allocate(PoolLayout("kv", "uint8", (4096,), page_tokens=16, planes=1), 16)
        try:
            path = str(self.world.directory / f"{self.node}.sock")
            client = await AsyncClient.connect(path, "probe", "both", [pool], timeout=4 * ATTACH_WITHIN, wait=True)
            row.values.append(time.monotonic() - began)
            await client.close()
        except PdxferError as error:
            row.values.append(time.monotonic() - began)
            row.note = str(error)[:200]
        self.rows.append(row)


class SharedMemory(Kill):
    """/dev/shm of a node is full while its engine has to be started again."""

    def __init__(self, node: str, seconds: float = 5.0) -> None:
        super().__init__(f"engine of {node}")
        self.node = node
        self._seconds = seconds
        self._file = Path()
        self._told = ""

    async def strike(self) -> None:
        pid = self.world.pid(f"sidecar {self.node}")
        there = Path(f"/proc/{pid}/root/dev/shm")
        if os.stat(there).st_dev == os.stat("/dev/shm").st_dev:
            raise NotInjected(f"sidecar {self.node} has no /dev/shm of its own")
        self._file = there / "chaos-fill"
        with self._file.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"\0" * 4096):
                continue
        free = os.statvfs(there)
        if free.f_bavail:
            raise NotInjected(f"{free.f_bavail} blocks of {there} are still free")
        self._told = f"all {free.f_blocks} blocks of /dev/shm of sidecar {self.node} were taken"
        await super().strike()
        await asyncio.sleep(self._seconds)

    async def prove(self) -> str:
        return f"{self._told}; {await super().prove()}"

    async def cease(self) -> None:
        self._file.unlink(missing_ok=True)


class Memory(Kill):
    """A node's memory is used up while its engine has to be started again: the engine cannot start."""

    def __init__(self, node: str, seconds: float = 4.0) -> None:
        super().__init__(f"engine of {node}")
        self.node = node
        self._seconds = seconds
        self._pid = 0
        self._limits = (0, 0)
        self._failed = 0
        self._told = ""

    async def strike(self) -> None:
        self._pid = self.world.pid(f"sidecar {self.node}")
        self._limits = resource.prlimit(self._pid, resource.RLIMIT_AS)
        needed, limit = _size(self.victims[0].pid), _size(self._pid) + (32 << 20)
        if limit >= needed:
            raise NotInjected(
                f"the engine needs {needed >> 20} MiB, its parent itself has {limit >> 20}: no limit is between them"
            )
        self._told = f"an engine needs {needed >> 20} MiB of address space and may have {limit >> 20}"
        resource.prlimit(self._pid, resource.RLIMIT_AS, (limit, self._limits[1]))
        await super().strike()
        before = self.world.log_of(f"sidecar {self.node}").count("the engine is gone")
        await asyncio.sleep(self._seconds)
        self._failed = self.world.log_of(f"sidecar {self.node}").count("the engine is gone") - before

    async def prove(self) -> str:
        """The limit is the kernel's, and below what the engine had; how many could not start is told."""
        return f"{await super().prove()}; {self._told}; {max(0, self._failed - 1)} more ended for want of it"

    async def cease(self) -> None:
        resource.prlimit(self._pid, resource.RLIMIT_AS, self._limits)


def _size(pid: int) -> int:
    """Bytes of address space."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()


class Cut(Base):
    """No packet passes between two nodes, one way or both."""

    def __init__(self, *ways: tuple[str, str]) -> None:
        super().__init__()
        self.ways = ways

    async def strike(self) -> None:
        assert self.world.network is not None
        for source, target in self.ways:
            if not await asyncio.to_thread(self.world.network.passes, source, target):
                raise NotInjected(f"nothing passed from {source} to {target} before the cut")
        for source, target in self.ways:
            self.world.network.cut(source, target)
            self.world.manager.note("kill", f"link {source} to {target}", "cut")

    async def prove(self) -> str:
        assert self.world.network is not None
        for source, target in self.ways:
            if await asyncio.to_thread(self.world.network.passes, source, target):
                raise NotInjected(f"packets still pass from {source} to {target}")
        return ", ".join(f"50 datagrams from {source} to {target} did not arrive" for source, target in self.ways)

    async def cease(self) -> None:
        assert self.world.network is not None
        for source, target in self.ways:
            self.world.network.heal(source, target)


class Degraded(Base):
    """A link that is slow, or that delays and loses packets."""

    def __init__(self, node: str, *qdisc: str, seconds: float = 8.0) -> None:
        super().__init__()
        self.node = node
        self.qdisc = qdisc
        self._seconds = seconds
        self._told = ""

    async def strike(self) -> None:
        assert self.world.network is not None
        self.world.network.shape(self.node, *self.qdisc)
        self.world.manager.note("kill", f"link of {self.node}", " ".join(self.qdisc))
        await asyncio.sleep(self._seconds)
        self._told = self.world.network.qdisc(self.node)

    async def prove(self) -> str:
        if self.qdisc[0] not in self._told or "Sent 0 bytes" in self._told:
            raise NotInjected(f"no packet passed {self.qdisc[0]}: {self._told}")
        return " ".join(self._told.split())[:160]

    async def cease(self) -> None:
        assert self.world.network is not None
        self.world.network.unshape(self.node)


def no_netem() -> str:
    return "" if netem() else NO_NETEM
