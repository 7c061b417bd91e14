"""Faults: drawn from a seed as a list, so that a failing run can be tried again with fewer of them.

Owns: every fault's effect and its end. Must not: judge.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from pdxfer.core import messages
from pdxfer.core.events import OperatorAbort

from . import workload
from .network import Link, Pinch
from .world import World

KINDS = (
    "lossy", "repeats", "late", "corrupt", "cut_one_way", "cut", "reset", "engine_kill", "engine_hang", "engine_slow",
    "job_errors", "landed_lost", "late_writes", "parent_kill", "parent_freeze", "worker_kill", "worker_silent",
    "worker_drop", "abort_storm", "clock_jump", "registry_error", "registry_silent", "operator_abort", "few_slots",
    "few_pages", "thread_kill", "eighty", "pinch", "engine_loops", "late_hello", "stale_fate",
)  # fmt: skip
MILD = {"lossy", "repeats", "late", "corrupt", "reset", "landed_lost", "thread_kill"}  # taken alone
HARSH = (
    "engine_kill",
    "engine_hang",
    "late_writes",
    "parent_kill",
    "worker_drop",
    "worker_kill",
    "abort_storm",
    "reset",
    "thread_kill",
)
MANY = 3  # nodes: a world with more has faults in proportion
PINCHED = (  # messages whose loss or delay hurts most, the slots' first
    messages.Grant, messages.Grant, messages.Grant, messages.Grant, messages.SlotFate, messages.Segment, messages.Ack, messages.Done, messages.Ended,
    messages.EndedAck, messages.Finish, messages.Accept, messages.Want,
)  # fmt: skip
SESSIONS = 80  # that are aborted at once
SILENT_FOR = 4  # frames
BURST = 8  # sessions that want slots


def mild(faults: Sequence[Fault]) -> bool:
    """Must every room be done all the same?

    After its connections were cut a peer has to be heard soon, which a bad link may prevent, or a thread that dies again.
    """
    kinds = {fault.kind for fault in faults}
    if not kinds <= MILD:
        return False
    cuts = sum(fault.kind in ("reset", "thread_kill") for fault in faults)
    return not cuts or (not kinds & {"lossy", "late", "corrupt"} and (cuts == 1 or "thread_kill" not in kinds))


@dataclass(frozen=True)
class Fault:
    at: float
    kind: str
    target: int  # which node, worker or link, by number
    span: float
    value: float

    def __str__(self) -> str:
        return f"{self.at:.3f} s: {self.kind} of #{self.target} for {self.span:.2f} s ({self.value:.2f})"


def draw(seed: int, span: float, nodes: int = MANY) -> list[Fault]:
    """None in one run of eight, mild ones in one of four, messages singled out in one of seven, two kinds again and again in two of five."""
    rng = random.Random(f"{seed} faults")
    mood = rng.random()
    if mood < 0.12:
        return []
    kinds = (
        sorted(MILD) if mood < 0.35 else ["pinch", "pinch", "late_hello", "stale_fate"] if mood < 0.5 else list(KINDS)
    )
    if mood >= 0.8:
        kinds = rng.sample(kinds, 2)
    elif mood >= 0.65:  # a bad link, and something that dies or stalls meanwhile
        kinds = [rng.choice(("lossy", "repeats", "late")), rng.choice(HARSH)]
    few, targets = rng.choice((1, 1, 2, 3, 5, 8, 12)), 100
    if nodes > MANY:
        few, targets = max(few, nodes // 4), 100 * nodes
    return [
        Fault(
            rng.random() * span, rng.choice(kinds), rng.randrange(targets), 0.05 + 2.0 * rng.random() ** 2, rng.random()
        )
        for _ in range(few)
    ]


def strike(world: World, fault: Fault, tries: int = 200) -> None:
    """Half of the faults wait, a little, until their node is in the middle of something."""
    if world.calm:
        return
    sides = [world.sidecars[name] for name in sorted(world.sidecars)]
    core = sides[fault.target % len(sides)].core
    aimed = fault.target % 2 and fault.kind not in ("lossy", "repeats", "late", "corrupt")
    if (
        aimed
        and tries
        and core is not None
        and not core.state.jobs
        and not any(r.outstanding for r in core.state.recvs.values())
    ):
        world.after(0.002, lambda: strike(world, fault, tries - 1))
    else:
        apply(world, fault)


def _links(world: World, target: int) -> list[Link]:
    names = sorted(world.sidecars)
    if len(names) > MANY and world.network.links:  # most pairs of a big world never talk
        return [list(world.network.links.values())[target % len(world.network.links)]]
    pairs = [(a, b) for a in names for b in names if a != b]
    return [world.network.link(*pairs[target % len(pairs)])] if pairs else []


def _pinch(world: World, fault: Fault, node: str) -> Pinch:
    """One message is held back, said twice or lost; at that very moment an engine is killed or the message's room aborted,
    and perhaps the news of that is held back or lost as well.
    """
    rng = random.Random(fault.value)
    kind, how, seconds = rng.choice(PINCHED), rng.choice(("hold", "hold", "echo", "lose")), 0.2 + 0.6 * fault.span
    killed, aborted, deaf = rng.choice(("", "source", "target")), rng.random() < 0.5, rng.random() < 0.5

    def then(source: str, target: str, message: messages.Message) -> None:
        key = (getattr(message, "room", ""), getattr(message, "epoch", 0))
        sides = [w for w in world.workers if (*key, True) in w.tasks or (*key, False) in w.tasks]
        if deaf:
            world.network.pinches += [Pinch(source, messages.Ended, "lose", 0.0, _nothing) for _ in range(3)]
        if aborted and sides:
            rng.choice(sides).abort(*key)
        if killed:
            world.after(
                0.02, lambda: world.sidecars[source if killed == "source" else target].kill_engine("killed by a fault")
            )

    return Pinch(node, kind, how, seconds, then)


def _nothing(source: str, target: str, message: messages.Message) -> None:
    return


def _abort_all(world: World, node: str) -> None:
    """Every room of a node at once, and the news of it is lost for a while."""
    if world.calm:
        return
    for other in world.sidecars:
        if other != node:
            world.network.pinches += [
                Pinch(node, messages.Ended, "lose", 0.0, _nothing, to=other) for _ in range(SILENT_FOR)
            ]
    for one in world.workers:
        if one.side.name == node:
            for task in list(one.tasks.values()):
                one.abort(task.room, task.epoch)


def _late_hello(world: World, fault: Fault, node: str) -> Pinch:
    """A grant meets the writer's next engine: it is held back while that engine is replaced, whose Hello is later still. Then the
    receiver's rooms are aborted, and their slots are in doubt when the Hello comes.
    """
    seconds = 0.15 + 0.2 * fault.span

    def then(source: str, target: str, message: messages.Message) -> None:
        writer = world.sidecars[target]
        held = [Pinch(target, messages.Hello, "hold", seconds + 0.1, _nothing, to=source) for _ in range(SILENT_FOR)]
        world.network.pinches += held
        world.after(0.003, lambda: writer.kill_engine("killed by a fault"))

        def slow() -> None:
            if writer.engine is not None and not world.calm:
                writer.engine.slow = 100.0

        world.after(seconds - 0.001, slow)
        world.after(seconds + 0.05 * fault.value, lambda: _abort_all(world, source))

    return Pinch(node, messages.Grant, "hold", seconds, then)


def _stale_fate(world: World, fault: Fault, node: str) -> Pinch:
    """What a writer said of a slot comes a second time, when that slot is in doubt again for another room's sake."""
    seconds = 0.1 + 0.3 * fault.span

    def then(source: str, target: str, message: messages.Message) -> None:
        receivers = [one for one in world.workers if one.side.name == target]
        if receivers:
            workload.burst(world, fault.target, receivers[fault.target % len(receivers)], BURST, seconds)
        world.after(seconds - 0.03 * fault.value, lambda: _abort_all(world, target))

    # the first room of which a slot comes into doubt is one that is aborted now
    _abort_all(world, node)
    return Pinch(node, messages.SlotFate, "echo", seconds, then, to=node)


