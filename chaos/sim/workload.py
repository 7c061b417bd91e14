"""What the workers of a run do: rooms drawn from the seed.

Owns: the scripts. Must not: know faults; aborts are part of a worker's ordinary life and are drawn here.
"""

from __future__ import annotations

import itertools
import random

from .memory import SPECS
from .worker import PushPlan, Task, VirtualWorker
from .world import World


def contents(world: World, counts: tuple[int, ...]) -> list[list[list[int]]]:
    return [[[world.token() for _ in range(n)] for _ in range(s.planes)] for s, n in zip(SPECS, counts, strict=True)]


def pushes(world: World, counts: tuple[int, ...]) -> list[PushPlan]:
    """In one piece, in chunks, layer by layer, or both."""
    rng = world.workload
    cuts = [0, *sorted(rng.random() for _ in range(rng.choice((0, 0, 1, 2)))), 1]
    layered, shared = rng.random() < 0.4, rng.random() < 0.5
    out = []
    for low, high in itertools.pairwise(cuts):
        page0 = tuple(int(n * low) for n in counts)
        size = tuple(int(n * high) - p for n, p in zip(counts, page0, strict=True))
        if not layered:
            out.append(PushPlan(page0, size, 0, 0, 0.02 * rng.random()))
            continue
        for plane in range(max(s.planes for s in SPECS)):
            here = tuple(n if plane < s.planes else 0 for n, s in zip(size, SPECS, strict=True))
            together = shared and plane > 0
            out.append(PushPlan(page0, here, plane, 1, 0.0 if together else 0.005 * rng.random(), together))
    return out


def burst(world: World, number: int, source: VirtualWorker, sessions: int, lasts: float) -> None:
    """``sessions`` rooms of one page, begun and aborted at once: an agent that is killed."""
    rng = random.Random(f"{world.seed} burst {number}")
    target = rng.choice(world.workers)
    who = rng.choice(((source,), (target,), (source, target)))
    for i in range(sessions):
        name, counts = f"burst-{number}-{i}", (1, 1)
        if (name, 0) in world.contents:
            return
        world.contents[(name, 0)] = contents(world, counts)
        send = Task(name, 0, True, counts=counts, pushes=[PushPlan((0, 0), counts, 0, 0, 0.005 * rng.random())])
        receive = Task(name, 0, False, source.engine_id, counts)
        world.after(0.01 * rng.random(), lambda send=send: source.open(send))  # type: ignore[misc]
        world.after(0.01 * rng.random(), lambda receive=receive: target.receive(receive))  # type: ignore[misc]
        for one in who:
            world.after(lasts, lambda one=one, name=name: one.abort(name, 0))  # type: ignore[misc]


def probe(world: World, attempt: int) -> list[tuple[str, int]]:
    """When all is calm: one room from each worker to the next, so that each node serves again on both sides."""
    made = []
    for number, source in enumerate(world.workers):
        target = world.workers[(number + 1) % len(world.workers)]
        name, counts = f"probe-{attempt}-{number}", (1, 1)
        world.contents[(name, 0)] = contents(world, counts)
        source.open(Task(name, 0, True, counts=counts, pushes=[PushPlan((0, 0), counts, 0, 0, 0.0)]))
        target.receive(Task(name, 0, False, source.engine_id, counts))
        made.append((name, 0))
    return made


def room(
    world: World, name: str, epoch: int, source: VirtualWorker, target: VirtualWorker, when: float, *, clean: bool
) -> None:
    """One request: both sides' scripts. ``clean``: nobody aborts or forgets."""
    rng = world.workload
    n = rng.choice((0, 1, 2, 3, 5, 8))
    counts = (n, max(0, n - rng.choice((0, 0, 1))))
    world.contents[(name, epoch)] = contents(world, counts)
    send = Task(name, epoch, True, counts=counts, pushes=pushes(world, counts))
    receive = Task(name, epoch, False, source.engine_id, counts)
    if epoch < 2:

        def again(reason: str) -> None:
            if not reason.startswith(("done", "rejected")) and not world.calm:
                room(world, name, epoch + 1, source, target, world.now + 0.002, clean=clean)

        receive.then = again
    lag = rng.choice((0.0, 0.01, 0.2)) * rng.random()
    first, second = (when, when + lag) if rng.random() < 0.5 else (when + lag, when)
    fate = 1.0 if clean else rng.random()
    if fate >= 0.35:
        world.clean.add((name, epoch))
    if fate < 0.03:
        send.finishes = False
        world.forgotten.add((name, epoch))
    if not 0.03 <= fate < 0.06:
        world.at(first, lambda: source.open(send))
    if not 0.06 <= fate < 0.09:
        world.at(second, lambda: target.receive(receive))
    if 0.09 <= fate < 0.35:
        at = when + rng.choice((0.02, 0.1, 0.3)) * rng.random()
        who = rng.choice(((source,), (target,), (source, target)))
        for times in range(rng.choice((1, 1, 2))):
            for one in who:
                world.at(at + 0.01 * times, lambda one=one: one.abort(name, epoch))  # type: ignore[misc]


def draw(world: World, rooms: int, span: float, *, clean: bool) -> None:
    """``rooms`` requests between any two workers over ``span`` seconds."""
    rng = world.workload
    for i in range(rooms):
        source = rng.choice(world.workers)
        others = [w for w in world.workers if w.side is not source.side]
        target = rng.choice(others if others and rng.random() < 0.7 else world.workers)
        room(world, f"room-{i}", 0, source, target, 0.1 + span * rng.random(), clean=clean)
