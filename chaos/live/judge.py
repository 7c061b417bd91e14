"""From what was recorded to the rows of the verdict.

Owns: which rooms a fault has affected, and how each of the contract's figures is measured. Must not: run anything.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .records import NEVER, Leg, Trip
from .scenarios import DONE, Scenario
from .verdict import Result, Row, percentile
from .world import DEAD

ABORT_WITHIN = 0.1
HOME_WITHIN = 10.0
RATIO = 1.5
CROWDED = 0.25  # of the time some process waited for a processor: a p99 is then the machine's, which nodes of a fleet do not share
BUSIER = 0.1  # of all processors, that fault and recovery took beside what was used before: likewise
QUIET = 0.15  # cores that processes which are not the run's may use, before or during, for a p99 that is the run's
RESAMPLES = 400
OWN = ("early-", "reuse-", "record-", *(f"{dead}-" for dead in DEAD))  # rooms of the faults themselves, judged by them
MORE = {"fds": 24.0, "threads": 8.0}  # what a process may hold in the end beyond what it held before


@dataclass
class Evidence:
    """What one run has left behind. Times are CLOCK_MONOTONIC."""

    calm: float = 0.0  # the untouched rooms flow, nothing is wrong
    struck: float = 0.0
    ceased: float = 0.0
    stopped: float = 0.0  # the load was told to stop
    now: float = 0.0  # of the judgement
    legs: Sequence[Leg] = ()  # of the struck workers
    exits: Mapping[int, float] = field(default_factory=dict)  # pid of a worker -> when it ended
    frozen: Mapping[int, float] = field(
        default_factory=dict
    )  # pid of a stopped worker -> when its sidecar had its pages home
    disturbed: Sequence[
        str
    ] = ()  # workers whose own sidecar was struck: the bound on aborts is for what the remote does
    untouched: Sequence[Trip] = ()
    home: float | None = None  # seconds from the end of load and fault
    left: str = ""  # what was not home
    serving: Mapping[tuple[str, str], float | None] = field(default_factory=dict)
    probe: Sequence[Trip] = ()
    probes: int = 0  # rooms that were asked for
    wrong: int = 0
    late: int = 0
    defects: int = 0
    dead: int = 0
    restarts: int = 0
    gap: float = 0.0
    others: tuple[float, float] = (0.0, 0.0)  # cores that others used, in the calm and since the strike
    crowding: tuple[float, float] = (
        0.0,
        0.0,
    )  # part of the time in which some process waited for a processor, likewise
    busy: tuple[float, float] = (0.0, 0.0)  # part of all processors that computed, likewise


def ended(leg: Leg, seen: Evidence) -> float:
    """When this side was over: by its record, or with its worker; the judgement's time if it is not.

    A worker that is stopped cannot record anything: there the sidecar's books count.
    """
    books = seen.frozen.get(leg.pid, NEVER) if leg.opened <= seen.struck else NEVER
    return min(leg.ended, books, seen.exits.get(leg.pid, NEVER), seen.now)


def affected(scenario: Scenario, seen: Evidence) -> list[Leg]:
    """Sides that were open when the fault struck, and later ones that it, or the recovery, has cost.

    Of rooms whose two sides were open at the same time: where the other worker died, or failed, before it opened its side, it
    is the router that must abort this one. Likewise a send whose want never came through: nobody can tell it.
    """
    until = seen.stopped or seen.now
    lives: dict[tuple[str, int, bool], tuple[float, float]] = {}
    for leg in seen.legs:
        if leg.state != "REFUSED":
            lives[leg.room, leg.epoch, leg.sending] = (leg.opened, ended(leg, seen))
    found = []
    for leg in seen.legs:
        over = ended(leg, seen)
        opened, closed = lives.get((leg.room, leg.epoch, not leg.sending), (NEVER, NEVER))
        met = opened < over and leg.opened < closed and (leg.matched or not leg.sending or leg.reason != "aborted")
        touched = leg.opened <= seen.struck or not leg.done
        if (
            over > seen.struck
            and leg.opened < until
            and leg.state != "REFUSED"
            and touched
            and met
            and not leg.room.startswith(OWN)
        ):
            found.append(leg)
    return found


def fill(result: Result, scenario: Scenario, seen: Evidence) -> None:
    """All rows."""
    hit = affected(scenario, seen)
    result.hit = sum(leg.opened <= seen.struck for leg in hit)
    result.rooms = len({(leg.room, leg.epoch) for leg in seen.legs})
    result.ends = Counter(
        leg.reason or "worker_died" if ended(leg, seen) < seen.now else "NOT ENDED" for leg in seen.legs
    )
    rows = result.rows
    aborts = [
        min(leg.ended, seen.now) - leg.aborted
        for leg in seen.legs
        if leg.aborted < NEVER
        and leg.pid not in seen.exits
        and leg.pid not in seen.frozen
        and leg.worker not in seen.disturbed
    ]
    rows.append(
        Row("abort asked by a worker → its pages reusable", "100 ms at p99", ABORT_WITHIN, aborts, at_p99=True,
            applies=bool(aborts), gate=len(aborts) >= 20,
            note=f"{len(aborts)} aborts: too few for a p99" if len(aborts) < 20
            else "other processes used {:.2f} and {:.2f} cores".format(*seen.others) if max(seen.others) > QUIET else "")
    )  # fmt: skip
    values = [ended(leg, seen) - max(seen.struck, leg.opened) for leg in hit]
    rows.append(
        Row("affected room terminal, each side", f"{scenario.bound:g} s", scenario.bound, values, applies=bool(values))
    )
    for (what, node), seconds in seen.serving.items():
        within = next(w for a, n, w in scenario.serving if (a, n) == (what, node))
        row = Row(f"{what} of {node} serves again", f"{within:g} s", within)
        row.values = [seconds] if seconds is not None else []
        row.note = "" if seconds is not None else "it did not while it was waited for"
        rows.append(row)
    if scenario.keeps is not None:
        lost = Counter(
            leg.reason for leg in seen.legs if leg.opened < seen.stopped and _kept(leg, seen, scenario) is False
        )
        rows.append(
            Row("rooms lost, sides", "0", 0.0, [float(sum(lost.values()))], unit="sides",
                note=", ".join(f"{n} {reason or 'not ended'}" for reason, n in lost.most_common()))
        )  # fmt: skip
    if scenario.quiet:
        rows.append(
            Row(
                f"restarts of sidecar {scenario.quiet} and its services",
                "0",
                0.0,
                [float(seen.restarts)],
                unit="restarts",
            )
        )
    if scenario.gap:
        rows.append(
            Row(f"longest time without service of {scenario.quiet}", f"{scenario.gap:g} s", scenario.gap, [seen.gap])
        )
    rows.append(
        Row("faults stop → pages and slots at their baseline", f"{HOME_WITHIN:g} s", HOME_WITHIN,
            [seen.home] if seen.home is not None else [], note=seen.left)
    )  # fmt: skip
    done = sum(trip.done for trip in seen.probe)
    rows.append(Row("rooms afterwards that were not done", "0", 0.0, [float(seen.probes - done)], unit="rooms"))
    rows += _untouched(scenario, seen)
    rows.append(Row("bytes delivered wrong and reported done", "0", 0.0, [float(seen.wrong)], unit="bytes"))
    rows.append(Row("bytes written into pages that were home", "0", 0.0, [float(seen.late)], unit="bytes"))
    rows.append(Row("dead workers that a sidecar still has on its books", "0", 0.0, [float(seen.dead)], unit="workers"))
    rows.append(Row("events that a core raised on", "0", 0.0, [float(seen.defects)], unit="events"))


def _kept(leg: Leg, seen: Evidence, scenario: Scenario) -> bool:
    assert scenario.keeps is not None
    before = ended(leg, seen) <= seen.struck
    ours = leg.room.startswith(OWN)
    allowed = scenario.keeps | ({"sidecar_unavailable", "unreachable"} if scenario.keeps is not DONE else frozenset())
    return before or ours or leg.done or leg.reason in allowed


def _untouched(scenario: Scenario, seen: Evidence) -> list[Row]:
    """Rooms of the pair that the fault left alone."""
    calm = [trip for trip in seen.untouched if seen.calm <= trip.began and trip.ended < seen.struck]
    during = [trip for trip in seen.untouched if trip.ended >= seen.struck]
    failed = Row(
        "untouched rooms that were not done", "0", 0.0, [float(sum(not trip.done for trip in during))], unit="rooms",
        note=", ".join(sorted({f"{t.send}/{t.receive}" for t in during if not t.done})),
    )  # fmt: skip
    before = [trip.ended - trip.began for trip in calm if trip.done]
    after = [trip.ended - trip.began for trip in during if trip.done]
    ratio = Row("p99 of untouched rooms, against the calm before", f"{RATIO} ×", RATIO, unit="×")
    if before and after:
        ratio.values = [percentile(after, 99) / percentile(before, 99)]
        low, high = interval(before, after)
        crowded = max(seen.crowding) > CROWDED
        busier = seen.busy[1] - seen.busy[0] > BUSIER
        quiet = max(seen.others) <= QUIET
        ratio.gate = high <= RATIO or (quiet and not crowded and not busier and low > RATIO)
        ratio.note = (
            f"{percentile(before, 99) * 1000:.1f} ms over {len(before)} rooms before, {percentile(after, 99) * 1000:.1f} ms over"
            f" {len(after)} during and after; 95 % interval {low:.2f} to {high:.2f}"
        )
        if not ratio.gate:
            if crowded:
                why = "in {:.0%} and {:.0%} of the time some process waited for one of the {} processors that all nodes share here".format(
                    *seen.crowding, len(os.sched_getaffinity(0))
                )
            elif busier:
                why = "fault and recovery computed on the {} processors that all nodes share here: {:.0%} of them were busy before, {:.0%} during".format(
                    len(os.sched_getaffinity(0)), *seen.busy
                )
            elif not quiet:
                why = "other processes used {:.2f} and {:.2f} cores".format(*seen.others)
            else:
                why = "the interval holds the bound"
            ratio.note = f"not measurable here ({why}): {ratio.note}"
    else:
        ratio.gate, ratio.note = False, "no rooms to compare"
    return [failed, ratio]


def interval(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """Between which values the ratio of the two p99s lies, at 95 % (bootstrap, always with the same seed).

    A p99 of a hundred rooms on a shared machine is mostly chance: only what chance cannot explain is judged.
    """
    draw = random.Random(0)
    ratios = sorted(
        percentile(draw.choices(after, k=len(after)), 99) / percentile(draw.choices(before, k=len(before)), 99)
        for _ in range(RESAMPLES)
    )
    return percentile(ratios, 2.5), percentile(ratios, 97.5)


def compare(
    before: Mapping[str, Mapping[str, float]], after: Mapping[str, Mapping[str, float]], result: Result
) -> None:
    """Put both inventories into the result; descriptors and threads that stayed are a row."""
    result.inventory = {
        name: {what: (of.get(what, 0.0), after[name][what]) for what in after[name]}
        for name, of in before.items()
        if after.get(name)
    }
    for what, most in MORE.items():
        grown = [
            pair[what][1] - pair[what][0] for name, pair in result.inventory.items() if what in pair and pair[what][0]
        ]
        result.rows.append(
            Row(
                f"{what} of a process, more than before",
                f"{most:g}",
                most,
                [max(0.0, max(grown, default=0.0))],
                unit=what,
            )
        )
