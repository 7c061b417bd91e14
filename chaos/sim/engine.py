"""A virtual engine child: staging slots with contents, copies that take time, WRITEs that land when they like.

Owns: the physics. A gather and a scatter touch their pages over an interval; a WRITE reads its slot when it lands, not
when it was posted, and lands even after its room has ended; notifications come in any order or not at all; nothing of
it happens once the process is dead. Must not: decide; it does what jobs say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from pdxfer.core import jobs
from pdxfer.core.ledger import SlotState
from pdxfer.core.messages import EngineInfo, Segment
from pdxfer.core.state import agent_name

from .memory import Memory
from .world import Violation

if TYPE_CHECKING:
    from .sidecar import Sidecar

SLOT_BYTES = 200
SLOT_BASE = 1 << 20


def digest(tokens: list[int]) -> int:
    return hash(tuple(tokens)) & (2**64 - 1)


class VirtualEngine:
    """One process. ``side`` is its parent; reports and jobs pass through pipes that keep their order."""

    def __init__(self, side: Sidecar, incarnation: int, send_slots: int, recv_slots: int) -> None:
        self.side = side
        self.world = side.world
        self.incarnation = incarnation
        self.agent = agent_name(side.name, side.incarnation, incarnation)
        self.serial = len(side.world.engines)
        self.alive = True
        self.hung = False
        self._held: list[Callable[[], None]] = []  # what a hung engine will do once it runs again
        self.send_slots: list[list[int]] = [[] for _ in range(send_slots)]
        self.recv_slots: list[list[int]] = [[] for _ in range(recv_slots)]
        self.pools: dict[int, Memory] = {}
        self.mirror: dict[int, list[int]] | None = None  # of the parent: what each entry holds, by offset
        self.copied: dict[int, str] = {}  # entries that a job touches: "read" or "written"
        self.peers: set[str] = set()
        self.incoming: dict[int, tuple[int, int, str]] = {}  # WRITEs into this engine: slot, generation, whose
        self._writes: dict[int, VirtualEngine] = {}  # WRITEs by this engine, from the job on, and their targets
        self.last_report = 0.0
        self.last_job = 0.0
        # what faults set
        self.slow = 1.0
        self.error = 0.0  # chance that a job fails
        self.lose_landed = 0.05
        self.late_write = 0.0  # chance that a WRITE takes seconds

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            self.incarnation, self.agent, "1.5.1", b"m", b"d", SLOT_BASE, SLOT_BYTES, len(self.recv_slots)
        )

    def kill(self) -> None:
        """Not one byte moves after this."""
        self.alive = False
        self._held.clear()
        for number in list(self._writes):
            self._written(number)

    # pipes and time ------------------------------------------------------------------------------------------------

    def submit(self, job: jobs.EngineJob) -> None:
        memory = None
        if isinstance(job, jobs.MapPools):  # the descriptors travel with the frame
            memory = self.side.memories.get(job.worker)
            if memory is None:
                raise Violation(f"{self.agent}: MapPools of worker {job.worker}, whose descriptors are closed")
        if isinstance(job, jobs.Send):
            target = self.world.engines[job.agent]
            why = f"{self.agent} Send {job.job} of {job.segment.room}/{job.segment.epoch}"
            self._writes[job.job] = target
            target.incoming[self._number(job.job)] = (
                (job.address - SLOT_BASE) // SLOT_BYTES,
                job.segment.generation,
                why,
            )
        self.last_job = max(self.last_job, self.world.now + 0.0001)
        self.world.at(self.last_job, lambda: self.does(lambda: self._start(job, memory)))

    def report(self, report: jobs.EngineReport, delay: float = 0.0002) -> None:
        self.last_report = max(self.last_report, self.world.now + delay)
        self.world.at(self.last_report, lambda: self.side.engine_said(self, report))

    def does(self, call: Callable[[], None]) -> None:
        """Code of the engine's process: it waits while the process is stopped and dies with it."""
        if not self.alive:
            return
        if self.hung:
            self._held.append(call)
        else:
            call()

    def resume(self) -> None:
        self.hung = False
        held, self._held = self._held, []
        for call in held:
            self.does(call)

    def _later(self, low: float, high: float, call: Callable[[], None], most: float = float("inf")) -> None:
        delay = (low + (high - low) * self.world.metal.random()) * self.slow * self.world.pace
        self.world.after(min(delay, most), lambda: self.does(call))

    def _fails(self) -> bool:
        return self.world.metal.random() < self.error

    # jobs ----------------------------------------------------------------------------------------------------------

    def _start(self, job: jobs.EngineJob, memory: Memory | None) -> None:
        match job:
            case jobs.MapPools(worker=worker):
                assert memory is not None
                self.pools[worker] = memory
                self.report(jobs.Mapped(worker, ""))
            case jobs.UnmapPools(worker=worker):
                del self.pools[worker]
            case jobs.AddPeer(info=info):
                if info.agent in self.peers:
                    raise Violation(f"{self.agent}: peer {info.agent} added twice")
                self.peers.add(info.agent)
                error = "injected" if self._fails() else ""
                self.world.refused |= bool(error)
                # It holds up the whole process: one that takes longer is an engine that hangs, which is another fault.
                most = self.world.limits.stall_deadline
                self._later(0.0005, 0.003, lambda: self.report(jobs.PeerAdded(info.agent, error)), most)
            case jobs.RemovePeer(agent=agent):
                self.peers.discard(agent)
            case jobs.Send():
                self._send(job)
            case jobs.Scatter():
                self._scatter(job)
            case jobs.Copy():
                self._copy(job)
            case jobs.MapMirror():
                self.mirror = self.side.mirror
                self.report(jobs.MirrorMapped(""))
            case jobs.MirrorStore() | jobs.MirrorLoad():
                self._mirror(job)
            case jobs.Expect() | jobs.Close():
                return

    def _cells(self, worker: int, rows: tuple[jobs.Rows, ...], why: str) -> list[tuple[Memory, int, int, int]]:
        memory = self.pools.get(worker)
        if memory is None:
            raise Violation(f"{why}: the pools of worker {worker} are not mapped")
        out = []
        for row in rows:
            pages = [int.from_bytes(row.pages[i : i + 4], "little") for i in range(0, len(row.pages), 4)]
            out += [
                (memory, row.pool, plane, page)
                for plane in range(row.plane0, row.plane0 + row.planes)
                for page in pages
            ]
        return out

    def _send(self, job: jobs.Send) -> None:
        why = f"{self.agent} Send {job.job} of {job.segment.room}/{job.segment.epoch}"
        cells = self._cells(job.worker, job.rows, why)
        slot = self.send_slots[job.slot]
        slot[:] = [-1] * len(cells)
        half = len(cells) // 2

        def gather(first: int, last: int) -> None:
            for i in range(first, last):
                memory, pool, plane, page = cells[i]
                slot[i] = memory.read(pool, plane, page, why)

        def gathered() -> None:
            gather(half, len(cells))
            found = digest(slot)
            self.report(jobs.Gathered(job.job))
            self._post(job, msgspec.structs.replace(job.segment, digest=found), why)

        def begin() -> None:
            gather(0, half)
            self._later(0.0002, 0.001, gathered)

        self._later(0.0002, 0.001, begin)

    def _post(self, job: jobs.Send, segment: Segment, why: str) -> None:
        """The WRITE: it runs on while this process is stopped, and ends with either process."""
        if self._fails():
            self._written(job.job)
            self._later(0.001, 0.01, lambda: self.report(jobs.Sent(job.job, 0, "injected", 0.0)))
            return
        metal = self.world.metal
        seconds = (0.001 + 0.006 * metal.random()) * self.slow * self.world.pace
        if metal.random() < self.late_write:
            seconds += 5.0 * metal.random()
        target = self.world.engines[job.agent]
        index = (job.address - SLOT_BASE) // SLOT_BYTES
        n = len(self.send_slots[job.slot])

        def polled(error: str) -> None:
            self.report(jobs.Sent(job.job, segment.digest, error, 0.0), 0.0002 + 0.002 * metal.random())
            if not error and metal.random() >= self.lose_landed:
                self.world.after(
                    0.0002 + 0.003 * metal.random(),
                    lambda: target.does(lambda: target.report(jobs.Landed(self.agent, segment))),
                )

        def move(first: int, last: int, then: Callable[[], None]) -> None:
            if not self.alive:
                return
            if not target.alive:
                self.world.after(
                    0.005 + 0.2 * metal.random(), lambda: self.does(lambda: polled("nixlRemoteDisconnectError"))
                )
                return
            if not self.world.network.data_open(self.side.name, target.side.name):
                self.world.after(0.1, lambda: move(first, last, then))
                return
            target.landing(index, segment, n, self.send_slots[job.slot], first, last, why)
            then()

        def rest() -> None:
            self.world.after(seconds / 2, lambda: move(n // 2, n, moved))

        def moved() -> None:
            self._written(job.job)
            self.does(lambda: polled(""))

        self.world.after(seconds / 2, lambda: move(0, n // 2, rest))

    def landing(self, index: int, segment: Segment, n: int, source: list[int], first: int, last: int, why: str) -> None:
        """Bytes of a peer's WRITE arrive. This is where a slot that was given away too early shows."""
        if not 0 <= index < len(self.recv_slots) or n > SLOT_BYTES:
            raise Violation(f"{why}: lands outside the slots of {self.agent} (slot {index})")
        core = self.side.core
        if core is not None and core.state.engine.info is not None and core.state.engine.info.agent == self.agent:
            self.check_slot(index, segment.generation, why)
        memory = self.recv_slots[index]
        if len(memory) < n:
            memory.extend([-2] * (n - len(memory)))
        memory[first:last] = source[first:last]

    def check_slot(self, index: int, generation: int, why: str) -> None:
        """What a WRITE goes to must be held for it by the books of this engine's parent."""
        assert self.side.core is not None
        slot = self.side.core.state.engine.recv.all[index]
        if slot.generation != generation or slot.state not in (SlotState.GRANTED, SlotState.QUARANTINED):
            raise Violation(
                f"{why}: goes to slot {index} generation {generation} of {self.agent},"
                f" which is {slot.state} in generation {slot.generation}"
            )

    def _number(self, job: int) -> int:
        return job << 32 | self.serial

    def _written(self, job: int) -> None:
        """Not one byte of this WRITE moves any more."""
        target = self._writes.pop(job, None)
        if target is not None:
            target.incoming.pop(self._number(job), None)

    def _scatter(self, job: jobs.Scatter) -> None:
        why = f"{self.agent} Scatter {job.job}"
        cells = self._cells(job.worker, job.rows, why)
        slot = self.recv_slots[job.slot]
        half = len(cells) // 2

        def put(first: int, last: int) -> None:
            for i in range(first, last):
                memory, pool, plane, page = cells[i]
                memory.write(pool, plane, page, slot[i], why)

        def end() -> None:
            put(half, len(cells))
            self.report(jobs.Scattered(job.job, "injected" if self._fails() else "", False))

        def middle() -> None:
            put(0, half)
            self._later(0.0002, 0.002, end)

        def begin() -> None:
            if digest(slot[: len(cells)]) != job.digest:
                self.report(jobs.Scattered(job.job, "digest", True))
            else:
                self._later(0.0002, 0.002, middle)

        self._later(0.0002, 0.001, begin)

    def _copy(self, job: jobs.Copy) -> None:
        why = f"{self.agent} Copy {job.job}"
        source = self._cells(job.source, job.source_rows, why)
        target = self._cells(job.target, job.target_rows, why)
        if len(source) != len(target):
            raise Violation(f"{why}: {len(source)} pages to {len(target)}")
        half = len(source) // 2

        def copy(first: int, last: int) -> None:
            for (a, ap, al, an), (b, bp, bl, bn) in zip(source[first:last], target[first:last], strict=True):
                b.write(bp, bl, bn, a.read(ap, al, an, why), why)

        def end() -> None:
            copy(half, len(source))
            self.report(jobs.Copied(job.job, "injected" if self._fails() else ""))

        def begin() -> None:
            copy(0, half)
            self._later(0.0005, 0.003, end)

        self._later(0.0002, 0.001, begin)

    def _mirror(self, job: jobs.MirrorStore | jobs.MirrorLoad) -> None:
        storing = isinstance(job, jobs.MirrorStore)
        why = f"{self.agent} {type(job).__name__} {job.job}"
        mirror = self.mirror
        if mirror is None:
            raise Violation(f"{why}: the mirror is not mapped")
        work: list[tuple[list[int], int, tuple[Memory, int, int, int]]] = []
        bad = []
        for n, entry in enumerate(job.entries):
            if entry.offset in self.copied and (storing or self.copied[entry.offset] == "written"):
                raise Violation(f"{why}: the entry at {entry.offset} is being {self.copied[entry.offset]}")
            near = [at for at in mirror if at != entry.offset and abs(at - entry.offset) < job.entry_bytes]
            if near:
                raise Violation(f"{why}: {job.entry_bytes} bytes at {entry.offset} overlap the entry at {near[0]}")
            cells = self._cells(job.worker, entry.rows, why)
            place = mirror.setdefault(entry.offset, [])
            if storing:
                place[:] = [-3] * len(cells)
            elif digest(place) != entry.digest:
                bad.append(n)
                continue
            self.copied[entry.offset] = "written" if storing else "read"
            work += [(place, i, cell) for i, cell in enumerate(cells)]
        half = len(work) // 2

        def move(first: int, last: int) -> None:
            for place, i, (memory, pool, plane, page) in work[first:last]:
                if storing:
                    place[i] = memory.read(pool, plane, page, why)
                else:
                    memory.write(pool, plane, page, place[i], why)

        def end() -> None:
            move(half, len(work))
            for entry in job.entries:
                self.copied.pop(entry.offset, None)
            error = "injected" if self._fails() else ""
            if storing:
                digests = () if error else tuple(digest(mirror[entry.offset]) for entry in job.entries)
                self.report(jobs.MirrorStored(job.job, digests, error))
            else:
                self.report(jobs.MirrorLoaded(job.job, tuple(bad), error))

        def begin() -> None:
            move(0, half)
            self._later(0.0005, 0.003, end)

        self._later(0.0002, 0.001, begin)
