"""The engine child as the supervisor sees it.

Owns: the adapter between EngineChild and ``supervisor.Service``. Must not: decide when to restart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from .core import jobs
from .engine import exits, nixl
from .engine.child import EngineChild
from .engine.settings import EngineSettings
from .runtime import RuntimeDir
from .supervisor import Phase

log = logging.getLogger(__name__)

nixl_installed = nixl.installed  # for commands, which do not reach into the engine


class EngineService:
    """The engine child: each start is a new incarnation, and the next starts only when this one is proven dead."""

    name = "engine"

    def __init__(
        self,
        settings: EngineSettings,
        node: str,
        incarnation: int,
        runtime: RuntimeDir,
        said: Callable[[jobs.EngineReport], None],
        gone: Callable[[str], None],
    ) -> None:
        self._node = node
        self._parent = incarnation
        self._runtime = runtime
        self._said = said
        self._gone = gone
        self._child = EngineChild(settings, self._on_report, self._on_exit, inherit=(runtime.engine_lock,))
        self._ready = self._ever_ready = False
        self._why = ""

    async def restart(self) -> None:
        self._ready, self._why = False, ""
        await self._child.start(self._node, self._parent, self._runtime.respawn_incarnation())
        if self._child.pid is not None:
            self._runtime.note_engine(self._child.pid)

    def _on_report(self, report: jobs.EngineReport) -> None:
        if isinstance(report, jobs.Ready):
            self._ready = self._ever_ready = True
            log.info(
                "engine ready: agent %s, pid %d, %d send and %d receive slots of %d bytes",
                report.info.agent, report.pid, report.send_slots, report.info.slots, report.info.slot_bytes,
            )  # fmt: skip
        self._said(report)

    def _on_exit(self, detail: str) -> None:
        """It is proven dead."""
        self._ready = False
        self._gone(f"{detail} (killed: {self._why})" if self._why else detail)

    def send(self, job: jobs.EngineJob, fds: tuple[int, ...]) -> None:
        """To an engine that is dead it does nothing: the core hears EngineGone in a moment."""
        self._child.send(job, fds)

    @property
    def hopeless(self) -> int | None:
        """The engine's exit status, if starting it again can only end the same way."""
        status = self._child.exit_status
        return status if exits.permanent(status, ever_ready=self._ever_ready) else None

    @property
    def ready(self) -> bool:
        return self._ready

    def phase(self) -> Phase:
        if self._child.pid is None:
            return Phase.DOWN
        return Phase.SERVING if self._ready else Phase.STARTING

    def heartbeat(self) -> int:
        return self._child.heartbeat

    def kill(self, why: str) -> None:
        self._why = why
        self._child.kill()

    async def close(self, timeout: float) -> None:
        await self._child.close(timeout)
