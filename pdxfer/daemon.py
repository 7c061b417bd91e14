"""The daemon: wires the parts of one sidecar, runs them, and ends them in order.

Owns: start, signals, readiness, status, drain and exit codes. Must not: hold state of rooms (the core does), interpret
actions (``driver`` does), or decide on restarts (``supervisor`` does).

Order of the start: runtime directory, death of every engine of an earlier parent, then the sockets. A peer that hears a new
incarnation may rely on it that nothing of the old one writes any more.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from . import __version__, config, logs, shortage
from .admin import AdminService
from .bootstrap.keys import BadKeyFile
from .cli import BUSY, INTERNAL, OK, UNAVAILABLE, USAGE
from .config import Effective
from .core import events, jobs, messages, worker
from .core.node import Node
from .core.reasons import Refused
from .driver import Driver
from .engine import exits
from .engineservice import EngineService
from .metrics import Metrics
from .operations import Operations
from .peerlink import RELOADABLE, BootstrapService
from .pools import mirror
from .runtime import Notifier, RuntimeDir, RuntimeDirBusy, RuntimeDirError
from .supervisor import RestartPolicy, Supervisor
from .workers import SocketInUse, WorkerService

log = logging.getLogger(__name__)


class StartError(Exception):
    """The daemon cannot start: a message for people and an exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


# The exit code for an engine that cannot start: what must be installed, what may pass, and what only another setting helps.
_HOPELESS = {exits.NO_NIXL: UNAVAILABLE, exits.NO_MEMORY: BUSY, exits.NIXL_FAILED: INTERNAL}
_TOLD = (StartError, RuntimeDirBusy, RuntimeDirError)  # whose words are for people


def run(effective: Effective, reload: Callable[[], Effective]) -> int:
    """Run until a signal or a failure; returns the exit code."""
    settings = effective.config
    logs.set_up(settings.node.name, settings.log.level, settings.log.json)
    daemon: Daemon | None = None
    try:
        _be_prompt()
        _raise_descriptor_limit()
        daemon = Daemon(effective, reload)
        return asyncio.run(daemon.run())
    except Exception as error:  # noqa: BLE001 - logged there, with its traceback if it is a defect
        return _failed(error, daemon)


def _failed(error: Exception, daemon: Daemon | None) -> int:
    """Say why it ends, and return the exit code: a line for what the world did, a traceback for a defect."""
    found = _judged(error)
    if found is None:
        log.error("a defect ended the daemon; report it with this traceback", exc_info=error)
        return INTERNAL
    if daemon is not None and daemon.ended is not None:
        log.warning("after the end, and without effect: %s", found[0])
        return daemon.ended
    # The first is the cause, since the end of a start that failed may fail as well. One that would block mostly says
    # nothing but that a socket was empty.
    causes = [c for c in shortage.chain(error, _TOLD) if not isinstance(c, BlockingIOError)]
    found = next((judged for cause in causes if (judged := _judged(cause))), found)
    details = error if log.isEnabledFor(logging.DEBUG) and not isinstance(error, _TOLD) else None
    began = "the shutdown was cut short" if daemon is not None and daemon.started else "cannot start"
    log.critical("%s: %s", began, found[0], exc_info=details)
    return found[1]


def _judged(error: BaseException) -> tuple[str, int] | None:
    """What the world did, in words, and the exit code for it. None: a defect."""
    if isinstance(error, StartError):
        return str(error), error.exit_code
    if isinstance(error, RuntimeDirBusy):
        return str(error), BUSY
    if isinstance(error, RuntimeDirError):
        return str(error), BUSY if error.passes else USAGE
    short = shortage.of(error)
    return None if short is None else (short.words, BUSY if short.passes else USAGE)


