"""A synthetic worker as a process: moves rooms when it is asked to, checks every byte, and writes down how each ended.

Owns: one attachment to a sidecar and the pages of its pools. Must not: decide what is moved; agents do. Pages that nobody has
are poisoned, so that a write that comes after a room's end is seen when they are taken again.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from pdxfer.client import AsyncClient, PdxferError, PdxferRefused, SidecarUnavailable
from pdxfer.demo.engine import Sequence, pages_for
from pdxfer.demo.paging import NoPages, Pages
from pdxfer.demo.synthetic import SyntheticEngine

from .control import Ask
from .records import NEVER, Leg, Writer

log = logging.getLogger("pdxfer.chaos")
ADMISSION = 60.0  # seconds that a leg waits for pages
LAYERS = 2
PAGE_TOKENS = 16


class Legs:
    """The rooms of one worker."""

    def __init__(self, engine_id: str, engine: SyntheticEngine, client: AsyncClient, records: Writer) -> None:
        self.engine_id = engine_id
        self.engine = engine
        self.client = client
        self.pages = Pages(engine.num_pages, poison=engine.poison, late=engine.late_bytes)
        self.records = records
        self.live: dict[tuple[str, int], Leg] = {}
        self.wrong = 0

    async def move(self, ask: Ask) -> dict[str, Any]:
        """One leg from its pages to its end. Never raises for what pdxfer or the peer does."""
        sending = ask.op == "send"
        leg = Leg(self.engine_id, os.getpid(), ask.room, ask.epoch, sending, 0.0)
        seq = Sequence(ask.room, ask.epoch, [0] * ask.tokens if sending else [], [], 1)
        try:
            seq.pages = await self.pages.take(pages_for(ask.tokens, PAGE_TOKENS), ADMISSION)
        except NoPages as error:
            return {"reason": "no_pages", "detail": str(error), "state": "REFUSED"}
        try:
            await self._with_pages(ask, leg, seq)
        finally:
            self.pages.home(seq.pages)
            self.pages.give(seq.pages)
        return dict(msgspec.to_builtins(leg))

    async def _with_pages(self, ask: Ask, leg: Leg, seq: Sequence) -> None:
        if leg.sending:
            for _ in self.engine.prefill(seq):
                await asyncio.sleep(0)
        leg.opened = time.monotonic()
        self.records.write(leg)
        key = (ask.room, ask.epoch)
        self.live[key] = leg
        timer = None
        if ask.abort_after >= 0:
            timer = asyncio.create_task(self._abort_twice(key, ask.abort_after))
        safe = True
        try:
            safe = await (self._send if leg.sending else self._receive)(ask, leg, seq)
        except PdxferRefused as error:
            leg.state, leg.reason, leg.detail = "REFUSED", error.code, error.detail[:200]
        except SidecarUnavailable as error:
            leg.state, leg.reason, leg.detail = "REFUSED", "sidecar_unavailable", error.found[:200]
        finally:
            if self.live.get(key) is leg:
                del self.live[key]
            if timer is not None:
                timer.cancel()
                await asyncio.gather(timer, return_exceptions=True)
        leg.ended = time.monotonic()
        if not leg.sending and leg.done:
            seq.length = ask.tokens
            leg.wrong = self.engine.wrong_bytes(seq)
            self.wrong += leg.wrong
        self.records.write(leg)
        if not safe:  # its engine is frozen, and may write into the pages until it is dead
            await self.client.wait_connected()

    async def _send(self, ask: Ask, leg: Leg, seq: Sequence) -> bool:
        room = await self.client.open(ask.room, ask.epoch)
        over = asyncio.ensure_future(room.ended())
        try:
            step = -(-len(seq.pages) // max(1, ask.pushes))
            for at in range(0, len(seq.pages), step):
                if at and ask.pause:
                    await asyncio.wait({over}, timeout=ask.pause)
                piece = seq.pages[at : at + step]
                self.pages.lend(piece)
                await room.push(piece)
            await room.finish(b"")
        except PdxferError as error:
            leg.detail = str(error)[:200]  # it ended meanwhile, or its sidecar did: its end says why
        end = await over
        leg.state, leg.reason, leg.bytes, leg.matched = end.state, end.reason, end.bytes, await room.matched()
        leg.detail = end.detail[:200] or leg.detail
        return end.pages_safe

    async def _receive(self, ask: Ask, leg: Leg, seq: Sequence) -> bool:
        self.pages.lend(seq.pages)
        room = await self.client.receive(ask.room, ask.source, seq.pages, ask.epoch, ask.source_incarnation)
        end = await room.ended()
        leg.state, leg.reason, leg.bytes, leg.matched = end.state, end.reason, end.bytes, await room.matched()
        leg.detail = end.detail[:200]
        return end.pages_safe

    async def abort(self, room: str, epoch: int, detail: str) -> str:
        """Returns "" or the refusal's code."""
        leg = self.live.get((room, epoch))
        if leg is not None and leg.aborted == NEVER and self.client.connected:
            leg.aborted = time.monotonic()
        try:
            await self.client.abort(room, epoch, detail)
        except PdxferRefused as error:
            return error.code
        except SidecarUnavailable:
            return "sidecar_unavailable"
        return ""

    async def _abort_twice(self, key: tuple[str, int], after: float) -> None:
        await asyncio.sleep(after)
        await self.abort(*key, "abort storm")
        await self.abort(*key, "abort storm, again")

    def stats(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "connected": self.client.connected,
            "problem": self.client.problem,
            "incarnation": self.client.incarnation,
            "live": len(self.live),
            "pages_free": self.pages.free,
            "pages_total": self.pages.total,
            "wrong_bytes": self.wrong,
            "late_bytes": self.pages.late_bytes,
        }


