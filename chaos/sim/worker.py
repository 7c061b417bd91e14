"""Virtual workers: an inference engine's process as far as pdxfer sees it, and the room's judge.

Owns: requests at their moments, page allocation that uses a page again as soon as it came home, and the checks of what
the worker is told: one end per room, released once, right bytes. Must not: ask the Node anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pdxfer.core import worker
from pdxfer.core.events import WorkerSaid

from .memory import SPECS, Memory
from .mirror import MirrorUser
from .sidecar import Sidecar
from .world import Violation, World

Key = tuple[str, int]


@dataclass
class PushPlan:
    """One push: logical pages of each pool, in planes ``plane0`` …; ``together``: with the same pages as the one before."""

    page0: tuple[int, ...]
    counts: tuple[int, ...]
    plane0: int
    planes: int
    wait: float
    together: bool = False


@dataclass
class Task:
    """One side of a room as its worker lives it."""

    room: str
    epoch: int
    sending: bool
    source: str = ""
    counts: tuple[int, ...] = ()
    pushes: list[PushPlan] = field(default_factory=list)
    finishes: bool = True
    taken: bool = False  # the sidecar said Ok
    ended: str = ""
    aborted: bool = False
    next_push: int = 0
    then: Callable[[str], None] | None = None  # called with the end's reason
    lent: dict[int, list[tuple[int, list[int]]]] = field(default_factory=dict)  # push request -> (pool, pages)
    pages: list[list[int]] = field(default_factory=list)  # of a receive
    held: tuple[int, ...] = (0, 0)  # of these the first ones have their content before
    last_pages: list[list[int]] = field(default_factory=list)

    @property
    def key(self) -> Key:
        return (self.room, self.epoch)


def table(pages: list[int]) -> bytes:
    return np.array(pages, dtype="<u4").tobytes()


class VirtualWorker:
    def __init__(self, world: World, side: Sidecar, engine_id: str, num_pages: tuple[int, ...]) -> None:
        self.world, self.side, self.engine_id, self.num_pages = world, side, engine_id, num_pages
        self.memory = Memory(world, engine_id, num_pages)
        self.life = 0
        self.id: int | None = None
        self.connected = False
        self.silent = False
        self.req = 0
        self.asked: dict[int, tuple[str, Task | None]] = {}
        self.doomed: set[Key] = set()  # aborted before they came
        self.tasks: dict[tuple[str, int, bool], Task] = {}
        self.held: list[Task] = []  # ended by a lost connection: their pages are not safe before we are attached again
        self.mirror = MirrorUser(self) if world.mirror is not None else None
        world.workers.append(self)
        self.attach()
        self._ping(0)

    # connection ----------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        if self.id is not None:
            return
        self.req += 1
        pools = tuple(
            worker.PoolAt(s, n, tuple(worker.PlaneAt(0, p * s.page_bytes * n, s.page_bytes) for p in range(s.planes)))
            for s, n in zip(SPECS, self.num_pages, strict=True)
        )
        frame = worker.Attach(
            self.req, worker.WORKER_PROTOCOL, self.engine_id, "both", 1000 + self.life, pools, (1 << 20,)
        )
        self.id = self.side.connect(self, frame, self.memory)
        if self.id is None:
            self._again()

    def _again(self) -> None:
        life = self.life
        self.world.after(
            self.world.workload.choice((0.001, 0.02, 0.2)), lambda: self.attach() if life == self.life else None
        )

    def disconnected(self) -> None:
        """The sidecar is gone or has hung up: every room ends, and no page is touched before we are attached again."""
        if self.id is None:
            return
        self.id, self.connected = None, False
        for task in self.tasks.values():
            if not task.ended:
                self._end(task, "sidecar_lost")
                self.held.append(task)
        self.tasks.clear()
        self.asked.clear()
        self.doomed.clear()
        if self.mirror is not None:
            self.mirror.disconnected()
        self._again()

    def drop(self) -> None:
        """We close the connection ourselves, alive."""
        if self.id is not None:
            self.side.hang_up(self.id, "closed by the client")
            self.disconnected()

    def kill(self, back_after: float) -> None:
        """The process dies; another, with other memory, takes its place."""
        self.world.note(self.engine_id, "WORKER KILLED")
        self.memory.orphan = True
        if self.id is not None:
            self.side.hang_up(self.id, "connection reset")
        for task in self.tasks.values():
            if not task.ended:
                self._end(task, "died")
        self.id, self.connected, self.silent = None, False, False
        self.tasks, self.asked, self.held, self.doomed = {}, {}, [], set()
        self.memory = Memory(self.world, f"{self.engine_id}#{self.life + 1}", self.num_pages)
        self.life += 1
        if self.mirror is not None:
            self.mirror.died()
        life = self.life
        self.world.after(back_after, lambda: self.attach() if life == self.life else None)
        self._ping(life)

    def _ping(self, life: int) -> None:
        if life != self.life:
            return
        if self.tasks or (self.mirror is not None and self.mirror.busy):
            self.say(worker.Ping())
        self.world.after(0.5, lambda: self._ping(life))

    def say(self, frame: worker.WorkerRequest | worker.Ping) -> None:
        if self.id is None or self.silent:
            return
        id, incarnation = self.id, self.side.incarnation
        if self.world.trace:
            self.world.note(self.engine_id, frame)

        def arrive() -> None:
            if self.side.incarnation == incarnation:
                self.side.deliver(WorkerSaid(id, frame))

        self.world.after(0.0002, arrive)

    def _ask(self, kind: str, task: Task | None) -> int:
        self.req += 1
        self.asked[self.req] = (kind, task)
        return self.req

    # sending -------------------------------------------------------------------------------------------------------

    def open(self, task: Task) -> None:
        if not self.connected or self.silent:
            return
        self.tasks[(task.room, task.epoch, True)] = task
        self.say(worker.Open(self._ask("open", task), task.room, task.epoch))
        self._next(task)

    def _next(self, task: Task) -> None:
        life = self.life
        if task.next_push < len(task.pushes):
            self.world.after(task.pushes[task.next_push].wait, lambda: self._push(task) if life == self.life else None)
        elif task.finishes:
            self.world.after(0.001, lambda: self._finish(task) if life == self.life else None)

    def _push(self, task: Task) -> None:
        if task.ended or self.silent or not self.connected:
            return
        plan = task.pushes[task.next_push]
        if not (plan.together and task.last_pages):
            pages = self._allocate(plan.counts)
            if pages is None:
                self.world.after(0.02, lambda: self._push(task))
                return
            task.last_pages = pages
        task.next_push += 1
        pages = [table_[:n] for table_, n in zip(task.last_pages, plan.counts, strict=True)]
        contents = self.world.contents[task.key]
        req = self._ask("push", task)
        task.lent[req] = []
        for pool, spec in enumerate(SPECS):
            planes = plan.planes or spec.planes
            for plane in range(plan.plane0, min(plan.plane0 + planes, spec.planes)):
                for i, page in enumerate(pages[pool]):
                    self.memory.pages[pool][plane][page] = contents[pool][plane][plan.page0[pool] + i]
            if pages[pool]:
                self.memory.lend_read(pool, pages[pool])
                task.lent[req].append((pool, pages[pool]))
        self.say(
            worker.Push(
                req, task.room, task.epoch, plan.page0, plan.plane0, plan.planes, tuple(table(p) for p in pages)
            )
        )  # fmt: skip
        self._next(task)

    def _allocate(self, counts: tuple[int, ...]) -> list[list[int]] | None:
        if any(n > len(self.memory.free[pool]) for pool, n in enumerate(counts)):
            return None
        return [self.memory.allocate(pool, n) or [] for pool, n in enumerate(counts)]

    def _finish(self, task: Task) -> None:
        if not task.ended:
            self.say(worker.Finish(self._ask("finish", task), task.room, task.epoch, task.room.encode()))

    # receiving -----------------------------------------------------------------------------------------------------

    def receive(self, task: Task, tries: int = 20) -> None:
        if not self.connected or self.silent:
            return
        pages = self._allocate(task.counts)
        if pages is None:
            if tries:
                life = self.life
                self.world.after(0.05, lambda: self.receive(task, tries - 1) if life == self.life else None)
            return
        task.pages = pages
        if self.mirror is not None:
            task.held = self.mirror.holds(task)
        for pool, table_ in enumerate(pages):
            self.memory.lend_write(pool, table_[task.held[pool] :], f"{task.room}/{task.epoch}")
        self.tasks[(task.room, task.epoch, False)] = task
        self.say(
            worker.Receive(
                self._ask("receive", task),
                task.room,
                task.epoch,
                task.source,
                0,
                tuple(table(p) for p in pages),
                task.held if any(task.held) else (),
            )
        )

    def abort(self, room: str, epoch: int) -> None:
        for sending in (True, False):
            task = self.tasks.get((room, epoch, sending))
            if task is not None:
                task.aborted = True
        if (room, epoch, True) not in self.tasks and (room, epoch, False) not in self.tasks:
            self.doomed.add((room, epoch))
        self.say(worker.Abort(self._ask("abort", None), room, epoch, "gone"))
        self._must_end(room, epoch)

    def _must_end(self, room: str, epoch: int) -> None:
        life = self.life

        def check() -> None:
            for sending in (True, False):
                task = self.tasks.get((room, epoch, sending))
                if life == self.life and task is not None and task.aborted and task.taken and not self.silent:
                    raise Violation(
                        f"{self.engine_id}: room {room}/{epoch} was aborted {self.world.abort_bound:g} s ago and has not ended"
                    )

        self.world.after(self.world.abort_bound, check)

    # what the sidecar says -----------------------------------------------------------------------------------------

    def says(self, id: int, frame: worker.SidecarFrame) -> None:
        if id != self.id:
            return
        match frame:
            case worker.Attached():
                self.connected = True
                for lost in self.held:
                    self._home(lost)
                self.held = []
                if self.mirror is not None:
                    self.mirror.attached()
            case worker.Held() | worker.Evicted() | worker.MirrorEnded() if self.mirror is not None:
                self.mirror.says(frame)
            case worker.Ok(req=req) if self.mirror is not None and self.mirror.answers(req):
                self.mirror.ok(req)
            case worker.Rejected(req=req, code=code) if self.mirror is not None and self.mirror.answers(req):
                self.mirror.rejected(req, code)
            case worker.Ok(req=req):
                kind, task = self._answered(req)
                if kind == "reuse":
                    raise Violation(f"{self.engine_id}: a room that has ended was taken a second time (request {req})")
                if kind in ("open", "receive") and task is not None:
                    task.taken = True
                    if task.key in self.doomed:
                        task.aborted = True
                        self._must_end(*task.key)
            case worker.Rejected(req=req, code=code):
                if req not in self.asked:
                    return  # the attach: the sidecar hangs up after it
                kind, task = self._answered(req)
                if task is None:
                    return
                if kind == "push" and req in task.lent:  # else its room ended while it was on its way
                    self._push_home(task, req)
                elif kind in ("open", "receive"):
                    self._end(task, f"rejected: {code}")
                    self._home(task)
                    del self.tasks[(task.room, task.epoch, task.sending)]
            case worker.Released(req=req, room=room, epoch=epoch):
                pushed = self._task(room, epoch, True, frame)
                if req not in pushed.lent:
                    raise Violation(f"{self.engine_id}: {frame} comes twice, or of no push")
                self._push_home(pushed, req)
            case worker.RoomEnded(room=room, epoch=epoch, sending=sending, reason=reason):
                over = self._task(room, epoch, sending, frame)
                if not over.taken:
                    raise Violation(f"{self.engine_id}: {frame} before the room was taken")
                if reason == "done":
                    self._check(over, frame)
                self._end(over, reason)
                self._home(over)
                del self.tasks[(room, epoch, sending)]
                if self.req % 8 == 0:  # once more under the same id and epoch: it must be refused
                    ask = self._ask("reuse", None)
                    none = tuple(b"" for _ in SPECS)
                    self.say(
                        worker.Open(ask, room, epoch)
                        if sending
                        else worker.Receive(ask, room, epoch, over.source, 0, none)
                    )
            case worker.Matched(room=room, epoch=epoch, sending=sending):
                self._task(room, epoch, sending, frame)

    def _answered(self, req: int) -> tuple[str, Task | None]:
        if req not in self.asked:
            raise Violation(f"{self.engine_id}: a second answer to request {req}")
        return self.asked.pop(req)

    def _task(self, room: str, epoch: int, sending: bool, frame: object) -> Task:
        task = self.tasks.get((room, epoch, sending))
        if task is None or task.ended:
            raise Violation(f"{self.engine_id}: {frame} for a room that has ended or never was")
        return task

    def _check(self, task: Task, frame: worker.RoomEnded) -> None:
        """DONE: every byte must be right."""
        if task.sending:
            if not task.finishes or task.next_push < len(task.pushes):
                raise Violation(f"{self.engine_id}: send {task.key} is done before it was finished")
            return
        contents = self.world.contents[task.key]
        if frame.aux != task.room.encode():
            raise Violation(f"{self.engine_id}: receive {task.key} is done with aux {frame.aux!r}")
        for pool, planes in enumerate(contents):
            for plane, logical in enumerate(planes):
                for i, token in enumerate(logical):
                    page = task.pages[pool][i]
                    found = self.memory.pages[pool][plane][page]
                    if found != token:
                        raise Violation(
                            f"{self.engine_id}: receive {task.key} is done with WRONG BYTES:"
                            f" pool {pool} plane {plane} logical page {i} (page {page}) holds {found}, sent was {token}"
                        )

    def _end(self, task: Task, reason: str) -> None:
        key = (task.room, task.epoch, task.sending)
        if task.ended or key in self.world.ends:
            raise Violation(f"{self.engine_id}: room {key} ended twice: {self.world.ends.get(key)}, {reason}")
        task.ended = reason
        self.world.ends[key] = reason
        self.world.end_times[key] = self.world.now
        if task.then is not None:
            self.world.after(0.001, lambda: task.then(reason) if task.then is not None else None)

    def _push_home(self, task: Task, req: int) -> None:
        for pool, pages in task.lent.pop(req):
            self.memory.home_read(pool, pages)

    def _home(self, task: Task) -> None:
        for req in list(task.lent):
            self._push_home(task, req)
        for pool, pages in enumerate(task.pages):
            self.memory.home_write(pool, pages[task.held[pool] :])
            self.memory.home_own(pool, pages[: task.held[pool]])
        task.pages = []
