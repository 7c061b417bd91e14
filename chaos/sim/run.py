"""One run: a world, its workload, its faults; then calm, and everything must end and come home.

Owns: the verdict; ``pdxfer chaos sim`` prints it. Must not: know a fault's or a worker's details.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from pdxfer.core.ledger import SlotState

from . import faults, mirror, workload
from .faults import MANY, Fault
from .network import Network
from .sidecar import Sidecar
from .worker import VirtualWorker
from .world import LIMITS, Violation, World

__all__ = ["MANY", "Result", "drawn", "run", "shrink"]

SPAN = 1.5  # seconds over which rooms begin and faults strike
SERVE = 4.0  # seconds in which a room that begins after calm must be done
BOUND = LIMITS.room_timeout + 2 * LIMITS.quarantine_limit + 2 * LIMITS.transfer_deadline + LIMITS.stall_deadline
NEVER = {
    "digest_mismatch",
    "protocol_error",
    "internal_error",
    "layout_mismatch",
    "page_count_mismatch",
    "room_timeout",
}


def drawn(seed: int, nodes: int = 0) -> list[Fault]:
    """The faults of a seed; their places in this list are their numbers."""
    return faults.draw(seed, SPAN + 0.5, nodes)


@dataclass
class Result:
    seed: int
    violation: str = ""
    faults: list[Fault] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    mirror: Counter[str] = field(default_factory=Counter)  # how stores and loads ended
    struck: Counter[str] = field(default_factory=Counter)  # faults that took effect
    steps: int = 0
    seconds: float = 0.0  # virtual
    home_after: float = 0.0  # virtual seconds from calm to baseline
    timeline: list[tuple[float, str, object]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.violation


def run(
    seed: int,
    *,
    nodes: int = 0,
    only: Sequence[int] | None = None,
    trace: bool = False,
    audit_every: int = 1,
    mutant: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Result:
    """Run one seed.

    ``nodes``: as many, and not one to three by chance. ``only``: the numbers of the faults to keep. ``audit_every``: events
    between two audits of a node's books. ``mutant``: a seeded bug, in force during the run.
    """
    rng = random.Random(f"{seed} world")
    chosen = None if only is None else set(only)
    kept = [f for i, f in enumerate(drawn(seed, nodes)) if chosen is None or i in chosen]
    result = Result(seed, faults=kept)
    world = World(seed, trace=trace)
    world.mirror = mirror.SETTINGS if mirror.has_mirror(seed) else None
    with mutant():
        try:
            _run(world, rng, kept, nodes, audit_every, result)
        except Violation as violation:
            result.violation = f"at {world.now:.4f} s: {violation}"
    result.ends, result.struck = Counter(world.ends.values()), world.struck
    result.mirror = world.mirror_ends
    result.steps, result.seconds, result.timeline = world.steps, world.now, world.timeline
    return result


def _run(world: World, rng: random.Random, kept: list[Fault], nodes: int, audit_every: int, result: Result) -> None:
    world.network = Network(world)
    mild = faults.mild(kept)
    clean = mild and rng.random() < 0.5
    world.respawn = rng.choice((0.005, 0.02, 0.1))
    span = rng.choice((0.3, SPAN))
    world.pace = rng.choice((1.0, 1.0, 5.0, 20.0)) if not mild else 1.0
    world.abort_bound = 0.1 if mild else 4 * LIMITS.transfer_deadline + LIMITS.stall_deadline
    names = ["p", "d", "e"][: rng.choice((1, 2, 2, 2, 2, 3))]
    if nodes:
        names = [f"n{i:0{len(str(nodes - 1))}}" for i in range(nodes)]
    for name in names:
        side = Sidecar(world, name, send_slots=rng.choice((2, 3, 5)), recv_slots=rng.choice((2, 4, 6)))
        side.audit_every = audit_every
        world.sidecars[name] = side
    for name in names:
        for i in range(rng.choice((1, 1, 2))):
            pages = (
                400 if mild else 120 if any(f.kind == "eighty" for f in kept) else 24
            )  # mild: no room may starve for pages
            VirtualWorker(world, world.sidecars[name], f"{name}-{i}", (pages, pages))
    rooms = rng.choice((3, 6, 12, 24))
    workload.draw(world, max(rooms, 2 * nodes), span, clean=clean)
    for fault in kept:
        world.at(fault.at, lambda fault=fault: faults.strike(world, fault))  # type: ignore[misc]
    world.run(SPAN + 0.5)
    _calm(world)
    start = world.now
    world.run(start + 1.5)  # what workers have in hand still begins
    while (left := unsettled(world)) and world.now < start + BOUND:
        world.run(world.now + 0.25)
    result.home_after = world.now - start
    if left:
        raise Violation(f"{BOUND:g} s after the faults stopped: {left}")
    serves(world)
    if left := unsettled(world):
        raise Violation(f"it had come home, and then: {left}")
    judge(world, kept)


def _calm(world: World) -> None:
    """The faults stop: links heal, hung engines are left to the supervisor, silent workers speak again."""
    world.note("world", "CALM")
    world.calm = True
    world.network.calm()
    for side in world.sidecars.values():
        side.registry_fails, side.no_engine_before = "", 0.0
        if side.engine is not None:
            side.engine.slow, side.engine.error, side.engine.late_write = 1.0, 0.0, 0.0
    for one in world.workers:
        one.silent = False


def serves(world: World) -> None:
    """When everything is home, new rooms must be done: nothing that was broken may stay broken.

    The first room with a peer that restarted unheard may end, by name and to be tried again; the second may not.
    """
    for attempt in range(2):
        probes = [(*key, sending) for key in workload.probe(world, attempt) for sending in (True, False)]
        end = world.now + SERVE
        world.run(world.now + 0.5)
        while world.now < end and not all(key in world.ends for key in probes):
            world.run(world.now + 0.1)
        left = [key for key in probes if world.ends.get(key) != "done"]
        if not left:
            break
        world.run(world.now + LIMITS.open_timeout)
    for key in left:
        nodes = [side.core for side in world.sidecars.values() if side.core is not None]
        fatal = any(n >= 3 for node in nodes for n in node.state.fatal_agents.values())
        if (world.refused or fatal) and world.ends.get(key) == "metadata_refused":
            continue
        raise Violation(
            f"after calm, room {key} did not end done within {SERVE:g} s but {world.ends.get(key, 'not at all')}"
        )
    world.run(world.now + 0.5)


def unsettled(world: World) -> str:
    """What is not at its baseline; empty when everything has ended and come home."""
    for one in world.workers:
        if not one.connected:
            return f"worker {one.engine_id} is not attached"
        if one.tasks:
            return f"worker {one.engine_id} waits for {sorted(one.tasks)}"
        if one.mirror is not None and one.mirror.busy:
            return f"worker {one.engine_id} waits for {one.mirror.asked or one.mirror.open} of the mirror"
        if one.memory.lent:
            return f"worker {one.engine_id}: {one.memory.lent} pages are not home"
    for side in world.sidecars.values():
        if side.core is None or side.engine is None or side.frozen:
            return f"sidecar {side.name} is not up"
        st = side.core.state
        if not st.engine.up or side.engine.hung:
            return f"the engine of {side.name} is not up"
        mirrors = side.core.mirrors
        for what in (
            st.sends, st.recvs, st.homing, st.jobs, st.parked, side.core.ends.closing, mirrors.operations, mirrors.jobs,
            mirrors.leases,
        ):  # fmt: skip
            if what:
                return f"node {side.name} still holds {what}"
        if any(counts["home"] != sum(counts.values()) for counts in st.pages.counts().values()):
            return f"node {side.name}: pages {st.pages.counts()}"
        for slots in (st.engine.send, st.engine.recv):
            if slots.free != len(slots.all):
                return f"node {side.name}: slots {[(s.index, str(s.state), s.room) for s in slots.all if s.state is not SlotState.FREE]}"
        if len(st.workers) != sum(w.side is side for w in world.workers):
            return f"node {side.name} knows {len(st.workers)} workers"
    return ""


def judge(world: World, kept: list[Fault]) -> None:
    """After the run: ends that nothing explains."""
    kinds, mild = {f.kind for f in kept}, faults.mild(kept)
    for key, reason in world.ends.items():
        slow = reason == "room_timeout" and key[:2] in world.forgotten  # one that took long before it was forgotten
        if reason in NEVER and not slow:
            raise Violation(f"room {key} ended {reason}, which no fault of this world can cause")
        if reason == "copy_error" and "job_errors" not in kinds:
            raise Violation(f"room {key} ended {reason} without an error of the engine")
        lost_hellos = (
            reason == "peer_unreachable" and "lossy" in kinds
        )  # every Hello of the connect deadline, by chance
        if mild and reason != "done" and key[:2] in world.clean and not lost_hellos:
            raise Violation(f"room {key} ended {reason}, and nothing worse than {sorted(kinds)} had happened to it")
    for room, epoch, sending in world.ends:
        if sending and (room, epoch, False) in world.ends:
            ends = world.ends[(room, epoch, True)], world.ends[(room, epoch, False)]
            apart = abs(world.end_times[(room, epoch, True)] - world.end_times[(room, epoch, False)])
            if mild and apart > 3.0 and "open_timeout" not in ends:
                raise Violation(
                    f"room {room}/{epoch}: its sides ended {ends} {apart:.2f} s apart, with nothing worse than {sorted(kinds)}"
                )
            if ends[0] == "done" and ends[1] not in ("done", "sidecar_lost", "died"):
                raise Violation(f"room {room}/{epoch}: the send is done, the receive {ends[1]}")


def shrink(
    seed: int, *, nodes: int = 0, mutant: Callable[[], AbstractContextManager[object]] = nullcontext, tries: int = 60
) -> list[int]:
    """The faults of a failing seed that it takes: a list of their numbers from which none can be left out.

    Halves are left out first, then quarters, and so on to single faults; ``tries`` bounds the runs that it may cost.
    """
    keep = list(range(len(drawn(seed, nodes))))
    size = len(keep)
    while size:
        found = False
        for first in range(0, len(keep), size):
            fewer = keep[:first] + keep[first + size :]
            if not tries:
                return keep
            tries -= 1
            if not run(seed, nodes=nodes, only=fewer, mutant=mutant).ok:
                keep, found = fewer, True
                break
        if not found:
            size //= 2
        size = min(size, len(keep))
    return keep
