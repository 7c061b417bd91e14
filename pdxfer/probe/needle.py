"""``pdxfer probe needle``: every path, every storage format, one at a time and many; selections compared with those before.

Owns: the order of the runs, the comparison and its figures. Must not: print.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from pdxfer.bench.child import BenchError, Child
from pdxfer.bench.run import machine
from pdxfer.bench.sidecars import Sidecars
from pdxfer.pools.dsa import TOP_K, Dtype, IndexFormat

from . import recall, worker
from .cases import CONTEXTS, Document, Plan, Room, Selection, found_needles, plan
from .paths import FILLED, PATHS, SOURCE, TARGET, Found, Stage, ask, selected

START = 60.0  # seconds for a worker to attach
Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    paths: tuple[str, ...] = tuple(PATHS)
    dtypes: tuple[Dtype, ...] = ("bf16", "fp8")
    contexts: tuple[int, ...] = CONTEXTS
    concurrency: tuple[int, ...] = (1, 80)
    page_tokens: int = 64
    tls: str = ""


@dataclass
class Case:
    """Rooms of equal context, position and number of needles, on one path."""

    context: int
    position: str
    copies: int
    rooms: int = 0
    sets: int = 0  # compared
    differ: int = 0  # of those, not identical
    wrong_rooms: int = 0  # with stored bytes other than before
    needles: dict[int, tuple[int, int]] = field(default_factory=dict)  # k -> selected after the path, could be


@dataclass
class Run:
    """One path, format and concurrency."""

    path: str
    dtype: Dtype
    concurrency: int
    rooms: int
    tokens: int
    seconds: float  # of the path, with the selection at its end
    cases: list[Case] = field(default_factory=list)

    @property
    def sets(self) -> int:
        return sum(case.sets for case in self.cases)

    @property
    def differ(self) -> int:
        return sum(case.differ for case in self.cases)

    @property
    def wrong_rooms(self) -> int:
        return sum(case.wrong_rooms for case in self.cases)

    @property
    def identical(self) -> bool:
        """Something was compared, and nothing differs."""
        return self.sets > 0 and not self.differ and not self.wrong_rooms


@dataclass
class Result:
    """Everything, as it goes into the JSON file."""

    options: Options
    machine: dict[str, Any]
    runs: list[Run] = field(default_factory=list)
    recall: list[recall.Row] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        return bool(self.runs) and all(run.identical for run in self.runs)

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        for run, out in zip(self.runs, found["runs"], strict=True):
            out |= {"identical": run.identical, "sets": run.sets, "differ": run.differ, "wrong_rooms": run.wrong_rooms}
        return {"identical": self.identical, **found}


async def run(options: Options, say: Say) -> Result:
    """Probe. Raises BenchError or DemoError with what went wrong; nothing stays behind in any case."""
    result = Result(options, machine(options.tls))
    sidecars = Sidecars(options.tls, SOURCE)
    try:
        say("two sidecars start")
        await sidecars.start(*mirror_flags(options))
        for dtype in options.dtypes:
            form = IndexFormat(dtype, options.page_tokens)
            for concurrency in options.concurrency:
                result.runs += await _paths(options, plan(form, options.contexts, concurrency), sidecars, say)
    finally:
        problems = await sidecars.close()
    if problems:
        raise BenchError("; ".join(problems))
    say("needles by format")
    result.recall = await asyncio.to_thread(recall.measure, options.contexts)
    return result


def mirror_flags(options: Options) -> list[str]:
    """A mirror that holds every room of the largest plan; two, since the next plan's workers may come before the last one's have gone."""
    most = 0
    for dtype in options.dtypes:
        form = IndexFormat(dtype, options.page_tokens)
        for concurrency in options.concurrency:
            rooms = plan(form, options.contexts, concurrency)
            most = max(most, rooms.pages() * -(-rooms.layers * form.page_bytes // 4096) * 4096)
    blocks = str(options.page_tokens)
    return ["--mirror-bytes", str(2 * most), "--mirror-layouts", "2", "--mirror-block-tokens", blocks]


async def _paths(options: Options, rooms: Plan, sidecars: Sidecars, say: Say) -> list[Run]:
    """All paths of one format at one concurrency, against the same selections before."""
    title = f"{rooms.form.dtype}, {rooms.concurrency} at a time"
    say(f"{title}: workers attach")
    children: list[Child] = []
    try:
        for name, node, engine, role in (
            ("the prefill worker", "p", SOURCE, "prefill"),
            ("the decode worker", "d", TARGET, "decode"),
        ):
            children.append(Child(name, worker.serve, rooms, sidecars.socket(node), engine, role))
        for child in children:
            await asyncio.to_thread(child.answer, START)
        prefill, decode = children
        say(f"{title}: {len(rooms.rooms)} rooms are filled")
        await ask(prefill, "place", FILLED, True)
        await ask(prefill, "fill")
        before = await selected(prefill)
        found = []
        for name in options.paths:
            say(f"{title}: {name}")
            prefix = f"{rooms.form.dtype}-{rooms.concurrency}-{name}"
            began = time.monotonic()
            after = await PATHS[name].play(Stage(sidecars, prefill, decode, prefix))
            found.append(compare(name, rooms, before, after, time.monotonic() - began))
        return found
    except BenchError as error:
        raise BenchError(f"{title}: {error}") from error
    finally:
        for child in children:
            child.close()


def compare(path: str, rooms: Plan, before: Found, after: Found, seconds: float) -> Run:
    """Room by room and set by set. A room that did not arrive is a room with every set wrong."""
    tokens = sum(room.document.context for room in rooms.rooms)
    result = Run(path, rooms.form.dtype, rooms.concurrency, len(rooms.rooms), tokens, seconds)
    cases: dict[Document, Case] = {}
    for room in rooms.rooms:
        case = cases.setdefault(room.document, Case(*room.document))
        _add(case, room, before[room.name], after.get(room.name, Selection((), ())))
    result.cases = sorted(cases.values(), key=lambda case: (case.context, case.copies, case.position))
    return result


def _add(case: Case, room: Room, before: Selection, after: Selection) -> None:
    case.rooms += 1
    case.sets += len(before.sets)
    arrived = len(after.sets) == len(before.sets)
    pairs = zip(before.sets, after.sets, strict=True) if arrived else ()
    case.differ += sum(not np.array_equal(a, b) for a, b in pairs) if arrived else len(before.sets)
    case.wrong_rooms += before.digest != after.digest
    for k in TOP_K if arrived else ():
        selected_now, could = found_needles(room, after, k)
        had = case.needles.get(k, (0, 0))
        case.needles[k] = had[0] + selected_now, had[1] + could
