"""What the fix costs: rooms without any fault, against the original behaviour and against pdxfer, in turns.

Owns: the measurement and its table. Must not: inject anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich import box
from rich.table import Table

from .records import read_trips
from .verdict import percentile
from .wedge import BUILDS
from .world import DECODE, PREFILL, Kind, Load, World, WorldError

TOKENS = 256
DEADLINE = 120.0


@dataclass
class Cost:
    """Rooms of one build at one concurrency, over all rounds."""

    build: str
    sessions: int
    seconds: list[float] = field(default_factory=list)  # of each room
    rates: list[float] = field(default_factory=list)  # rooms a second, of each round
    failed: int = 0


async def measure(
    concurrency: Sequence[int], rooms: int, rounds: int, found: list[Cost], say: Callable[[str], None]
) -> None:  # fmt: skip
    """Raises WorldError when rooms do not end."""
    costs = {(build, n): Cost(build, n) for build in BUILDS for n in concurrency}
    found += costs.values()
    for number in range(1, rounds + 1):
        for build in BUILDS:
            world = World(Kind(mutant=BUILDS[build], bystander=False))
            try:
                await world.start()
                await _round(world, 4, 40, Cost(build, 4))  # connections, handles and memory come with the first rooms
                for n in concurrency:
                    cost = costs[build, n]
                    await _round(world, n, rooms, cost)
                    say(f"round {number}, {build}, C={n}: {cost.rates[-1]:.0f} rooms/s")
            finally:
                await world.close()


async def _round(world: World, sessions: int, rooms: int, cost: Cost) -> None:
    each = -(-rooms // sessions)
    load = Load(pushes=1, pause=0.0, think=0.0, tokens=(TOKENS, TOKENS), spread=0.0, rooms=each)
    agent = await world.agent(PREFILL, DECODE, sessions, load, "cost")
    if await world.manager.wait_exit(agent, DEADLINE) is None:
        raise WorldError(f"{sessions} sessions of {each} rooms did not end within {DEADLINE:g} s, without any fault")
    trips = read_trips(world.trips(agent))
    cost.seconds += [trip.ended - trip.began for trip in trips if trip.done]
    cost.failed += sum(not trip.done for trip in trips)
    cost.rates.append(len(trips) / (max(t.ended for t in trips) - min(t.began for t in trips)))


def table(found: Sequence[Cost]) -> Table:
    result = Table(box=box.SIMPLE_HEAD)
    for name in ("C", "build", "rooms", "p50 ms", "p99 ms", "rooms/s: median (least to most)", "not done"):
        result.add_column(name, justify="left" if name == "build" else "right")
    for cost in sorted(found, key=lambda cost: cost.sessions):
        if cost.seconds:
            p50, p99 = (f"{1000 * percentile(cost.seconds, p):.1f}" for p in (50, 99))
            rates = f"{percentile(cost.rates, 50):.0f} ({min(cost.rates):.0f} to {max(cost.rates):.0f})"
            result.add_row(str(cost.sessions), cost.build, str(len(cost.seconds)), p50, p99, rates, str(cost.failed))
    return result


def write_json(path: Path, found: Sequence[Cost]) -> None:
    path.write_text(
        json.dumps({"tokens": TOKENS, "runs": [asdict(cost) for cost in found]}, indent=2) + "\n", encoding="utf-8"
    )
