"""Runs many scenarios: groups them by the world that they need, keeps a healthy world, replaces a sick one.

Owns: that. Must not: know what a scenario does.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pdxfer.demo.processes import DemoError

from . import netns, run
from .scenarios import Scenario
from .verdict import Result
from .world import Kind, World, WorldError

Report = Callable[[Result], None]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Order:
    """One run that is to be made."""

    scenario: Scenario
    sessions: int
    control: bool = False

    @property
    def kind(self) -> Kind:
        return dataclasses.replace(self.scenario.kind, mutant=self.scenario.mutant if self.control else "")


def orders(
    scenarios: Iterable[Scenario], concurrency: Sequence[int] = (), repeat: int = 1, *, control: bool = False
) -> list[Order]:
    """Every scenario at each concurrency where it applies. A control runs once, at 16 if it can."""
    found = []
    for scenario in scenarios:
        counts = [n for n in scenario.concurrency if n in concurrency] if concurrency else list(scenario.concurrency)
        if control and counts:
            counts = [16 if 16 in counts else counts[-1]]
        found += [Order(scenario, n, control) for n in counts for _ in range(repeat)]
    return found


class Suite:
    """Runs orders one after the other. ``logs`` of a world in which something failed are kept, and named."""

    def __init__(self, report: Report, say: Say) -> None:
        self.report = report
        self.say = say
        self.results: list[Result] = []
        self.kept: list[str] = []
        self._world: World | None = None

    async def go(self, todo: Sequence[Order]) -> None:
        """All of them, those that share a world next to each other."""
        kinds = list(dict.fromkeys(order.kind for order in todo))
        try:
            for order in sorted(todo, key=lambda order: kinds.index(order.kind)):
                await self.one(order)
        finally:
            await self.close()

    async def soak(self, scenarios: Sequence[Scenario], seconds: float, seed: int) -> None:
        """Scenarios drawn at random, all in one world, until the time is over."""
        draw = random.Random(seed)
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end:
                scenario = draw.choice(scenarios)
                await self.one(Order(scenario, draw.choice(scenario.concurrency)))
        finally:
            await self.close()

    async def one(self, order: Order) -> None:
        """One run. A world that cannot be used for another is replaced."""
        scenario = order.scenario
        mutant = scenario.mutant if order.control else ""
        if why := scenario.skip():
            self._found(Result(scenario.name, scenario.about, order.sessions, mutant, skipped=why))
            return
        try:
            world = await self._have(order)
            self.say(f"{scenario.name}, C={order.sessions}{f', mutant {mutant}' if mutant else ''}")
            result = await run.run(world, scenario, order.sessions, self.say)
        except (DemoError, WorldError, netns.NetworkError) as error:
            result = Result(scenario.name, scenario.about, order.sessions, mutant, problems=[str(error)])
            result.proof = "there was no world to inject it into"
        self._found(result)
        if not result.held:  # what follows must not inherit it; a mutant's world is as good as its first run
            await self._drop(keep_logs=not result.passed)

    def _found(self, result: Result) -> None:
        self.results.append(result)
        self.report(result)

    async def _have(self, order: Order) -> World:
        if self._world is not None and self._world.kind != order.kind:
            await self._drop()
        if self._world is None:
            self.say("starting three sidecars and their workers")
            self._world = World(order.kind)
            await self._world.start()
        return self._world

    async def _drop(self, *, keep_logs: bool = False) -> None:
        world, self._world = self._world, None
        if world is None:
            return
        if keep_logs:
            self.kept.append(str(world.directory))
        problems = await world.close(keep_logs=keep_logs)
        mutant = bool(world.kind.mutant)
        for problem in problems:
            self.say(problem)
            if not mutant and self.results:
                self.results[-1].problems.append(problem)

    async def close(self) -> None:
        await self._drop()
