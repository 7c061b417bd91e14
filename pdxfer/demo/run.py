"""``pdxfer demo``: the four steps in their order, and what a person sees of them.

Owns: options, the display, the order of the steps, ^C, and writing the results. Must not: know how a fault strikes or a
round is judged.

 1. parity: eight prompts through two workers, token for token equal to one process
 2. an agent with open streams is killed, again and again
 3. engines and a worker are killed, and a bootstrap thread raises, under load
 4. after each: prompts are answered as before, and every page, slot and room is home
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import importlib.metadata
import os
import platform
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from . import checks, page
from . import report as results
from .faults import Fault, KillEngine, KillWorker, RaiseInBootstrap
from .observe import baseline, defects, why
from .processes import DemoError
from .report import Report, Round
from .rounds import Pace, Rounds, settled
from .system import DECODE, System

OK, FAILED, INTERRUPTED = 0, 1, 130
LOAD_SESSIONS = 16
WIDTH = 118  # columns of the table where there is no terminal to ask
REFERENCE_DEADLINE = 120.0  # seconds
QUICK = Pace(probe_timeout=10.0, probe_deadline=30.0, home_deadline=15.0, agent_deadline=45.0)
FULL = Pace(probe_timeout=40.0, probe_deadline=90.0, home_deadline=30.0, agent_deadline=120.0, load_deadline=60.0)


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    quick: bool = False
    json: Path | None = None
    html: Path | None = None
    keep_logs: Path | None = None
    rounds: int = 3
    sessions: int = 80
    seed: int = 0
    dtype: str = "fp32"


class Display:
    """A progress display on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._began = time.monotonic()
        self._progress: Progress | None = None

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(
            f"[dim]{time.monotonic() - self._began:6.1f} s[/dim]  {text}", highlight=False, soft_wrap=True
        )

    @contextlib.contextmanager
    def showing(self, steps: int) -> Iterator[None]:
        """Show progress over so many steps while the block runs."""
        if not self.console.is_terminal:
            yield
            return
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console, transient=True) as self._progress:
            self._progress.add_task("starting", total=steps)
            yield
        self._progress = None

    def step(self, text: str) -> None:
        """What is being done now."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], description=text)
        else:
            self.say(text)

    def advance(self) -> None:
        if self._progress is not None:
            self._progress.advance(self._progress.task_ids[0])


class Demo:
    """One run."""

    def __init__(self, options: Options, display: Display) -> None:
        self.options = options
        self.display = display
        self.began = time.monotonic()
        self.pace = QUICK if options.quick else FULL
        engine = "synthetic" if options.quick else "smollm2"
        self.report = Report(
            engine, options.dtype, options.seed,
            expected_rounds=options.rounds + len(FAULTS),
            started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            versions=versions(),
        )  # fmt: skip
        self.system = System(engine, options.dtype, options.seed, options.keep_logs, display.say)
        self.bands: list[page.Band] = []
        self.rounds: Rounds | None = None
        self.interrupted = False
        self._shared_before = shared_memory()

    async def run(self) -> None:
        """All steps. What is found is in ``report``, whatever happens."""
        try:
            await self._steps()
        except DemoError as error:
            self.report.problems.append(str(error))
        except httpx.HTTPError as error:
            self.report.problems.append(
                f"a sidecar's admin service did not answer in the middle of a round: {why(error)}"
            )
        finally:
            self.report.seconds = time.monotonic() - self.began

    async def _steps(self) -> None:
        options, system, display = self.options, self.system, self.display
        questions = checks.prompts(options.seed, max_tokens=24)
        with self._phase("start"):
            display.step("starting two sidecars, two workers and a gateway")
            reference = asyncio.create_task(checks.reference(system, questions, REFERENCE_DEADLINE))
            try:
                await system.start(lambda name: display.step(f"{name} is up"))
                system.observer.start()
                display.advance()
                display.step("computing the reference answers in one process")
                expected = await reference
            finally:
                reference.cancel()
                await asyncio.gather(reference, return_exceptions=True)
            base = baseline(await settled(system, self.pace.home_deadline))
            display.advance()
        with self._phase("parity"):
            display.step(f"step 1: {len(questions)} prompts through prefill, transfer and decode")
            answers = await checks.ask_all(
                system.observer.http, system.gateway, system.model, questions, self.pace.agent_deadline
            )
            self.report.parity = checks.compare(questions, answers, expected, needles=not options.quick)
            await settled(system, self.pace.home_deadline)
            display.advance()
        known = dict(zip(questions[:3], expected[:3], strict=True))
        self.rounds = Rounds(system, base, known, self.pace, display.say)
        for number in range(options.rounds):
            with self._phase(f"agent {number + 1}"):
                display.step(
                    f"step 2: an agent with {options.sessions} sessions is killed,"
                    f" round {number + 1} of {options.rounds}"
                )
                self._found(await self.rounds.killed_agent(options.sessions))
        for fault in self._faults():
            with self._phase(fault.name.removeprefix("SIGKILL ")):
                display.step(f"step 3: {fault.name} under {LOAD_SESSIONS} sessions")
                self._found(await self.rounds.under_load(fault, LOAD_SESSIONS))

        for node in system.observer.sidecars:
            if count := defects(await system.observer.metrics(node)):
                self.report.problems.append(
                    f"sidecar {node} raised {count} times by itself (pdxfer_core_errors_total); see its log"
                )

    def _faults(self) -> list[Fault]:
        return [make(self.system) for make in FAULTS]

    def _found(self, item: Round) -> None:
        """Take a round's result. Raises DemoError when no further one makes sense."""
        assert self.rounds is not None
        self.report.rounds.append(item)
        self.display.advance()
        recovery = "no recovery" if item.recovery_seconds is None else f"recovered in {item.recovery_seconds:.1f} s"
        state = "[green]ok[/green]" if item.passed else "[bold red]FAIL[/bold red]"
        self.display.say(f"{state} {escape(item.fault)}: {results.ended_text(item)}; {recovery}")
        for problem in item.faults_found():
            self.display.say(f"     [red]{escape(problem)}[/red]")
        if self.rounds.beyond_use:
            raise DemoError(self.rounds.beyond_use)

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Time it, for the report and the timeline."""
        began = time.monotonic()
        try:
            yield
        finally:
            ended = time.monotonic()
            self.report.phases[name] = ended - began
            self.bands.append(page.Band(began - self.began, ended - self.began, name))

    async def close(self) -> None:
        """End everything; what stayed behind is a problem."""
        self.report.problems += await self.system.close(keep_logs=not self.report.passed and not self.interrupted)
        self.report.problems += [
            f"/dev/shm/{name} was left behind" for name in sorted(shared_memory() - self._shared_before)
        ]

    def timeline(self) -> page.Timeline:
        """For the page: what the observer saw, faults, and what came up again."""
        lanes: dict[str, list[page.Point]] = {node: [] for node in self.system.observer.sidecars}
        marks: list[page.Mark] = []
        restarts: dict[tuple[str, str], int] = {}
        for seen in self.system.observer.history:
            at = seen.at - self.began
            for node, points in lanes.items():
                view = seen.nodes.get(node)
                points.append(page.Point(at, view.rooms if view is not None else None))
                for service, count in view.restarts.items() if view is not None else ():
                    if restarts.setdefault((node, service), count) < count:
                        marks.append(page.Mark(at, False, f"{service} of {node} was restarted (restart {count})"))
                    restarts[node, service] = count
        if self.rounds is not None:
            marks += [page.Mark(at - self.began, True, name) for at, name in self.rounds.faults]
        marks += [
            page.Mark(happened.at - self.began, False, f"{happened.name} was started again ({happened.detail})")
            for happened in self.system.manager.happened
            if happened.kind == "restart"
        ]
        return page.Timeline(time.monotonic() - self.began, lanes, sorted(marks, key=lambda mark: mark.at), self.bands)


FAULTS = (
    lambda system: KillEngine(system.observer, system.prefill_node, "prefill side", system.manager),
    lambda system: KillEngine(system.observer, system.decode_node, "decode side", system.manager),
    lambda system: KillWorker(system.manager, system.observer, "decode worker", DECODE),
    lambda system: RaiseInBootstrap(system.observer, system.prefill_node, "prefill side", system.manager),
)


def shared_memory() -> set[str]:
    """The names in /dev/shm that can be ours: pdxfer's own and those of what the engines load."""
    try:
        return {name for name in os.listdir("/dev/shm") if name.startswith(("pdxfer", "ucx", "nixl", "psm_", "torch_"))}
    except FileNotFoundError:
        return set()


