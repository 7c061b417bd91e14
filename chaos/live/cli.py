"""The live verbs of ``pdxfer chaos``: list, run, soak, wedge, cost, corruption.

Owns: their options and exit codes. Must not: run anything itself.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import click
from rich.console import Console

from pdxfer.cli import FAILED, Failure

from . import show
from .scenarios import SCENARIOS, Scenario
from .suite import Suite, orders
from .verdict import Result

NARROWEST = 130
_FILE = click.Path(dir_okay=False, path_type=Path)


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=NARROWEST)


def _counts(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    parts = [part.strip() for part in value.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"{value!r}: expected positive numbers, for example 1,16,80", ctx, param)
    return tuple(map(int, parts))


def interruptible(work: Callable[[], Awaitable[None]]) -> None:
    """Run it; ^C and SIGTERM end it with every process cleaned up."""

    async def main() -> bool:
        task = asyncio.ensure_future(work())
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            return False
        return True

    if not asyncio.run(main()):
        raise Failure("ended by a signal; every process is gone", 130)


@click.command("list")
def list_() -> None:
    """List the scenarios: name, concurrency, the mutant that its control runs against, what happens."""
    from ..mutants.live import BUGS

    for scenario in SCENARIOS.values():
        counts = ",".join(map(str, scenario.concurrency))
        why = scenario.skip()
        click.echo(f"{scenario.name:24} C={counts:8} {scenario.about}{f' [skipped here: {why}]' if why else ''}")
        click.echo(f"{'':24} {'':10} control: {scenario.mutant} ({BUGS[scenario.mutant][0]})")


@click.command(epilog="Example: pdxfer chaos run agent-kill-1s decode-engine-kill --concurrency 80 --html chaos.html")
@click.argument("names", nargs=-1, metavar="NAME…")
@click.option("--all", "everything", is_flag=True, help="Every scenario.")
@click.option(
    "--control",
    is_flag=True,
    help="Run the controls instead: the same fault against a broken build must fail the verdict.",
)
@click.option(
    "--concurrency",
    callback=_counts,
    default="",
    metavar="N,…",
    help="Sessions, of those that a scenario has; default all: 1,16,80.",
)
@click.option("--repeat", type=click.IntRange(1, 1000), default=1, show_default=True)
@click.option("--json", "json_file", metavar="FILE", type=_FILE, help="Write the results as JSON.")
@click.option("--html", "html_file", metavar="FILE", type=_FILE, help="Write a page with a timeline of each run.")
@click.option("--verbose", is_flag=True, help="Print every row of every verdict.")
def run(
    names: Sequence[str], everything: bool, control: bool, concurrency: tuple[int, ...], repeat: int,
    json_file: Path | None, html_file: Path | None, verbose: bool,
) -> None:  # fmt: skip
    """Run scenarios against real processes, and judge them by the wedge contract.

    A fault that cannot be shown to have taken effect fails the run. Exit code 0 when everything held (with --control: when
    every broken build was caught), 1 when not.
    """
    chosen = _choose(names, everything)
    todo = orders(chosen, concurrency, repeat, control=control)
    if not todo:
        raise Failure(f"none of {', '.join(names)} has a concurrency of {concurrency}", FAILED)
    console = _console()
    suite = _suite(console, verbose)
    interruptible(lambda: suite.go(todo))
    _publish(console, suite, json_file, html_file)


@click.command(epilog="Example: pdxfer chaos soak --minutes 30 --seed 1 --json soak.json")
@click.option("--minutes", type=click.FloatRange(0.1), default=10.0, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="For the choice of scenarios.")
@click.option("--json", "json_file", metavar="FILE", type=_FILE, help="Write the results as JSON.")
@click.option("--html", "html_file", metavar="FILE", type=_FILE, help="Write a page with a timeline of each run.")
@click.option("--verbose", is_flag=True, help="Print every row of every verdict.")
def soak(minutes: float, seed: int, json_file: Path | None, html_file: Path | None, verbose: bool) -> None:
    """Draw scenarios at random against one set of processes, until the time is over; nothing may grow."""
    from .growth import growth

    console = _console()
    suite = _suite(console, verbose)
    plain = [s for s in SCENARIOS.values() if s.kind == type(s.kind)()]
    interruptible(lambda: suite.soak(plain, minutes * 60, seed))
    problems = growth(suite.results)
    for problem in problems:
        console.print(problem, style="red", markup=False)
    _publish(console, suite, json_file, html_file, failed=bool(problems))


@click.command(epilog="Example: pdxfer chaos wedge --runs 20 --json wedge.json")
@click.option("--runs", type=click.IntRange(1, 1000), default=20, show_default=True, help="Of each build.")
@click.option("--sessions", type=click.IntRange(1, 1000), default=80, show_default=True)
@click.option(
    "--share",
    type=click.FloatRange(0.001, 1.0),
    default=1.0,
    show_default=True,
    help="Of its time that a session has a room in transfer; 1: all of it, so that the kill hits every session's room.",
)
@click.option(
    "--build",
    type=click.Choice(["before", "after", "both"]),
    default="both",
    show_default=True,
    help="The mutant with the original behaviour, pdxfer, or both in turns.",
)
@click.option(
    "--wait",
    type=click.FloatRange(1.0),
    default=15.0,
    show_default=True,
    help="Seconds after the kill in which everything must end.",
)
@click.option("--json", "json_file", metavar="FILE", type=_FILE, help="Write the results as JSON.")
def wedge(runs: int, sessions: int, share: float, build: str, wait: float, json_file: Path | None) -> None:
    """The original wedge, before and after: an agent with 80 sessions is killed, against a mutant and against pdxfer.

    Exit code 0 when the mutant wedged each time that the kill hit a room, and pdxfer never did.
    """
    from . import wedge as wedged

    console = _console()
    found: list[wedged.Outcome] = []
    builds = list(wedged.BUILDS) if build == "both" else [build]

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    interruptible(lambda: wedged.compare(builds, runs, sessions, share, wait, found, say))
    console.print(wedged.table(found))
    if json_file is not None:
        wedged.write_json(json_file, found)
    raise SystemExit(0 if wedged.as_expected(found) else FAILED)


@click.command(epilog="Example: pdxfer chaos cost --rounds 5 --json cost.json")
@click.option("--concurrency", callback=_counts, default="1,80", show_default=True, metavar="N,…", help="Sessions.")
@click.option(
    "--rooms", type=click.IntRange(1), default=400, show_default=True, help="Of a round, at each concurrency."
)
@click.option(
    "--rounds", type=click.IntRange(1, 100), default=5, show_default=True, help="How often the builds take turns."
)
@click.option("--json", "json_file", metavar="FILE", type=_FILE, help="Write every measurement as JSON.")
def cost(concurrency: tuple[int, ...], rooms: int, rounds: int, json_file: Path | None) -> None:
    """What the fix of the original wedge costs: rooms without any fault, against the mutant and against pdxfer."""
    from . import cost as costs

    console = _console()
    found: list[costs.Cost] = []

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    interruptible(lambda: costs.measure(concurrency, rooms, rounds, found, say))
    console.print(costs.table(found))
    if json_file is not None:
        costs.write_json(json_file, found)


@click.command(epilog="Example: pdxfer chaos corruption --concurrency 1,80 --requests 500 --json corruption.json")
@click.option(
    "--concurrency", callback=_counts, default="1,8,60,80", show_default=True, metavar="N,…", help="Requests at a time."
)
@click.option("--requests", type=click.IntRange(1), default=500, show_default=True, help="For each line of the table.")
@click.option(
    "--build",
    "builds",
    type=click.Choice(("off", "sized for fp8", "no ledger", "after")),
    multiple=True,
    help="Only these; again for more.",
)
@click.option(
    "--dtype", "dtypes", type=click.Choice(("bf16", "fp8")), multiple=True, help="Only this format of the index keys."
)
@click.option("--json", "json_file", metavar="FILE", type=_FILE, help="Write every count as JSON.")
def corruption(
    concurrency: tuple[int, ...],
    requests: int,
    builds: tuple[str, ...],
    dtypes: tuple[str, ...],
    json_file: Path | None,
) -> None:
    """The original corruption, before and after: requests with shared prefixes through the host mirror, and how many of them are wrong.

    "before" is two mutants: a mirror that is sized for fp8 index keys beside a device that may hold bf16, and one without the
    ledger. Exit code 0 when the product was never wrong, and each mutant was.
    """
    from . import corruption as corrupted

    console = _console()
    found: list[corrupted.Outcome] = []

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    interruptible(
        lambda: corrupted.compare(
            builds or list(corrupted.BUILDS), dtypes or corrupted.DTYPES, concurrency, requests, found, say
        )
    )
    console.print(corrupted.table(found))
    if json_file is not None:
        corrupted.write_json(json_file, found)
    raise SystemExit(0 if corrupted.as_expected(found) else FAILED)


def _choose(names: Sequence[str], everything: bool) -> list[Scenario]:
    if everything or not names:
        if not everything:
            raise Failure("name scenarios (pdxfer chaos list), or pass --all", 2)
        return list(SCENARIOS.values())
    unknown = [name for name in names if name not in SCENARIOS]
    if unknown:
        raise Failure(f"no scenario {', '.join(unknown)}; `pdxfer chaos list` names them", 2)
    return [SCENARIOS[name] for name in names]


def _suite(console: Console, verbose: bool) -> Suite:
    quiet = Console(stderr=True, highlight=False)

    def report(result: Result) -> None:
        show.say(console, result)
        if verbose and result.rows:
            console.print(show.verdict(result))

    return Suite(report, lambda text: quiet.print(f"… {text}", style="dim", markup=False, soft_wrap=True))


def _publish(
    console: Console, suite: Suite, json_file: Path | None, html_file: Path | None, *, failed: bool = False
) -> None:
    results = suite.results
    console.print(show.table(results))
    if json_file is not None:
        show.write_json(json_file, results)
    if html_file is not None:
        show.write_html(html_file, results)
    bad = sum(not result.passed for result in results)
    skipped = sum(bool(result.skipped) for result in results)
    for directory in suite.kept:
        console.print(f"logs and records of a failed run: {directory}", markup=False, soft_wrap=True)
    text = f"{len(results)} runs: {len(results) - bad - skipped} as they must be, {bad} not, {skipped} skipped"
    console.print(text, style="bold red" if bad or failed else "bold green")
    raise SystemExit(FAILED if bad or failed else 0)


COMMANDS = {"list": list_, "run": run, "soak": soak, "wedge": wedge, "cost": cost, "corruption": corruption}
