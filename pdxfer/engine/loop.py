"""The engine: jobs in, reports out, and the one loop that keeps copies and WRITEs going.

Owns: what is under way, and when the heartbeat ticks. Must not: remember anything that the parent cannot say again, or
decide about rooms; it has neither deadlines nor retries (the parent has both).

A Send goes: gather into its slot → Gathered → digest → WRITE → Sent. A Scatter goes: digest → scatter → Scattered. Gather, digest
and scatter run in the copy threads, NIXL in this one, so that the stages of different slots overlap.
"""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable
from typing import Final

import msgspec

from pdxfer.core import jobs
from pdxfer.core.messages import EngineInfo, Segment, decode_segment, encode_segment
from pdxfer.core.reasons import Refused

from . import copy
from .agent import Agent, PeerLost, metadata_digest
from .copier import Copier
from .counters import Counters
from .exits import ORDERLY
from .link import Link, ParentGone, close_all
from .mirror import Mirror
from .pace import Pace
from .planes import MappedPool, map_pools
from .settings import EngineSettings
from .slots import Slots
from .vitals import Vitals

log = logging.getLogger(__name__)

_COUNTERS_EVERY: Final = 1.0
_CLOSE_PATIENCE: Final = 2.0  # seconds for what is under way when the parent says Close
_NOTIFICATIONS_AT_ONCE: Final = 4096  # of one peer in one round; more are dropped, they are hints
_WARM_UP: Final = 0.5  # seconds of quick polling after a peer was added, for the connection to come up