def _raise_descriptor_limit() -> None:
    """Each peer takes about four descriptors and each worker as many as its pools: what the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < shortage.LEAST_DESCRIPTORS:
        raise StartError(
            f"open files: expected a limit of at least {shortage.LEAST_DESCRIPTORS}, found {hard}; raise it (ulimit -n,"
            " LimitNOFILE=): a peer takes about four, a worker one and one for each pool",
            USAGE,
        )
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        log.info("descriptor limit raised from %d to the hard limit, %d", soft, hard)


def _be_prompt() -> None:
    """Two threads answer within fractions of a millisecond: neither waits long for the other's turn, nor for a collection
    that finds nothing, since what a room leaves behind is mostly free of cycles.
    """
    sys.setswitchinterval(0.0005)
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


class Daemon:
    """One sidecar."""

    node: Node
    driver: Driver
    supervisor: Supervisor

    def __init__(self, effective: Effective, reload: Callable[[], Effective]) -> None:
        self._effective = effective
        self._read_again = reload
        self._settings = effective.config
        self._runtime = RuntimeDir(self._settings.node.runtime_dir)
        self._notify = Notifier()
        self._watchdog_said = 0.0
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._workers_up = False
        self._exit_code = OK
        self._mirror: tuple[int, ...] = ()  # its descriptor, if there is a mirror
        self._failure = ""  # why the daemon gives up, when it does
        self.started = False
        self.ended: int | None = None  # the exit code, once everything is closed

    async def run(self) -> int:
        """Everything from the lock to the last goodbye; returns the exit code."""
        settings = self._settings
        self._runtime.acquire(settings.node.name)
        # The pool's first thread stays: the end of everything needs one, and may find none then.
        await asyncio.to_thread(time.monotonic)
        try:
            await self._runtime.own_engines(patience=15.0, kill_after=2.0)
            await self._take_mirror()
            self._wire()
            try:
                await self._start()
                self.started = True
                await self._stop.wait()
                self._notify.say("STOPPING=1")
                if not self._failure:
                    await self._drain()
            finally:
                await self._close()
        finally:
            self._runtime.release()
        if self._failure:
            log.critical("exit code %d: %s", self._exit_code, self._failure)
        else:
            log.info("stopped")
        self.ended = self._exit_code
        return self._exit_code

    # start ---------------------------------------------------------------------------------------------------------

    async def _take_mirror(self) -> None:
        """All of its memory, now or not at all: it would be a SIGBUS later."""
        size = self._settings.mirror.bytes
        if size:
            try:
                self._mirror = (await asyncio.to_thread(mirror.allocate, size),)
            except Refused as error:
                raise StartError(f"mirror.bytes is {size}: {error.detail}", BUSY) from None

    def _wire(self) -> None:
        """Make the parts; nothing runs yet."""
        settings = self._settings
        name = settings.node.name
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._loop_error)
        incarnation = self._runtime.next_incarnation()
        self.metrics = Metrics(name, incarnation, __version__, ("main", "engine", "bootstrap", "admin"))
        self.workers = WorkerService(
            settings.worker.socket,
            self._worker_event,
            refused=lambda code, detail: self.driver.refused("worker", "worker socket", code, detail),
            attach_timeout=settings.worker.attach_timeout,
            max_connections=settings.worker.max_connections,
            max_buffer=settings.worker.max_buffer,
            users=settings.worker.users,
        )
        self.engine = EngineService(
            settings.engine, name, incarnation, self._runtime, self._engine_said, self._engine_gone
        )
        try:
            self.bootstrap = BootstrapService(
                settings,
                incarnation,
                make_keys=self._effective.origins["bootstrap.key_file"] == "derived",
                deliver=lambda batch: self.driver.deliver_all(batch),
                refused=lambda origin, who, code, detail, count: self.driver.refused(origin, who, code, detail, count),
                died=lambda why: self.supervisor.died("bootstrap", why),
                attached=lambda: list(self.node.state.by_engine_id),
            )
        except BadKeyFile as error:
            short = shortage.of(error.__cause__) if error.__cause__ is not None else None
            code = BUSY if short is not None and short.passes else USAGE
            raise StartError(f"bootstrap.key_file: {error}", code) from None
        # Its address, with a port of its own choice perhaps, is what the node tells its peers.
        self._bind("bootstrap", settings.bootstrap.listen, self.bootstrap.start)
        self.node = Node(name, incarnation, self.bootstrap.address, __version__, settings.limits, settings.mirror)
        errors = RestartPolicy("core", settings.supervisor, "core_error_budget")
        self.driver = Driver(self.node, self, self.metrics, errors, self._give_up)
        self.operations = Operations(self.driver, self.metrics, self.engine, self.bootstrap, hooks=settings.debug.hooks)
        self.admin = AdminService(settings.admin, self.operations, loop, lambda why: self.supervisor.died("admin", why))
        services = (self.engine, self.bootstrap, self.admin)
        self.supervisor = Supervisor(
            services,
            settings.supervisor,
            settings.limits.stall_deadline,
            give_up=self._give_up,
            restarted=lambda service, why: self.metrics.restarts.labels(service).inc(),
            looked=self._looked,
        )
        self.operations.services = {s.name: (s, self.supervisor.guards[s.name]) for s in services}

    async def _start(self) -> None:
        settings = self._settings
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._terminate, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        self._bind("admin", f"{settings.admin.host}:{settings.admin.port}", self.admin.start)
        self._runtime.publish_admin(*self.admin.address)
        try:
            await self.workers.start()
        except (SocketInUse, OSError) as error:
            short = shortage.of(error)
            raise StartError(f"worker.socket: {error if short is None else short.words}", BUSY) from error
        self._workers_up = True
        await self.engine.restart()
        self.supervisor.start()
        log.info(
            "node %s, incarnation %x: workers at %s, peers at %s, admin at http://%s:%d", settings.node.name, self.node.state.incarnation,
            settings.worker.socket, self.node.state.address, *self.admin.address,
        )  # fmt: skip

    @staticmethod
    def _bind(part: str, where: str, start: Callable[[], None]) -> None:
        try:
            start()
        except OSError as error:
            short = shortage.of(error)
            if short is not None:
                raise StartError(f"{part} cannot listen on {where}: {short.words}", BUSY) from error
            raise StartError(
                f"{part} cannot listen on {where}: {error.strerror or error}; choose another port", BUSY
            ) from None

    # the end -------------------------------------------------------------------------------------------------------

    def _terminate(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._stop.is_set():
            log.warning("%s again: rooms are ended now", name)
            self._hurry.set()
        else:
            log.info(
                "%s: draining for up to %g s; again to stop at once", name, self._settings.supervisor.drain_timeout
            )
            self.operations.draining = True
            self._stop.set()

    def _give_up(self, why: str, exit_code: int = INTERNAL) -> None:
        if not self._failure:
            self._failure, self._exit_code = why, exit_code
        self.operations.draining = True
        self._stop.set()

    async def _drain(self) -> None:
        """Take no new rooms, and let the others come to their own end."""
        self.driver.deliver(events.Drain())
        if not await self._until(self._no_rooms, self._settings.supervisor.drain_timeout):
            st = self.node.state
            log.warning("%d rooms are left and are ended as shutdown", len(st.sends) + len(st.recvs))

    def _no_rooms(self) -> bool:
        st = self.node.state
        return not (st.sends or st.recvs or st.homing or self.node.mirrors.operations)

    async def _until(self, reached: Callable[[], bool], timeout: float) -> bool:
        """Wait for it, for so long, or until a second signal or a failure."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        while not reached():
            if loop.time() >= end or self._hurry.is_set() or self._failure:
                return False
            await asyncio.sleep(0.02)
        return True

    async def _close(self) -> None:
        """End every room by name, tell workers and peers, close the engine, then the sockets."""
        await self.supervisor.stop()
        self.driver.deliver(events.Shutdown())
        await self._until(self._no_rooms, 1.0)  # copies under way; what is left ends with the engine
        await self.engine.close(0.0 if self._hurry.is_set() else self._settings.supervisor.close_timeout)
        await self.bootstrap.stop()
        if self._workers_up:
            await self.workers.close()
        await self.admin.stop()
        self.driver.close()

    # the parts' events ---------------------------------------------------------------------------------------------

    def _worker_event(self, event: events.Event) -> None:
        self.driver.deliver(event)
        if not isinstance(event, events.WorkerSaid):
            self.bootstrap.attached_changed()

    def _engine_said(self, report: jobs.EngineReport) -> None:
        if isinstance(report, jobs.Counters):
            self.metrics.engine.update(report.values)
        self.driver.deliver(events.EngineSaid(report))
        if isinstance(report, jobs.Ready):
            self._notify.say("READY=1", f"STATUS=engine {report.info.agent}")

    def _engine_gone(self, detail: str) -> None:
        log.log(logging.INFO if self._stop.is_set() else logging.ERROR, "the engine is gone: %s", detail)
        self.metrics.engine.engine_gone()
        self.driver.deliver(events.EngineGone(detail))
        if (status := self.engine.hopeless) is not None:
            self._give_up(detail, _HOPELESS[status])
        else:
            self.supervisor.died("engine", detail)

    # sinks of the driver -------------------------------------------------------------------------------------------

    def to_worker(self, id: int, frame: worker.SidecarFrame) -> None:
        self.workers.send(id, frame)

    def drop_worker(self, id: int) -> None:
        self.workers.drop(id)

    def fds(self, id: int) -> tuple[int, ...]:
        return self.workers.fds(id)

    def mirror_fds(self) -> tuple[int, ...]:
        return self._mirror

    def forget_worker(self, id: int) -> None:
        self.workers.forget(id)

    def to_peer(self, envelope: messages.Envelope) -> None:
        self.bootstrap.send(envelope)

    def forget_peer(self, node: str) -> None:
        self.bootstrap.forget(node)

    def to_engine(self, job: jobs.EngineJob, fds: tuple[int, ...]) -> None:
        self.engine.send(job, fds)

    def kill_engine(self, why: str) -> None:
        self.engine.kill(why)

    def resolve(self, engine_id: str) -> None:
        self.bootstrap.resolve(engine_id)

    def _looked(self) -> None:
        """Each look of the supervisor: the main loop turns."""
        self.operations.beat()
        every, now = self._notify.watchdog_interval, time.monotonic()
        if every is not None and now - self._watchdog_said >= every:
            self._watchdog_said = now
            self._notify.say("WATCHDOG=1")

    # SIGHUP --------------------------------------------------------------------------------------------------------

    def _reload(self) -> None:
        """Take over what can change in a running sidecar; say what changed, and what needs a restart."""
        try:
            new = self._read_again()
        except config.ConfigError as error:
            log.error("SIGHUP: the configuration is wrong and nothing changes: %s", "; ".join(error.problems))
            return
        changed = config.differences(self._effective.config, new.config)
        live = [path for path in changed if path == "log.level" or path.startswith(("limits.", *RELOADABLE))]
        self._settings = config.merged(self._settings, new.config, live)
        self._effective = new._replace(config=self._settings)
        logs.set_level(self._settings.log.level)
        self.node.state.limits = self._settings.limits
        self.supervisor.set_stall_deadline(self._settings.limits.stall_deadline)
        self.bootstrap.reload(self._settings)
        log.info("SIGHUP: changed: %s; needs a restart: %s", ", ".join(live) or "nothing",
                 ", ".join(path for path in changed if path not in live) or "nothing")  # fmt: skip

    def _loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception in a callback or task of the main loop that nobody awaited: a defect, counted like the core's."""
        error = context.get("exception")
        log.error("a defect in the main loop: %s", context.get("message"), exc_info=error)
        self.metrics.core_errors.inc()
