"""Measure the engine's staged path against plain NIXL, on this machine: python benchmarks/engine_path.py [--tls tcp] …

Three ways to move the same scattered pages between two processes, one after the other:
  descriptor  one WRITE of one descriptor of the same bytes: the limit
  per page    one WRITE with a descriptor per page: what engines do without staging
  staged      two engine children as the sidecar runs them: gather, digest, WRITE, digest, scatter

The plain ways run without a progress thread, the target polling every 0.2 ms, the initiator without pause.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing as mp
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from pdxfer.core import jobs
from pdxfer.core.geometry import Piece
from pdxfer.core.messages import Segment
from pdxfer.engine.child import EngineChild
from pdxfer.engine.nixl import load
from pdxfer.engine.settings import EngineSettings
from pdxfer.pools import PoolLayout, SharedPool


def _plain_agent(name: str, size: int) -> tuple[Any, np.ndarray]:
    nixl = load()
    agent = nixl.api.nixl_agent(name, nixl.api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
    memory = np.zeros(size, np.uint8)
    agent.register_memory([(memory.ctypes.data, size, 0, "")], "DRAM")
    return agent, memory


def _plain_target(pipe: Connection, size: int) -> None:
    agent, memory = _plain_agent("target", size)
    pipe.send((agent.get_agent_metadata(), memory.ctypes.data))
    while not pipe.poll(0):
        agent.get_new_notifs()
        time.sleep(0.0002)
    os._exit(0)


def _plain_initiator(pipe: Connection, size: int, page: int, repeat: int, metadata: bytes, there: int) -> None:
    agent, memory = _plain_agent("initiator", size)
    memory[:] = 7
    here = memory.ctypes.data
    agent.add_remote_agent(metadata)
    pages = size // page
    rng = np.random.default_rng(3)

    def descriptors(base: int) -> np.ndarray:
        found = np.zeros((pages, 3), np.uint64)
        found[:, 0] = base + rng.permutation(pages).astype(np.uint64) * page
        found[:, 1] = page
        return found

    def write(source: Any, target: Any) -> float:
        began = time.perf_counter()
        handle = agent.initialize_xfer(
            "WRITE", agent.get_xfer_descs(source, "DRAM"), agent.get_xfer_descs(target, "DRAM"), "target", b"done"
        )
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        handle.release()
        return time.perf_counter() - began

    out: dict[str, list[float]] = {"descriptor": [], "per page": []}
    for _ in range(repeat + 1):
        out["descriptor"].append(write([(here, size, 0)], [(there, size, 0)]))
        out["per page"].append(write(descriptors(here), descriptors(there)))
    pipe.send(out)
    pipe.recv()
    os._exit(0)


def plain(settings: EngineSettings, size: int, page: int, repeat: int) -> dict[str, list[float]]:
    os.environ.update(settings.environment())
    context = mp.get_context("spawn")
    ours_t, theirs_t = context.Pipe()
    ours_i, theirs_i = context.Pipe()
    target = context.Process(target=_plain_target, args=(theirs_t, size))
    target.start()
    metadata, there = ours_t.recv()
    initiator = context.Process(target=_plain_initiator, args=(theirs_i, size, page, repeat, metadata, there))
    initiator.start()
    found: dict[str, list[float]] = ours_i.recv()
    ours_i.send("end")
    ours_t.send("end")
    initiator.join()
    target.join()
    return {name: times[1:] for name, times in found.items()}  # the first one pays for the connection


def _burnt(pid: int | None) -> float:
    """Seconds of processor time."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Staged:
    """Two engines, and a window of slots that are sent, scattered and used again."""

    def __init__(self, settings: EngineSettings, size: int, page: int, window: int) -> None:
        self.settings = settings
        self.pages = size // page
        self.page = page
        self.per_slot = settings.slot_bytes // page
        self.window = min(window, settings.send_slots, settings.recv_slots)
        self.counters: dict[str, dict[str, float]] = {}
        self.ready: dict[str, jobs.Ready] = {}
        self.event = asyncio.Event()
        self.a = EngineChild(settings, lambda r: self.on("a", r), self.on_exit)
        self.b = EngineChild(settings, lambda r: self.on("b", r), self.on_exit)
        self.mapped = 0
        self.todo: list[tuple[np.ndarray, np.ndarray]] = []
        self.at: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.left = 0
        self.free_send: list[int] = []
        self.free_recv: list[int] = []
        self.burnt = [0.0, 0.0]

    def on_exit(self, detail: str) -> None:
        if self.left:
            raise SystemExit(detail)

    def on(self, name: str, report: jobs.EngineReport) -> None:
        match report:
            case jobs.Ready():
                self.ready[name] = report
            case jobs.Mapped(error=error) | jobs.PeerAdded(error=error):
                assert not error, error
                self.mapped += 1
            case jobs.Sent(job=id, error=error):
                assert not error, error
                self.free_send.append(id % self.settings.send_slots)
                self.pump()
            case jobs.Landed(segment=segment):
                _, target = self.at[segment.segment]
                rows = (jobs.Rows(0, 0, 1, target.tobytes()),)
                self.b.send(jobs.Scatter(segment.segment, 1, rows, segment.slot, segment.bytes, segment.digest))
            case jobs.Scattered(job=id, error=error):
                assert not error, error
                self.free_recv.append(self.slot_of.pop(id))
                self.left -= 1
                self.pump()
            case jobs.Counters(values=values):
                self.counters[name] = values
        self.event.set()

    def pump(self) -> None:
        info = self.ready["b"].info
        while self.todo and self.free_send and self.free_recv:
            source, target = self.todo.pop()
            send, recv = self.free_send.pop(), self.free_recv.pop()  # the one last used: it is in the cache
            self.serial += 1
            id = self.serial * self.settings.send_slots + send
            self.at[id] = (source, target)
            self.slot_of[id] = recv
            size = len(source) * self.page
            segment = Segment("room", 0, id, recv, 1, 1, size, 0, (Piece(0, 0, 1, 0, len(source)),))
            address = info.slot_base + recv * info.slot_bytes
            rows = (jobs.Rows(0, 0, 1, source.tobytes()),)
            self.a.send(jobs.Send(id, 1, rows, send, size, info.agent, address, segment))

    async def until(self, done: Any) -> None:
        while not done():
            self.event.clear()
            await asyncio.wait_for(self.event.wait(), 30)

    async def run(self, repeat: int) -> list[float]:
        self.serial = 0
        self.slot_of: dict[int, int] = {}
        await self.a.start("bench-a", 1, 1)
        await self.b.start("bench-b", 1, 1)
        await self.until(lambda: len(self.ready) == 2)
        layout = PoolLayout("kv", "uint8", (self.page,), 16, planes=1)
        pools = [SharedPool.allocate(layout, self.pages) for _ in range(2)]
        rng = np.random.default_rng(1)
        pools[0].pages()[0][:] = rng.integers(0, 256, (self.pages, self.page), dtype=np.uint8)
        for child, pool in zip((self.a, self.b), pools, strict=True):
            child.send(jobs.MapPools(1, (pool.at(),), pool.fd_bytes), pool.fds)
        self.a.send(jobs.AddPeer(self.ready["b"].info))
        await self.until(lambda: self.mapped == 3)
        self.b.send(jobs.Expect(self.window))
        self.free_send, self.free_recv = list(range(self.window)), list(range(self.window))
        times = []
        before = [_burnt(child.pid) for child in (self.a, self.b)]
        for _ in range(repeat + 1):
            source = rng.permutation(self.pages).astype("<u4")
            target = rng.permutation(self.pages).astype("<u4")
            step = self.per_slot
            self.todo = [(source[n : n + step], target[n : n + step]) for n in range(0, self.pages, step)]
            self.left = len(self.todo)
            self.at.clear()
            began = time.perf_counter()
            self.pump()
            await self.until(lambda: not self.left)
            times.append(time.perf_counter() - began)
            assert (pools[1].pages()[0][target] == pools[0].pages()[0][source]).all(), "wrong bytes"
        self.burnt = [_burnt(child.pid) - had for child, had in zip((self.a, self.b), before, strict=True)]
        await asyncio.sleep(1.1)  # for the last counters
        await self.a.close(5)
        await self.b.close(5)
        return times[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tls", default="tcp", help="UCX_TLS, e.g. tcp or cma,tcp")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--page", type=int, default=16384)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--slot-kib", type=int, nargs="*", default=[EngineSettings().slot_bytes >> 10])
    parser.add_argument("--window", type=int, nargs="*", default=[16])
    parser.add_argument("--copy-threads", type=int, nargs="*", default=[EngineSettings().threads])
    parser.add_argument("--staged-only", action="store_true")
    options = parser.parse_args()
    size = options.mib << 20
    print(f"UCX_TLS={options.tls}, {options.mib} MiB in scattered pages of {options.page} bytes, GB/s: median (best)")
    if not options.staged_only:
        for name, times in plain(EngineSettings(tls=options.tls), size, options.page, options.repeat).items():
            _print(name, times, size)
    for slot in options.slot_kib:
        for threads in options.copy_threads:
            for window in options.window:
                settings = EngineSettings(
                    tls=options.tls,
                    slot_bytes=slot << 10,
                    copy_threads=threads,
                    send_slots=max(16, window),
                    recv_slots=32,
                )
                staged = Staged(settings, size, options.page, window)
                times = asyncio.run(staged.run(options.repeat))
                _print(f"staged, slot {slot} KiB, window {window}, {threads} copy threads", times, size)
                _shares(staged, size * (options.repeat + 1))


def _print(name: str, times: list[float], size: int) -> None:
    print(f"  {name:48} {size / sorted(times)[len(times) // 2] / 1e9:6.2f} ({size / min(times) / 1e9:.2f})")


def _shares(staged: Staged, size: int) -> None:
    a, b = staged.counters["a"], staged.counters["b"]
    parts = {
        "gather": a["gather_seconds"],
        "digest": a["digest_seconds"],
        "scatter": b["scatter_seconds"],
        "digest again": b["digest_seconds"],
    }
    rates = ", ".join(f"{name} {size / max(t, 1e-9) / 1e9:.1f}" for name, t in parts.items())
    sender, receiver = (t / (size / 1e9) for t in staged.burnt)
    print(f"    GB/s of the parts: {rates}; processor time {sender:.2f} + {receiver:.2f} s per GB")


if __name__ == "__main__":
    main()
