"""What operators and probes may ask of a running sidecar: the admin service's ``Backend``.

Owns: readiness and its reasons, the status, and the debug hook. Must not: change anything but by an event to the core.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import Any

from .core import events
from .core.ledger import SlotState
from .driver import Driver
from .engineservice import EngineService
from .metrics import Metrics
from .peerlink import BootstrapService
from .supervisor import Guard, Phase, Service

log = logging.getLogger(__name__)


class Operations:
    """``alive`` and ``render_metrics`` are safe in any thread; the rest belongs to the main loop."""

    def __init__(
        self,
        driver: Driver,
        metrics: Metrics,
        engine: EngineService,
        bootstrap: BootstrapService,
        *,
        hooks: bool,
    ) -> None:
        self._driver = driver
        self._metrics = metrics
        self._engine = engine
        self._bootstrap = bootstrap
        self._hooks = hooks
        self._began = time.monotonic()
        self._beat = time.monotonic()
        self.services: dict[str, tuple[Service, Guard]] = {}  # once the supervisor exists
        self.draining = False

    # the main loop -------------------------------------------------------------------------------------------------

    def beat(self) -> None:
        """The main loop turns: called at each look of the supervisor."""
        self._beat = time.monotonic()

    def alive(self) -> str | None:
        age = time.monotonic() - self._beat
        limit = self._driver.node.state.limits.stall_deadline
        if age <= limit:
            return None
        return f"main loop: no turn for {age:.1f} s, expected at most limits.stall_deadline = {limit:g} s"

    def render_metrics(self, status: dict[str, Any] | None) -> bytes:
        return self._metrics.render(status, time.monotonic() - self._beat)

    # readiness and status ------------------------------------------------------------------------------------------

    async def not_ready(self) -> list[str]:
        return self.reasons()

    def reasons(self) -> list[str]:
        """Why no room should be sent here now."""
        reasons = []
        if self.draining:
            reasons.append("draining: the sidecar is shutting down")
        for service in (self._engine, self._bootstrap):
            phase = service.phase()
            if phase is not Phase.SERVING:
                cause = self.services[service.name][1].cause
                reasons.append(f"{service.name}: {phase.value}{f', after: {cause}' if cause else ''}")
        problem = self._bootstrap.problem()
        if problem:
            reasons.append(f"registry: {problem}")
        return reasons

    async def status(self) -> dict[str, Any]:
        """The core's snapshot without its rooms, and what the daemon knows beside it."""
        status = self._snapshot()
        del status["rooms"]
        st = self._driver.node.state
        now = asyncio.get_running_loop().time()
        quarantined = [now - slot.since for slot in st.engine.recv.all if slot.state is SlotState.QUARANTINED]
        services = {"main": _service(Phase.SERVING, time.monotonic() - self._beat, 0, "")}
        for name, (service, guard) in self.services.items():
            services[name] = _service(service.phase(), guard.watch.age, guard.restarts, guard.cause)
        reasons = self.reasons()
        return status | {
            "ready": not reasons,
            "reasons": reasons,
            "draining": self.draining,
            "pid": os.getpid(),
            "uptime_seconds": time.monotonic() - self._began,
            "services": services,
            "frames_dropped": self._bootstrap.dropped,
            "oldest_quarantined_seconds": max(quarantined, default=0.0),
        }

    async def rooms(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._snapshot()["rooms"]
        return found

    def _snapshot(self) -> dict[str, Any]:
        self._driver.deliver(events.Tick())  # so that ages are of now
        return self._driver.node.snapshot()

    # acts ----------------------------------------------------------------------------------------------------------

    async def abort(self, room: str, epoch: int, detail: str) -> dict[str, Any]:
        st = self._driver.node.state
        live = [r for r in (st.sends.get((room, epoch)), st.recvs.get((room, epoch))) if r is not None and r.live]
        self._driver.deliver(events.OperatorAbort(room, epoch, detail))
        return {"room": room, "epoch": epoch, "found": bool(live), "sides": len(live)}

    async def inject(self, service: str, fault: str) -> None:
        if not self._hooks:
            raise LookupError(
                "debug.hooks is false: faults can be injected only into a sidecar started with --debug-hooks true"
            )
        log.warning("debug hook: %s into %s", fault, service)
        self._bootstrap.inject(fault)


def _service(phase: Phase, age: float, restarts: int, cause: str) -> dict[str, Any]:
    return {"phase": phase.value, "heartbeat_age_seconds": age, "restarts": restarts, "last_cause": cause}
