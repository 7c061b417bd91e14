"""The verbs of simulated chaos: ``pdxfer chaos sim`` and ``pdxfer chaos replay``.

Owns: their options, what they print and their exit codes. Must not: run a world itself, or need more than numpy, msgspec,
click and rich: a big machine without the rest of pdxfer's dependencies can run many seeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pdxfer.cli import FAILED, USAGE, Failure

from ..mutants.sim import MUTANTS, Mutant
from . import many, run, show

EVERY = 10.0  # seconds between two lines of progress where there is no terminal
_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


@click.command(epilog="Example: pdxfer chaos sim --seeds 2000 --json sim.json")
@click.argument("names", nargs=-1, metavar="[MUTANT…]")
@click.option(
    "--seeds",
    type=click.IntRange(1),
    default=2000,
    show_default=True,
    help="How many runs; with --mutants, how many each at most.",
)
@click.option("--start", type=click.IntRange(0), default=0, show_default=True, help="The first seed.")
@click.option(
    "--nodes", type=click.IntRange(1, 10_000), help="Nodes of each world; default one to three, drawn from the seed."
)
@click.option("--jobs", type=click.IntRange(1, 1024), default=1, show_default=True, help="Processes.")
@click.option("--json", "json_file", metavar="FILE", type=_FILE, help="Write the result as JSON.")
@click.option(
    "--mutants",
    "mutating",
    is_flag=True,
    help="Run seeded bugs of the core instead, each until it is caught: those named, or all.",
)
def sim(
    names: Sequence[str], seeds: int, start: int, nodes: int | None, jobs: int, json_file: Path | None, mutating: bool
) -> None:
    """Run many seeds of the deterministic simulation: the real core, in a virtual world with faults.

    One seed is one run. Every invariant is checked after each event; when the faults stop, everything must end, come home
    and serve again. A failing seed is shrunk and prints the command that replays it. Exit code 0 when every seed held (with
    --mutants: when every mutant was caught), 1 when not.
    """
    if names and not mutating:
        raise Failure(f"unexpected argument {names[0]!r}: names are those of mutants, and go with --mutants", USAGE)
    if mutating and nodes is not None:
        raise Failure("--mutants draws the number of nodes from the seed: leave --nodes out", USAGE)
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise Failure(f"--json {json_file}: there is no directory {json_file.absolute().parent}", USAGE)
    if mutating:
        _hunt(
            [_mutant(name) for name in names] or list(MUTANTS.values()),
            start,
            seeds,
            jobs,
            json_file,
        )
    else:
        _sweep(start, seeds, nodes or 0, jobs, json_file)


@click.command(epilog="Example: pdxfer chaos replay 4711 --only 0,2 --room room-3")
@click.argument("seed", type=click.IntRange(0))
@click.option("--only", metavar="N,…", help="Keep only these of the seed's faults, by number; none: no fault at all.")
@click.option("--room", default="", help="Only what names this room, and the faults.")
@click.option("--nodes", type=click.IntRange(1, 10_000), help="As with `chaos sim`.")
@click.option("--mutant", metavar="NAME", help="With this seeded bug in force.")
@click.option("--all", "everything", is_flag=True, help="Heartbeats and ticks as well.")
def replay(seed: int, only: str | None, room: str, nodes: int | None, mutant: str | None, everything: bool) -> None:
    """Replay one seed of the simulation, and print its timeline: seconds, place, what happened.

    Exit code 0 when every invariant held, 1 when not.
    """
    drawn = run.drawn(seed, nodes or 0)
    result = run.run(
        seed,
        nodes=nodes or 0,
        only=_numbers(only, len(drawn)),
        trace=True,
        mutant=_mutant(mutant).in_force if mutant else nullcontext,
    )
    for line in show.timeline(result, room=room, everything=everything):
        click.echo(line)
    for line in show.summary(result):
        click.echo(line)
    if not result.ok:
        raise SystemExit(FAILED)


def _mutant(name: str) -> Mutant:
    if name not in MUTANTS:
        raise Failure(f"no mutant {name!r}; there are {', '.join(MUTANTS)}", USAGE)
    return MUTANTS[name]


def _numbers(only: str | None, faults: int) -> list[int] | None:
    """Which faults to keep; None: all."""
    if only is None:
        return None
    parts = [] if only == "none" else [part.strip() for part in only.split(",")]
    if not all(part.isdecimal() and int(part) < faults for part in parts):
        known = f"numbers below {faults}, for example 0,2," if faults else "this seed has no fault:"
        raise Failure(f"--only {only!r}: expected {known} or none", USAGE)
    return [int(part) for part in parts]


def command(seed: int, only: Sequence[int], nodes: int) -> str:
    """The shortest command that shows the failure."""
    kept = ",".join(map(str, only)) or "none"
    return f"pdxfer chaos replay {seed} --only {kept}" + (f" --nodes {nodes}" if nodes else "")


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """Call what it gives with (how many more are done, a word): a bar on a terminal, else a line now and then."""
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda n, word: bar.update(task, advance=n, description=f"{what} {word}")
        return
    done, said = 0, time.monotonic()

    def plain(n: int, word: str) -> None:
        nonlocal done, said
        done += n
        if time.monotonic() - said >= EVERY:
            said = time.monotonic()
            click.echo(f"{what}: {done} of {total} {word}", err=True)

    yield plain


def _sweep(start: int, seeds: int, nodes: int, jobs: int, json_file: Path | None) -> None:
    began, total = time.monotonic(), many.Sum()
    with _progress("seeds", seeds) as tick:
        for part in many.sweep(start, seeds, nodes=nodes, jobs=jobs):
            total.add(part)
            for one in part.failed:
                click.echo(f"seed {one.seed} failed: {one.violation}")
                for fault in one.faults:
                    click.echo(f"  it takes: {fault}")
                click.echo(f"  {command(one.seed, one.only, nodes)}")
            tick(part.seeds, f"({len(total.failed)} failed)")
    took = time.monotonic() - began
    if json_file is not None:
        commands = [command(one.seed, one.only, nodes) for one in total.failed]
        _write(
            json_file, {"start": start, "nodes": nodes, "jobs": jobs, "took": took, "sum": total, "replay": commands}
        )
    held = total.seeds - len(total.failed)
    click.echo(
        f"{total.seeds} seeds from {start}: {held} held, {len(total.failed)} failed; {sum(total.struck.values())} faults,"
        f" {sum(total.ends.values())} ends of rooms, {total.steps} steps, {total.seconds:.0f} virtual seconds;"
        f" all home {total.latest_home:.2f} s after the faults at the latest; took {took:.1f} s"
    )
    if total.failed:
        raise SystemExit(FAILED)


def _hunt(mutants: Sequence[Mutant], start: int, seeds: int, jobs: int, json_file: Path | None) -> None:
    hunts: dict[str, many.Hunt] = {}
    click.echo("| mutant | what is wrong | seeds | caught by |\n|---|---|---|---|")
    waiting = list(mutants)
    with _progress("mutants", len(mutants)) as tick:
        for name, found in many.hunts([m.name for m in mutants], _in_force, start, seeds, jobs):
            hunts[name] = found
            while waiting and waiting[0].name in hunts:
                click.echo(_row(waiting[0], hunts[waiting.pop(0).name]))
            tick(1, "" if found.caught else f"({name} survives)")
    if json_file is not None:
        _write(json_file, hunts)
    survive = [one.name for one in mutants if not hunts[one.name].caught]
    click.echo(
        f"{len(mutants)} mutants: {len(mutants) - len(survive)} caught"
        + (f"; survive: {', '.join(survive)}" if survive else "")
    )
    if survive:
        raise SystemExit(FAILED)


def _row(mutant: Mutant, found: many.Hunt) -> str:
    by = f"seed {found.seed}: {_cell(found.violation)}" if found.caught else "**nothing**"
    return f"| `{mutant.name}` | {mutant.what} | {found.seeds} | {by} |"


def _in_force(name: str) -> AbstractContextManager[object]:
    return MUTANTS[name].in_force()


def _cell(text: str, most: int = 140) -> str:
    text = " ".join(text.split()).replace("|", "/")
    return text if len(text) <= most else text[: most - 1] + "…"


def _write(path: Path, value: object) -> None:
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")
    except OSError as error:
        raise Failure(f"--json {path}: {error.strerror}", FAILED) from None


COMMANDS = {"sim": sim, "replay": replay}