class Engine:
    def __init__(
        self, settings: EngineSettings, incarnation: int, agent: Agent, slots: Slots, link: Link, vitals: Vitals
    ):
        self._settings = settings
        self._incarnation = incarnation
        self._agent = agent
        self._slots = slots
        self._link = link
        self._vitals = vitals
        self._pace = Pace()
        self._copier = Copier(settings.threads, settings.copy_stall)
        self._counters = Counters()
        self._told: dict[str, float] = {}
        self._told_at = 0.0
        self._pools: dict[int, list[MappedPool]] = {}
        self._mirror: Mirror | None = None
        self._sends: dict[int, jobs.Send] = {}  # gathering, or posted
        self._digests: dict[int, int] = {}  # of the posted ones
        self._copies = 0  # tasks given to the copier and not reported yet
        self._expect = 0
        self._warm_until = 0.0
        self._close_by: float | None = None
        self._readable = True  # the parent has said something

    def info(self) -> EngineInfo:
        agent = self._agent
        return EngineInfo(
            self._incarnation,
            agent.name,
            agent.version,
            agent.metadata,
            metadata_digest(agent.name, agent.version, agent.metadata),
            self._slots.recv_address,
            self._slots.slot_bytes,
            self._slots.recv_count,
        )

    def run(self, pid: int) -> int:
        """Serve until the parent says Close, or is gone. Returns the exit status."""
        self._link.report(jobs.Ready(self.info(), self._settings.send_slots, pid))
        try:
            while not self._round():
                self._wait()
        except ParentGone:
            log.info("the parent is gone")
        return ORDERLY

    # one round -----------------------------------------------------------------------------------------------------

    def _round(self) -> bool:
        """Do what can be done now. True when the engine has ended in order."""
        now = time.monotonic()
        moved = self._readable and self._take_jobs()
        moved |= self._copier.step()
        for transfer, error in self._agent.poll():
            self._over(transfer.tag, error, time.monotonic() - transfer.since)
            moved = True
        moved |= self._hear()
        if moved:
            self._pace.stir(now)
        self._tell_counters(now)
        self._link.flush()
        if not self._copier.hung(now):
            self._vitals.tick()
        if self._close_by is None:
            return False
        under_way = self._sends or self._copies or self._link.queued
        return not under_way or now > self._close_by

    def _wait(self) -> None:
        now = time.monotonic()
        waiting = self._expect > 0 or self._agent.busy or now < self._warm_until
        pause = 0.0 if self._copier.pending else self._pace.pause(now, waiting=waiting)
        link, wake = self._link.socket.fileno(), self._copier.wake
        readable, _, _ = select.select([link, wake], [link] if self._link.queued else [], [], pause)
        self._readable = link in readable
        if wake in readable:
            self._copier.drain_wake()

    def _take_jobs(self) -> bool:
        any_job = False
        for job, fds in self._link.receive():
            any_job = True
            self._take(job, fds)
        return any_job

    def _take(self, job: jobs.EngineJob, fds: tuple[int, ...]) -> None:
        match job:
            case jobs.Send():
                self._send(job)
            case jobs.Scatter():
                self._scatter(job)
            case jobs.Copy():
                self._copy(job)
            case jobs.Expect():
                self._expect = job.slots
            case jobs.MapPools():
                self._link.report(jobs.Mapped(job.worker, self._map(job, fds)))
            case jobs.UnmapPools():
                self._pools.pop(job.worker, None)
            case jobs.MirrorStore():
                self._store(job)
            case jobs.MirrorLoad():
                self._load(job)
            case jobs.MapMirror():
                self._link.report(jobs.MirrorMapped(self._map_mirror(job, fds)))
            case jobs.AddPeer():
                self._vitals.say(f"while it was adding peer {job.info.agent}")
                error = self._agent.add(job.info)
                self._vitals.say("")
                self._warm_until = time.monotonic() + _WARM_UP
                self._link.report(jobs.PeerAdded(job.info.agent, error))
            case jobs.RemovePeer():
                self._agent.remove(job.agent)
            case jobs.Close():
                self._close_by = time.monotonic() + _CLOSE_PATIENCE

    def _map(self, job: jobs.MapPools, fds: tuple[int, ...]) -> str:
        try:
            if len(fds) < len(job.fd_bytes):
                return f"{len(fds)} of {len(job.fd_bytes)} descriptors came through: raise the limit of open files (ulimit -n)"
            if job.worker in self._pools:
                return f"worker {job.worker} is mapped already"
            self._pools[job.worker] = map_pools(job.pools, job.fd_bytes, fds)
        except (ValueError, OSError) as error:
            return str(error)
        finally:
            close_all(fds)
        return ""

    def _of(self, worker: int) -> list[MappedPool]:
        pools = self._pools.get(worker)
        if pools is None:
            raise ValueError(f"the pools of worker {worker} are not mapped")
        return pools

    def _submit(self, task: Callable[[], Callable[[], None]]) -> None:
        """Run ``task`` in a copy thread; what it returns is run in this one."""
        self._copies += 1

        def whole() -> None:
            report = task()

            def done() -> None:
                self._copies -= 1
                report()

            self._copier.report(done)

        self._copier.submit(whole)

    # sending -------------------------------------------------------------------------------------------------------

    def _send(self, job: jobs.Send) -> None:
        problem = self._agent.usable(job.agent)
        if problem:
            self._sent(job, f"{job.agent}: {problem}")
            return
        self._sends[job.job] = job

        def task() -> Callable[[], None]:
            began = time.perf_counter()
            try:
                slot = self._slots.send(job.slot, job.bytes)
                copy.gather(self._of(job.worker), job.rows, slot)
            except Exception as error:  # noqa: BLE001
                text = _problem(error)
                return lambda: self._gather_failed(job, text)
            self._copier.report(lambda: self._link.report(jobs.Gathered(job.job)))
            gathered = time.perf_counter()
            digest = copy.digest(slot)
            self._counters.add(gather_seconds=gathered - began, digest_seconds=time.perf_counter() - gathered)
            return lambda: self._write(job, digest)

        self._submit(task)

    def _gather_failed(self, job: jobs.Send, error: str) -> None:
        self._counters.add(copy_errors=1)
        del self._sends[job.job]
        self._sent(job, f"gathering: {error}")

    def _write(self, job: jobs.Send, digest: int) -> None:
        segment: Segment = msgspec.structs.replace(job.segment, digest=digest)
        self._digests[job.job] = digest
        try:
            self._agent.post(
                job.agent, self._slots.send_address(job.slot), job.address, job.bytes, encode_segment(segment), job.job
            )
        except PeerLost as error:
            self._over(job.job, str(error), 0.0)

    def _over(self, id: int, error: str, seconds: float) -> None:
        """A WRITE is terminal."""
        job = self._sends.pop(id)
        digest = self._digests.pop(id)
        if error:
            self._sent(job, error, digest, seconds)
            return
        self._counters.add(transfers=1, bytes_sent=job.bytes, write_seconds=seconds)
        self._link.report(jobs.Sent(job.job, digest, "", seconds))

    def _sent(self, job: jobs.Send, error: str, digest: int = 0, seconds: float = 0.0) -> None:
        self._counters.add(transfer_errors=1)
        self._link.report(jobs.Sent(job.job, digest, error, seconds))

    # receiving -----------------------------------------------------------------------------------------------------

    def _hear(self) -> bool:
        heard = self._agent.notifications()
        for agent, raws in heard.items():
            self._counters.add(
                notifications=len(raws), notifications_dropped=max(0, len(raws) - _NOTIFICATIONS_AT_ONCE)
            )
            for raw in raws[:_NOTIFICATIONS_AT_ONCE]:
                try:
                    segment = decode_segment(raw)
                except Refused:
                    self._counters.add(notifications_garbage=1)
                    continue
                self._link.report(jobs.Landed(agent, segment))
        return bool(heard)

    def _scatter(self, job: jobs.Scatter) -> None:
        def task() -> Callable[[], None]:
            began = digested = time.perf_counter()
            error, mismatch = "", False
            try:
                slot = self._slots.recv(job.slot, job.bytes)
                found = copy.digest(slot)
                digested = time.perf_counter()
                mismatch = found != job.digest
                if mismatch:
                    error = f"the digest of {job.bytes} bytes is {found:016x}, expected {job.digest:016x}"
                else:
                    copy.scatter(self._of(job.worker), job.rows, slot)
            except Exception as problem:  # noqa: BLE001
                error = _problem(problem)
            self._counters.add(
                digest_seconds=digested - began,
                scatter_seconds=time.perf_counter() - digested,
                bytes_scattered=0 if error else job.bytes,
                digest_mismatches=mismatch,
                copy_errors=bool(error) and not mismatch,
            )
            return lambda: self._link.report(jobs.Scattered(job.job, error, mismatch))

        self._submit(task)

    def _copy(self, job: jobs.Copy) -> None:
        def task() -> Callable[[], None]:
            began = time.perf_counter()
            error = ""
            try:
                copy.copy(self._of(job.source), job.source_rows, self._of(job.target), job.target_rows, job.bytes)
            except Exception as problem:  # noqa: BLE001
                error = _problem(problem)
            self._counters.add(
                copy_seconds=time.perf_counter() - began,
                bytes_copied=0 if error else job.bytes,
                copy_errors=bool(error),
            )
            return lambda: self._link.report(jobs.Copied(job.job, error))

        self._submit(task)

    # the mirror ----------------------------------------------------------------------------------------------------

    def _map_mirror(self, job: jobs.MapMirror, fds: tuple[int, ...]) -> str:
        try:
            if len(fds) != 1:
                return f"{len(fds)} descriptors came through, expected 1"
            self._mirror = Mirror(fds[0], job.bytes)
        except (ValueError, OSError) as error:
            return str(error)
        finally:
            close_all(fds)
        return ""

    def _mapped_mirror(self) -> Mirror:
        if self._mirror is None:
            raise ValueError("the mirror is not mapped")
        return self._mirror

    def _store(self, job: jobs.MirrorStore) -> None:
        def task() -> Callable[[], None]:
            began = time.perf_counter()
            digests: tuple[int, ...] = ()
            error = ""
            try:
                digests = self._mapped_mirror().store(self._of(job.worker), job.entries, job.entry_bytes)
            except Exception as problem:  # noqa: BLE001
                error = _problem(problem)
            self._counters.add(
                mirror_store_seconds=time.perf_counter() - began,
                mirror_bytes_stored=len(digests) * job.entry_bytes,
                copy_errors=bool(error),
            )
            return lambda: self._link.report(jobs.MirrorStored(job.job, digests, error))

        self._submit(task)

    def _load(self, job: jobs.MirrorLoad) -> None:
        def task() -> Callable[[], None]:
            began = time.perf_counter()
            bad: tuple[int, ...] = ()
            error = ""
            try:
                bad = self._mapped_mirror().load(self._of(job.worker), job.entries, job.entry_bytes)
            except Exception as problem:  # noqa: BLE001
                error = _problem(problem)
            self._counters.add(
                mirror_load_seconds=time.perf_counter() - began,
                mirror_bytes_loaded=0 if error else (len(job.entries) - len(bad)) * job.entry_bytes,
                mirror_digest_mismatches=len(bad),
                copy_errors=bool(error),
            )
            return lambda: self._link.report(jobs.MirrorLoaded(job.job, bad, error))

        self._submit(task)

    # telling -------------------------------------------------------------------------------------------------------

    def _tell_counters(self, now: float) -> None:
        if now - self._told_at < _COUNTERS_EVERY:
            return
        self._told_at = now
        self._counters.set("nixl_errors", self._agent.errors)
        self._counters.set("reports_dropped", self._link.dropped)
        values = self._counters.snapshot()
        if values != self._told:
            self._told = values
            self._link.report(jobs.Counters(values))


def _problem(error: Exception) -> str:
    """What a copy thread failed of. Bad input is a ValueError; anything else is a defect and is logged as one."""
    if isinstance(error, ValueError):
        return str(error)
    log.exception("a defect: a copy raised")
    return f"{type(error).__name__}: {error}"
