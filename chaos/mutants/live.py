"""Bugs for live chaos: each is put into a sidecar's parent before it starts, and makes one scenario's verdict fail.

Owns: the bugs and what each is, in words. Must not: be imported by the product.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec

from pdxfer import daemon, engineservice, peerlink, workers
from pdxfer.bootstrap import generation, links, thread
from pdxfer.core import messages, worker
from pdxfer.core import workers as core_workers
from pdxfer.core.ends import Ends
from pdxfer.core.peers import Peers
from pdxfer.core.receiver import Receiver
from pdxfer.core.sender import Sender
from pdxfer.supervisor import Phase

Bug = Callable[[], None]
BUGS: dict[str, tuple[str, Bug]] = {}  # name -> (what is wrong, put it in)
FOR_EVER = 1e9


def bug(what: str) -> Callable[[Bug], Bug]:
    def register(put: Bug) -> Bug:
        BUGS[put.__name__] = (what, put)
        return put

    return register


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


@bug("a worker's abort is taken and nothing is done")
def abort_ignored() -> None:
    replace(core_workers.Workers, "_abort", lambda self, owner, key, detail: nothing)


@bug("the end of a worker's connection is not noticed")
def dead_worker_unnoticed() -> None:
    def lost(self: Any, event: Any) -> None:
        owner = self.state.workers.get(event.id)
        if owner is not None and self.state.by_engine_id.get(owner.engine_id) is owner:
            del self.state.by_engine_id[owner.engine_id]
            self.state.timers.clear(("worker", owner.id))

    replace(core_workers.Workers, "lost", lost)


@bug("a worker that is silent is waited for")
def stalled_worker_unnoticed() -> None:
    def silent(self: Any, id: int) -> None:
        self.state.timers.set(("worker", id), self.state.now + 1.0)

    replace(core_workers.Workers, "silent", silent)


@bug("an engine that died or hangs is not replaced")
def engine_not_replaced() -> None:
    _never_missed(engineservice.EngineService)


@bug("rooms whose peer was lost or has restarted go on waiting")
def peer_loss_unnoticed() -> None:
    _peers_are_waited_for()


@bug("a bootstrap thread that died or hangs is not replaced")
def thread_not_restarted() -> None:
    _never_missed(peerlink.BootstrapService)


@bug("a frame that does not decode ends the bootstrap thread")
def garbage_fatal() -> None:
    decoder = msgspec.msgpack.Decoder(messages.Envelope, strict=True)
    replace(messages, "decode", decoder.decode)


@bug("a worker's frame that does not decode raises into the loop")
def worker_garbage_fatal() -> None:
    decoder = msgspec.msgpack.Decoder(worker.WorkerFrame, strict=True)
    replace(worker, "decode_from_worker", decoder.decode)


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


@bug("the end of a room is not remembered")
def no_tombstones() -> None:
    replace(Ends, "bury", nothing)


@bug("an abort that comes before its room is forgotten")
def early_abort_forgotten() -> None:
    bury = Ends.bury

    def late_only(self: Any, key: Any, reason: str, detail: str, *, early: bool = False) -> None:
        if not early:
            bury(self, key, reason, detail)

    replace(Ends, "bury", late_only)


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


@bug("a question to the registry has no deadline")
def registry_waited_for() -> None:
    _no_deadlines()