def versions() -> dict[str, str]:
    """What a reader of the result needs to know."""
    found = {"python": platform.python_version()}
    for name in ("pdxfer", "nixl", "torch", "transformers", "pyzmq"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # the quick demo needs no transformers
            found[name] = importlib.metadata.version(name)
    return found


def main(options: Options) -> int:
    """Run the demo; returns the exit code."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    display = Display(console)
    for path in (options.json, options.html):
        if path is not None and not path.absolute().parent.is_dir():
            console.print(f"{path}: its directory does not exist; nothing was run")
            return FAILED
    return asyncio.run(_main(options, display))


async def _main(options: Options, display: Display) -> int:
    """Between SIGINT or SIGTERM and the end lies only the clean-up, which no second signal cuts short."""
    demo = Demo(options, display)
    loop = asyncio.get_running_loop()
    work = asyncio.create_task(demo.run())
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, work.cancel)
    try:
        with display.showing(3 + demo.report.expected_rounds):
            await work
    except asyncio.CancelledError:
        demo.interrupted = True
        display.say("interrupted: ending every process")
    finally:
        await demo.close()
    if demo.interrupted:
        for problem in demo.report.problems:
            display.console.print(f"[red]{problem}[/red]", highlight=False)
        return INTERRUPTED
    return _publish(options, display.console, demo)


def _publish(options: Options, console: Console, demo: Demo) -> int:
    """Print and write what was found."""
    report = demo.report
    if report.rounds:
        console.print(results.table(report))
    for problem in report.all_problems():
        console.print(f"- {problem}", style="red", highlight=False, markup=False, soft_wrap=True)
    if options.json is not None:
        report.write_json(options.json)
    if options.html is not None:
        page.write(options.html, report, demo.timeline())
    console.print(
        report.verdict_line(),
        style="bold green" if report.passed else "bold red",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    console.print(f"{report.seconds:.0f} s in all", highlight=False)
    if not report.passed:
        console.print(f"every process's log is in {demo.system.logs}", highlight=False)
    return OK if report.passed else FAILED
