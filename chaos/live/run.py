"""One scenario against one world: load, calm, fault, proof, recovery, home, judgement.

Owns: the order of a run and its waits. Must not: know particular faults, or judge.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable

import httpx

from pdxfer.demo.faults import NotInjected
from pdxfer.demo.observe import NodeView, defects
from pdxfer.demo.page import Mark, Point, Timeline
from pdxfer.demo.processes import DemoError, alive, until

from . import inventory, judge
from .control import Lost
from .faults import Fault, Kill, Restart, Stop
from .judge import Evidence
from .records import read_legs, read_trips
from .scenarios import Scenario
from .verdict import Result
from .world import DECODE, PREFILL, Load, World, WorldError

CALM = 3.0  # seconds of untouched rooms before the fault
AFTER = 2.0  # seconds of load after it
LOAD_DEADLINE = 40.0
STOP_DEADLINE = 25.0  # for a load's last rooms: they are under the contract's bounds, too
HOME_DEADLINE = 25.0  # how long a homecoming is waited for, longer than it may take
OF_A_MUTANT = 0.5  # of these deadlines, where nothing is expected to come of waiting
BYSTANDERS = Load(pushes=1, tokens=(64, 64), think=0.1, spread=0.1)
PROBE = Load(pushes=1, tokens=(64, 320), rooms=2)
PROBE_SESSIONS = 4
PROBE_DEADLINE = 24.0


class Run:
    """Made for one run."""

    def __init__(self, world: World, scenario: Scenario, sessions: int, say: Callable[[str], None]) -> None:
        self.world = world
        self.scenario = scenario
        self.sessions = sessions
        self.say = say
        self.fault = scenario.fault(sessions)
        self.seen = Evidence()
        self.result = Result(scenario.name, scenario.about, sessions, world.kind.mutant)
        self._began = time.monotonic()
        self._patience = OF_A_MUTANT if world.kind.mutant else 1.0
        self._agents: list[str] = []
        self._defects: dict[str, tuple[int, int]] = {}
        self._wrong = (0, 0)

    async def go(self) -> Result:
        """Raises DemoError or WorldError when there is no world to speak of; what a run finds is in its result."""
        world, scenario, seen = self.world, self.scenario, self.seen
        prefill, decode = scenario.untouched
        more = dict([scenario.second] if scenario.second else [])
        await world.place(dict((prefill, decode)) | more)
        if left := await world.home(15.0):
            raise WorldError(f"the world is not at rest before the run: {left}")
        before = await inventory.take(world)
        views = {node: await world.look(node) for node in world.nodes}
        self._defects = await self._count_defects()
        self._wrong = await self._bytes()
        others, crowding = inventory.Others(world), inventory.Crowding()
        bystander = await world.agent(prefill[0], decode[0], 4, BYSTANDERS, "bystander")
        load = scenario.load(self.sessions)
        if scenario.delay >= 0:
            await asyncio.sleep(1.0)
            seen.calm, busy = time.monotonic(), inventory.Busy()
            await asyncio.sleep(CALM)
        for engine in more:
            self._agents.append(await world.agent(engine, DECODE, self.sessions, load, "second"))
        self._agents.append(await world.agent(PREFILL, DECODE, self.sessions, load, "load"))
        await self._flowing()
        if scenario.delay < 0:
            seen.calm, busy = time.monotonic(), inventory.Busy()
            await asyncio.sleep(CALM)
        calm, crowded, used = others.cores(), crowding.share(), busy.share()
        await self._strike(self.fault)
        await self._serving(views)
        await asyncio.sleep(AFTER)
        seen.crowding, seen.busy = (crowded, crowding.share()), (used, busy.share())
        await self._stop_load()
        left = await world.home(HOME_DEADLINE * self._patience)
        seen.home = None if left else time.monotonic() - max(seen.stopped, seen.ceased)
        seen.left = left
        seen.others = (calm, others.cores())
        await self._probe()
        await self._stop(bystander, 10.0)
        seen.now = time.monotonic()
        await self._collect(bystander, views)
        self.result.rows += self.fault.rows
        judge.fill(self.result, scenario, seen)
        if not left and (left := await world.home(5.0)):
            self.result.problems.append(f"not home after the last rooms: {left}")
        judge.compare(before, await inventory.take(world), self.result)
        self.result.seconds = time.monotonic() - self._began
        self.result.timeline = self._timeline()
        return self.result

    # the parts -----------------------------------------------------------------------------------------------------

    async def _flowing(self) -> None:
        """Return once the load's rooms are open; or, where the fault has its time, at that time."""
        world, scenario = self.world, self.scenario
        began = time.monotonic()
        wanted = max(1, self.sessions * 2 // 3) if scenario.delay < 0 else 1

        async def missing() -> str:
            legs = read_legs(world.records(PREFILL))
            asked = sum(leg.opened >= began - 1.0 for leg in legs)
            return "" if asked >= wanted else f"{asked} of {wanted} rooms are open"

        if scenario.delay >= 0:
            if left := await until(missing, LOAD_DEADLINE, 0.02):
                self.result.problems.append(f"the load did not begin: {left}")
            await asyncio.sleep(scenario.delay)
        elif left := await until(missing, LOAD_DEADLINE, 0.1):
            self.result.problems.append(f"the load did not begin: {left}")

    async def _strike(self, fault: Fault) -> None:
        seen, result = self.seen, self.result
        try:
            await fault.prepare(self.world)
            seen.struck = time.monotonic()
            self.say(f"{self.scenario.name}: strikes")
            try:
                await fault.strike()
                result.proof = await fault.prove()
                result.injected = True
                self.say(f"{self.scenario.name}: {result.proof}")
                await asyncio.sleep(self.scenario.hold)
            finally:
                await fault.cease()
        except NotInjected as error:
            result.proof = str(error)
        except (Lost, TimeoutError, DemoError) as error:
            result.proof = f"{type(error).__name__}: {error}"
        seen.struck = seen.struck or time.monotonic()
        seen.ceased = time.monotonic()

    async def _serving(self, views: dict[str, NodeView | None]) -> None:
        """Wait for what must serve again; when it did, by the samples."""
        found: dict[tuple[str, str], float | None] = {}
        for what, node, within in self.scenario.serving:
            old = views[node]

            async def missing(what: str = what, node: str = node, old: NodeView | None = old) -> str:
                return "" if self._again(what, node, old) is not None else f"{what} of {node} does not serve"

            patience = max(3.0, self.seen.struck + 2.0 * within + 3.0 - time.monotonic())
            await until(missing, patience, 0.05)
            at = self._again(what, node, old)
            found[what, node] = None if at is None else at - self.seen.struck
        self.seen.serving = found

    def _again(self, what: str, node: str, old: NodeView | None) -> float | None:
        """When it served again, after the fault had struck."""
        mine = {engine for engine, at in self.world.placed.items() if at == node}
        for sample in self.world.observers[node].history:
            view = sample.nodes.get(node)
            if view is None or sample.at < self.seen.struck or not view.ready or old is None:
                continue
            restarted = view.incarnation != old.incarnation
            if what == "engine" and view.engine_incarnation not in (0, old.engine_incarnation):
                return sample.at
            if what == "bootstrap" and (restarted or view.restarts["bootstrap"] > old.restarts["bootstrap"]):
                return sample.at
            if what == "parent" and restarted and mine <= view.pages.keys():
                return sample.at
        return None

    async def _stop_load(self) -> None:
        self.seen.stopped = time.monotonic()
        await asyncio.gather(*(self._stop(agent, STOP_DEADLINE * self._patience) for agent in self._agents))

    async def _stop(self, agent: str, seconds: float) -> None:
        """SIGTERM: the rooms under way come to their end. An agent whose rooms do not is killed, which aborts them."""
        pid = self.world.pid(agent)
        if not pid:
            return
        os.kill(pid, signal.SIGTERM)
        if await self.world.manager.wait_exit(agent, seconds) is None:
            self.result.problems.append(f"{agent}: its rooms had not ended {seconds:g} s after it was told to stop")
            self.world.manager.kill(agent)
            await self.world.manager.wait_exit(agent, 5.0)

    async def _probe(self) -> None:
        """Is there service again? Fresh rooms between the struck workers, all of which must be done."""
        self.seen.probes = PROBE_SESSIONS * PROBE.rooms
        agent = await self.world.agent(PREFILL, DECODE, PROBE_SESSIONS, PROBE, "probe")
        seconds = PROBE_DEADLINE * self._patience
        if await self.world.manager.wait_exit(agent, seconds) is None:
            self.result.problems.append(f"rooms that were asked for afterwards had no end within {seconds:g} s")
            self.world.manager.kill(agent)
            await self.world.manager.wait_exit(agent, 5.0)
        self.seen.probe = read_trips(self.world.trips(agent))

    # what is left behind -------------------------------------------------------------------------------------------

    async def _collect(self, bystander: str, views: dict[str, NodeView | None]) -> None:
        world, seen = self.world, self.seen
        engines = [PREFILL, DECODE] + [engine for engine, _ in ([self.scenario.second] if self.scenario.second else [])]
        seen.legs = [leg for leg in read_legs(world.records(*engines)) if leg.opened >= self._began]
        seen.exits = {pid: at for pid in {leg.pid for leg in seen.legs} if (at := world.died(pid)) is not None}
        seen.untouched = read_trips(world.trips(bystander))
        seen.dead = await self._dead_attachments()
        seen.frozen = self._frozen()
        struck = self._struck()
        seen.disturbed = [engine for engine, node in world.placed.items() if node in struck]
        _wrong, late = await self._bytes()
        seen.wrong = sum(leg.wrong for leg in seen.legs)
        seen.late = late if late < self._wrong[1] else late - self._wrong[1]
        seen.defects = 0
        for node, (incarnation, count) in (await self._count_defects()).items():
            before = self._defects.get(node, (0, 0))
            seen.defects += count - before[1] if before[0] == incarnation else count
        if self.scenario.quiet:
            node = self.scenario.quiet
            old, new = views[node], await world.look(node)
            if old is None or new is None or old.incarnation != new.incarnation:
                seen.restarts = 1 + sum(new.restarts.values() if new is not None else ())
            else:
                seen.restarts = sum(new.restarts.values()) - sum(old.restarts.values())
            seen.gap = self._gap(node)

    async def _dead_attachments(self) -> int:
        """Workers that a sidecar has on its books and whose process is gone."""
        count = 0
        for node in self.world.nodes:
            try:
                status = await self.world.status(node)
            except httpx.HTTPError:
                continue  # a sidecar that does not answer is another row's
            count += sum(not alive(worker["pid"]) for worker in status["workers"])
        return count

    def _struck(self) -> set[str]:
        """Nodes of which a process itself was struck."""
        if isinstance(self.fault, Restart):
            return set(self.fault.nodes)
        roles = self.fault.roles if isinstance(self.fault, Kill) else ()
        return {role.split()[-1] for role in roles if role.startswith(("engine of ", "sidecar "))}

    def _frozen(self) -> dict[int, float]:
        """Of workers that were stopped: when their sidecar held none of their pages any more."""
        found = {}
        for victim in self.fault.victims if isinstance(self.fault, Stop) else ():
            engine = victim.role.removeprefix("worker ")
            if engine in self.world.placed:
                node = self.world.placed[engine]
                for sample in self.world.observers[node].history:
                    if sample.at > self.seen.struck and (view := sample.nodes.get(node)) is not None:
                        states = view.pages.get(engine, {})
                        if not any(n for state, n in states.items() if state != "home"):
                            found[victim.pid] = sample.at
                            break
        return found

    def _gap(self, node: str) -> float:
        """The longest time for which the node was not seen ready."""
        last, longest = self.seen.struck, 0.0
        for sample in self.world.observers[node].history:
            view = sample.nodes.get(node)
            if sample.at > self.seen.struck and view is not None and view.ready:
                longest, last = max(longest, sample.at - last), sample.at
        return longest

    async def _bytes(self) -> tuple[int, int]:
        """Wrong and late bytes of all workers."""
        wrong = late = 0
        for engine in self.world.placed:
            try:
                stats = await self.world.stats(engine)
            except Lost as error:
                self.result.problems.append(f"worker {engine} does not answer: {error}")
                continue
            wrong += stats["wrong_bytes"]
            late += stats["late_bytes"]
        return wrong, late

    async def _count_defects(self) -> dict[str, tuple[int, int]]:
        found = {}
        for node, observer in self.world.observers.items():
            view = await self.world.look(node)
            if view is not None:
                try:
                    found[node] = (view.incarnation, defects(await observer.metrics(node)))
                except httpx.HTTPError as error:
                    self.result.problems.append(f"sidecar {node}: /metrics: {error}")
        return found

    def _timeline(self) -> Timeline:
        began = self._began
        lanes: dict[str, list[Point]] = {}
        marks = []
        for node, observer in self.world.observers.items():
            samples = [s for s in observer.history if s.at >= began]
            lanes[node] = [Point(s.at - began, s.nodes[node].rooms if node in s.nodes else None) for s in samples]
            counts: dict[str, int] = {}
            for sample in samples:
                view = sample.nodes.get(node)
                for service, count in view.restarts.items() if view is not None else ():
                    if counts.setdefault(service, count) < count:
                        marks.append(
                            Mark(sample.at - began, False, f"{service} of {node} was restarted (restart {count})")
                        )
                    counts[service] = count
        for happened in self.world.manager.happened:
            if happened.at >= began and happened.kind in ("kill", "restart", "continue"):
                text = f"{happened.name}: {happened.detail}"
                marks.append(Mark(happened.at - began, happened.kind == "kill", text))
        marks.append(Mark(self.seen.struck - began, True, f"the fault strikes: {self.scenario.about}"))
        marks.append(Mark(self.seen.stopped - began, False, "the load is told to stop"))
        return Timeline(time.monotonic() - began, lanes, sorted(marks, key=lambda mark: mark.at), [])


async def run(world: World, scenario: Scenario, sessions: int, say: Callable[[str], None]) -> Result:
    return await Run(world, scenario, sessions, say).go()
