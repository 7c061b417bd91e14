"""Faults that strike processes and threads: each proves that it took effect, without relying on the recovery.

Owns: signals to agents, workers, engines and parents; the bootstrap thread's debug hook; restarts. Must not: judge what
follows. Faults on sockets are in ``wire``, faults of resources in ``resources``, faults on rooms in ``rooms``.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import httpx

from pdxfer.demo.faults import NotInjected
from pdxfer.demo.observe import why
from pdxfer.demo.processes import alive, birth, exit_text, until

from .verdict import Row
from .world import World

PROOF = 10.0  # seconds for the effect to show


class Fault(Protocol):
    """``strike`` injects, ``prove`` shows that it took effect, ``cease`` ends it. Any of them raises NotInjected."""

    rows: list[Row]  # what the fault itself has measured

    async def prepare(self, world: World) -> None: ...
    async def strike(self) -> None: ...
    async def prove(self) -> str: ...
    async def cease(self) -> None: ...


class Base:
    """A fault that needs nothing but its strike."""

    world: World

    def __init__(self) -> None:
        self.rows: list[Row] = []

    async def prepare(self, world: World) -> None:
        self.world = world

    async def cease(self) -> None:
        """It is over by itself."""


@dataclass
class Victim:
    """A process by its role: "worker X", "sidecar X", "engine of X" or "agent"."""

    role: str
    pid: int = 0
    born: str = ""
    exits: int = 0
    also: list[int] = field(default_factory=list)


async def find(world: World, role: str, agent: str = "") -> Victim:
    """Raises NotInjected when it does not run."""
    if role.startswith("engine of "):
        view = await world.look(role.removeprefix("engine of "))
        victim = Victim(role, view.engine_pid if view is not None else 0)
    else:
        name = agent if role == "agent" else role
        victim = Victim(name, world.pid(name), exits=len(world.manager[name].exits))
    if not victim.pid:
        raise NotInjected(f"{role} does not run")
    victim.born = birth(victim.pid)
    return victim


def state(pid: int) -> str:
    """The kernel's letter for what a process does; "" when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


class Kill(Base):
    """SIGKILL of one or more processes at once."""

    def __init__(self, *roles: str) -> None:
        super().__init__()
        self.roles = roles
        self.victims: list[Victim] = []

    async def prepare(self, world: World) -> None:
        self.world = world
        self.victims = [await find(world, role, self._agent()) for role in self.roles]

    def _agent(self) -> str:
        return f"agent {self.world.agents}"

    async def strike(self) -> None:
        for victim in self.victims:
            if not alive(victim.pid, victim.born):
                raise NotInjected(f"{victim.role} (pid {victim.pid}) was not running any more")
        for victim in self.victims:
            os.kill(victim.pid, signal.SIGKILL)
        for victim in self.victims:
            self.world.manager.note("kill", victim.role, f"SIGKILL pid {victim.pid}")

    async def prove(self) -> str:
        async def missing() -> str:
            for victim in self.victims:
                if alive(victim.pid, victim.born):
                    return f"{victim.role} (pid {victim.pid}) is still there"
                if victim.role in self.world.manager.running:
                    exits = self.world.manager[victim.role].exits[victim.exits :]
                    if not exits:
                        return f"{victim.role} (pid {victim.pid}) has not been waited for"
                    if exits[0] != -signal.SIGKILL:
                        return f"{victim.role} ended by {exit_text(exits[0])}, expected SIGKILL"
            return ""

        if left := await until(missing, PROOF, 0.02):
            raise NotInjected(left)
        return ", ".join(f"{victim.role} (pid {victim.pid}) ended by SIGKILL" for victim in self.victims)


class KillAgent(Kill):
    """SIGKILL of the agent that is started for this scenario, so many seconds after its start.

    ``find`` names the newest agent, so the scenario starts this one last."""

    def __init__(self) -> None:
        super().__init__("agent")


class Stop(Kill):
    """SIGSTOP, and SIGCONT for those that are still there when it ceases."""

    async def strike(self) -> None:
        for victim in self.victims:
            try:
                os.kill(victim.pid, signal.SIGSTOP)
            except ProcessLookupError:
                raise NotInjected(f"{victim.role} (pid {victim.pid}) was not running any more") from None
            self.world.manager.note("kill", victim.role, f"SIGSTOP pid {victim.pid}")

    async def prove(self) -> str:
        async def missing() -> str:
            running = [v for v in self.victims if state(v.pid) != "T"]
            return ", ".join(f"{v.role} (pid {v.pid}) is in state {state(v.pid) or 'gone'}" for v in running)

        if left := await until(missing, 2.0, 0.01):
            raise NotInjected(left)
        return ", ".join(f"{victim.role} (pid {victim.pid}) was in state T (stopped)" for victim in self.victims)

    async def cease(self) -> None:
        for victim in self.victims:
            if alive(victim.pid, victim.born):
                os.kill(victim.pid, signal.SIGCONT)
                self.world.manager.note("continue", victim.role, f"SIGCONT pid {victim.pid}")


