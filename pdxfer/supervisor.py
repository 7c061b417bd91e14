"""The supervisor: services that die are restarted, services that hang are replaced, and enough is enough.

Owns: restart budgets, backoff, stall detection, and the loop that applies them. Must not: know what a service does, or
hold anything of a room; a restarted service finds its state in the core.

The policy is pure (``now`` is passed in); ``Supervisor`` is the asyncio loop around it. A heartbeat is a counter that only
real progress moves. Silence is summed over the supervisor's own looks, so that a process that was stopped and
continued as a whole (SIGSTOP, a suspended machine) does not take its healthy services for hung.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from .settings import SupervisorSettings

log = logging.getLogger(__name__)


class Phase(enum.Enum):
    DOWN = "down"  # not running: to be restarted
    STARTING = "starting"  # started, not serving yet: under the start deadline
    SERVING = "serving"  # under the stall deadline


class Service(Protocol):
    """What the supervisor needs of a service. All is called in the main loop's thread, and nothing may block."""

    @property
    def name(self) -> str: ...
    def phase(self) -> Phase: ...
    def heartbeat(self) -> int:
        """A counter that only progress moves."""
        ...

    def kill(self, why: str) -> None:
        """Bring a hung service down; ``phase`` becomes DOWN when it is proven dead or given up for lost."""
        ...

    async def restart(self) -> None:
        """Start it again. An exception counts as one more death; GiveUp ends the daemon."""
        ...


# policy (pure) -----------------------------------------------------------------------------------------------------


class GiveUp(Exception):
    """Nothing but a new process helps: the daemon ends, and systemd or Kubernetes starts it again."""


class OverBudget(GiveUp):
    """A service failed more often than its budget allows."""


class RestartPolicy:
    """When may a service be started again? At once the first time in a window, later with doubled pauses, then never."""

    def __init__(self, name: str, settings: SupervisorSettings, budget: str = "restart_budget") -> None:
        self.name = name
        self._settings = settings
        self._key = budget
        self._budget: int = getattr(settings, budget)
        self._deaths: deque[float] = deque()

    def died(self, now: float, why: str) -> float:
        """The time of the next start. Raises OverBudget."""
        s = self._settings
        while self._deaths and now - self._deaths[0] >= s.restart_window:
            self._deaths.popleft()
        self._deaths.append(now)
        recent = len(self._deaths)
        if recent > self._budget:
            raise OverBudget(
                f"{self.name}: {recent} failures within {s.restart_window:g} s, expected at most"
                f" supervisor.{self._key} = {self._budget}; the last one: {why}"
            )
        if recent == 1:
            return now
        return now + min(s.backoff_first * 2.0 ** min(recent - 2, 60), s.backoff_most)


class Watch:
    """How long has a heartbeat been still?"""

    def __init__(self, longest_step: float) -> None:
        self._longest_step = longest_step  # a longer time between two looks is the observer's own silence
        self._last: int | None = None
        self._looked = 0.0
        self.age = 0.0

    def reset(self) -> None:
        self._last, self.age = None, 0.0

    def look(self, heartbeat: int, now: float) -> float:
        """Seconds of silence."""
        if heartbeat != self._last:
            self._last, self.age = heartbeat, 0.0
        else:
            self.age += min(max(now - self._looked, 0.0), self._longest_step)
        self._looked = now
        return self.age


