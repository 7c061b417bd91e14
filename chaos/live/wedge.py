"""The original wedge, before and after: one pair of sidecars a run, 80 sessions, their agent killed.

Owns: the runs, what counts as wedged, the table. Must not: be a scenario; it is one experiment, repeated.

"before" is the mutant ``original``, "after" the product. A run is *wedged* when, so many seconds after the kill, a room of
the killed agent is still open on either side, or a new room between the same workers does not come to be done.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich import box
from rich.table import Table

from pdxfer.demo.faults import NotInjected
from pdxfer.demo.processes import until

from .faults import KillAgent
from .records import NEVER, read_legs, read_trips
from .run import PROBE, PROBE_SESSIONS
from .scenarios import held
from .verdict import percentile
from .world import DECODE, PREFILL, Kind, Load, World

BUILDS = {"before": "original", "after": ""}
TRANSFER = 0.1  # seconds that a room lasts, where the load is not one long transfer


@dataclass
class Outcome:
    """One run."""

    build: str
    sessions: int = 80
    share: float = 1.0  # of its time that a session has a room in transfer
    injected: bool = False
    proof: str = ""
    hit: int = 0  # sides of rooms that were open at the kill
    open: int = 0  # of those, still open when the wait was over
    terminal: float | None = None  # seconds until the last of them was over
    answered: float | None = None  # seconds from the kill until new rooms were done
    lent: int = 0  # pages that the sidecars still hold on loan in the end
    threads: dict[str, str] = field(default_factory=dict)  # bootstrap thread of each node: alive or what it died of

    @property
    def wedged(self) -> bool:
        return bool(self.open) or self.answered is None


def sparse(share: float) -> Load:
    """Rooms that are in transfer for this share of a session's time, at random moments; the rest is decoding, say."""
    cycle = TRANSFER / share
    return Load(pushes=2, pause=TRANSFER, think=cycle - TRANSFER, spread=cycle, tokens=(64, 64))


async def compare(
    builds: Sequence[str], runs: int, sessions: int, share: float, wait: float, found: list[Outcome], say: Callable[[str], None]
) -> None:  # fmt: skip
    """The builds in turns, so that all see the same machine. ``share`` of 1: every session has a room open when it is killed."""
    for number in range(1, runs + 1):
        for build in builds:
            outcome = await one(build, sessions, share, wait)
            found.append(outcome)
            state = "not injected" if not outcome.injected else "WEDGED" if outcome.wedged else "served again"
            terminal = "never" if outcome.terminal is None else f"after {outcome.terminal:.2f} s"
            answered = "never" if outcome.answered is None else f"after {outcome.answered:.2f} s"
            say(
                f"run {number} {build}: {state}; {outcome.hit} sides hit, {outcome.open} open after {wait:g} s,"
                f" all over {terminal}, new rooms done {answered}, {outcome.lent} pages lent"
            )


async def one(build: str, sessions: int, share: float, wait: float) -> Outcome:
    """One pair of sidecars, one kill."""
    outcome = Outcome(build, sessions, share)
    world = World(Kind(mutant=BUILDS[build], bystander=False))
    try:
        await world.start()
        load = held(sessions) if share == 1.0 else sparse(share)
        await world.agent(PREFILL, DECODE, sessions, load, "load")

        async def flowing() -> str:
            legs = read_legs(world.records(PREFILL, DECODE))
            return "" if len(legs) >= 2 * sessions else f"{len(legs)} sides of {2 * sessions} were opened"

        if left := await until(flowing, 30.0, 0.05):
            outcome.proof = left
            return outcome
        if share < 1.0:  # the moment of a kill is chance
            await asyncio.sleep(random.uniform(0.0, TRANSFER / share))
        fault = KillAgent()
        await fault.prepare(world)
        struck = time.monotonic()
        await fault.strike()
        outcome.proof = await fault.prove()
        outcome.injected = True
        await _follow(world, outcome, struck, wait)
    except NotInjected as error:
        outcome.proof = str(error)
    finally:
        await world.close()
    return outcome


async def _follow(world: World, outcome: Outcome, struck: float, wait: float) -> None:
    """What becomes of the rooms that were hit, and of new ones."""
    legs = read_legs(world.records(PREFILL, DECODE))
    hit = {leg.key for leg in legs if leg.opened <= struck < leg.ended}
    outcome.hit = len(hit)

    async def over() -> str:
        left = [leg for leg in read_legs(world.records(PREFILL, DECODE)) if leg.key in hit and leg.ended == NEVER]
        return f"{len(left)} sides are open" if left else ""

    await until(over, wait, 0.05)
    ends = {leg.key: leg.ended for leg in read_legs(world.records(PREFILL, DECODE)) if leg.key in hit}
    outcome.open = sum(at == NEVER for at in ends.values())
    if not outcome.open:
        outcome.terminal = max(ends.values(), default=struck) - struck
    probe = await world.agent(PREFILL, DECODE, PROBE_SESSIONS, PROBE, "probe")
    left = max(8.0, wait - (time.monotonic() - struck))
    if await world.manager.wait_exit(probe, left) is None:
        world.manager.kill(probe)
        await world.manager.wait_exit(probe, 5.0)
    trips = read_trips(world.trips(probe))
    if len(trips) == PROBE_SESSIONS * PROBE.rooms and all(trip.done for trip in trips):
        outcome.answered = max(trip.ended for trip in trips) - struck
    for node in world.nodes:
        view = await world.look(node)
        if view is not None:
            outcome.lent += sum(n for states in view.pages.values() for state, n in states.items() if state != "home")
        died = [line for line in world.log_of(f"sidecar {node}").splitlines() if line.startswith("KeyError")]
        outcome.threads[node] = died[-1][:120] if died else "alive"


def as_expected(found: list[Outcome]) -> bool:
    """Before: wedged, every time that a room was hit. After: never."""
    return bool(found) and all(o.injected and o.wedged == (o.build == "before" and bool(o.hit)) for o in found)


def table(found: list[Outcome]) -> Table:
    result = Table(box=box.SIMPLE_HEAD)
    for name in (
        "build",
        "runs",
        "wedged",
        "runs with rooms hit",
        "sides hit",
        "still open",
        "all over, s: p50 / max",
        "new rooms done, s: p50 / max",
        "bootstrap threads dead",
    ):
        result.add_column(name, justify="left" if name == "build" else "right")
    for build in BUILDS:
        runs = [o for o in found if o.build == build and o.injected]
        if runs:
            result.add_row(
                build, str(len(runs)), str(sum(o.wedged for o in runs)), str(sum(bool(o.hit) for o in runs)), str(sum(o.hit for o in runs)), str(sum(o.open for o in runs)),
                _times([o.terminal for o in runs]), _times([o.answered for o in runs]),
                f"{sum(state != 'alive' for o in runs for state in o.threads.values())} of {sum(len(o.threads) for o in runs)}",
            )  # fmt: skip
    return result


def _times(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "never"
    text = f"{percentile(known, 50):.2f} / {max(known):.2f}"
    return text if len(known) == len(values) else f"{text} in {len(known)} of {len(values)}"


def write_json(path: Path, found: list[Outcome]) -> None:
    runs = [asdict(outcome) | {"wedged": outcome.wedged} for outcome in found]
    path.write_text(json.dumps({"as_expected": as_expected(found), "runs": runs}, indent=2) + "\n", encoding="utf-8")
