"""The demo's result as one HTML page: verdict, table, and a timeline drawn in SVG. Needs no network and no script.

Owns: markup, colours and the timeline's geometry. Must not: decide what passed; it is given a Report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from .report import COLUMNS, Report, row

WIDTH, LEFT, RIGHT, LANE, GAP, TOP, MARKS = 1120, 56, 12, 110, 34, 26, 30

# Room states from opening to end, coolest to warmest; the same state has the same colour in both lanes.
STATES: Mapping[str, tuple[str, str]] = {
    "send open": ("#9aa7b8", "open (sender)"),
    "send matched": ("#4c78c8", "matched"),
    "send sending": ("#1f9e89", "sending"),
    "send homing": ("#d98c2b", "ended, a copy still touches its pages"),
    "receive resolving": ("#c3b1e1", "resolving"),
    "receive wanting": ("#8e6bbf", "wanting (receiver)"),
    "receive receiving": ("#2aa876", "receiving"),
    "receive homing": ("#d98c2b", "ended, a copy still touches its pages"),
}
_FAULT = ' class="fault"'
OTHER = ("#777777", "other")


@dataclass(frozen=True)
class Point:
    """A node's rooms by state at a time; None while its sidecar did not answer."""

    at: float  # seconds since the demo's start
    rooms: Mapping[str, int] | None


@dataclass(frozen=True)
class Mark:
    """Something that happened: a fault, or a service or process that came up again."""

    at: float
    fault: bool
    text: str


@dataclass(frozen=True)
class Band:
    """A phase of the demo."""

    start: float
    end: float
    name: str


@dataclass(frozen=True)
class Timeline:
    seconds: float
    lanes: Mapping[str, Sequence[Point]]  # node -> points in the order of time
    marks: Sequence[Mark]
    bands: Sequence[Band]


def write(path: Path, report: Report, timeline: Timeline) -> None:
    """Whole or not at all."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(render(report, timeline), encoding="utf-8")
    temporary.replace(path)


def render(report: Report, timeline: Timeline) -> str:
    """The page."""
    parity = report.parity
    problems = report.all_problems()
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>pdxfer demo: {"pass" if report.passed else "fail"}</title>
<style>{STYLE}</style></head><body>
<h1>pdxfer demo</h1>
<p class="verdict {"pass" if report.passed else "fail"}">{escape(report.verdict_line())}</p>
<p>Engine {escape(report.engine)}, {escape(report.dtype)}, seed {report.seed}, started {escape(report.started)}, took
{report.seconds:.1f} s. {escape(", ".join(f"{name} {version}" for name, version in report.versions.items()))}</p>
<h2>Parity</h2>
<p>{parity.identical} of {parity.prompts} prompts were answered through prefill, transfer and decode token for token
as in one process ({parity.tokens} tokens compared, longest prompt {parity.longest_prompt} tokens); the cache's bytes
were equal for {parity.kv_identical}; {parity.needles_found} of {parity.needles} hidden codes were found.</p>
<h2>Faults</h2>
{_table(report)}
{_problems(problems)}
<h2>Timeline</h2>
<p>Rooms that are live on each sidecar, by state. Red lines are faults; triangles are what came up again.</p>
{svg(timeline)}
{legend(timeline)}
<ol class="marks">{"".join(map(_item, timeline.marks))}</ol>
</body></html>
"""


def _item(mark: Mark) -> str:
    return f"<li{_FAULT if mark.fault else ''}>{mark.at:.1f} s: {escape(mark.text)}</li>"


