"""The result of ``pdxfer probe needle`` for people.

Owns: tables and their words. Must not: measure. What was not run has no row.
"""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from .needle import Result, Run
from .paths import PATHS
from .recall import STRENGTHS, Row


def show(result: Result, console: Console) -> None:
    """Print everything, the verdict last."""
    console.print(_paths(result.runs))
    for name in dict.fromkeys(run.path for run in result.runs):
        console.print(f"{name}: {PATHS[name].what}.", style="dim")
    if result.recall:
        console.print(_recall(result.recall))
        console.print(
            f"Needles {min(STRENGTHS):g} to {max(STRENGTHS):+g} standard deviations above the last place that is selected."
            " What fp32 does not find is the limit of a selection of k tokens; what only another format does not find is its"
            " rounding. Neither has anything to do with a transfer.",
            style="dim",
        )
    bad = [run for run in result.runs if not run.identical]
    sets = sum(run.sets for run in result.runs)
    if bad:
        names = ", ".join(f"{run.path} ({run.dtype}, {run.concurrency} at a time)" for run in bad)
        differ = sum(run.differ for run in bad)
        console.print(f"{differ} of {sets} top-k sets differ from those before: {names}", style="bold red")
        for run in bad:
            for case in run.cases:
                if case.differ or case.wrong_rooms:
                    console.print(
                        f"  {run.path}, {run.dtype}, {run.concurrency} at a time: {case.context} tokens, {case.copies} needles, {case.position}:"
                        f" {case.differ} of {case.sets} sets, wrong bytes in {case.wrong_rooms} of {case.rooms} rooms"
                    )
    else:
        console.print(f"all {sets} top-k sets are those before, on {len(result.runs)} runs", style="bold green")


def _paths(runs: list[Run]) -> Table:
    table = Table(
        title="top-k sets after each path, against those before it", title_justify="left", box=box.SIMPLE_HEAD
    )
    for column in ("path", "index-K"):
        table.add_column(column)
    for column in (
        "at a time",
        "rooms",
        "tokens",
        "sets",
        "differ",
        "rooms with wrong bytes",
        "needles in the top 512",
        "seconds",
    ):
        table.add_column(column, justify="right")
    for number, run in enumerate(runs):
        before = runs[number - 1]
        if (run.dtype, run.concurrency) != (before.dtype, before.concurrency):
            table.add_section()
        found = [sum(part) for part in zip(*(case.needles.get(512, (0, 0)) for case in run.cases), strict=True)]
        table.add_row(
            run.path, run.dtype, str(run.concurrency), str(run.rooms), f"{run.tokens:,}", str(run.sets), str(run.differ),
            str(run.wrong_rooms), f"{found[0]} of {found[1]}", f"{run.seconds:.1f}", style="" if run.identical else "red",
        )  # fmt: skip
    return table


def _recall(rows: list[Row]) -> Table:
    formats = list(dict.fromkeys(row.dtype for row in rows))
    table = Table(title="needles that are found, by format; no transfer", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("context", "position", "k"):
        table.add_column(column, justify="left" if column == "position" else "right")
    for dtype in formats:
        table.add_column(f"{dtype}{' (reference)' if dtype == 'fp32' else ''}", justify="right")
    for dtype in formats:
        if dtype != "fp32":
            table.add_column(f"{dtype}: same tokens as fp32", justify="right")
    for context, position, k in dict.fromkeys((row.context, row.position, row.k) for row in rows):
        of = {row.dtype: row for row in rows if (row.context, row.position, row.k) == (context, position, k)}
        table.add_row(
            str(context), position, str(k), *(f"{of[d].found} of {of[d].needles}" for d in formats),
            *(f"{of[d].overlap:.2%}" for d in formats if d != "fp32"),
        )  # fmt: skip
    return table
