"""The prefill side of a request: compute the prompt's cache, push it, and keep its pages until they are home.

Owns: that order. Must not: know HTTP or a particular engine.

Prompts are computed one at a time, in the order of their arrival. A long one is pushed in pieces, so its transfer overlaps
its computation.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from pdxfer.client import PdxferRefused

from .ends import Failure
from .engine import Engine, Sequence, kv_digest
from .requests import Aux, Job, PrefillAsk, Sidecar, Worker


class PrefillWorker(Worker):
    """Answers POST /prefill."""

    role = "prefill"

    def __init__(self, engine: Engine, sidecar: Sidecar, *, admission: float) -> None:
        super().__init__(engine, sidecar, admission=admission)
        self._turn = asyncio.Lock()  # its waiters are served in order

    def prefill(self, ask: PrefillAsk) -> Job:
        """Start a request; its one line comes when the room has ended. Raises Failure."""
        if not ask.tokens:
            raise Failure("bad_request", "tokens is empty, expected the prompt's tokens")
        return self.begin(ask.room, ask.epoch, lambda job: self._serve(job, ask))

    async def _serve(self, job: Job, ask: PrefillAsk) -> dict[str, Any]:
        seq = Sequence(ask.room, ask.epoch, ask.tokens, await self.take(len(ask.tokens)), 1)
        mine = list(seq.pages)  # those that are still to be given back
        send = None
        try:
            send = await self.sidecar.open(ask.room, ask.epoch)
            try:
                async with self._turn:
                    pushes = await self._compute(seq, send)
                digest = await self.in_thread(self.check, kv_digest, self.pools, seq.pages)
                aux = Aux(seq.last, seq.length, digest, seq.seed)
                await send.finish(msgspec.msgpack.encode(aux))
            except PdxferRefused as error:
                if send.end is not None:  # the refusal says only that the room is over; its end says why
                    raise Failure.of_room(send.end) from error
                raise
            for number, pages in pushes:
                await send.released(number)
                self.pages.home(pages)
                if send.end is None:  # read, while the room goes on: others may have them
                    self.pages.give(pages)
                    mine = mine[len(pages) :]
            end = await send.ended()
            if not end.done:
                raise Failure.of_room(end)
            return {
                "first_token": seq.last, "length": seq.length, "kv_digest": digest, "bytes": end.bytes,
                "seconds": round(end.age, 6),
            }  # fmt: skip
        finally:
            await self.end_room(job.key, send, sending=True, detail=job.why or "the prefill failed")
            self.pages.home(mine)
            self.pages.give(mine)

    async def _compute(self, seq: Sequence, send: Any) -> list[tuple[int, list[int]]]:
        """Compute and push, piece by piece. Returns the pushes: number and pages."""
        pieces = self.engine.prefill(seq)
        pushes = []
        pushed = 0
        while (ready := await self.in_thread(self.compute, next, pieces, None)) is not None:
            pages = seq.pages[pushed:ready]
            self.pages.lend(pages)
            pushes.append((await send.push(pages), pages))
            pushed = ready
            if send.end is not None:
                raise Failure.of_room(send.end)
        return pushes