class Guard:
    """One service's watch, policy and schedule: says what to do next, and does nothing."""

    def __init__(self, name: str, settings: SupervisorSettings, stall_deadline: float) -> None:
        self.name = name
        self._settings = settings
        self.stall_deadline = stall_deadline
        self.policy = RestartPolicy(name, settings)
        self.watch = Watch(4 * settings.check_interval)
        self.restarts = 0
        self.due: float | None = None  # a restart is scheduled
        self._started: float | None = None
        self._killed: float | None = None
        self.why = ""  # what the service, or this guard, said about the death that comes or came
        self.cause = ""  # of the last restart

    def decide(self, phase: Phase, heartbeat: int, now: float) -> str:
        """ "", "kill" or "restart". Raises OverBudget."""
        if phase is Phase.DOWN:
            self.watch.reset()
            self._started = self._killed = None
            if self.due is None:
                self.cause, self.why = self.why or "it ended by itself", ""
                self.due = self.policy.died(now, self.cause)
            if now < self.due:
                return ""
            self.due = None
            self.restarts += 1
            return "restart"
        self.due = None
        if phase is Phase.STARTING:
            self.watch.reset()
            self._started = now if self._started is None else self._started
            if now - self._started > self._settings.start_deadline:
                return self._kill(now, f"not ready {self._settings.start_deadline:g} s after its start")
            return ""
        self._started = None
        age = self.watch.look(heartbeat, now)
        if age > self.stall_deadline:
            return self._kill(
                now, f"no progress for {age:.1f} s, expected at most limits.stall_deadline = {self.stall_deadline:g} s"
            )
        return ""

    @property
    def stalls_in(self) -> float | None:
        """Seconds from the last look until the service counts as stalled, unless it makes progress. None: it is not watched, or
        has been killed.
        """
        if self._killed is not None or not self.watch.age:
            return None
        return self.stall_deadline - self.watch.age + 0.001

    def _kill(self, now: float, why: str) -> str:
        """Once, and again each stall deadline while it does not die."""
        if self._killed is not None and now - self._killed < self.stall_deadline:
            return ""
        self._killed, self.why = now, why
        return "kill"


# the loop ----------------------------------------------------------------------------------------------------------


class Supervisor:
    """Looks at its services each ``check_interval`` and whenever it is woken."""

    def __init__(
        self,
        services: Sequence[Service],
        settings: SupervisorSettings,
        stall_deadline: float,
        *,
        give_up: Callable[[str], None],
        restarted: Callable[[str, str], None] = lambda name, why: None,
        looked: Callable[[], None] = lambda: None,
    ) -> None:
        self._services = list(services)
        self._settings = settings
        self.guards = {service.name: Guard(service.name, settings, stall_deadline) for service in services}
        self._give_up = give_up
        self._restarted = restarted
        self._looked = looked
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="supervisor")
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Nobody watches the watcher, so its own defect ends the daemon."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.critical("a defect in the supervisor", exc_info=error)
            self._give_up(f"supervisor: {type(error).__name__}: {error}")

    def wake(self) -> None:
        """Look now: something died. In the main loop's thread."""
        self._wake.set()

    async def stop(self) -> None:
        """No service is restarted any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def died(self, name: str, why: str) -> None:
        """A service reports its own death, with the cause; wakes the loop."""
        self.guards[name].why = why
        self.wake()

    def set_stall_deadline(self, seconds: float) -> None:
        for guard in self.guards.values():
            guard.stall_deadline = seconds

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._looked()
            for service in self._services:
                try:
                    await self._look(service, loop.time())
                except GiveUp as error:
                    log.critical("giving up: %s", error)
                    self._give_up(str(error))
                    return
            pause = self._settings.check_interval
            for guard in self.guards.values():
                restarts_in = None if guard.due is None else guard.due - loop.time()
                for left in (restarts_in, guard.stalls_in):
                    pause = pause if left is None else min(pause, max(left, 0.001))
            try:
                await asyncio.wait_for(self._wake.wait(), pause)
            except TimeoutError:
                continue
            self._wake.clear()

    async def _look(self, service: Service, now: float) -> None:
        guard = self.guards[service.name]
        decision = guard.decide(service.phase(), service.heartbeat(), now)
        if decision == "kill":
            log.error("%s: %s: it is killed and restarted", service.name, guard.why)
            service.kill(guard.why)
            self.wake()
        elif decision == "restart":
            log.warning("%s: restart %d: %s", service.name, guard.restarts, guard.cause)
            self._restarted(service.name, guard.cause)
            try:
                await service.restart()
            except GiveUp:
                raise
            except Exception as error:
                log.exception("%s: the restart failed", service.name)
                guard.why = f"its restart failed: {type(error).__name__}: {error}"
