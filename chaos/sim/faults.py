"""Faults: drawn from a seed as a list, so that a failing run can be tried again with fewer of them.

Owns: every fault's effect and its end. Must not: judge.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from pdxfer.core.events import OperatorAbort

from .network import Link
from .world import World

KINDS = (
    "lossy", "repeats", "late", "corrupt", "cut_one_way", "cut", "reset", "engine_kill", "engine_hang", "engine_slow",
    "job_errors", "landed_lost", "late_writes", "parent_kill", "parent_freeze", "worker_kill", "worker_silent",
    "worker_drop", "abort_storm", "clock_jump", "registry_error", "registry_silent", "operator_abort", "few_slots",
)  # fmt: skip
MILD = {"lossy", "repeats", "late", "corrupt", "reset", "landed_lost"}  # taken alone
HARSH = ("engine_kill", "engine_hang", "late_writes", "parent_kill", "worker_drop", "worker_kill", "abort_storm", "reset")


def mild(kinds: set[str]) -> bool:
    """Must every room be done all the same? After a reset a peer has to be heard soon, which a bad link may prevent."""
    return kinds <= MILD and not ("reset" in kinds and kinds & {"lossy", "late", "corrupt"})


@dataclass(frozen=True)
class Fault:
    at: float
    kind: str
    target: int  # which node, worker or link, by number
    span: float
    value: float

    def __str__(self) -> str:
        return f"{self.at:.3f} s: {self.kind} of #{self.target} for {self.span:.2f} s ({self.value:.2f})"


def draw(seed: int, span: float) -> list[Fault]:
    """None in one run of eight, mild ones in one of four, two kinds again and again in two of five, a storm in the others."""
    rng = random.Random(f"{seed} faults")
    mood = rng.random()
    if mood < 0.12:
        return []
    kinds = sorted(MILD) if mood < 0.35 else list(KINDS)
    if mood >= 0.8:
        kinds = rng.sample(kinds, 2)
    elif mood >= 0.6:  # a bad link, and something that dies or stalls meanwhile
        kinds = [rng.choice(("lossy", "repeats", "late")), rng.choice(HARSH)]
    return [
        Fault(rng.random() * span, rng.choice(kinds), rng.randrange(100), 0.05 + 2.0 * rng.random() ** 2, rng.random())
        for _ in range(rng.choice((1, 1, 2, 3, 5, 8, 12)))
    ]


def strike(world: World, fault: Fault, tries: int = 200) -> None:
    """Half of the faults wait, a little, until their node is in the middle of something."""
    if world.calm:
        return
    sides = [world.sidecars[name] for name in sorted(world.sidecars)]
    core = sides[fault.target % len(sides)].core
    aimed = fault.target % 2 and fault.kind not in ("lossy", "repeats", "late", "corrupt")
    if aimed and tries and core is not None and not core.state.jobs and not any(r.outstanding for r in core.state.recvs.values()):
        world.after(0.002, lambda: strike(world, fault, tries - 1))
    else:
        apply(world, fault)


def _links(world: World, target: int) -> list[Link]:
    names = sorted(world.sidecars)
    pairs = [(a, b) for a in names for b in names if a != b]
    return [world.network.link(*pairs[target % len(pairs)])] if pairs else []


def apply(world: World, fault: Fault) -> None:
    """Put the fault into effect now, and its end into the queue."""
    world.note("fault", f"{fault}")
    sides = [world.sidecars[name] for name in sorted(world.sidecars)]
    side = sides[fault.target % len(sides)]
    one = world.workers[fault.target % len(world.workers)]
    links, engine = _links(world, fault.target), side.engine
    done = None
    match fault.kind:
        case "lossy" | "repeats" | "late" | "corrupt":
            name = {"lossy": "drop", "repeats": "repeat"}.get(fault.kind, fault.kind)
            amount = 0.05 + 0.35 * fault.value
            for link in links:
                setattr(link, name, amount)

            def done() -> None:
                for link in links:
                    setattr(link, name, 0.0)
        case "cut_one_way" | "cut":
            if fault.kind == "cut":
                links = [link for key, link in world.network._links.items() if side.name in key]
            for link in links:
                link.cut = True

            def done() -> None:
                for link in links:
                    link.cut = False
        case "reset":
            world.network.reset(side.name)
        case "engine_kill":
            side.kill_engine("killed by a fault")
        case "engine_hang":
            side.hang_engine()
            if engine is not None and fault.value < 0.5:
                done = engine.resume
        case "engine_slow" | "job_errors" | "landed_lost" | "late_writes":
            if engine is not None:
                name, value, well = {
                    "engine_slow": ("slow", 1 + 200 * fault.value**2, 1.0),
                    "job_errors": ("error", 0.3 * fault.value, 0.0),
                    "landed_lost": ("lose_landed", fault.value, 0.0),
                    "late_writes": ("late_write", fault.value, 0.0),
                }[fault.kind]
                setattr(engine, name, value)

                def done() -> None:
                    setattr(engine, name, well)
        case "parent_kill":
            side.kill(0.05 + fault.span / 2)
        case "parent_freeze":
            if side.core is not None:
                side.freeze(fault.span * 2)
        case "worker_kill":
            one.kill(0.05 + fault.span / 4)
        case "worker_silent":
            one.silent = True
            life = one.life

            def done() -> None:
                if one.life == life:
                    one.silent = False
        case "worker_drop":
            one.drop()
        case "abort_storm":
            for task in list(one.tasks.values()):
                one.abort(task.room, task.epoch)
        case "clock_jump":
            side.clock += 0.1 + 3 * fault.value**2
            side.tick()
        case "registry_error" | "registry_silent":
            side.registry_fails = "registry_unavailable" if fault.kind == "registry_error" else "silence"

            def done() -> None:
                side.registry_fails = ""
        case "operator_abort":
            for task in list(one.tasks.values())[:1]:
                side.deliver(OperatorAbort(task.room, task.epoch, "by a fault"))
        case "few_slots":
            side.send_slots, side.recv_slots = 1, 1 + fault.target % 2
        case _:
            raise ValueError(f"unknown fault {fault.kind!r}, expected one of {', '.join(KINDS)}")
    if done is not None:
        world.after(fault.span * (2 if fault.kind == "worker_silent" else 1), done)
