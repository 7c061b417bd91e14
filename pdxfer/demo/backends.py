"""The workers that a gateway may use, and whether they can serve.

Owns: health checks and the choice of workers. Must not: know requests; it tells those of a silent worker by a callback.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from . import http1
from .ends import Failure

log = logging.getLogger("pdxfer.demo")
CHECK_INTERVAL = 0.5
CHECK_TIMEOUT = 2.0
STALL = 10.0  # seconds without an answer, after which a worker's requests are given up


class Backend:
    """A worker. ``lost`` are called with why when it has been silent for too long."""

    def __init__(self, role: str, engine_id: str, url: str) -> None:
        self.role = role
        self.engine_id = engine_id
        self.url = url
        self.problem = "it was not asked yet"  # empty: healthy
        self.silent_since = 0.0  # time.monotonic; 0 while it answers
        self.lost: set[Callable[[Failure], None]] = set()

    @property
    def healthy(self) -> bool:
        return not self.problem

    def failed(self, problem: str) -> None:
        """A request found it down; believed until the next check."""
        self.problem = problem


class Backends:
    """All of them."""

    def __init__(self, backends: Iterable[Backend]) -> None:
        self.all: Sequence[Backend] = tuple(backends)
        self._turn = itertools.count()

    async def pick(self, role: str) -> Backend:
        """The next healthy one. Raises Failure('no_worker')."""
        wanted = [backend for backend in self.all if backend.role == role]
        if not any(backend.healthy for backend in wanted):  # it may have come back since the last look
            await asyncio.gather(*(self.check(backend) for backend in wanted))
        healthy = [backend for backend in wanted if backend.healthy]
        if not healthy:
            raise Failure(
                "no_worker",
                f"no healthy {role} worker: " + "; ".join(f"{b.engine_id} at {b.url}: {b.problem}" for b in wanted),
            )
        return healthy[next(self._turn) % len(healthy)]

    async def watch(self) -> None:
        """Check them all, again and again, until cancelled."""
        await asyncio.gather(*(self._watch(backend) for backend in self.all))

    async def _watch(self, backend: Backend) -> None:
        while True:
            await self.check(backend)
            await asyncio.sleep(CHECK_INTERVAL)

    async def check(self, backend: Backend) -> None:
        began = time.monotonic()
        try:
            async with (
                asyncio.timeout(CHECK_TIMEOUT),
                http1.ask("GET", f"{backend.url}/health", connect=CHECK_TIMEOUT) as answer,
            ):
                body = await answer.read()
        except TimeoutError:
            backend.silent_since = backend.silent_since or began
            silent = time.monotonic() - backend.silent_since
            self._set(backend, f"no answer for {silent:.0f} s")
            if silent > STALL:
                failure = Failure("worker_stalled", f"{backend.engine_id} has not answered for {silent:.0f} s")
                for tell in list(backend.lost):
                    tell(failure)
            return
        except http1.HttpError as error:
            backend.silent_since = 0.0  # it is down: its requests have ended with their connections
            self._set(backend, str(error))
            return
        backend.silent_since = 0.0
        self._set(
            backend, "" if answer.status == 200 else f"HTTP {answer.status}: {body[:200].decode(errors='replace')}"
        )

    def _set(self, backend: Backend, problem: str) -> None:
        if bool(problem) != bool(backend.problem):
            log.info("%s is %s", backend.engine_id, f"down: {problem}" if problem else "healthy")
        backend.problem = problem
