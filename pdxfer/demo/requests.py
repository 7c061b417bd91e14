"""What the two kinds of workers have in common: requests, each a task of its own, that end exactly once, by name.

Owns: the table of requests under way, their abort, and the count of their ends. Must not: know what a request does.

The task of a request is cancelled by ``abort`` alone and at most once, so that its clean-up may wait for what must be waited
for: a computation in a thread, the room's end. An HTTP client that goes away asks for an abort and waits for nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import msgspec

from pdxfer.client import PdxferError, PdxferRefused, RoomEnd, SidecarUnavailable
from pdxfer.pools import SharedPool

from .ends import ABORTED, DONE, Failure
from .engine import Engine
from .paging import NoPages, Pages

log = logging.getLogger("pdxfer.demo")
Key = tuple[str, int]


class PrefillAsk(msgspec.Struct, frozen=True):
    room: str
    tokens: list[int]
    epoch: int = 0


class DecodeAsk(msgspec.Struct, frozen=True):
    room: str
    source: str  # the prefill worker's engine id
    length: int  # of the prompt, in tokens
    max_tokens: int
    epoch: int = 0


class AbortAsk(msgspec.Struct, frozen=True):
    room: str
    epoch: int = 0
    detail: str = ""


class Aux(msgspec.Struct, frozen=True, array_like=True):
    """What travels with the room, beside the pages."""

    token: int  # the first of the answer
    length: int
    digest: str  # of the cache, as the prefill worker has it
    seed: int


class Room(Protocol):
    """A handle of AsyncClient."""

    @property
    def end(self) -> RoomEnd | None: ...
    async def ended(self) -> RoomEnd: ...
    async def abort(self, detail: str = "") -> None: ...


class Sidecar(Protocol):
    """What the workers use of AsyncClient."""

    @property
    def node(self) -> str: ...
    @property
    def connected(self) -> bool: ...
    @property
    def problem(self) -> str: ...
    async def open(self, room: str, epoch: int = 0) -> Any: ...
    async def receive(self, room: str, source: str, pages: list[int], epoch: int = 0) -> Any: ...
    async def abort(self, room: str, epoch: int = 0, detail: str = "") -> None: ...
    def find(self, room: str, epoch: int = 0, *, sending: bool) -> Any: ...
    async def close(self) -> None: ...


class Job:
    """A request under way. ``lines`` are what its HTTP answer consists of; the last one says how it ended."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.why = ""  # it is aborted
        self.began = False
        self.task: asyncio.Task[None] | None = None
        self._lines: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    def emit(self, line: dict[str, Any]) -> None:
        self._lines.put_nowait(line)

    def close(self) -> None:
        self._lines.put_nowait(None)

    async def lines(self) -> AsyncIterator[dict[str, Any]]:
        while (line := await self._lines.get()) is not None:
            yield line

    async def last(self) -> dict[str, Any]:
        line: dict[str, Any] = {}
        async for found in self.lines():
            line = found
        return line


