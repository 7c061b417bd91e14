"""The results of chaos runs for people: a table on the terminal, JSON, and an HTML page with a timeline of each run.

Owns: their forms. Must not: decide what passed.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from html import escape
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape as plain
from rich.table import Table

from pdxfer.demo.page import STYLE, Mark, legend, svg

from .verdict import Result, Row, percentile

COLOURS = {"pass": "green", "caught": "green", "SKIPPED": "yellow"}


def table(results: Sequence[Result]) -> Table:
    found = Table(box=box.SIMPLE_HEAD)
    for name, justify in (
        ("scenario", "left"), ("C", "right"), ("rooms", "right"), ("hit", "right"), ("terminal, max s", "right"),
        ("home s", "right"), ("p99 ratio", "right"), ("verdict", "left"),
    ):  # fmt: skip
        found.add_column(name, justify=justify)  # type: ignore[arg-type]
    for result in results:
        label = result.scenario + (f" [{result.mutant}]" if result.mutant else "")
        colour = COLOURS.get(result.state, "bold red")
        found.add_row(
            plain(label), str(result.sessions), str(result.rooms), str(result.hit), _worst(result, "affected room"),
            _worst(result, "faults stop"), _worst(result, "p99 of untouched"), f"[{colour}]{result.state}[/{colour}]",
        )  # fmt: skip
    return found


def _worst(result: Result, what: str) -> str:
    for row in result.rows:
        if row.what.startswith(what) and row.measured:
            return f"{max(row.values):.2f}"
    return "–"


def verdict(result: Result) -> Table:
    """All rows of one run."""
    found = Table(box=box.SIMPLE_HEAD, title=f"{result.scenario}, C={result.sessions}", title_justify="left")
    for name in ("row", "bound", "n", "p50", "p99", "max", "verdict", "note"):
        found.add_column(name, justify="right" if name in ("n", "p50", "p99", "max") else "left")
    for row in result.rows:
        found.add_row(*(plain(cell) for cell in cells(row)))
    return found


def cells(row: Row) -> tuple[str, ...]:
    if row.values:
        numbers = tuple(
            f"{value:.3g}" for value in (percentile(row.values, 50), percentile(row.values, 99), max(row.values))
        )
    else:
        numbers = ("–", "–", "–")
    return (row.what, row.bound, str(len(row.values)), *numbers, row.verdict, row.note)


def write_json(path: Path, results: Sequence[Result]) -> None:
    whole = {
        "machine": {"cores": cores(), "python": platform.python_version(), "kernel": platform.release()},
        "passed": all(result.passed for result in results),
        "runs": [result.as_json() for result in results],
    }
    path.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")


def cores() -> int:
    return len(os.sched_getaffinity(0))


def write_html(path: Path, results: Sequence[Result]) -> None:
    """One page that needs no network."""
    failed = [result for result in results if not result.passed]
    head = f"{len(results)} runs, {len(failed)} failed, {sum(bool(result.skipped) for result in results)} skipped"
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>pdxfer chaos: {head}</title><style>{STYLE}</style></head><body><h1>pdxfer chaos</h1>",
        f'<p class="verdict {"fail" if failed else "pass"}">{head}</p>',
        f"<p>{cores()} cores, kernel {escape(platform.release())}, Python {platform.python_version()}.</p><table>",
        "<thead><tr><th>scenario</th><th>C</th><th>what shows that it struck</th><th>verdict</th></tr></thead><tbody>",
    ]
    for number, result in enumerate(results):
        label = result.scenario + (f" [{result.mutant}]" if result.mutant else "")
        parts.append(
            f'<tr><td><a href="#run{number}">{escape(label)}</a></td><td>{result.sessions}</td>'
            f"<td>{escape(result.skipped or result.proof)}</td><td>{escape(result.state)}</td></tr>"
        )
    parts.append("</tbody></table>")
    parts += [_section(number, result) for number, result in enumerate(results) if not result.skipped]
    parts.append("</body></html>\n")
    temporary = path.with_name(path.name + ".new")
    temporary.write_text("\n".join(parts), encoding="utf-8")
    temporary.replace(path)


def _section(number: int, result: Result) -> str:
    rows = "".join(
        f'<tr class="{"pass" if row.passed else "fail"}">{"".join(f"<td>{escape(cell)}</td>" for cell in cells(row))}</tr>'
        for row in result.rows
    )
    titles = "".join(f"<th>{name}</th>" for name in ("row", "bound", "n", "p50", "p99", "max", "verdict", "note"))
    problems = "".join(f"<li>{escape(text)}</li>" for text in result.problems)
    held = "".join(
        f"<tr><td>{escape(name)}</td>"
        + "".join(f"<td>{what} {a:.0f} → {b:.0f}</td>" for what, (a, b) in of.items())
        + "</tr>"
        for name, of in result.inventory.items()
    )
    ends = ", ".join(f"{n} {reason}" for reason, n in sorted(result.ends.items(), key=lambda pair: -pair[1]))
    drawing = ""
    if result.timeline is not None:
        marks: Sequence[Mark] = result.timeline.marks
        items = "".join(f"<li{' class=fault' if m.fault else ''}>{m.at:.1f} s: {escape(m.text)}</li>" for m in marks)
        drawing = f'{svg(result.timeline)}{legend(result.timeline)}<ol class="marks">{items}</ol>'
    mutant = f", with mutant {escape(result.mutant)}: the verdict must fail" if result.mutant else ""
    return (
        f'<h2 id="run{number}">{escape(result.scenario)}, C={result.sessions}: {escape(result.state)}</h2>'
        f"<p>{escape(result.about)}{mutant}. Proof: {escape(result.proof)}. {result.rooms} rooms, {result.hit} sides open when it"
        f" struck; ends: {escape(ends)}. {result.seconds:.1f} s.</p>"
        f"<table><thead><tr>{titles}</tr></thead><tbody>{rows}</tbody></table>"
        + (f'<ul class="fail">{problems}</ul>' if problems else "")
        + f"{drawing}<details><summary>descriptors, threads, memory: before → after</summary><table>{held}</table></details>"
    )


def say(console: Console, result: Result) -> None:
    """One line as soon as it is known, and what did not hold."""
    colour = COLOURS.get(result.state, "bold red")
    label = result.scenario + (f" with mutant {result.mutant}" if result.mutant else "")
    why = result.skipped or result.proof
    console.print(
        f"[{colour}]{result.state}[/{colour}] {plain(label)}, C={result.sessions}, {result.seconds:.0f} s: {plain(why)}",
        soft_wrap=True,
    )
    for text in result.broken():
        style = "dim" if result.passed else "red"
        console.print(f"     {text}", style=style, markup=False, highlight=False, soft_wrap=True)
