"""The demo's faults: each strikes something real, and each proves afterwards that it did.

Owns: what a fault does and what counts as proof (pid gone, exit status, restart counter, new incarnation). Must not:
wait for recovery or judge a round; ``rounds`` does. A fault without its proof makes the round fail as not injected.
"""

from __future__ import annotations

import os
import signal
from typing import Protocol

import httpx

from .observe import Observer, restarts, why
from .processes import Manager, alive, birth, exit_text, until

PROOF_DEADLINE = 30.0  # seconds until what was struck must be dead, and its successor seen


class NotInjected(Exception):
    """The fault could not be injected, or nothing shows that it took effect; the message says what is missing."""


class Fault(Protocol):
    """``prepare`` reads what the proof compares with, ``strike`` returns at once, ``prove`` waits for the evidence."""

    name: str
    harmless: bool  # no session may fail by it

    async def prepare(self) -> None: ...
    async def strike(self) -> None: ...
    async def prove(self) -> str:
        """The evidence in words. Raises NotInjected."""
        ...


class KillAgent:
    """SIGKILL of the agent process with all its streams open."""

    harmless = False

    def __init__(self, manager: Manager, process: str, sessions: int) -> None:
        self.name = f"SIGKILL agent, {sessions} sessions"
        self._manager = manager
        self._process = process
        self._pid = 0

    async def prepare(self) -> None:
        self._pid = self._manager[self._process].pid

    async def strike(self) -> None:
        if not self._manager[self._process].pid:
            exits = self._manager[self._process].exits
            raise NotInjected(
                f"the agent had ended before it was killed ({exit_text(exits[-1]) if exits else 'no exit seen'})"
            )
        self._manager.kill(self._process)

    async def prove(self) -> str:
        code = await self._manager.wait_exit(self._process, PROOF_DEADLINE)
        if code != -signal.SIGKILL:
            raise NotInjected(
                f"the agent ended by {'nothing yet' if code is None else exit_text(code)}, expected SIGKILL"
            )
        return f"agent pid {self._pid} ended by SIGKILL"


class KillWorker:
    """SIGKILL of a worker process; the process manager starts it again."""

    harmless = False

    def __init__(self, manager: Manager, observer: Observer, process: str, engine_id: str) -> None:
        self.name = f"SIGKILL {process}"
        self._manager = manager
        self._observer = observer
        self._process = process
        self._engine_id = engine_id
        self._pid = 0
        self._restarts = 0
        self._exits = 0

    async def prepare(self) -> None:
        running = self._manager[self._process]
        self._pid, self._restarts, self._exits = running.pid, running.restarts, len(running.exits)

    async def strike(self) -> None:
        if self._manager[self._process].pid != self._pid or not self._pid:
            raise NotInjected(f"{self._process} (pid {self._pid}) was not running any more")
        self._manager.kill(self._process)

    async def prove(self) -> str:
        running = self._manager[self._process]

        async def missing() -> str:
            if len(running.exits) <= self._exits:
                return f"pid {self._pid} has not ended"
            if running.exits[self._exits] != -signal.SIGKILL:
                return f"it ended by {exit_text(running.exits[self._exits])}, expected SIGKILL"
            if running.restarts <= self._restarts or not running.pid:
                return running.gave_up or "it was not started again"
            seen = await self._observer.look()
            if self._engine_id not in seen.workers:
                reason = seen.silent.get(f"worker {self._engine_id}", "")
                return f"the new process (pid {running.pid}) does not answer: {reason}"
            if not any(self._engine_id in node.pages for node in seen.nodes.values()):
                return f"the new process (pid {running.pid}) has not attached to its sidecar"
            return ""

        if left := await until(missing, PROOF_DEADLINE):
            raise NotInjected(left)
        return f"pid {self._pid} ended by SIGKILL, started again as pid {running.pid} and attached"


class KillEngine:
    """SIGKILL of a sidecar's engine child; the supervisor starts a new one with a new incarnation."""

    harmless = False

    def __init__(self, observer: Observer, node: str, side: str, note: Manager) -> None:
        self.name = f"SIGKILL {side}'s engine"
        self._observer = observer
        self._node = node
        self._note = note
        self._pid = 0
        self._birth = ""
        self._incarnation = 0

    async def prepare(self) -> None:
        seen = await self._observer.look()
        node = seen.nodes.get(self._node)
        if node is None or not node.engine_pid:
            raise NotInjected(
                f"sidecar {self._node} shows no engine: {seen.silent.get(f'sidecar {self._node}', 'none in /status')}"
            )
        self._pid, self._incarnation, self._birth = node.engine_pid, node.engine_incarnation, birth(node.engine_pid)

    async def strike(self) -> None:
        if not alive(self._pid, self._birth):
            raise NotInjected(f"the engine (pid {self._pid}) was not running any more")
        os.kill(self._pid, signal.SIGKILL)
        self._note.note("kill", f"engine of {self._node}", f"SIGKILL pid {self._pid}")

    async def prove(self) -> str:
        found = {"pid": 0, "incarnation": 0}

        async def missing() -> str:
            if alive(self._pid, self._birth):
                return f"pid {self._pid} is still there"
            node = (await self._observer.look()).nodes.get(self._node)
            if node is None:
                return f"sidecar {self._node} does not answer"
            if not node.engine_pid or node.engine_incarnation in (0, self._incarnation):
                return f"sidecar {self._node} shows no new engine (pid {node.engine_pid})"
            found.update(pid=node.engine_pid, incarnation=node.engine_incarnation)
            return ""

        if left := await until(missing, PROOF_DEADLINE):
            raise NotInjected(left)
        return (
            f"pid {self._pid} is gone; engine incarnation {self._incarnation} became {found['incarnation']}"
            f" (pid {found['pid']})"
        )


class RaiseInBootstrap:
    """An exception inside a sidecar's bootstrap thread, through its debug hook."""

    harmless = True

    def __init__(self, observer: Observer, node: str, side: str, note: Manager) -> None:
        self.name = f"exception in {side}'s bootstrap"
        self._observer = observer
        self._node = node
        self._note = note
        self._restarts = 0

    async def _count(self) -> int:
        return restarts(await self._observer.metrics(self._node)).get("bootstrap", 0)

    async def prepare(self) -> None:
        try:
            self._restarts = await self._count()
        except httpx.HTTPError as error:
            raise NotInjected(f"sidecar {self._node}: /metrics: {why(error)}") from error

    async def strike(self) -> None:
        url = f"{self._observer.sidecars[self._node]}/debug/bootstrap"
        try:
            (await self._observer.http.post(url, json={"inject": "exception"})).raise_for_status()
        except httpx.HTTPError as error:
            raise NotInjected(f"sidecar {self._node}: POST /debug/bootstrap: {why(error)}") from error
        self._note.note("kill", f"bootstrap of {self._node}", "exception injected")

    async def prove(self) -> str:
        async def missing() -> str:
            try:
                count = await self._count()
            except httpx.HTTPError as error:
                return f"sidecar {self._node}: /metrics: {why(error)}"
            return "" if count > self._restarts else f"pdxfer_restarts_total of bootstrap is still {count}"

        if left := await until(missing, PROOF_DEADLINE):
            raise NotInjected(left)
        return f"pdxfer_restarts_total of bootstrap on {self._node}: {self._restarts} became {await self._count()}"
