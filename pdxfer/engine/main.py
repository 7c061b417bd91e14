"""The engine child's entry: ``python -m pdxfer.engine.main SPEC``, started by child.py and by nobody else.

Owns: the order of a start and of an end. Must not: be imported by the parent for anything but ``Spec``.

It ends by os._exit only: an ordinary interpreter exit with a UCX back end is a segmentation fault.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import signal
import socket
import sys
from typing import Final, NoReturn

import msgspec

from .exits import DEFECT, ORDERLY, Fault
from .settings import EngineSettings
from .vitals import Vitals

log = logging.getLogger("pdxfer.engine")

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_TIMERSLACK: Final = 29


class Spec(msgspec.Struct, frozen=True):
    """What a child is told at its birth; everything else comes as jobs."""

    agent: str
    incarnation: int
    parent: int  # pid
    socket: int
    vitals: int
    settings: EngineSettings


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, the moment before this call included."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise Fault(DEFECT, f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    libc.prctl(_PR_SET_TIMERSLACK, 1000)  # short pauses are to be short
    if os.getppid() != parent:
        os._exit(ORDERLY)


def allow_descriptors() -> None:
    """Every mapped pool costs one: take as many as the system gives."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def serve(spec: Spec, vitals: Vitals) -> int:
    vitals.say("while it was loading NIXL")
    # Here and not above: what fails in these imports must find the vitals page in place.
    from .agent import Agent
    from .link import Link
    from .loop import Engine
    from .nixl import load
    from .slots import Slots

    settings = spec.settings
    nixl = load()
    vitals.say("while it was taking its staging memory")
    slots = Slots(settings)
    vitals.say("while it was making its NIXL agent")
    agent = Agent(nixl, spec.agent, settings.backend, slots.address, slots.size)
    vitals.say("")
    fd = os.dup(spec.socket)  # a low number: select takes none above 1023
    os.close(spec.socket)
    link = Link(socket.socket(fileno=fd))
    return Engine(settings, spec.incarnation, agent, slots, link, vitals).run(os.getpid())


def main() -> NoReturn:
    spec = msgspec.json.decode(sys.argv[1], type=Spec)
    vitals = Vitals(spec.vitals)
    logging.basicConfig(format="%(levelname)s pdxfer engine: %(message)s", level=logging.INFO)
    for quiet in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(quiet, signal.SIG_IGN)  # the whole group gets them; the parent decides when the engine ends
    status = DEFECT
    try:
        die_with(spec.parent)
        allow_descriptors()
        if spec.settings.nice:
            os.nice(spec.settings.nice)
        status = serve(spec, vitals)
    except Fault as fault:
        vitals.say(str(fault))
        status = fault.status
    except BaseException as error:
        log.exception("a defect: the engine ends")
        vitals.say(f"{type(error).__name__}: {error}")
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
