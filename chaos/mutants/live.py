"""Bugs for live chaos: each is put into a sidecar's parent before it starts, and makes one scenario's verdict fail.

Owns: the bugs and what each is, in words. Must not: be imported by the product.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec

from pdxfer import daemon, engineservice, peerlink, workerlink, workers
from pdxfer.bootstrap import generation, links, registry, thread
from pdxfer.core import messages
from pdxfer.core import workers as core_workers
from pdxfer.core.peers import Peers
from pdxfer.core.receiver import Receiver
from pdxfer.core.sender import Sender
from pdxfer.supervisor import Phase

from . import sim

Bug = Callable[[], None]
BUGS: dict[str, tuple[str, Bug]] = {}  # name -> (what is wrong, put it in)
FOR_EVER = 1e9
_in_force = contextlib.ExitStack()  # never closed: what it holds is undone with it


def bug(what: str) -> Callable[[Bug], Bug]:
    def register(put: Bug) -> Bug:
        BUGS[put.__name__] = (what, put)
        return put

    return register


def core(name: str) -> None:
    """A bug of the simulator's, in force until the process ends."""
    found = sim.MUTANTS[name]

    def put() -> None:
        _in_force.enter_context(found.in_force())

    BUGS[name] = (found.what, put)


for _name in ("abort_of_a_worker_unhandled", "dead_worker_unnoticed", "no_tombstone", "early_abort_forgotten"):
    core(_name)


def nothing(*_: Any, **__: Any) -> None:
    return None


def replace(owner: object, name: str, by: object) -> None:
    """Put ``by`` in the place of a method or function that is there."""
    assert hasattr(owner, name), f"{owner} has no {name} any more: the mutant {name} must follow the product"
    setattr(owner, name, by)


def _never_missed(service: type) -> None:
    """The supervisor takes this service for healthy, whatever happens to it."""
    ticks = itertools.count(1)
    replace(service, "phase", lambda self: Phase.SERVING)
    replace(service, "heartbeat", lambda self: next(ticks))


def _no_deadlines() -> None:
    for side in (Sender, Receiver):
        replace(side, "deadline", lambda self, room: (room.opened + FOR_EVER, "room_timeout", ""))


def _peers_are_waited_for() -> None:
    replace(Peers, "_end_rooms", nothing)


@bug("one bootstrap thread, which an ABORT from the peer ends; nobody starts it again; nothing has a deadline")
def original() -> None:
    """The behaviour of the incident (docs/DSV4_BF16_TRANSFER_WEDGE.md)."""
    understand = generation.Generation._understand

    def unhandled(self: Any, frame: bytes, key: str) -> Any:
        envelope = understand(self, frame, key)
        for message in envelope.body:
            if isinstance(message, messages.Ended):
                raise KeyError(f"no handler for {type(message).__name__} of room {message.room}")
        return envelope

    replace(generation.Generation, "_understand", unhandled)
    _never_missed(peerlink.BootstrapService)
    _no_deadlines()
    _peers_are_waited_for()


@bug("a worker that is silent is waited for")
def stalled_worker_unnoticed() -> None:
    def silent(self: Any, id: int) -> None:
        self.state.timers.set(("worker", id), self.state.now + 1.0)

    replace(core_workers.Workers, "silent", silent)


@bug("a room is done only when its decode worker has shown that it lives, and its silence is not noticed")
def done_waits_for_worker() -> None:
    stalled_worker_unnoticed()
    complete = Receiver.complete
    finished: dict[int, float] = {}

    def confirmed(self: Any, room: Any) -> bool:
        if room.finish is None:
            return False
        since = finished.setdefault(room.serial, self.state.now)
        return room.worker.heard > since and complete(self, room)

    replace(Receiver, "complete", confirmed)


@bug("an engine that died or hangs is not replaced")
def engine_not_replaced() -> None:
    _never_missed(engineservice.EngineService)


@bug(
    "rooms whose peer was lost or has restarted go on waiting, and a restarted peer does not say that it knows nothing of them"
)
def peer_loss_unnoticed() -> None:
    _peers_are_waited_for()
    replace(Receiver, "_answer_dead", nothing)


@bug("a bootstrap thread that died or hangs is not replaced")
def thread_not_restarted() -> None:
    _never_missed(peerlink.BootstrapService)


@bug("a frame that does not decode ends the bootstrap thread")
def garbage_fatal() -> None:
    decoder = msgspec.msgpack.Decoder(messages.Envelope, strict=True)
    replace(messages, "decode", decoder.decode)


@bug("a worker's frame that cannot be taken raises into the loop, and its connection stays open")
def worker_garbage_fatal() -> None:
    def refuse(self: Any, why: Any, req: int = 0) -> None:
        raise why

    replace(workerlink.WorkerLink, "refuse", refuse)


@bug("connections that say nothing stay open")
def half_open_kept() -> None:
    made, served = thread.Bootstrap.__init__, workers.WorkerService.__init__

    def bootstrap(self: Any, node: str, settings: Any, *rest: Any, **named: Any) -> None:
        made(self, node, msgspec.structs.replace(settings, handshake_seconds=3600.0), *rest, **named)

    def service(self: Any, *rest: Any, **named: Any) -> None:
        served(self, *rest, **named | {"attach_timeout": 3600.0, "max_connections": 10**6, "max_half_open": 10**6})

    replace(thread.Bootstrap, "__init__", bootstrap)
    replace(workers.WorkerService, "__init__", service)


@bug("the bootstrap thread waits for one peer's handshake before it serves the next")
def peers_in_turn() -> None:
    connect = links.Links._connect

    def wait(self: Any, node: str, place: Any, turn: int, now: float) -> Any:
        where = urlsplit(place.address)
        end = time.monotonic() + 5.0
        try:
            with socket.create_connection((where.hostname or "", where.port or 0), 5.0) as probe:
                probe.settimeout(max(0.01, end - time.monotonic()))
                probe.recv(1)
        except OSError:
            time.sleep(max(0.0, end - time.monotonic()))
        return connect(self, node, place, turn, now)

    replace(links.Links, "_connect", wait)


@bug("the writer of a quarantined slot is never asked whether it is finished")
def quarantine_forgotten() -> None:
    def inquire(self: Any) -> None:
        self.state.timers.set(("quarantine",), self.state.now + 1.0)

    replace(Receiver, "inquire", inquire)
    replace(Receiver, "writers_gone", nothing)


@bug("a receive slot that was scattered is not used again")
def credits_lost() -> None:
    replace(Receiver, "_free", nothing)


@bug("after it ran out of descriptors once, the sidecar accepts no worker any more")
def accept_gives_up() -> None:
    replace(workers.WorkerService, "_start_accepting", nothing)


@bug("SIGTERM ends the sidecar at once, without a word to workers and peers")
def no_farewell() -> None:
    def terminate(self: Any, number: int) -> None:
        os._exit(0)

    replace(daemon.Daemon, "_terminate", terminate)


@bug("engine ids are announced to the registry once, for good, and its answers have no deadline")
def registry_told_once() -> None:
    due = registry.Registry.due
    told: set[tuple[str, ...]] = set()

    def once(self: Any, engines: tuple[str, ...], address: str, now: float) -> Any:
        out = []
        for one in due(self, engines, address, now):
            if isinstance(one.message, messages.Announce):
                if engines in told:
                    continue
                told.add(engines)
                one = one._replace(message=msgspec.structs.replace(one.message, ttl=3600.0))
            out.append(one)
        return out

    replace(registry.Registry, "due", once)
    _no_deadlines()
