"""Two engine children with real NIXL: pages go over, byte for byte, and what is wrong is named."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from engines import SMALL, Handle, close, pair, pool_of, table

from pdxfer.core import jobs
from pdxfer.core.jobs import Rows
from pdxfer.core.worker import PlaneAt, PoolAt

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("tls", ["", "tcp"])
@pytest.mark.parametrize("copy_threads", [0, 2])
def test_many_shapes_arrive_byte_for_byte(tls: str, copy_threads: int) -> None:
    async def main() -> None:
        p, d = await pair(msgspec.structs.replace(SMALL, tls=tls, copy_threads=copy_threads))
        rng = np.random.default_rng(5)
        shapes = [(768, 64, 5), (16384, 40, 3), (8448, 33, 2), (13, 50, 4)]
        sources = [pool_of(s, n, k, f"pool{i}", fill=i) for i, (s, n, k) in enumerate(shapes)]
        targets = [pool_of(s, n, k, f"pool{i}") for i, (s, n, k) in enumerate(shapes)]
        assert await p.map(1, *sources) == "" and await d.map(1, *targets) == ""
        for trial in range(24):
            here, there, size, checks = [], [], 0, []
            for i, (page_bytes, pages, planes) in enumerate(shapes):
                n = int(rng.integers(1, 8))
                a, b = rng.permutation(pages)[:n], rng.permutation(pages)[:n]
                if trial % 3 == 0:
                    a = b = np.arange(n) + 2
                plane0 = int(rng.integers(0, planes))
                count = int(rng.integers(1, planes - plane0 + 1))
                here.append(Rows(i, plane0, count, table(a)))
                there.append(Rows(i, plane0, count, table(b)))
                size += count * n * page_bytes
                checks.append((i, plane0, count, a, b))
            job = p.post(d.info, tuple(here), size, slot=trial % 4, recv=trial % 8)
            landed = await d.landed(job)
            assert landed.agent == p.info.agent
            sent = await p.report(jobs.Sent, job=job)
            assert (sent.error, sent.digest) == ("", landed.segment.digest)
            kinds = [type(r) for r in p.reports if getattr(r, "job", None) == job]
            assert kinds == [jobs.Gathered, jobs.Sent]
            d.child.send(jobs.Scatter(job, 1, tuple(there), trial % 8, size, landed.segment.digest))
            scattered = await d.report(jobs.Scattered, job=job)
            assert (scattered.error, scattered.mismatch) == ("", False)
            for i, plane0, count, a, b in checks:
                for plane in range(plane0, plane0 + count):
                    assert (targets[i].pages()[plane][b] == sources[i].pages()[plane][a]).all()
        await close(p, d)
        assert [h.child.exit_status for h in (p, d)] == [0, 0]

    asyncio.run(main())


def test_many_in_flight_with_slots_used_again() -> None:
    async def main() -> None:
        p, d = await pair(msgspec.structs.replace(SMALL, tls="tcp"))
        pages, size = 256, 32 * 16384
        source, target = pool_of(16384, pages, 1, fill=1), pool_of(16384, pages, 1)
        await p.map(1, source)
        await d.map(1, target)
        order = np.random.default_rng(2).permutation(pages)
        free_send, free_recv, todo, slot_of = [0, 1, 2, 3], list(range(8)), list(range(0, pages, 32)) * 4, {}
        seen, scattered = 0, 0
        while scattered < pages // 32 * 4:
            while todo and free_send and free_recv:
                at, send, recv = todo.pop(0), free_send.pop(0), free_recv.pop(0)
                job = p.post(d.info, (Rows(0, 0, 1, table(order[at : at + 32])),), size, slot=send, recv=recv)
                slot_of[job] = (send, recv, at)
            await d.until(lambda seen=seen: len(d.reports) + len(p.reports) > seen)
            seen = len(d.reports) + len(p.reports)
            for report in p.reports:
                if isinstance(report, jobs.Sent) and slot_of.get(report.job, (-1,))[0] >= 0:
                    assert report.error == ""
                    free_send.append(slot_of[report.job][0])
                    slot_of[report.job] = (-1, *slot_of[report.job][1:])
            for report in list(d.reports):
                if isinstance(report, jobs.Landed):
                    d.reports.remove(report)
                    s = report.segment
                    rows = (Rows(0, 0, 1, table(np.arange(slot_of[s.segment][2], slot_of[s.segment][2] + 32))),)
                    d.child.send(jobs.Scatter(s.segment, 1, rows, s.slot, s.bytes, s.digest))
                elif isinstance(report, jobs.Scattered):
                    d.reports.remove(report)
                    assert (report.error, report.mismatch) == ("", False)
                    free_recv.append(slot_of[report.job][1])
                    scattered += 1
            seen = len(d.reports) + len(p.reports)
        assert (target.pages()[0] == source.pages()[0][order]).all()
        await d.until(lambda: any(isinstance(r, jobs.Counters) and r.values["notifications"] == 32 for r in d.reports))
        await close(p, d)

    asyncio.run(main())


def test_a_wrong_digest_touches_no_page() -> None:
    async def main() -> None:
        p, d = await pair()
        source, target = pool_of(4096, 8, fill=1), pool_of(4096, 8)
        await p.map(1, source)
        await d.map(1, target)
        rows = (Rows(0, 0, 1, table([1, 5])),)
        p.post(d.info, rows, 8192, recv=2)
        landed = await d.report(jobs.Landed)
        d.child.send(jobs.Scatter(1, 1, rows, 2, 8192, landed.segment.digest ^ 1))
        scattered = await d.report(jobs.Scattered, job=1)
        assert scattered.mismatch and "expected" in scattered.error
        assert not target.pages()[0].any()
        d.child.send(jobs.Scatter(2, 1, rows, 2, 8192, landed.segment.digest))
        assert (await d.report(jobs.Scattered, job=2)).error == ""
        await close(p, d)

    asyncio.run(main())


def test_copy_from_pool_to_pool() -> None:
    async def main() -> None:
        e = Handle("e")
        await e.start()
        source, target = pool_of(1000, 64, 3, fill=1), pool_of(1000, 64, 3)
        assert await e.map(1, source) == "" and await e.map(2, target) == ""
        a, b = np.random.default_rng(1).permutation(64)[:40], np.random.default_rng(2).permutation(64)[:40]
        size = 2 * 40 * 1000
        e.child.send(jobs.Copy(1, size, 1, (Rows(0, 1, 2, table(a)),), 2, (Rows(0, 1, 2, table(b)),)))
        assert (await e.report(jobs.Copied, job=1)).error == ""
        for plane in (1, 2):
            assert (target.pages()[plane][b] == source.pages()[plane][a]).all()
        assert not target.pages()[0].any()
        e.child.send(jobs.UnmapPools(2))
        e.child.send(jobs.Copy(2, size, 1, (Rows(0, 1, 2, table(a)),), 2, (Rows(0, 1, 2, table(b)),)))
        assert "worker 2 are not mapped" in (await e.report(jobs.Copied, job=2)).error
        await close(e)

    asyncio.run(main())


def test_bad_jobs_are_answered_by_name() -> None:
    async def main() -> None:
        p, d = await pair()
        source = pool_of(4096, 8, fill=1)
        assert await p.map(1, source) == ""
        p.reports.clear()
        assert "mapped already" in await p.map(1, source)
        cases = [
            ({"rows": (Rows(0, 0, 1, table([8])),), "size": 4096}, "page 8 of 8"),
            ({"rows": (Rows(1, 0, 1, table([0])),), "size": 4096}, "pool 1"),
            ({"rows": (Rows(0, 0, 2, table([0])),), "size": 8192}, "planes 0+2 of 1"),
            ({"rows": (Rows(0, 0, 1, table([0])),), "size": 8192}, "the rows have 4096 bytes"),
            ({"rows": (Rows(0, 0, 1, table([0])),), "size": 4096, "slot": 99}, "send slot 99"),
            ({"rows": (Rows(0, 0, 1, table([0])),), "size": 4096, "worker": 7}, "worker 7"),
            ({"rows": (Rows(0, 0, 1, b""),), "size": 4096}, "page table"),
        ]
        for options, text in cases:
            job = p.post(d.info, **options)
            assert text in (await p.report(jobs.Sent, job=job)).error
        stranger = msgspec.structs.replace(d.info, agent="x:1:1")
        job = p.post(stranger, (Rows(0, 0, 1, table([0])),), 4096)
        assert "no such peer" in (await p.report(jobs.Sent, job=job)).error
        job = p.post(d.info, (Rows(0, 0, 1, table([0])),), 4096)
        assert (await p.report(jobs.Sent, job=job)).error == ""
        job = p.post(
            msgspec.structs.replace(d.info, slot_base=d.info.slot_base - 4096), (Rows(0, 0, 1, table([0])),), 4096
        )
        assert "outside its receive slots" in (await p.report(jobs.Sent, job=job)).error
        await close(p, d)

    asyncio.run(main())


def test_pools_that_cannot_be_mapped() -> None:
    async def main() -> None:
        e = Handle("e")
        await e.start()
        pool = pool_of(4096, 8)
        at = pool.at()

        async def refused(worker: int, at: PoolAt, size: int, fd: int) -> str:
            e.child.send(jobs.MapPools(worker, (at,), (size,)), (fd,))
            return (await e.report(jobs.Mapped, worker=worker)).error

        fd, size = pool.fds[0], pool.fd_bytes[0]
        assert "expected the" in await refused(1, at, size + 1, fd)
        assert "expected within" in await refused(2, msgspec.structs.replace(at, num_pages=9), size, fd)
        wrong = msgspec.structs.replace(at, planes=(PlaneAt(0, 0, 100),))
        assert "stride 100" in await refused(3, wrong, size, fd)
        assert "descriptor 3" in await refused(4, msgspec.structs.replace(at, planes=(PlaneAt(3, 0, 4096),)), size, fd)
        loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
        os.ftruncate(loose, size)
        assert "F_SEAL_SHRINK" in await refused(5, at, size, loose)
        os.close(loose)
        assert await refused(6, at, size, fd) == ""
        assert len(os.listdir(f"/proc/{e.child.pid}/fd")) < 40
        await close(e)

    asyncio.run(main())


def test_many_descriptors_in_one_frame() -> None:
    async def main() -> None:
        e = Handle("e")
        await e.start()
        pools = [pool_of(4096, 1, name=f"p{i}") for i in range(300)]
        before = len(os.listdir("/proc/self/fd"))
        assert await e.map(1, *pools) == ""
        assert len(os.listdir("/proc/self/fd")) <= before
        await close(e)

    asyncio.run(main())


def test_descriptors_that_do_not_come_through_are_missed_by_name() -> None:
    async def main() -> None:
        e = Handle("e")
        await e.start()
        few = len(os.listdir(f"/proc/{e.child.pid}/fd")) + 3
        _, hard = resource.prlimit(e.child.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(e.child.pid, resource.RLIMIT_NOFILE, (few, hard))
        assert "ulimit -n" in await e.map(1, *[pool_of(4096, 1, name=f"p{i}") for i in range(20)])
        resource.prlimit(e.child.pid, resource.RLIMIT_NOFILE, (hard, hard))
        assert await e.map(2, *[pool_of(4096, 1, name=f"p{i}") for i in range(20)]) == ""
        await close(e)

    asyncio.run(main())


def test_an_unmapped_pool_is_let_go() -> None:
    async def main() -> None:
        from pdxfer.pools import memory

        e = Handle("e")
        await e.start()
        pool = pool_of(4096, 8, fill=1)
        held = memory.hold(pool.fds[0])
        e.child.send(jobs.MapPools(1, (pool.at(),), pool.fd_bytes), (held,))
        os.close(held)
        assert (await e.report(jobs.Mapped, worker=1)).error == ""
        assert pool.held()
        e.child.send(jobs.Copy(1, 4096, 1, (Rows(0, 0, 1, table([1])),), 1, (Rows(0, 0, 1, table([2])),)))
        await e.report(jobs.Copied, job=1)
        e.child.send(jobs.UnmapPools(1))
        deadline = time.monotonic() + 2
        while pool.held():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        await close(e)

    asyncio.run(main())


def test_an_idle_engine_sleeps_and_its_heart_beats() -> None:
    async def main() -> None:
        p, d = await pair()
        d.child.send(jobs.Expect(0))
        await asyncio.sleep(1.0)

        def burnt(pid: int) -> float:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

        before = [(burnt(h.child.pid), h.child.heartbeat) for h in (p, d)]
        await asyncio.sleep(4.0)
        for handle, (cpu, beat) in zip((p, d), before, strict=True):
            assert burnt(handle.child.pid) - cpu <= 0.02 * 4.0
            assert handle.child.heartbeat - beat >= 20
        await close(p, d)

    asyncio.run(main())


def test_a_small_transfer_is_quick() -> None:
    async def main() -> None:
        p, d = await pair(msgspec.structs.replace(SMALL, tls="tcp"))
        source, target = pool_of(4096, 8, fill=1), pool_of(4096, 8)
        await p.map(1, source)
        await d.map(1, target)
        times = []
        for _ in range(40):
            job = p.post(d.info, (Rows(0, 0, 1, table([1])),), 4096)
            times.append((await p.report(jobs.Sent, job=job)).seconds)
        assert sorted(times)[len(times) // 2] < 0.002  # 0.3 ms on a quiet machine
        await close(p, d)

    asyncio.run(main())