def apply(world: World, fault: Fault) -> None:
    """Put the fault into effect now, and its end into the queue. One that finds nothing to hit is not counted."""
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
            if not links:
                return
            for link in links:
                setattr(link, name, amount)

            def done() -> None:
                for link in links:
                    setattr(link, name, 0.0)
        case "cut_one_way" | "cut":
            if fault.kind == "cut":
                links = [link for key, link in world.network.links.items() if side.name in key]
            if not links:
                return
            for link in links:
                link.cut = True

            def done() -> None:
                for link in links:
                    link.cut = False
        case "reset":
            world.network.reset(side.name)
        case "thread_kill":
            world.network.kill_thread(side.name, int(8 * fault.value), 0.2 * fault.span / 2.05)
        case "engine_kill" | "engine_loops":
            if engine is None:
                return
            if fault.kind == "engine_loops":
                side.no_engine_before = world.now + 3 * fault.span
            side.kill_engine("killed by a fault")
        case "engine_hang":
            if engine is None:
                return
            side.hang_engine()
            if fault.value < 0.5:
                done = engine.resume
        case "engine_slow" | "job_errors" | "landed_lost" | "late_writes":
            if engine is None:
                return
            name, value, well = {
                "engine_slow": ("slow", 1 + 200 * fault.value**2, 1.0),
                "job_errors": ("error", 0.3 * fault.value, 0.0),
                "landed_lost": ("lose_landed", fault.value, 0.0),
                "late_writes": ("late_write", fault.value, 0.0),
            }[fault.kind]
            setattr(engine, name, value)

            def done() -> None:
                setattr(engine, name, well)
        case "parent_kill" | "parent_freeze":
            if side.core is None:
                return
            if fault.kind == "parent_kill":
                side.kill(0.05 + fault.span / 2)
            else:
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
            if not one.tasks:
                return
            for task in list(one.tasks.values()):
                one.abort(task.room, task.epoch)
        case "eighty":
            workload.burst(world, fault.target, one, SESSIONS, 0.2 * fault.value)
        case "clock_jump":
            side.clock += 0.1 + 3 * fault.value**2
            side.tick()
        case "registry_error" | "registry_silent":
            side.registry_fails = "registry_unavailable" if fault.kind == "registry_error" else "silence"

            def done() -> None:
                side.registry_fails = ""
        case "operator_abort":
            if not one.tasks:
                return
            task = next(iter(one.tasks.values()))
            side.deliver(OperatorAbort(task.room, task.epoch, "by a fault"))
        case "few_slots":  # the next engine has no more
            side.send_slots, side.recv_slots = 1, 1 + fault.target % 2
            side.kill_engine("killed by a fault")
        case "pinch":
            world.network.pinches.append(_pinch(world, fault, side.name))
        case "late_hello":
            world.network.pinches.append(_late_hello(world, fault, side.name))
        case "stale_fate":
            world.network.pinches.append(_stale_fate(world, fault, side.name))
        case "few_pages":
            taken, memory = one.memory.take_free(), one.memory

            def done() -> None:
                memory.give_free(taken)
        case _:
            raise ValueError(f"unknown fault {fault.kind!r}, expected one of {', '.join(KINDS)}")
    world.struck[fault.kind] += 1
    if done is not None:
        world.after(fault.span * (2 if fault.kind == "worker_silent" else 1), done)
