"""Faults that are requests: aborts at the wrong moment, ids that come back, slots that nobody gives back.

Owns: what a router that is hurried or wrong asks for, and what must come of it. Must not: judge the rest of the system.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time

from pdxfer.demo.faults import NotInjected
from pdxfer.demo.processes import until

from .control import Ask
from .faults import Base, Stop
from .records import NEVER, read_legs
from .verdict import Row
from .world import DECODE, PREFILL, World

WITHIN = 5.0  # seconds for a room of these scenarios to end
PACE = 0.04  # seconds between two of their rooms, as a load begins them: the subject is what is asked, not how much at once


def name(tag: str, number: int) -> str:
    return f"{tag}-{time.monotonic_ns()}-{number}"


async def both(world: World, room: str, epoch: int = 0, **send: float) -> list[dict[str, object]]:
    """Move a room between the struck workers; the two ends."""
    prefill, decode = await world.line(PREFILL), await world.line(DECODE)
    return list(
        await asyncio.gather(
            prefill.ask(Ask("send", room=room, epoch=epoch, tokens=128, **send)),  # type: ignore[arg-type]
            decode.ask(Ask("receive", room=room, epoch=epoch, tokens=128, source=PREFILL)),
        )
    )


class Storm(Base):
    """The load itself is the fault: its agents abort every room. The proof is in the workers' records."""

    def __init__(self, seconds: float = 6.0) -> None:
        super().__init__()
        self._seconds = seconds
        self._began = 0.0

    async def strike(self) -> None:
        self._began = time.monotonic()
        await asyncio.sleep(self._seconds)

    async def prove(self) -> str:
        legs = read_legs(self.world.records(PREFILL, DECODE))
        aborted = sum(self._began <= leg.aborted < NEVER for leg in legs)
        if aborted < 10:
            raise NotInjected(f"{aborted} rooms were aborted by their workers, expected at least 10")
        return f"{aborted} rooms were aborted under way by one of their workers"


class Reuse(Base):
    """Each room is aborted under way; its id is used again at once, in the same epoch and then in the next."""

    def __init__(self, sessions: int) -> None:
        super().__init__()
        self.sessions = sessions
        self._aborted = 0

    async def strike(self) -> None:
        again = Row("an ended id that was taken again", "0", 0.0, [0.0], unit="sides")
        after = Row("rooms of the next epoch that were not done", "0", 0.0, [0.0], unit="rooms")
        took = Row("a room of the next epoch, from asking to its end", f"{WITHIN:g} s", WITHIN)

        async def one(number: int) -> None:
            await asyncio.sleep(PACE * number)
            room = name("reuse", number)
            line = await self.world.line(PREFILL)
            moving = asyncio.create_task(both(self.world, room, pushes=4, pause=0.5))
            await asyncio.sleep(0.3 + 0.01 * (number % 20))
            await line.ask(Ask("abort", room=room))
            ends = await asyncio.wait_for(moving, 30.0)
            self._aborted += all(end["state"] != "DONE" for end in ends)
            reused = await asyncio.wait_for(both(self.world, room), 30.0)
            again.values[0] += sum(end["state"] != "REFUSED" for end in reused)
            began = time.monotonic()
            ends = await asyncio.wait_for(both(self.world, room, 1), 30.0)
            took.values.append(time.monotonic() - began)
            after.values[0] += not all(end["state"] == "DONE" for end in ends)

        await asyncio.gather(*(one(number) for number in range(self.sessions)))
        self.rows += [again, after, took]

    async def prove(self) -> str:
        if self._aborted < self.sessions:
            raise NotInjected(f"{self._aborted} of {self.sessions} rooms were aborted under way")
        return f"{self._aborted} rooms were aborted under way, and their ids used again at once"


class EarlyAbort(Base):
    """The abort comes to the prefill worker before the room, and before the want for it."""

    def __init__(self, sessions: int) -> None:
        super().__init__()
        self.sessions = sessions
        self._early = 0

    async def strike(self) -> None:
        alive = Row("rooms aborted before they came that were done all the same", "0", 0.0, [0.0], unit="sides")
        took = Row("a room that was aborted before it came ends", f"{WITHIN:g} s", WITHIN)

        async def one(number: int) -> None:
            await asyncio.sleep(PACE * number)
            room = name("early", number)
            prefill, decode = await self.world.line(PREFILL), await self.world.line(DECODE)
            found = await prefill.ask(Ask("abort", room=room))
            self._early += found["refused"] == "unknown_room"
            receive = decode.start(Ask("receive", room=room, tokens=128, source=PREFILL))
            await asyncio.sleep(0.05 * (number % 3))
            send = prefill.start(Ask("send", room=room, tokens=128))
            for end in await asyncio.wait_for(asyncio.gather(receive, send), 90.0):
                took.values.append(end["ended"] - end["opened"])
                alive.values[0] += end["state"] == "DONE"

        await asyncio.gather(*(one(number) for number in range(self.sessions)))
        self.rows += [alive, took]

    async def prove(self) -> str:
        if self._early < self.sessions:
            raise NotInjected(f"{self._early} of {self.sessions} aborts came before their room")
        return f"{self._early} aborts came before their rooms: each was answered unknown_room"


class Quarantine(Stop):
    """The engines of two prefill nodes stop with grants in their hands, and the agents with all rooms die: the
    receiver's slots are quarantined, every one."""

    def __init__(self) -> None:
        super().__init__("engine of p", "engine of b")
        self._seen = ""

    async def strike(self) -> None:
        world = self.world
        await super().strike()

        async def granted() -> str:
            view = await world.look("d")
            if view is None:
                return "sidecar d does not answer"
            slots = view.slots["receive"]
            return "" if not slots["free"] and not slots["scattering"] else f"slots of d: {dict(slots)}"

        if left := await until(granted, 6.0, 0.02):
            raise NotInjected(f"not all receive slots were granted: {left}")
        for running in list(world.manager.running.values()):
            if running.spec.name.startswith("agent ") and running.pid and "bystander" not in running.spec.argv:
                os.kill(running.pid, signal.SIGKILL)
                world.manager.note("kill", running.spec.name, f"SIGKILL pid {running.pid}")

        async def quarantined() -> str:
            view = await world.look("d")
            if view is None:
                return "sidecar d does not answer"
            slots = view.slots["receive"]
            if slots["quarantined"] == sum(slots.values()):
                self._seen = f"all {slots['quarantined']} receive slots of d were quarantined"
                return ""
            return f"slots of d: {dict(slots)}"

        if left := await until(quarantined, 3.0, 0.02):
            raise NotInjected(left)

    async def prove(self) -> str:
        return self._seen
