"""Continuous batching: requests join and leave the running batch between two steps.

Owns: which sequences the next decode step computes, and the thread that computes it. Must not: know rooms, pages' owners
or HTTP. A sequence that has left is touched by no step any more: only then may its pages be given back.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from concurrent.futures import Executor

from .ends import Failure
from .engine import Engine, Sequence

log = logging.getLogger("pdxfer.demo")


def finished(engine: Engine, seq: Sequence) -> str:
    """Why the answer is complete: stop or length; empty when it is not."""
    if seq.last in engine.ends:
        return "stop"
    return "length" if len(seq.tokens) >= seq.max_tokens else ""


class Job:
    """A sequence that is decoded."""

    def __init__(self, seq: Sequence) -> None:
        self.seq = seq
        self.leaving = False
        self.left = asyncio.Event()
        self._news: asyncio.Queue[int | Failure] = asyncio.Queue()

    async def next(self) -> int:
        """The next token. Raises Failure when the engine could not compute it."""
        found = await self._news.get()
        if isinstance(found, Failure):
            raise found
        return found

    def tell(self, news: int | Failure) -> None:
        self._news.put_nowait(news)


class Scheduler:
    """Runs while ``run`` does."""

    def __init__(self, engine: Engine, executor: Executor, max_batch: int) -> None:
        self._engine = engine
        self._executor = executor
        self._max_batch = max_batch
        self._joining: deque[Job] = deque()
        self._running: list[Job] = []
        self._wake = asyncio.Event()
        self.steps = 0

    @property
    def batch(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._joining)

    def join(self, seq: Sequence) -> Job:
        """Decode it, from the next step with room on."""
        job = Job(seq)
        self._joining.append(job)
        self._wake.set()
        return job

    async def leave(self, job: Job) -> None:
        """Return once no step touches the sequence. Twice is once."""
        job.leaving = True
        if job in self._joining:
            self._joining.remove(job)
            job.left.set()
        self._wake.set()
        await job.left.wait()

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._gather()
                if not self._running:
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                batch = list(self._running)
                # The thread cannot be cancelled: even a cancelled run() waits for the step's end.
                step = loop.run_in_executor(self._executor, self._engine.decode_step, [job.seq for job in batch])
                try:
                    await asyncio.shield(step)
                except asyncio.CancelledError:
                    await asyncio.wait([step])
                    raise
                except Exception as error:
                    log.exception("a decode step of %d requests failed", len(batch))
                    self._fail(batch, Failure("engine_error", f"decode step of {len(batch)} requests: {error!r}"))
                else:
                    self.steps += 1
                    for job in batch:
                        job.tell(job.seq.last)
                        job.leaving |= bool(finished(self._engine, job.seq))  # its pages end here
        finally:
            self._fail([*self._running, *self._joining], Failure("engine_error", "the decode loop has ended"))

    def _gather(self) -> None:
        """The batch of the next step."""
        for job in [job for job in self._running if job.leaving]:
            self._running.remove(job)
            job.left.set()
        while self._joining and len(self._running) < self._max_batch:
            self._running.append(self._joining.popleft())

    def _fail(self, jobs: list[Job], failure: Failure) -> None:
        for job in jobs:
            if job in self._running:
                self._running.remove(job)
            elif job in self._joining:
                self._joining.remove(job)
            job.left.set()
            job.tell(failure)
