"""A round of the demo: load, a fault, every session's end, recovery, and everything home again.

Owns: the order of a round and its deadlines. Must not: start the system or draw anything. What a round finds goes into
its Round; only a system that is beyond use raises (DemoError).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from . import checks
from .checks import Answer, Prompt
from .faults import Fault, KillAgent, NotInjected
from .observe import Baseline, Snapshot, away, difference, everything
from .processes import DemoError, exit_text, until
from .report import Round
from .sessions import NEVER, Session, read_sessions
from .system import System

ABORTS = ("aborted", "aborted_early")


@dataclass(frozen=True)
class Pace:
    """How long things may take; the full demo computes a real model on two cores, the quick one nothing."""

    agent_life: float = 3.0  # seconds until the agent is killed
    load_deadline: float = 30.0  # until a load's first room is seen
    terminal_deadline: float = 10.0  # until every room of a killed agent is terminal: twice the wedge contract's bound
    agent_deadline: float = 60.0  # until a load's sessions have all ended
    home_deadline: float = 20.0  # until everything is home afterwards
    probe_timeout: float = 15.0  # one answer
    probe_deadline: float = 45.0  # from the fault until a probe prompt is answered right
    load_tokens: int = 24  # per session of a load
    agent_tokens: int = 200  # per session of the agent that is killed: it must not end by itself


class Rounds:
    """Runs rounds against a system whose baseline and answers are known."""

    def __init__(
        self, system: System, base: Baseline, known: Mapping[Prompt, Answer], pace: Pace, say: Callable[[str], None]
    ) -> None:
        self.system = system
        self.base = base
        self.known = known
        self.pace = pace
        self.faults: list[tuple[float, str]] = []  # (time.monotonic, what) for the timeline
        self.beyond_use = ""  # why no further round makes sense
        self._say = say
        self._agents = 0

    # the two kinds of round ----------------------------------------------------------------------------------------

    async def killed_agent(self, sessions: int) -> Round:
        """Step 2: the agent dies, with all its streams, seconds after its start."""
        system, pace = self.system, self.pace
        ends, requests = await system.observer.ends(), await self._requests()
        wrong = system.observer.wrong_bytes
        agent = await self._agent(sessions, pace.agent_tokens)
        began = time.monotonic()
        fault = KillAgent(system.manager, agent, sessions)
        item = Round(fault.name, sessions, step=2)
        await fault.prepare()
        await self._load_is_on(agent, item, tokens=False)
        await system.manager.wait_exit(agent, max(0.0, pace.agent_life - (time.monotonic() - began)))
        struck = await self._strike(fault, item)
        await self._prove(fault, item, struck)
        item.unresolved = await self._terminal(sessions)
        self._count_requests(
            item, difference(await self._requests(), requests), read_sessions(system.agent_output(agent))
        )
        after = await system.observer.ends()
        item.rooms = {node: _sum(after[node], ends[node]) for node in after}
        await self._recover(item, struck, wrong)
        return item

    async def under_load(self, fault: Fault, sessions: int) -> Round:
        """Step 3: the fault strikes while an agent's sessions are under way; each of them is followed to its end."""
        system, pace = self.system, self.pace
        before = await system.observer.ends()
        wrong = system.observer.wrong_bytes
        item = Round(fault.name, sessions, step=3)
        agent = await self._agent(sessions, pace.load_tokens)
        await self._load_is_on(agent, item, tokens=True)
        try:
            await fault.prepare()
            struck = await self._strike(fault, item)
        except NotInjected as error:
            item.proof, struck = str(error), time.monotonic()
        else:
            await self._prove(fault, item, struck)
        first = asyncio.create_task(self._first_answer(struck))  # while the load goes on: it must not wait for its end
        code = await system.manager.wait_exit(agent, pace.agent_deadline)
        if code is None:
            item.problems.append(f"the agent did not end within {pace.agent_deadline:g} s; it was killed")
            system.manager.kill(agent)
            await system.manager.wait_exit(agent, 5.0)
        elif code not in (0, 1):
            item.problems.append(f"the agent ended by {exit_text(code)}: {' / '.join(system.manager[agent].tail(3))}")
        self._count_sessions(item, fault, read_sessions(system.agent_output(agent)), struck)
        item.service_seconds = await first
        after = await system.observer.ends()
        item.rooms = {node: _sum(after[node], before[node]) for node in after}
        await self._recover(item, struck, wrong)
        return item

    # their parts ---------------------------------------------------------------------------------------------------

    async def _agent(self, sessions: int, max_tokens: int) -> str:
        self._agents += 1
        spec = self.system.agent(self._agents, sessions, max_tokens)
        await self.system.manager.start(spec)
        return spec.name

    async def _requests(self) -> Mapping[str, int]:
        """The gateway's count of ended requests. Raises DemoError when it does not answer."""
        seen = await self.system.observer.look()
        if seen.gateway is None:
            raise DemoError(f"the gateway's /stats does not answer: {seen.silent.get('gateway', '')}")
        return seen.gateway.ended

    async def _terminal(self, sessions: int) -> int:
        """Wait until every room is terminal. Returns how many sessions are not resolved when the deadline is over."""

        async def missing() -> str:
            found = away(await self.system.observer.look(), self.base)
            return f"{found.rooms} rooms live" if found.rooms or found.unknown else ""

        if not await until(missing, self.pace.terminal_deadline, 0.05):
            return 0
        return min(sessions, away(await self.system.observer.look(), self.base).rooms)

    async def _load_is_on(self, agent: str, item: Round, *, tokens: bool) -> None:
        """Return at the first sign of the load: a session has begun, or, with ``tokens``, some cache has been moved."""
        running, output = self.system.manager[agent], self.system.agent_output(agent)

        async def missing() -> str:
            sessions = read_sessions(output)
            if any(session.tokens or not tokens for session in sessions) or not running.pid:
                return ""
            return "no session has a token" if sessions else "no session has begun"

        left = await until(missing, self.pace.load_deadline, 0.02)
        if not running.pid and not read_sessions(output):
            code = exit_text(running.exits[-1]) if running.exits else "unknown cause"
            left = f"the agent ended by {code}: {' / '.join(running.tail(3))}"
        if left:
            item.problems.append(f"the load did not begin within {self.pace.load_deadline:g} s: {left}")

    async def _strike(self, fault: Fault, item: Round) -> float:
        """Inject; returns when."""
        struck = time.monotonic()
        try:
            await fault.strike()
        except NotInjected as error:
            item.proof = str(error)
            return struck
        self.faults.append((struck, fault.name))
        self._say(f"{fault.name}: struck")
        return struck

    async def _prove(self, fault: Fault, item: Round, struck: float) -> None:
        if item.proof:
            return  # it could not strike, and says why
        try:
            item.proof = await fault.prove()
            item.proof_seconds = time.monotonic() - struck
            item.injected = True
        except NotInjected as error:
            item.proof = str(error)

    def _probe(self) -> Prompt:
        return next(iter(self.known))

    async def _first_answer(self, struck: float) -> float | None:
        """Ask a prompt again and again from the fault on; seconds until it is answered as before."""
        system, prompt = self.system, self._probe()

        async def missing() -> str:
            answer = await checks.ask(
                system.observer.http, system.gateway, system.model, prompt, self.pace.probe_timeout
            )
            return checks.same(answer, self.known[prompt])

        left = await until(missing, max(1.0, self.pace.probe_deadline - (time.monotonic() - struck)), 0.1)
        if left:
            self._say(f"the probe is not answered: {left}")
            return None
        return time.monotonic() - struck

    async def _recover(self, item: Round, struck: float, wrong: int) -> None:
        """Step 4: answered again, equal, and everything home; and what is not."""
        system = self.system
        if item.service_seconds is None:
            item.service_seconds = await self._first_answer(struck)
        if item.service_seconds is None:
            item.problems.append(
                f"no probe prompt was answered right within {self.pace.probe_deadline:g} s of the fault"
            )
        left = await self._home()
        if not left and item.service_seconds is not None:
            item.recovery_seconds = time.monotonic() - struck
        prompts = list(self.known)
        answers = await checks.ask_all(
            system.observer.http, system.gateway, system.model, prompts, self.pace.probe_timeout * 2
        )
        item.answers = len(prompts)
        for prompt, answer in zip(prompts, answers, strict=True):
            problem = checks.same(answer, self.known[prompt])
            item.answers_equal += not problem
            if problem:
                item.problems.append(f"prompt {prompt.name!r} afterwards: {problem}")
        left = await self._home()
        seen = away(await system.observer.look(), self.base)
        item.pages_leaked, item.slots_leaked = seen.pages, seen.slots
        if left:
            item.problems.append(f"not home {self.pace.home_deadline:g} s later: {left}")
        item.wrong_bytes = system.observer.wrong_bytes - wrong
        for running in system.manager.running.values():
            if running.gave_up:
                self.beyond_use = system.manager.explain(running, running.gave_up, self.pace.home_deadline)

    async def _home(self) -> str:
        async def missing() -> str:
            return away(await self.system.observer.look(), self.base).text()

        return await until(missing, self.pace.home_deadline, 0.05)

    # counting ------------------------------------------------------------------------------------------------------

    def _count_requests(self, item: Round, requests: Mapping[str, int], sessions: Sequence[Session]) -> None:
        """The ends of a killed agent's sessions: by the gateway's count, as their agent cannot tell any more.

        Every room of theirs is terminal by then, or is counted as unresolved. A session whose request had not reached
        the gateway when its agent died ended with it.
        """
        item.hit = sum(session.ended == NEVER for session in sessions)
        item.done = requests.get("done", 0)
        item.failed = sum(n for reason, n in requests.items() if reason not in ("done", *ABORTS))
        reached = sum(requests.values())
        item.aborted = item.sessions - item.unresolved - item.done - item.failed
        item.ends = dict(requests)
        if reached + item.unresolved > item.sessions:
            item.problems.append(
                f"the gateway counts {reached} requests that ended, the agent had {item.sessions} sessions"
            )
        elif reached + item.unresolved < item.sessions:
            item.ends["ended_with_agent"] = item.sessions - item.unresolved - reached

    def _count_sessions(self, item: Round, fault: Fault, sessions: Sequence[Session], struck: float) -> None:
        """The ends of a load's sessions, from the agent's own record."""
        item.done = sum(session.end == "done" for session in sessions)
        item.aborted = sum(session.end == "aborted" for session in sessions)
        item.failed = sum(session.end == "failed" for session in sessions)
        item.unresolved = item.sessions - item.done - item.aborted - item.failed
        for session in sessions:
            reason = session.reason if session.end == "failed" else session.end
            item.ends[reason or "no_end"] = item.ends.get(reason or "no_end", 0) + 1
        item.hit = sum(session.began <= struck < session.ended for session in sessions)
        if item.injected and not item.hit:
            item.problems.append("no session was under way when the fault struck")
        for session in sessions:
            if session.end == "failed" and fault.harmless:
                item.problems.append(
                    f"session {session.number} failed, expected none to: {session.detail or session.reason}"
                )
        torn = sum(session.kv_identical is False for session in sessions)
        if torn:
            item.problems.append(f"{torn} sessions were done with other cache bytes than prefill had")


def _sum(after: Mapping[str, Mapping[str, int]], before: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Room ends of one node over both sides, by reason."""
    out: dict[str, int] = {}
    for side, reasons in after.items():
        for reason, n in difference(reasons, before.get(side, {})).items():
            out[reason] = out.get(reason, 0) + n
    return out


async def settled(system: System, seconds: float) -> Snapshot:
    """Wait until nothing is under way, so that a baseline can be taken. Raises DemoError that says what is."""

    async def missing() -> str:
        seen = await system.observer.look()
        return away(seen, everything(seen)).text()

    if left := await until(missing, seconds):
        raise DemoError(f"the system does not come to rest within {seconds:g} s: {left}")
    return await system.observer.look()
