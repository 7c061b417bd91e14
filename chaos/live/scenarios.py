"""The scenarios of live chaos: which fault, under which load, with which bounds, and the bug that must fail each.

Owns: the table. Must not: run anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from . import netns
from .faults import Fault, Kill, KillAgent, Restart, Slow, Stop, Thread
from .resources import Cut, Degraded, Descriptors, Memory, SharedMemory, no_netem
from .rooms import EarlyAbort, Quarantine, Reuse, Storm
from .wire import DeadPeers, Garbage, HalfOpen, Truncated, WorkerGarbage
from .world import DECODE, PREFILL, Kind, Load

KILLED = 5.0  # the contract's bound for rooms that a SIGKILL hits
STALLED = 15.0  # for a SIGSTOP or a cut link: limits.stall_deadline + 5 s
ENGINE_AGAIN = 3.0
PARENT_AGAIN = 5.0
THREAD_AGAIN = 1.0
STALL = 10.0
RATE = 25.0  # rooms a second that a load begins, however many sessions it has: the subject is not throughput

ALL = (1, 16, 80)


def paced(sessions: int) -> Load:
    """Rooms that last for most of a cycle, so that at any moment most sessions have one open."""
    cycle = max(0.5, sessions / RATE)
    return Load(pushes=4, pause=cycle * 0.7 / 3, think=cycle * 0.3, spread=min(cycle, 1.0))


def held(sessions: int) -> Load:
    """Rooms of several seconds: whatever happens, happens in their middle."""
    return Load(pushes=12, pause=0.4, think=0.0, spread=0.1)


def storm(sessions: int) -> Load:
    cycle = max(0.5, sessions / RATE)
    return Load(pushes=4, pause=cycle * 0.2, think=cycle * 0.2, spread=min(cycle, 1.0), abort_within=cycle * 0.8)


@dataclass(frozen=True)
class Scenario:
    """``fault`` is made for a number of sessions. ``nodes``: those that it strikes; untouched rooms keep off them."""

    name: str
    about: str
    fault: Callable[[int], Fault]
    mutant: str  # the bug of the control
    nodes: str = ""
    bound: float = KILLED  # for every affected room to be terminal on both sides
    concurrency: tuple[int, ...] = ALL
    kind: Kind = field(default_factory=Kind)
    load: Callable[[int], Load] = paced
    delay: float = -1.0  # from the load's start to the fault; negative: once rooms flow, and some calm
    hold: float = 0.0  # from the proof to the end of the fault
    serving: tuple[tuple[str, str, float], ...] = ()  # (what, node, within): "engine", "parent" or "bootstrap"
    keeps: frozenset[str] | None = None  # no room may be lost: every side ends by one of these
    quiet: str = ""  # of this node no service may have been restarted
    gap: float = 0.0  # that node answers, with no longer pause than this
    bystanders: tuple[tuple[str, str], tuple[str, str]] | None = None
    second: tuple[str, str] | None = None  # a further prefill worker and its node, with as many sessions
    skip: Callable[[], str] = lambda: ""

    @property
    def untouched(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """(engine, node) of the prefill and the decode worker whose rooms must not notice anything."""
        if self.bystanders is not None:
            return self.bystanders
        return {
            "": (("by-p", "p"), ("by-d", "d")),
            "p": (("by-b1", "b"), ("by-d", "d")),
            "d": (("by-p", "p"), ("by-b1", "b")),
            "pd": (("by-b1", "b"), ("by-b2", "b")),
        }[self.nodes]


DONE = frozenset({"done"})
ORDERLY = frozenset({"done", "shutdown", "draining", "aborted", "aborted_early", "sidecar_unavailable", "unreachable"})


def _kills() -> list[Scenario]:
    found = [
        Scenario(
            f"agent-kill-{after:g}s",
            f"SIGKILL of an agent with all its sessions, {after:g} s after its first room",
            lambda n: KillAgent(),
            "original",
            load=held,
            delay=after,
        )
        for after in (0.2, 1.0, 3.0)
    ]
    for role, engine in (("prefill", PREFILL), ("decode", DECODE)):
        worker = f"worker {engine}"
        found += [
            Scenario(f"{role}-worker-kill", f"SIGKILL of the {role} worker", lambda n, w=worker: Kill(w), "dead_worker_unnoticed"),  # type: ignore[misc]
            Scenario(
                f"{role}-worker-stop", f"SIGSTOP of the {role} worker",
                lambda n, w=worker: Stop(w), "stalled_worker_unnoticed" if role == "prefill" else "done_waits_for_worker", bound=STALLED, hold=17.0,  # type: ignore[misc]
            ),
        ]  # fmt: skip
    for side, node in (("prefill", "p"), ("decode", "d")):
        found += [
            Scenario(
                f"{side}-engine-kill", f"SIGKILL of the {side} node's engine", lambda n, e=f"engine of {node}": Kill(e),  # type: ignore[misc]
                "engine_not_replaced", nodes=node, serving=(("engine", node, ENGINE_AGAIN),),
            ),
            Scenario(
                f"{side}-engine-stop", f"SIGSTOP of the {side} node's engine", lambda n, e=f"engine of {node}": Stop(e),  # type: ignore[misc]
                "engine_not_replaced", nodes=node, bound=STALLED, hold=15.0,
                serving=(("engine", node, STALL + ENGINE_AGAIN),),
            ),
            Scenario(
                f"{side}-parent-kill", f"SIGKILL of the {side} node's sidecar", lambda n, s=f"sidecar {node}": Kill(s),  # type: ignore[misc]
                "peer_loss_unnoticed", nodes=node, serving=(("parent", node, PARENT_AGAIN),),
            ),
            Scenario(
                f"{side}-parent-stop", f"SIGSTOP of the {side} node's sidecar", lambda n, s=f"sidecar {node}": Stop(s),  # type: ignore[misc]
                "peer_loss_unnoticed", nodes=node, bound=STALLED, hold=17.0,
            ),
        ]  # fmt: skip
    registry = Kind(registry=True)
    local = (("by-d", "d"), ("by-d2", "d"))  # rooms within a node ask no registry; all others do
    found += [
        Scenario(
            "registry-kill", "SIGKILL of the node that keeps the registry", lambda n: Kill("sidecar r", "engine of r"),
            "registry_told_once", bound=STALLED, kind=registry, serving=(("parent", "r", PARENT_AGAIN),), bystanders=local,
        ),
        Scenario(
            "registry-stop", "SIGSTOP of the node that keeps the registry", lambda n: Stop("sidecar r", "engine of r"),
            "registry_told_once", bound=STALLED, kind=registry, hold=17.0, bystanders=local,
        ),
        Scenario(
            "node-kill", "SIGKILL of everything on the decode node at once",
            lambda n: Kill("sidecar d", "engine of d", f"worker {DECODE}"), "peer_loss_unnoticed", nodes="d",
            serving=(("parent", "d", PARENT_AGAIN),),
        ),
        Scenario(
            "same-name", "the prefill node comes back under its name, with another incarnation, while it is asked",
            lambda n: Kill("sidecar p", f"worker {PREFILL}"), "peer_loss_unnoticed", nodes="p",
            serving=(("parent", "p", PARENT_AGAIN),),
        ),
        Scenario(
            "rolling-restart", "SIGTERM of both sidecars under load, one after the other", lambda n: Restart("p", "d"),
            "no_farewell", nodes="pd", keeps=ORDERLY,
        ),
    ]  # fmt: skip
    return found


def _threads_and_wire() -> list[Scenario]:
    return [
        Scenario(
            "bootstrap-exception", "an exception in the prefill node's bootstrap thread", lambda n: Thread("p", "exception"),
            "thread_not_restarted", nodes="p", serving=(("bootstrap", "p", THREAD_AGAIN),), keeps=DONE,
        ),
        Scenario(
            "bootstrap-loop", "an endless loop in the prefill node's bootstrap thread", lambda n: Thread("p", "loop"),
            "thread_not_restarted", nodes="p", bound=STALLED, serving=(("bootstrap", "p", STALL + THREAD_AGAIN),),
        ),
        Scenario(
            "garbage-peers", "a flood of garbage on the bootstrap port, from strangers and from an authorised peer",
            lambda n: Garbage("p"), "garbage_fatal", nodes="p", keeps=DONE, quiet="p", gap=THREAD_AGAIN,
        ),
        Scenario(
            "garbage-workers", "a flood of garbage on the worker socket", lambda n: WorkerGarbage("p"), "worker_garbage_fatal",
            nodes="p", keeps=DONE, quiet="p", gap=THREAD_AGAIN,
        ),
        Scenario(
            "half-open", "1,000 connections that say nothing on the bootstrap port, and 1,000 on the worker socket",
            lambda n: HalfOpen("p"), "half_open_kept", nodes="p", keeps=DONE, quiet="p", gap=THREAD_AGAIN,
        ),
        Scenario(
            "truncated", "a recorded handshake, cut off at each of its bytes", lambda n: Truncated("p"), "garbage_fatal",
            nodes="p", keeps=DONE, quiet="p", gap=THREAD_AGAIN,
        ),
        Scenario(
            "dead-peers", "four peers that take connections and never answer, beside a live one", lambda n: DeadPeers(),
            "peers_in_turn", keeps=DONE, quiet="d",
        ),
    ]  # fmt: skip


def _rooms() -> list[Scenario]:
    small = Kind(slots=(8, 3))  # so few that two peers may have all of them between them
    return [
        Scenario(
            "abort-storm", "every room is aborted by one of its workers at a random moment, twice", lambda n: Storm(),
            "abort_of_a_worker_unhandled", load=storm,
        ),
        Scenario(
            "slow-decode", "the decode worker and its engine are stopped for nine tenths of the time: credits come slowly",
            lambda n: Slow(f"worker {DECODE}", "engine of d"), "credits_lost", nodes="d", bound=30.0,
        ),
        Scenario(
            "quarantine", "all receive slots are quarantined: their writers stopped, their rooms aborted", lambda n: Quarantine(),
            "quarantine_forgotten", kind=small, bound=STALLED, concurrency=(16, 80), hold=13.0,
            bystanders=(("by-d", "d"), ("by-d2", "d")), second=("by-b1", "b"), load=held,
        ),
        Scenario(
            "reuse", "a room's id is used again at once after its abort, in the same epoch and in the next", Reuse,
            "no_tombstone", keeps=DONE,
        ),
        Scenario("early-abort", "the abort comes before the room and before its want", EarlyAbort, "early_abort_forgotten", keeps=DONE),
    ]  # fmt: skip


def _resources() -> list[Scenario]:
    network = Kind(network=True)

    def cut(name: str, about: str, *ways: tuple[str, str]) -> Scenario:
        return Scenario(
            name, about, lambda n: Cut(*ways), "peer_loss_unnoticed", nodes="pd", bound=STALLED, kind=network,
            hold=17.0, skip=netns.missing,
        )  # fmt: skip

    return [
        Scenario(
            "descriptors", "the prefill node's sidecar has no file descriptor left", lambda n: Descriptors("p"),
            "accept_gives_up", nodes="p", bound=STALLED,
        ),
        Scenario(
            "shm-full", "/dev/shm of the prefill node is full while its engine starts again", lambda n: SharedMemory("p"),
            "engine_not_replaced", nodes="p", kind=Kind(private_shm=True), serving=(("engine", "p", ENGINE_AGAIN),),
            skip=netns.missing,
        ),
        Scenario(
            "memory-full", "the prefill node has no memory for an engine that must start again", lambda n: Memory("p"),
            "engine_not_replaced", nodes="p", bound=STALLED, kind=Kind(slot_bytes=16 << 20), concurrency=(16,),
            serving=(("engine", "p", 4.0 + 5.0 + ENGINE_AGAIN),),
        ),
        cut("cut-both", "no packet passes between the two nodes, for 17 s", ("p", "d"), ("d", "p")),
        cut("cut-prefill-to-decode", "no packet passes from the prefill to the decode node, for 17 s", ("p", "d")),
        cut("cut-decode-to-prefill", "no packet passes from the decode to the prefill node, for 17 s", ("d", "p")),
        Scenario(
            "slow-link", "the prefill node's link passes 20 Mbit/s", lambda n: Degraded("p", "tbf", "rate", "20mbit", "burst", "32kb", "latency", "50ms"),
            "credits_lost", nodes="pd", bound=30.0, kind=network, skip=netns.missing,
        ),
        Scenario(
            "lossy-link", "the prefill node's link delays by 50 ms and loses 5 % of all packets",
            lambda n: Degraded("p", "netem", "delay", "50ms", "10ms", "loss", "5%"), "credits_lost", nodes="pd", bound=30.0,
            kind=network, skip=lambda: netns.missing() or no_netem(),
        ),
    ]  # fmt: skip


SCENARIOS: dict[str, Scenario] = {s.name: s for s in (*_kills(), *_threads_and_wire(), *_rooms(), *_resources())}
