"""The demo's process manager: starts real processes, sees each one's end, restarts those it should, leaves none behind.

Owns: spawning (own session, killed with the demo), logs, restarts with a budget, stopping, and finding what is left
over. Must not: know what a process does; a Spec says how to tell that it is up and what to do when it is not.

Every process carries MARKER in its environment, and so do its children, however deep: that is how leftovers are found.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import secrets
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

MARKER = "PDXFER_DEMO_RUN"
RESTART_PAUSE = 0.2  # before the first restart, then multiplied by the process's backoff
RESTART_BUDGET = 6  # restarts of one process
PR_SET_PDEATHSIG = 1

Probe = Callable[[], Awaitable[str]]  # "" when it holds, else what is missing

_libc = ctypes.CDLL(None, use_errno=True)  # loaded before any fork: nothing may be imported between fork and exec


class DemoError(Exception):
    """The demo cannot go on; the message says what, why and what to do."""


@dataclass(frozen=True)
class Spec:
    """A process to run. ``ready`` says what it still lacks, ``advice`` what to do when it does not come up."""

    name: str
    argv: tuple[str, ...]
    ready: Probe | None = None
    advice: str = ""
    restart: bool = False
    budget: int = RESTART_BUDGET
    backoff: float = 2.0  # what the pause before a restart is multiplied by each time
    stdin: Path | None = None
    stdout: Path | None = None  # where standard output goes when it is data and not log
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Happening:
    """Something that a timeline shows."""

    at: float  # time.monotonic
    kind: str  # start, exit, restart, kill
    name: str
    detail: str


class Running:
    """One process and its history."""

    def __init__(self, spec: Spec, log: Path) -> None:
        self.spec = spec
        self.log = log
        self.process: asyncio.subprocess.Process | None = None
        self.starts = 0
        self.exits: list[int] = []  # return codes, oldest first
        self.watcher: asyncio.Task[None] | None = None
        self.gave_up = ""

    @property
    def restarts(self) -> int:
        return max(0, self.starts - 1)

    @property
    def pid(self) -> int:
        """0 while it is not running."""
        return self.process.pid if self.process is not None and self.process.returncode is None else 0

    def tail(self, lines: int = 12) -> list[str]:
        """The last lines of its log."""
        try:
            with self.log.open(encoding="utf-8", errors="replace") as file:
                return [line.rstrip() for line in deque(file, lines)]
        except FileNotFoundError:
            return []


async def until(probe: Probe, seconds: float, every: float = 0.1) -> str:
    """Ask ``probe`` until it answers "" or the time is over. Returns what was missing at last, "" for nothing."""
    end = time.monotonic() + seconds
    while True:
        try:
            missing = await asyncio.wait_for(probe(), max(0.05, end - time.monotonic()))
        except TimeoutError:
            missing = "no answer"
        if not missing or time.monotonic() >= end:
            return missing
        await asyncio.sleep(min(every, max(0.0, end - time.monotonic())))


class Manager:
    """All processes of one demo."""

    def __init__(self, logs: Path, say: Callable[[str], None] = lambda text: None) -> None:
        self.logs = logs
        self.id = secrets.token_hex(8)
        self.running: dict[str, Running] = {}
        self.happened: list[Happening] = []
        self.stopping = False
        self._say = say

    def __getitem__(self, name: str) -> Running:
        return self.running[name]

    def note(self, kind: str, name: str, detail: str = "") -> None:
        self.happened.append(Happening(time.monotonic(), kind, name, detail))

    # starting ------------------------------------------------------------------------------------------------------

    async def start(self, spec: Spec) -> Running:
        """Spawn it; its name must be free or its earlier process over."""
        old = self.running.get(spec.name)
        assert old is None or not old.pid, f"{spec.name} is running"
        running = Running(spec, self.logs / f"{spec.name.replace(' ', '-').replace('/', '-')}.log")
        self.running[spec.name] = running
        await self._spawn(running)
        running.watcher = asyncio.create_task(self._watch(running), name=f"watch {spec.name}")
        return running

    async def _spawn(self, running: Running) -> None:
        spec = running.spec
        with contextlib.ExitStack() as files:
            log: IO[bytes] = files.enter_context(running.log.open("ab"))
            out: IO[bytes] = files.enter_context(spec.stdout.open("ab")) if spec.stdout is not None else log
            stdin = files.enter_context(spec.stdin.open("rb")) if spec.stdin is not None else None
            try:
                running.process = await asyncio.create_subprocess_exec(
                    *spec.argv,
                    stdin=asyncio.subprocess.DEVNULL if stdin is None else stdin,
                    stdout=out,
                    stderr=log,
                    start_new_session=True,  # ^C is for the demo, which then ends them in order
                    preexec_fn=_die_with(os.getpid()),
                    env=os.environ | {"PYTHONUNBUFFERED": "1"} | dict(spec.environment) | {MARKER: self.id},
                )
            except OSError as error:
                raise DemoError(
                    f"{spec.name} cannot be started: {spec.argv[0]}: {error.strerror}. {spec.advice}"
                ) from error
        running.starts += 1
        self.note("start" if running.starts == 1 else "restart", spec.name, f"pid {running.process.pid}")

    async def _watch(self, running: Running) -> None:
        """See the process end, and start it again if that is its lot."""
        pause = RESTART_PAUSE
        while True:
            assert running.process is not None
            code = await running.process.wait()
            running.exits.append(code)
            self.note("exit", running.spec.name, exit_text(code))
            if self.stopping or not running.spec.restart:
                return
            if running.restarts >= running.spec.budget:
                running.gave_up = (
                    f"{running.spec.name} ended {len(running.exits)} times, the last by {exit_text(code)};"
                    " it is not restarted again"
                )
                self._say(running.gave_up)
                return
            await asyncio.sleep(pause)
            pause *= running.spec.backoff
            if self.stopping:
                return
            await self._spawn(running)

    async def wait_ready(
        self, names: list[str], seconds: float, progress: Callable[[str], None] = lambda name: None
    ) -> None:
        """Wait until all are up. Raises DemoError that says which is not, its last log lines, and what to do."""
        end = time.monotonic() + seconds

        async def one(running: Running) -> None:
            spec = running.spec

            async def missing() -> str:
                if running.exits:
                    return f"it ended by {exit_text(running.exits[-1])}"
                return await spec.ready() if spec.ready is not None else ""

            left = "it was not asked"
            while left and time.monotonic() < end and not running.exits:  # who dies at the start does so again
                left = await until(missing, min(0.5, max(0.05, end - time.monotonic())))
            if running.exits:
                left = await missing()
            if left:
                raise DemoError(self.explain(running, left, seconds))
            progress(spec.name)

        tasks = [asyncio.create_task(one(self.running[name])) for name in names]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def explain(self, running: Running, missing: str, seconds: float) -> str:
        """Why something did not come up, for people."""
        how = "did not come up" if running.exits else f"is not up within {seconds:g} s"
        lines = [f"{running.spec.name} {how}: {missing}."]
        tail = running.tail()
        lines.append(f"Its last log lines ({running.log}):" if tail else "It has logged nothing.")
        lines += [f"    {line}" for line in tail]
        if running.spec.advice:
            lines.append(f"What to do: {running.spec.advice}")
        return "\n".join(lines)

    # ending --------------------------------------------------------------------------------------------------------

    def kill(self, name: str) -> int:
        """SIGKILL the process itself, not its group. Returns the pid. Raises DemoError when it is not running."""
        running = self.running[name]
        pid = running.pid
        if not pid:
            raise DemoError(f"{name} is not running and cannot be killed")
        os.kill(pid, signal.SIGKILL)
        self.note("kill", name, f"SIGKILL pid {pid}")
        return pid

    async def wait_exit(self, name: str, seconds: float) -> int | None:
        """The return code of the process that runs now, or of the last one; None when it does not end in time."""
        running = self.running[name]
        if running.process is None:
            return None
        try:
            return await asyncio.wait_for(running.process.wait(), seconds)
        except TimeoutError:
            return None

    async def stop(self, seconds: float = 8.0) -> list[str]:
        """End everything: SIGTERM to all, SIGKILL to the groups of those that stay, then whatever carries the marker.

        Returns what had to be killed or was left behind: a defect of the process that it names.
        """
        self.stopping = True
        problems = []
        alive = [running for running in self.running.values() if running.pid]
        for running in reversed(alive):  # clients first: a sidecar without workers has nothing to drain
            _signal(running.pid, signal.SIGTERM)
        waits = [asyncio.ensure_future(running.process.wait()) for running in alive if running.process is not None]
        if waits:
            await asyncio.wait(waits, timeout=seconds)
        for running in alive:
            if running.pid:
                problems.append(f"{running.spec.name} did not end within {seconds:g} s of SIGTERM and was killed")
                _signal_group(running.pid, signal.SIGKILL)
        if waits:
            await asyncio.wait(waits, timeout=5.0)
        for running in self.running.values():
            if running.watcher is not None:
                running.watcher.cancel()
        watchers = [running.watcher for running in self.running.values() if running.watcher is not None]
        await asyncio.gather(*watchers, return_exceptions=True)

        async def gone() -> str:
            return ", ".join(f"{pid} ({command})" for pid, command in leftovers(self.id))

        if left := await until(gone, 3.0):  # an engine may need a moment to see that its parent is gone
            problems.append(f"processes were left behind and were killed: {left}")
            for pid, _ in leftovers(self.id):
                _signal(pid, signal.SIGKILL)
            if left := await until(gone, 3.0):
                problems.append(f"processes cannot be killed: {left}")
        return problems


def _die_with(parent: int) -> Callable[[], None]:
    """For the child between fork and exec: be killed when the demo dies, however it dies."""

    def arrange() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the call
            os._exit(1)

    return arrange


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended by itself meanwhile, which is what we want
        os.kill(pid, number)


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def exit_text(code: int) -> str:
    """A return code for people."""
    if code < 0:
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"
    return f"exit code {code}"


def alive(pid: int, since: str | None = None) -> bool:
    """Is this process there, and not a zombie? ``since`` (from ``birth``) guards against a reused pid."""
    stat = _stat(pid)
    return bool(stat) and stat[0] not in "ZX" and (since is None or stat[19] == since)


def birth(pid: int) -> str:
    """The kernel's start time of a process; "" when there is none."""
    stat = _stat(pid)
    return stat[19] if stat else ""


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def leftovers(run: str) -> list[tuple[int, str]]:
    """Every live process that carries this run's marker: (pid, command)."""
    needle = f"{MARKER}={run}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            environment = Path(f"/proc/{entry}/environ").read_bytes()
            command = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # it ended while we looked, or it is another user's
            continue
        if needle in environment.split(b"\0") and alive(int(entry)):
            found.append((int(entry), command[:120]))
    return found
