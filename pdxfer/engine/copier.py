"""The threads that move bytes, beside the one that calls NIXL.

Owns: the threads, their queue, and a clock on each task. Must not: know what a task does, or call NIXL.

numpy and xxhash let go of the GIL while they move bytes, so a copy and a WRITE run at the same time. With no threads
the tasks run in the caller's ``step``, one at a time.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

Task = Callable[[], None]


class Copier:
    def __init__(self, threads: int, stall: float) -> None:
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # readable when a thread has finished something
        self._stall = stall
        self._done: deque[Task] = deque()
        self._inline: deque[Task] = deque()
        self._queue: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._since = [0.0] * threads  # when each thread began its task; 0: it has none
        self._threads = threads
        for n in range(threads):
            threading.Thread(target=self._work, args=(n,), name=f"pdxfer-copy-{n}", daemon=True).start()

    def submit(self, task: Task) -> None:
        """Run ``task`` as soon as a thread is free; it reports with ``report``."""
        if self._threads:
            self._queue.put(task)
        else:
            self._inline.append(task)

    def report(self, task: Task) -> None:
        """From a task: have the engine's thread run this."""
        self._done.append(task)
        if self._threads:
            os.eventfd_write(self.wake, 1)

    def step(self) -> bool:
        """Engine's thread: run a task if there are no threads for it, then every report. True if there was anything."""
        if self._inline:
            self._inline.popleft()()
        if not self._done:
            return False
        while self._done:
            self._done.popleft()()
        return True

    def drain_wake(self) -> None:
        """The descriptor has woken the loop: make it quiet again."""
        os.eventfd_read(self.wake)

    @property
    def pending(self) -> bool:
        """Whether ``step`` has something to do now."""
        return bool(self._inline or self._done)

    def hung(self, now: float) -> bool:
        """Whether a task has been running for so long that it will hardly come back."""
        return any(since and now - since > self._stall for since in self._since)

    def _work(self, n: int) -> None:
        while True:
            task = self._queue.get()
            self._since[n] = time.monotonic()
            task()
            self._since[n] = 0.0