def _table(report: Report) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in (*COLUMNS, "what shows that it struck"))
    body = "".join(
        f'<tr class="{"pass" if item.passed else "fail"}">'
        + "".join(f"<td>{escape(cell)}</td>" for cell in (*row(item), item.proof))
        + "</tr>"
        for item in report.rounds
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _problems(problems: Sequence[str]) -> str:
    if not problems:
        return ""
    return f'<h2>Problems</h2><ul class="fail">{"".join(f"<li>{escape(text)}</li>" for text in problems)}</ul>'


# the drawing -------------------------------------------------------------------------------------------------------


def svg(timeline: Timeline) -> str:
    seconds = max(timeline.seconds, 0.1)

    def x(at: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * min(max(at / seconds, 0.0), 1.0)

    height = TOP + len(timeline.lanes) * (LANE + GAP) + MARKS
    bottom = height - MARKS
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="rooms over time">']
    for index, band in enumerate(timeline.bands):
        parts.append(
            f'<g><title>{escape(band.name)}: {band.start:.1f} to {band.end:.1f} s</title><rect class="band{index % 2}"'
            f' x="{x(band.start):.1f}" y="{TOP - 16}" width="{max(x(band.end) - x(band.start), 0.5):.1f}"'
            f' height="{bottom - TOP + 16}"/>'
        )
        if x(band.end) - x(band.start) > 7 * len(band.name):
            parts.append(f'<text class="small" x="{x(band.start) + 3:.1f}" y="{TOP - 5}">{escape(band.name)}</text>')
        parts.append("</g>")
    for number, (node, points) in enumerate(timeline.lanes.items()):
        parts.append(_lane(node, points, TOP + number * (LANE + GAP), x, seconds))
    for mark in timeline.marks:
        at = f"{x(mark.at):.1f}"
        title = f"<title>{mark.at:.1f} s: {escape(mark.text)}</title>"
        if mark.fault:
            parts.append(f'<g>{title}<line class="fault" x1="{at}" x2="{at}" y1="{TOP - 16}" y2="{bottom}"/></g>')
        else:
            parts.append(
                f'<path class="restart" transform="translate({at} {bottom})" d="M-5 8L5 8L0 -1Z">{title}</path>'
            )
    for tick in _ticks(seconds):
        parts.append(f'<text class="small" text-anchor="middle" x="{x(tick):.1f}" y="{height - 6}">{tick:g} s</text>')
    return "".join([*parts, "</svg>"])


def _lane(node: str, points: Sequence[Point], top: float, x: object, seconds: float) -> str:
    assert callable(x)
    most = max((sum(point.rooms.values()) for point in points if point.rooms is not None), default=0) or 1
    base = top + LANE
    states = [s for s in STATES if any(p.rooms and s in p.rooms for p in points)]
    extra = sorted({s for p in points if p.rooms for s in p.rooms} - STATES.keys())
    parts = [
        f'<text x="4" y="{top + 14}">{escape(node)}</text><text class="small" x="4" y="{base}">0</text>'
        f'<text class="small" x="4" y="{top + 32}">{most} rooms</text>'
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>'
    ]
    steps = list(_steps(points, seconds))
    for start, end, rooms in steps:
        if rooms is None:
            parts.append(
                f'<rect class="silent" x="{x(start):.1f}" y="{top}" width="{max(x(end) - x(start), 1):.1f}"'
                f' height="{LANE}">'
                f"<title>{escape(node)} did not answer</title></rect>"
            )
    for state in [*states, *extra]:
        colour, words = STATES.get(state, OTHER)
        path = []
        for start, end, rooms in steps:
            if rooms and rooms.get(state):
                below = sum(rooms.get(s, 0) for s in _before(state, [*states, *extra]))
                low, high = base - LANE * below / most, base - LANE * (below + rooms[state]) / most
                wide = max(x(end) - x(start), 0.8)
                path.append(f"M{x(start):.1f} {low:.1f}h{wide:.1f}V{high:.1f}h-{wide:.1f}Z")
        if path:
            parts.append(f'<path fill="{colour}" d="{"".join(path)}"><title>{escape(words)}</title></path>')
    return "".join(parts)


def _before(state: str, order: Sequence[str]) -> Sequence[str]:
    return order[: order.index(state)]


def _steps(points: Sequence[Point], seconds: float) -> Iterable[tuple[float, float, Mapping[str, int] | None]]:
    """Runs of equal points as (start, end, rooms): thousands of samples, mostly of an idle node, become a few steps."""
    start = 0
    for index in range(1, len(points) + 1):
        if index == len(points) or points[index].rooms != points[start].rooms:
            end = points[index].at if index < len(points) else seconds
            yield points[start].at, end, points[start].rooms
            start = index


def _ticks(seconds: float) -> list[float]:
    step = next(s for s in (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1e9) if seconds / s <= 12)
    return [float(i * step) for i in range(int(seconds // step) + 1)]


def legend(timeline: Timeline) -> str:
    seen = {state for points in timeline.lanes.values() for point in points if point.rooms for state in point.rooms}
    entries = dict.fromkeys(
        STATES.get(state, OTHER) for state in (*STATES, *sorted(seen - STATES.keys())) if state in seen
    )
    items = "".join(f'<li><span style="background:{colour}"></span>{escape(words)}</li>' for colour, words in entries)
    return f'<ul class="legend">{items}</ul>'


STYLE = """
:root{color-scheme:light dark;--fg:#1c2430;--bg:#fff;--line:#c9d1dc;--soft:#f2f5f9;--soft2:#e7ecf3;
--bad:#c02626;--good:#14733b}
@media(prefers-color-scheme:dark){:root{--fg:#dde4ee;--bg:#12161c;--line:#3a4452;--soft:#191f28;--soft2:#212936;
--bad:#ff7b72;--good:#56d483}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--fg);background:var(--bg);
max-width:1160px;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{border-bottom:1px solid var(--line);padding:.35rem .6rem;text-align:left;vertical-align:top}
td:nth-child(n+4):nth-child(-n+7){text-align:right;font-variant-numeric:tabular-nums}
.verdict{font-size:1.15rem;font-weight:600;padding:.6rem .9rem;
border-left:6px solid currentColor;background:var(--soft)}
.pass.verdict,tr.pass td:nth-child(8){color:var(--good)}
.fail,tr.fail td{color:var(--bad)}
svg{width:100%;height:auto;font-size:13px}
svg text{fill:var(--fg)}
.small{font-size:11px;opacity:.75}
.band0{fill:var(--soft)}
.band1{fill:var(--soft2)}
.axis{stroke:var(--line)}
.silent{fill:var(--bad);opacity:.18}
.fault{stroke:var(--bad);stroke-width:1.5}
li.fault{color:var(--bad);stroke:none}
.restart{fill:var(--good)}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.3rem 1.2rem;padding:0}
.legend span{display:inline-block;width:.9em;height:.9em;margin-right:.4em;vertical-align:-.1em}
.marks{font-size:13px}
"""
