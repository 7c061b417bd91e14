"""One request of the gateway: a room, a prefill worker, a decode worker.

Owns: calling both in the right order, the answer's tokens as they come, and telling both when it is over early. Must not:
know OpenAI's shapes or the gateway's HTTP side.

The decode worker is called first: it answers "admitted" when it has pages for the whole answer, and only then is the prompt
computed. So a prefill worker never keeps pages for a request that has none at the other side, and the two queues cannot wait
for each other.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from . import http1
from .backends import Backend
from .ends import ABORTED, Failure
from .http1 import HttpError

log = logging.getLogger("pdxfer.demo")
LONGEST = 900.0  # seconds of a whole request
ABORT_TIMEOUT = 5.0
LAST_WORD = 1.0  # seconds that the other worker's reason is waited for, when one says only "aborted"


class Call:
    """``next`` gives tokens, then the end; ``close`` must be called, whatever happened."""

    def __init__(self, prefill: Backend, decode: Backend, prompt: Sequence[int], max_tokens: int) -> None:
        self.room = uuid.uuid4().hex
        self.epoch = 0
        self.tokens: list[int] = []
        self._prefill = prefill
        self._decode = decode
        self._prompt = prompt
        self._max_tokens = max_tokens
        self._until = time.monotonic() + LONGEST
        self._news: asyncio.Queue[int | dict[str, Any] | Failure] = asyncio.Queue()
        self._prefill_task: asyncio.Task[dict[str, Any]] | None = None
        self._decode_task: asyncio.Task[None] | None = None
        self._over = False

    async def next(self) -> int | dict[str, Any]:
        """A token, or at last what is known of the whole: finish_reason, usage, digests. Raises Failure."""
        if self._decode_task is None:
            for backend in (self._prefill, self._decode):
                backend.lost.add(self.fail)
            self._decode_task = asyncio.create_task(self._read_decode(), name=f"decode {self.room}")
        try:
            async with asyncio.timeout(self._until - time.monotonic()):
                news = await self._news.get()
        except TimeoutError:
            raise Failure("room_timeout", f"the request took longer than {LONGEST:g} s") from None
        if isinstance(news, Failure):
            raise await self._better(news)
        if isinstance(news, int):
            self.tokens.append(news)
            return news
        self._over = True
        return await self._whole(news)

    def fail(self, failure: Failure) -> None:
        """End it from outside."""
        self._news.put_nowait(failure)

    def close(self) -> list[asyncio.Task[Any]]:
        """Let go of both workers, and abort the room at both unless the answer is complete. Returns what goes on doing
        that: keep these tasks."""
        for backend in (self._prefill, self._decode):
            backend.lost.discard(self.fail)
        tasks: list[asyncio.Task[Any]] = []
        if not self._over and self._decode_task is not None:
            tasks += [asyncio.create_task(self._abort(backend)) for backend in (self._prefill, self._decode)]
        for task in (self._prefill_task, self._decode_task):
            if task is not None:
                task.cancel()
                tasks.append(task)
        return tasks

    # the two workers -----------------------------------------------------------------------------------------------

    async def _read_decode(self) -> None:
        ask = {
            "room": self.room, "epoch": self.epoch, "source": self._prefill.engine_id, "length": len(self._prompt),
            "max_tokens": self._max_tokens,
        }  # fmt: skip
        try:
            async with http1.ask("POST", f"{self._decode.url}/decode", msgspec.json.encode(ask)) as answer:
                if answer.status != 200:
                    raise _failure(await answer.read())
                async for line in answer.parts(b"\n"):
                    self._take(msgspec.json.decode(line))
            raise Failure(
                "worker_lost", f"{self._decode.engine_id} closed the connection before the answer was complete"
            )
        except Failure as failure:
            self._news.put_nowait(failure)
        except HttpError as error:
            self._decode.failed(str(error))
            self._news.put_nowait(Failure("worker_lost", f"{self._decode.engine_id}: {error}"))
        except msgspec.MsgspecError as error:
            self._news.put_nowait(Failure("engine_error", f"{self._decode.engine_id} answered no JSON: {error}"))

    def _take(self, line: dict[str, Any]) -> None:
        if "token" in line:
            self._news.put_nowait(line["token"])
        elif "error" in line:
            raise Failure.of_json(line["error"])
        elif line.get("done"):
            self._news.put_nowait(line)
        elif line.get("admitted") and self._prefill_task is None:
            self._prefill_task = asyncio.create_task(self._ask_prefill(), name=f"prefill {self.room}")
            self._prefill_task.add_done_callback(self._prefill_done)

    async def _ask_prefill(self) -> dict[str, Any]:
        ask = {"room": self.room, "epoch": self.epoch, "tokens": self._prompt}
        try:
            async with http1.ask("POST", f"{self._prefill.url}/prefill", msgspec.json.encode(ask)) as answer:
                body = await answer.read()
        except HttpError as error:
            self._prefill.failed(str(error))
            raise Failure("worker_lost", f"{self._prefill.engine_id}: {error}") from error
        if answer.status != 200:
            raise _failure(body)
        found: dict[str, Any] = msgspec.json.decode(body)
        return found

    def _prefill_done(self, task: asyncio.Task[dict[str, Any]]) -> None:
        """A prefill that fails ends the request, unless the cache has been delivered already."""
        if task.cancelled() or (error := task.exception()) is None or self.tokens:
            return
        self._news.put_nowait(error if isinstance(error, Failure) else Failure("engine_error", f"prefill: {error!r}"))

    async def _better(self, failure: Failure) -> Failure:
        """The reason closest to the cause: "aborted" is what one side hears of the other's trouble."""
        task = self._prefill_task
        if failure.reason != ABORTED or task is None or self.tokens:
            return failure
        await asyncio.wait([task], timeout=LAST_WORD)
        error = task.exception() if task.done() and not task.cancelled() else None
        return error if isinstance(error, Failure) else failure

    async def _whole(self, line: dict[str, Any]) -> dict[str, Any]:
        digest = line.get("kv_digest_prefill")  # as it came with the room
        task = self._prefill_task
        if task is not None:
            await asyncio.wait([task], timeout=LAST_WORD)
            if task.done() and not task.cancelled() and task.exception() is None:
                digest = task.result()["kv_digest"]  # as the prefill worker itself says it
        return {
            "finish_reason": line["finish_reason"],
            "usage": line["usage"],
            "pdxfer": {
                "room": self.room,
                "prefill": self._prefill.engine_id,
                "decode": self._decode.engine_id,
                "kv_digest_prefill": digest,
                "kv_digest_decode": line["kv_digest"],
                "kv_identical": digest is not None and digest == line["kv_digest"],
                "reason": "done",
            },
        }

    async def _abort(self, backend: Backend) -> None:
        ask = {"room": self.room, "epoch": self.epoch, "detail": "the client went away or the request failed"}
        try:
            async with asyncio.timeout(ABORT_TIMEOUT):
                async with http1.ask("POST", f"{backend.url}/abort", msgspec.json.encode(ask)) as answer:
                    await answer.read()
        except (HttpError, TimeoutError) as error:
            log.info(
                "room %s: abort at %s: %s; its own deadlines end it", self.room, backend.engine_id, error or "no answer"
            )


def _failure(body: bytes) -> Failure:
    try:
        return Failure.of_json(msgspec.json.decode(body)["error"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        return Failure("engine_error", f"a worker answered {body[:200]!r}, expected an error object")