async def converse(legs: Legs, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One agent's connection. Its end aborts what was asked for on it."""
    mine: set[tuple[str, int]] = set()
    tasks: set[asyncio.Task[None]] = set()

    async def answer(ask: Ask) -> None:
        match ask.op:
            case "stats":
                found = legs.stats()
            case "abort":
                found = {"refused": await legs.abort(ask.room, ask.epoch, "asked by the agent")}
            case _:
                mine.add((ask.room, ask.epoch))
                found = await legs.move(ask)
                mine.discard((ask.room, ask.epoch))
        if not writer.is_closing():
            writer.write(msgspec.json.encode(found | {"id": ask.id}) + b"\n")

    try:
        while line := await reader.readline():
            task = asyncio.create_task(answer(msgspec.json.decode(line, type=Ask)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("an agent's connection ended: %s", error)
    await asyncio.gather(*(legs.abort(*key, "the agent went away") for key in list(mine)))
    if tasks:
        await asyncio.wait(tasks)
    writer.close()


async def serve(args: argparse.Namespace) -> None:
    engine = SyntheticEngine(args.pages, page_tokens=PAGE_TOKENS, layers=LAYERS, token_delay=0.0)
    client = await AsyncClient.connect(args.sidecar, args.engine_id, "both", engine.pools, timeout=60.0, wait=True)
    legs = Legs(args.engine_id, engine, client, Writer(args.records))
    over = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, over.set)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await converse(legs, reader, writer)

    args.listen.unlink(missing_ok=True)
    server = await asyncio.start_unix_server(talk, args.listen, backlog=1024)
    await over.wait()
    server.close()
    await client.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pdxfer.chaos.live.worker", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--engine-id", required=True)
    parser.add_argument("--sidecar", required=True, metavar="SOCKET")
    parser.add_argument("--listen", required=True, type=Path, metavar="SOCKET")
    parser.add_argument("--records", required=True, type=Path, metavar="FILE")
    parser.add_argument("--pages", type=int, default=2048)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {args.engine_id} %(levelname)s %(message)s")
    try:
        asyncio.run(serve(args))
    except PdxferError as error:
        print(f"error: worker {args.engine_id}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