class Slow(Stop):
    """Stopped for most of the time, in short turns: a process on a machine that has no time for it."""

    def __init__(self, *roles: str, stopped: float = 0.27, running: float = 0.03, seconds: float = 12.0) -> None:
        super().__init__(*roles)
        self._turns = (stopped, running)
        self._seconds = seconds
        self._count = 0

    async def strike(self) -> None:
        end = time.monotonic() + self._seconds
        while time.monotonic() < end:
            for victim in self.victims:
                if not alive(victim.pid, victim.born):
                    raise NotInjected(f"{victim.role} (pid {victim.pid}) ended while it was slowed")
                os.kill(victim.pid, signal.SIGSTOP)
            await asyncio.sleep(0.005)
            self._count += all(state(victim.pid) == "T" for victim in self.victims)
            await asyncio.sleep(self._turns[0])
            for victim in self.victims:
                os.kill(victim.pid, signal.SIGCONT)
            await asyncio.sleep(self._turns[1])

    async def prove(self) -> str:
        expected = 0.5 * self._seconds / sum(self._turns)
        if self._count < expected:
            raise NotInjected(f"all were seen stopped {self._count} times, expected at least {expected:.0f}")
        return f"{', '.join(v.role for v in self.victims)}: seen stopped in {self._count} turns of {sum(self._turns):.2f} s"


class Thread(Base):
    """An exception or an endless loop in a sidecar's bootstrap thread, through its debug hook."""

    def __init__(self, node: str, inject: str) -> None:
        super().__init__()
        self.node = node
        self.inject = inject
        self._said = 0

    async def strike(self) -> None:
        observer = self.world.observers[self.node]
        self._said = len(self.world.log_of(f"sidecar {self.node}"))
        try:
            url = f"{observer.sidecars[self.node]}/debug/bootstrap"
            (await observer.http.post(url, json={"inject": self.inject})).raise_for_status()
        except httpx.HTTPError as error:
            raise NotInjected(f"sidecar {self.node}: POST /debug/bootstrap: {why(error)}") from error
        self.world.manager.note("kill", f"bootstrap of {self.node}", f"{self.inject} injected")

    async def prove(self) -> str:
        """An exception is in the log, with its traceback; a loop shows as a thread that computes without end."""
        if self.inject == "exception":
            sign = "injected by the debug hook"

            async def missing() -> str:
                return (
                    ""
                    if sign in self.world.log_of(f"sidecar {self.node}")[self._said :]
                    else f"{sign!r} is not in its log"
                )

            if left := await until(missing, PROOF, 0.02):
                raise NotInjected(left)
            return f"the bootstrap thread of {self.node} died of {sign!r}"
        pid = self.world.pid(f"sidecar {self.node}")
        before = _cpu(pid)
        await asyncio.sleep(1.0)
        busiest = max((ticks - before.get(task, 0) for task, ticks in _cpu(pid).items()), default=0)
        share = busiest / os.sysconf("SC_CLK_TCK")
        if share < 0.25:
            raise NotInjected(f"no thread of pid {pid} computed for more than {share:.2f} s of one second")
        return f"one thread of sidecar {self.node} (pid {pid}) computed for {share:.2f} s of one second"


def _cpu(pid: int) -> dict[str, int]:
    """Ticks of processor time by thread."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            fields = (task / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        found[task.name] = int(fields[11]) + int(fields[12])
    return found


class Restart(Base):
    """SIGTERM of sidecars, one after the other, each up again before the next: an upgrade under load."""

    def __init__(self, *nodes: str) -> None:
        super().__init__()
        self.nodes = nodes
        self._told: list[str] = []

    async def strike(self) -> None:
        for node in self.nodes:
            name = f"sidecar {node}"
            victim = await find(self.world, name)
            before = await self.world.look(node)
            os.kill(victim.pid, signal.SIGTERM)
            self.world.manager.note("kill", name, f"SIGTERM pid {victim.pid}")

            async def missing(name: str = name, victim: Victim = victim) -> str:
                exits = self.world.manager[name].exits[victim.exits :]
                return "" if exits else f"{name} (pid {victim.pid}) has not ended"

            if left := await until(missing, 20.0, 0.05):
                raise NotInjected(left)
            code = self.world.manager[name].exits[victim.exits]

            async def up(node: str = node, old: int = before.incarnation if before else 0) -> str:
                view = await self.world.look(node)
                return (
                    "" if view is not None and view.ready and view.incarnation != old else f"sidecar {node} is not up"
                )

            if left := await until(up, 20.0, 0.1):
                raise NotInjected(left)
            self._told.append(
                f"{name} (pid {victim.pid}) ended by {exit_text(code)} and came back as pid {self.world.pid(name)}"
            )
            await asyncio.sleep(1.0)

    async def prove(self) -> str:
        return "; ".join(self._told)
