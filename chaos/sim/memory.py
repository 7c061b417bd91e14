"""A worker's pools: what each page holds, and who may touch it now.

Owns: page contents as tokens, and the loans as the *worker* has made them, which are checked against what engines do.
Must not: ask the Node; it is what the Node is judged by.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdxfer.core.geometry import PoolSpec

from .world import Violation, World

SPECS = (
    PoolSpec("kv", "bf16", "2x3x64", 16, 3, 40),
    PoolSpec("index_k", "bf16", "128", 16, 2, 16),
)


class Memory:
    """Two pools. ``pages[pool][plane][page]`` is a token; a poisoned page holds one that no room has."""

    def __init__(self, world: World, name: str, num_pages: Sequence[int]) -> None:
        self.world = world
        self.name = name
        self.num_pages = tuple(num_pages)
        self.pages = [
            [[world.token() for _ in range(n)] for _ in range(spec.planes)]
            for spec, n in zip(SPECS, num_pages, strict=True)
        ]
        self.free = [list(range(n)) for n in num_pages]  # a stack: what came home last is used again first
        self.readers: list[list[int]] = [[0] * n for n in num_pages]
        self.writer: list[list[str]] = [[""] * n for n in num_pages]
        self.orphan = False  # its process is dead: nobody cares any more

    def allocate(self, pool: int, n: int) -> list[int] | None:
        if n > len(self.free[pool]):
            return None
        stack = self.free[pool]
        return [stack.pop() for _ in range(n)]

    def take_free(self) -> list[list[int]]:
        """The engine uses every page itself for a while."""
        taken, self.free = self.free, [[] for _ in self.num_pages]
        return taken

    def give_free(self, taken: list[list[int]]) -> None:
        for stack, pages in zip(self.free, taken, strict=True):
            stack[:0] = pages

    def lend_read(self, pool: int, pages: Sequence[int]) -> None:
        for page in pages:
            self.readers[pool][page] += 1

    def lend_write(self, pool: int, pages: Sequence[int], who: str) -> None:
        for page in pages:
            self.writer[pool][page] = who

    def home_read(self, pool: int, pages: Sequence[int]) -> None:
        for page in pages:
            if self.readers[pool][page] < 1:
                raise Violation(f"{self.name}: pool {pool} page {page} came home twice")
            self.readers[pool][page] -= 1
            if not self.readers[pool][page]:
                self._poison(pool, page)

    def home_write(self, pool: int, pages: Sequence[int]) -> None:
        for page in pages:
            if not self.writer[pool][page]:
                raise Violation(f"{self.name}: pool {pool} page {page} came home twice")
            self.writer[pool][page] = ""
            self._poison(pool, page)

    def home_own(self, pool: int, pages: Sequence[int]) -> None:
        """Pages that the worker had not lent to anybody are free again."""
        for page in pages:
            self._poison(pool, page)

    def _poison(self, pool: int, page: int) -> None:
        for plane in self.pages[pool]:
            plane[page] = self.world.token()
        self.free[pool].append(page)

    # what engines do -----------------------------------------------------------------------------------------------

    def read(self, pool: int, plane: int, page: int, why: str) -> int:
        if not self.orphan and not self.readers[pool][page]:
            raise Violation(f"{why} reads {self.name} pool {pool} page {page}, which is home")
        return self.pages[pool][plane][page]

    def write(self, pool: int, plane: int, page: int, token: int, why: str) -> None:
        if not self.orphan and not self.writer[pool][page]:
            raise Violation(f"{why} writes {self.name} pool {pool} page {page}, which is home")
        self.pages[pool][plane][page] = token

    @property
    def lent(self) -> int:
        return sum(n - len(free) for n, free in zip(self.num_pages, self.free, strict=True))
