"""An agent as a process: sessions that ask a prefill and a decode worker for one room after the other.

Owns: what a router owes its rooms: an id that is used once, both sides asked, and the other side aborted when one was
refused. A room that fails under way is left to pdxfer, which must end it on both sides.
Must not: touch a sidecar. It may be killed at any moment: the workers see its connections close.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from .control import Ask, Line, Lost
from .records import Trip, Writer

RETRY = 0.1
# Until the other side of a failed room is aborted: longer than pdxfer may take to end it by itself, after a death. It must
# be done: the other worker may never have opened its side, and only the router knows that.
PATIENCE = 7.0


class Session:
    """One of the agent's sessions: two connections, one room at a time."""

    def __init__(self, args: argparse.Namespace, number: int, records: Writer, stop: asyncio.Event) -> None:
        self.args = args
        self.number = number
        self.records = records
        self.stop = stop
        self.random = random.Random(f"{args.tag}/{args.seed}/{number}")
        self.lines: dict[bool, Line] = {}  # sending -> connection

    async def run(self) -> None:
        count = 0
        await self._pause(self.random.random() * self.args.spread)
        while not self.stop.is_set():
            await self._trip(f"{self.args.tag}-{os.getpid()}-{self.number}-{count}")
            count += 1
            if count == self.args.rooms:
                return
            await self._pause(self.args.think * self.random.uniform(0.5, 1.5))

    async def _pause(self, seconds: float) -> None:
        if seconds > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.stop.wait(), seconds)

    async def _line(self, sending: bool) -> Line:
        found = self.lines.get(sending)
        if found is None or not found.open:
            found = self.lines[sending] = await Line.connect(self.args.prefill if sending else self.args.decode)
        return found

    async def _trip(self, room: str) -> None:
        args = self.args
        tokens = self.random.randint(args.tokens[0], args.tokens[1])
        began = time.monotonic()
        storm = self.random.uniform(0.0, args.abort_within) if args.abort_within else -1.0
        aborter = self.random.choice((True, False))
        asks = {
            True: Ask("send", room=room, tokens=tokens, pushes=args.pushes, pause=args.pause),
            False: Ask("receive", room=room, tokens=tokens, source=args.source),
        }
        if storm >= 0:
            asks[aborter].abort_after = storm
        order = [True, False]
        self.random.shuffle(order)
        legs = {sending: asyncio.create_task(self._leg(sending, asks[sending])) for sending in order}
        await asyncio.wait(legs.values(), return_when=asyncio.FIRST_COMPLETED)
        first = next(sending for sending in order if legs[sending].done())
        if legs[first].result()["state"] == "DONE":
            await asyncio.wait(legs.values())
        elif legs[first].result()["state"] != "REFUSED":  # it is pdxfer's to end the other side
            await asyncio.wait(legs.values(), timeout=PATIENCE)
        if not legs[not first].done() and legs[first].result()["state"] != "DONE":
            await self._abort(not first, room)
        reasons = {sending: (await leg)["reason"] for sending, leg in legs.items()}
        self.records.write(Trip(room, began, time.monotonic(), reasons[True], reasons[False]))
        if {"unreachable", "worker_died", "sidecar_unavailable"} & set(reasons.values()):
            await self._pause(RETRY)

    async def _leg(self, sending: bool, ask: Ask) -> dict[str, Any]:
        try:
            line = await self._line(sending)
        except Lost as error:
            return {"state": "REFUSED", "reason": "unreachable", "detail": str(error)}
        try:
            return await line.ask(ask)
        except Lost as error:
            return {"state": "LOST", "reason": "worker_died", "detail": str(error)}

    async def _abort(self, sending: bool, room: str) -> None:
        with contextlib.suppress(Lost):  # then the room ends with its worker
            await (await self._line(sending)).ask(Ask("abort", room=room))


async def run(args: argparse.Namespace) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    records = Writer(args.out)
    sessions = [Session(args, number, records, stop) for number in range(args.sessions)]
    await asyncio.gather(*(session.run() for session in sessions))
    for session in sessions:
        for line in session.lines.values():
            await line.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pdxfer.chaos.live.agent", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--prefill", required=True, type=Path, metavar="SOCKET", help="the prefill worker's control socket"
    )
    parser.add_argument(
        "--decode", required=True, type=Path, metavar="SOCKET", help="the decode worker's control socket"
    )
    parser.add_argument("--source", required=True, help="the prefill worker's engine id")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE")
    parser.add_argument("--tag", required=True, help="prefix of the rooms' ids")
    parser.add_argument("--sessions", type=int, default=1)
    parser.add_argument("--rooms", type=int, default=0, help="rooms of each session; 0: until SIGTERM")
    parser.add_argument("--tokens", type=int, nargs=2, default=(64, 384))
    parser.add_argument("--pushes", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two pushes")
    parser.add_argument("--think", type=float, default=0.0, help="seconds between two rooms of a session, on average")
    parser.add_argument("--spread", type=float, default=0.0, help="seconds within which the sessions begin")
    parser.add_argument(
        "--abort-within", type=float, default=0.0, help="abort every room at a random moment up to this, twice"
    )
    parser.add_argument("--seed", type=int, default=0)
    asyncio.run(run(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
