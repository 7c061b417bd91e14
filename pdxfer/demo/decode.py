"""The decode side of a request: receive the prompt's cache, check it, and continue the answer in the running batch.

Owns: that order. Must not: know HTTP or a particular engine.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from .ends import Failure
from .engine import Engine, Sequence, kv_digest, pages_for
from .requests import Aux, DecodeAsk, Job, Sidecar, Worker
from .scheduler import Scheduler, finished


class DecodeWorker(Worker):
    """Answers POST /decode."""

    role = "decode"

    def __init__(self, engine: Engine, sidecar: Sidecar, *, admission: float, max_batch: int) -> None:
        super().__init__(engine, sidecar, admission=admission)
        self.scheduler = Scheduler(engine, self.compute, max_batch)
        self._loop = asyncio.create_task(self.scheduler.run(), name="decode loop")

    def decode(self, ask: DecodeAsk) -> Job:
        """Start a request. Its lines: admitted, then a line for each token, then how it ended. Raises Failure."""
        if ask.length < 1 or ask.max_tokens < 1:
            raise Failure("bad_request", f"length is {ask.length} and max_tokens {ask.max_tokens}, expected at least 1")
        return self.begin(ask.room, ask.epoch, lambda job: self._serve(job, ask))

    async def close(self, seconds: float) -> None:
        await super().close(seconds)
        self._loop.cancel()
        await asyncio.gather(self._loop, return_exceptions=True)

    def stats(self) -> dict[str, Any]:
        return super().stats() | {
            "batch": self.scheduler.batch, "batch_waiting": self.scheduler.waiting, "steps": self.scheduler.steps
        }  # fmt: skip

    async def _serve(self, job: Job, ask: DecodeAsk) -> dict[str, Any]:
        # All that it may come to need, at once: a request never waits for pages while it holds some.
        seq = Sequence(ask.room, ask.epoch, [], await self.take(ask.length + ask.max_tokens - 1), ask.max_tokens)
        receive = None
        try:
            job.emit({"admitted": True})
            prompt = seq.pages[: pages_for(ask.length, self.engine.page_tokens)]
            self.pages.lend(prompt)
            receive = await self.sidecar.receive(ask.room, ask.source, prompt, ask.epoch)
            end = await receive.ended()
            self.pages.home(prompt)
            if not end.done:
                raise Failure.of_room(end)
            aux, digest = await self._check(seq, prompt, ask, end.aux)
            job.emit({"token": aux.token})
            await self._continue(job, seq)
            wrong = await self.in_thread(self.check, self.engine.wrong_bytes, seq)
            if wrong:
                self.wrong_bytes += wrong
                raise Failure("cache_mismatch", f"{wrong} bytes of the cache changed while the answer was computed")
            return {
                "done": True,
                "finish_reason": finished(self.engine, seq),
                "usage": {
                    "prompt_tokens": ask.length,
                    "completion_tokens": len(seq.tokens),
                    "total_tokens": ask.length + len(seq.tokens),
                },
                "kv_digest": digest,
                "kv_digest_prefill": aux.digest,
            }
        finally:
            await self.end_room(job.key, receive, sending=False, detail=job.why or "the decode failed")
            self.pages.home(seq.pages)
            self.pages.give(seq.pages)

    async def _check(self, seq: Sequence, prompt: list[int], ask: DecodeAsk, raw: bytes) -> tuple[Aux, str]:
        """The cache has arrived: is it, byte for byte, the one that was computed? Raises Failure."""
        try:
            aux = msgspec.msgpack.decode(raw, type=Aux)
        except msgspec.MsgspecError as error:
            raise Failure(
                "engine_error", f"aux of {len(raw)} bytes from {ask.source} is not understood: {error}"
            ) from error
        if aux.length != ask.length:
            raise Failure("engine_error", f"{ask.source} computed {aux.length} tokens, this request has {ask.length}")
        seq.length, seq.seed, seq.tokens = aux.length, aux.seed, [aux.token]
        digest = await self.in_thread(self.check, kv_digest, self.pools, prompt)
        wrong = await self.in_thread(self.check, self.engine.wrong_bytes, seq)
        if wrong or digest != aux.digest:
            self.wrong_bytes += wrong or 1  # a digest tells that bytes are wrong, not how many
            raise Failure(
                "cache_mismatch", f"{wrong or 'some'} bytes are wrong: digest {digest}, {ask.source} sent {aux.digest}"
            )
        return aux, digest

    async def _continue(self, job: Job, seq: Sequence) -> None:
        """The rest of the answer."""
        if finished(self.engine, seq):
            return
        step = self.scheduler.join(seq)
        try:
            for count in range(2, seq.max_tokens + 1):
                token = await step.next()
                job.emit({"token": token})
                if token in self.engine.ends or count == seq.max_tokens:
                    return
        finally:
            await self.scheduler.leave(step)