class Worker:
    """A worker's requests, pages and threads."""

    role = ""

    def __init__(self, engine: Engine, sidecar: Sidecar, *, admission: float) -> None:
        self.engine = engine
        self.sidecar = sidecar
        self.admission = admission  # seconds that a request waits for pages
        self.pages = Pages(engine.num_pages, poison=engine.poison, late=engine.late_bytes)
        self.ended: Counter[str] = Counter()
        self.wrong_bytes = 0
        self.compute = ThreadPoolExecutor(1, "compute")  # the model
        self.check = ThreadPoolExecutor(1, "check")  # digests, beside it
        self._jobs: dict[Key, Job] = {}
        self._draining = ""

    @property
    def pools(self) -> list[SharedPool]:
        return self.engine.pools

    @property
    def rooms_open(self) -> int:
        return len(self._jobs)

    def begin(self, room: str, epoch: int, serve: Callable[[Job], Awaitable[dict[str, Any]]]) -> Job:
        """Start a request. Raises Failure when it cannot be started at all."""
        if self._draining:
            raise Failure("shutdown", self._draining)
        key = (room, epoch)
        if key in self._jobs:
            raise Failure("room_exists", f"room {room}, epoch {epoch} is under way on this worker")
        job = self._jobs[key] = Job(key)
        job.task = asyncio.create_task(self._run(job, serve), name=f"{self.role} {room}")
        return job

    async def abort(self, room: str, epoch: int, detail: str) -> bool:
        """End a request; one that is not here yet ends when it comes. Returns whether it was here."""
        job = self._jobs.get((room, epoch))
        if job is not None:
            self.stop(job, detail or "aborted")
            return True
        try:
            await self.sidecar.abort(room, epoch, detail)
        except PdxferRefused as error:
            raise Failure.of_refusal(error) from error
        except SidecarUnavailable as error:
            raise Failure("sidecar_lost", str(error)) from error
        return False

    def stop(self, job: Job, detail: str) -> None:
        """Cancel its task, once."""
        if job.why or job.task is None or job.task.done():
            return
        job.why = detail
        if job.began:  # a task that is cancelled before it begins would never end by name
            job.task.cancel()

    async def close(self, seconds: float) -> None:
        """End everything by name."""
        self.drain("the worker is shutting down")
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=seconds)
            if late:
                log.warning("%d requests did not end within %g s of the shutdown", len(late), seconds)
        self.compute.shutdown(wait=False, cancel_futures=True)
        self.check.shutdown(wait=False, cancel_futures=True)

    def drain(self, why: str) -> None:
        """Take no more requests and abort those under way."""
        self._draining = why
        for job in list(self._jobs.values()):
            self.stop(job, why)

    def stats(self) -> dict[str, Any]:
        return {
            "role": self.role,
            "node": self.sidecar.node,
            "connected": self.sidecar.connected,
            "pages_total": self.pages.total,
            "pages_free": self.pages.free,
            "pages_held": self.pages.held,
            "pages_lent": self.pages.lent,
            "waiting": self.pages.waiting,
            "rooms_open": self.rooms_open,
            "wrong_bytes": self.wrong_bytes + self.pages.late_bytes,
            "late_bytes": self.pages.late_bytes,
            "requests": dict(self.ended),
        }

    async def take(self, tokens: int) -> list[int]:
        """Pages for so many tokens. Raises Failure."""
        if tokens > self.engine.context:
            raise Failure(
                "context_length_exceeded",
                f"the request needs {tokens} tokens of context, this model has {self.engine.context}",
            )
        try:
            return await self.pages.take(-(-tokens // self.engine.page_tokens), self.admission)
        except NoPages as error:
            raise Failure("no_pages", str(error)) from error

    async def end_room(self, key: Key, room: Room | None, *, sending: bool, detail: str) -> None:
        """Make sure that the room has ended, so that its pages are the worker's again."""
        room = room or self.sidecar.find(*key, sending=sending)  # the latter: its open was cancelled
        if room is None or room.end is not None:
            return
        try:
            await room.abort(detail)
        except PdxferError as error:
            log.info("room %s: abort: %s; it ends with its sidecar", key[0], error)
        try:
            await room.ended()
        except PdxferRefused as error:
            log.info("room %s was never open: %s", key[0], error)

    async def in_thread(self, pool: ThreadPoolExecutor, call: Callable[..., Any], *args: Any) -> Any:
        """Run it in a thread, and wait for its end even if cancelled: a thread goes on and touches pages."""
        future = asyncio.get_running_loop().run_in_executor(pool, call, *args)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise

    async def _run(self, job: Job, serve: Callable[[Job], Awaitable[dict[str, Any]]]) -> None:
        job.began = True
        try:
            if job.why:
                raise asyncio.CancelledError
            last = {**await serve(job), "reason": DONE}
        except Failure as failure:
            last = {"error": failure.json()}
        except PdxferRefused as error:
            last = {"error": Failure.of_refusal(error).json()}
        except SidecarUnavailable as error:
            last = {"error": Failure("sidecar_lost", str(error)).json()}
        except asyncio.CancelledError:
            if not job.why:
                raise  # the loop is going down
            reason = "shutdown" if self._draining else ABORTED
            last = {"error": Failure(reason, job.why).json()}
        except Exception as error:
            log.exception("room %s: the %s worker failed", job.key[0], self.role)
            last = {"error": Failure("engine_error", f"{type(error).__name__}: {error}").json()}
        finally:
            del self._jobs[job.key]
        self.ended[last["error"]["reason"] if "error" in last else DONE] += 1
        job.emit(last)
        job.close()
