"""Many seeds, in this process or in several, and the hunt for mutants.

Owns: the order of runs, the sum of their results, and the processes. Must not: print, or know a mutant.
"""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from . import run

BLOCK = 20  # seeds between two looks at the garbage; worlds are full of cycles

AUDIT = 3  # the books of a node are compared after every third of its events: what is wrong in them stays wrong


@dataclass
class Failing:
    """A seed that failed, and what it takes."""

    seed: int
    violation: str
    only: list[int]  # numbers of the faults that are left
    faults: list[str]


@dataclass
class Sum:
    """What a block of seeds, or many, came to."""

    seeds: int = 0
    steps: int = 0
    seconds: float = 0.0  # virtual
    latest_home: float = 0.0  # virtual seconds from calm to everything home, the worst
    ends: Counter[str] = field(default_factory=Counter)
    struck: Counter[str] = field(default_factory=Counter)  # faults that took effect
    failed: list[Failing] = field(default_factory=list)

    def add(self, other: Sum) -> None:
        self.seeds += other.seeds
        self.steps += other.steps
        self.seconds += other.seconds
        self.latest_home = max(self.latest_home, other.latest_home)
        self.ends += other.ends
        self.struck += other.struck
        self.failed += other.failed


@contextmanager
def _no_collector() -> Iterator[None]:
    """The cyclic collector would look through a living world again and again, and find nothing."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


def _block(order: tuple[range, int]) -> Sum:
    """Run a block of seeds; a failing one is shrunk at once."""
    seeds, nodes = order
    total = Sum()
    with _no_collector():
        for seed in seeds:
            result = run.run(seed, nodes=nodes, audit_every=AUDIT)
            one = Sum(1, result.steps, result.seconds, result.home_after, result.ends, result.struck)
            if not result.ok:
                only = run.shrink(seed, nodes=nodes)
                drawn = run.drawn(seed, nodes)
                one.failed.append(Failing(seed, result.violation, only, [str(drawn[i]) for i in only]))
            total.add(one)
    return total


def sweep(start: int, seeds: int, *, nodes: int = 0, jobs: int = 1) -> Iterator[Sum]:
    """Blocks of seeds as they are done. In several processes the order is theirs; the runs are the same."""
    size = 1 if nodes > run.MANY else BLOCK
    orders = [(range(i, min(i + size, start + seeds)), nodes) for i in range(start, start + seeds, size)]
    if jobs == 1 or len(orders) == 1:
        yield from map(_block, orders)
        return
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(orders))) as pool:
        yield from pool.imap_unordered(_block, orders)


@dataclass
class Hunt:
    """How a mutant was caught, or that it was not."""

    seeds: int  # tried, the last one caught it
    seed: int = -1
    violation: str = ""
    seconds: float = 0.0

    @property
    def caught(self) -> bool:
        return bool(self.violation)


def hunt(
    mutant: Callable[[], AbstractContextManager[object]] = nullcontext,
    *,
    first: Iterable[int] = (),
    start: int = 0,
    most: int = 1000,
) -> Hunt:
    """Run seeds until one fails. ``first``: seeds that are tried before the others."""
    began, tried = time.perf_counter(), 0
    for seed in (*first, *range(start, start + most)):
        tried += 1
        result = run.run(seed, mutant=mutant)
        if not result.ok:
            return Hunt(tried, seed, result.violation, time.perf_counter() - began)
    return Hunt(tried, seconds=time.perf_counter() - began)


def hunts(
    names: Sequence[str], in_force: Callable[[str], AbstractContextManager[object]], start: int, most: int, jobs: int
) -> Iterator[tuple[str, Hunt]]:
    """Hunt each of these mutants; ``in_force`` makes the patch of a name, in whatever process that is."""
    orders = [(name, in_force, start, most) for name in names]
    if jobs == 1 or len(orders) == 1:
        yield from map(_named, orders)
        return
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(orders))) as pool:
        yield from pool.imap_unordered(_named, orders)


def _named(order: tuple[str, Callable[[str], AbstractContextManager[object]], int, int]) -> tuple[str, Hunt]:
    name, in_force, start, most = order
    return name, hunt(lambda: in_force(name), start=start, most=most)
