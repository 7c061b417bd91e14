"""The pages of a worker's pools: who has them, and who waits for them.

Owns: every page index, in exactly one of three states, and the queue of requests that wait for pages. Must not: touch
their bytes (the engine poisons and checks them through two hooks), or know rooms.

 free ──take──► held ──lend──► lent (the sidecar may read or write it)
 free ◄──give── held ◄──home── lent      a lent page cannot be given back: only Released or the room's end brings it home
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence


class NoPages(Exception):
    """A request waited for pages longer than it may, or asks for more than there are."""


class Pages:
    """All methods are called in the event loop's thread."""

    def __init__(
        self,
        total: int,
        *,
        poison: Callable[[Sequence[int]], None] = lambda pages: None,
        late: Callable[[Sequence[int]], int] = lambda pages: 0,
    ) -> None:
        self.total = total
        self.late_bytes = 0  # written to pages that nobody had
        self._free = deque(range(total))  # first freed, first used: a late write is the more likely to show
        self._held: set[int] = set()
        self._lent: set[int] = set()
        self._waiting: deque[tuple[int, asyncio.Future[list[int]]]] = deque()
        self._poison = poison
        self._late = late

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def held(self) -> int:
        return len(self._held)

    @property
    def lent(self) -> int:
        return len(self._lent)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def take(self, count: int, timeout: float) -> list[int]:
        """Get pages, in the order of asking. Raises NoPages."""
        if count > self.total:
            raise NoPages(
                f"{count} pages asked for, this worker has {self.total}; send a shorter request or start it with more --pages"
            )
        future: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        entry = (count, future)
        self._waiting.append(entry)
        self._serve()
        try:
            await asyncio.wait([future], timeout=timeout)
        except asyncio.CancelledError:
            if future.done():
                self.give(future.result())
            else:
                self._leave(entry)
            raise
        if future.done():
            return future.result()
        problem = NoPages(
            f"{count} pages asked for, {self.free} of {self.total} free after {timeout:g} s, {self.waiting} requests waiting;"
            " send less at once or start the worker with more --pages"
        )
        self._leave(entry)
        raise problem

    def lend(self, pages: Sequence[int]) -> None:
        """The sidecar is told of these pages."""
        self._move(pages, self._held, self._lent, "lent")

    def home(self, pages: Sequence[int]) -> None:
        """The sidecar has said that it is done with them. Pages that are home already stay so."""
        back = [page for page in pages if page in self._lent]
        self._move(back, self._lent, self._held, "brought home")

    def give(self, pages: Sequence[int]) -> None:
        """Nobody needs them any more."""
        self._move(pages, self._held, None, "given back")
        self._poison(pages)
        self._free.extend(pages)
        self._serve()

    def audit(self) -> None:
        """Raise AssertionError unless every page is in exactly one state."""
        everything = [*self._free, *self._held, *self._lent]
        assert sorted(everything) == list(range(self.total)), "a page is in two states or in none"

    def _move(self, pages: Sequence[int], source: set[int], target: set[int] | None, verb: str) -> None:
        wrong = [page for page in pages if page not in source]
        assert not wrong and len(set(pages)) == len(pages), f"pages {wrong or list(pages)} cannot be {verb}"
        source.difference_update(pages)
        if target is not None:
            target.update(pages)

    def _leave(self, entry: tuple[int, asyncio.Future[list[int]]]) -> None:
        self._waiting.remove(entry)
        self._serve()  # it may have stood before smaller ones

    def _serve(self) -> None:
        while self._waiting and self._waiting[0][0] <= len(self._free):
            count, future = self._waiting.popleft()
            pages = [self._free.popleft() for _ in range(count)]
            self.late_bytes += self._late(pages)
            self._held.update(pages)
            future.set_result(pages)
