"""The gateway: OpenAI's chat completions over a prefill worker and a decode worker.

Owns: the HTTP routes and turning tokens into text. Must not: know how workers are called (``call``) or chosen (``backends``).

    python -m pdxfer.demo.gateway --port 8100 --prefill prefill-0=http://127.0.0.1:8101 --decode decode-0=http://127.0.0.1:8102

A client that goes away becomes an abort of its room at both workers. Before the first token a failure is an HTTP error;
after it, an error object in the stream, which then ends without [DONE]. Chunks carry a field ``pdxfer`` beside OpenAI's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from . import openai
from .backends import Backend, Backends
from .call import Call
from .ends import ABORTED, DONE, Failure
from .reference import ENGINES, Chat
from .web import ClientGone, Streamed, answer, body_of, unless_gone

log = logging.getLogger("pdxfer.demo")
MAX_BODY = 4 << 20


class Text:
    """The text of tokens as they come; an incomplete character is held back."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        self._pending.append(token)
        text = self._chat.decode(self._pending)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and len(self._pending) < 8:
            return ""
        self._pending.clear()
        return text

    def rest(self) -> str:
        text = self._chat.decode(self._pending)
        self._pending.clear()
        return text


class Gateway:
    """Everything behind the routes."""

    def __init__(self, model: str, chat: Chat, backends: Iterable[Backend]) -> None:
        self.model = model
        self.chat = chat
        self.backends = Backends(backends)
        self.ended: Counter[str] = Counter()
        self._calls: set[Call] = set()
        self._draining = False
        self._going_on: set[asyncio.Task[Any]] = set()
        self._began = int(time.time())

    # routes --------------------------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        """POST /v1/chat/completions"""
        call = None
        try:
            if self._draining:
                raise Failure("shutdown", "the gateway is shutting down")
            ask = openai.parse(await body_of(request, MAX_BODY))
            if ask.model != self.model:
                raise Failure("model_not_found", f"there is no model {ask.model[:100]!r}, only {self.model!r}")
            prompt = self.chat.encode(ask.messages)
            prefill, decode = await self.backends.pick("prefill"), await self.backends.pick("decode")
            call = Call(prefill, decode, prompt, ask.max_tokens)
            self._calls.add(call)
            return await self._answer(request, ask, call)
        except Failure as failure:
            self._close(call, failure.reason)
            response = answer(openai.error_body(failure, call.room if call is not None else ""), failure.status)
            if failure.status == 503:
                response.headers["retry-after"] = "1"
            return response
        except ClientGone:
            self._close(call, ABORTED)
            return Response(status_code=499)
        except BaseException:
            self._close(call, ABORTED)
            raise

    async def models(self, request: Request) -> Response:
        """GET /v1/models"""
        return answer(
            {
                "object": "list",
                "data": [{"id": self.model, "object": "model", "created": self._began, "owned_by": "pdxfer"}],
            }
        )

    async def health(self, request: Request) -> Response:
        """GET /health: 200 while a request can be served."""
        roles = {role: any(b.healthy for b in self.backends.all if b.role == role) for role in ("prefill", "decode")}
        return answer({"ok": all(roles.values())} | roles, 200 if all(roles.values()) else 503)

    async def stats(self, request: Request) -> Response:
        """GET /stats"""
        workers = {b.engine_id: {"role": b.role, "url": b.url, "problem": b.problem} for b in self.backends.all}
        return answer(
            {
                "active": len(self._calls),
                "aborting": len(self._going_on),
                "requests": dict(self.ended),
                "workers": workers,
            }
        )

    # one answer ----------------------------------------------------------------------------------------------------

    async def _answer(self, request: Request, ask: openai.Chat, call: Call) -> Response:
        if not ask.stream:
            return answer(await unless_gone(request.receive, self._collect(call)))
        # The status line waits for the first token, so that a request that fails before it gets an HTTP error.
        first = await unless_gone(request.receive, call.next())
        pieces = self._stream(first, ask, call)
        return Streamed(pieces, "text/event-stream", lambda: self._close(call, ABORTED), {"cache-control": "no-cache"})

    async def _collect(self, call: Call) -> dict[str, Any]:
        while isinstance(news := await call.next(), int):
            continue
        self._close(call, DONE)
        extension = news["pdxfer"] | {"tokens": call.tokens}
        shapes = openai.Shapes(call.room, self.model)
        return shapes.whole(self.chat.decode(call.tokens), news["finish_reason"], news["usage"], extension)

    async def _stream(self, news: int | dict[str, Any], ask: openai.Chat, call: Call) -> AsyncIterator[bytes]:
        shapes = openai.Shapes(call.room, self.model)
        text = Text(self.chat)
        role: dict[str, Any] = {"role": "assistant"}
        try:
            while isinstance(news, int):
                extension = {"room": call.room, "tokens": [news]}
                yield openai.sse(shapes.chunk(role | {"content": text.add(news)}, extension))
                role = {}
                news = await call.next()
        except Failure as failure:
            self._close(call, failure.reason)
            yield openai.sse(openai.error_body(failure, call.room))
            return
        self._close(call, DONE)
        if rest := text.rest():
            yield openai.sse(shapes.chunk({"content": rest}, {"room": call.room, "tokens": []}))
        yield openai.sse(shapes.chunk({}, news["pdxfer"] | {"tokens": []}, news["finish_reason"], news["usage"]))
        if ask.include_usage:
            yield openai.sse(shapes.usage_chunk(news["usage"]))
        yield b"data: [DONE]\n\n"

    def _close(self, call: Call | None, reason: str) -> None:
        """The one end of a request; a second one is none."""
        if call is not None and call not in self._calls:
            return
        self.ended[reason] += 1
        if call is None:
            return
        self._calls.remove(call)
        for task in call.close():
            self._going_on.add(task)
            task.add_done_callback(self._gone_on)

    def _gone_on(self, task: asyncio.Task[Any]) -> None:
        self._going_on.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, Failure):
            log.error("ending a request: %r", error)

    def drain(self) -> None:
        """End every request by name, and take no more."""
        self._draining = True
        for call in self._calls:
            call.fail(Failure("shutdown", "the gateway is shutting down"))

    async def close(self) -> None:
        """Wait for the aborts that are on their way."""
        if self._going_on:
            await asyncio.wait(self._going_on, timeout=5.0)


def application(gateway: Gateway) -> Starlette:
    @contextlib.asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        watch = asyncio.create_task(gateway.backends.watch(), name="health checks")
        yield
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await gateway.close()

    routes = [
        Route("/v1/chat/completions", gateway.completions, methods=["POST"]),
        Route("/v1/models", gateway.models),
        Route("/health", gateway.health),
        Route("/stats", gateway.stats),
    ]
    return Starlette(routes=routes, lifespan=life)


def backends(role: str, found: Sequence[str]) -> list[Backend]:
    """Raises ValueError for what is not id=url."""
    out = []
    for item in found:
        engine_id, sep, url = item.partition("=")
        if not sep or not engine_id or not url.startswith("http://"):
            raise ValueError(f"--{role} {item!r}: expected ENGINE_ID=http://HOST:PORT")
        out.append(Backend(role, engine_id, url.rstrip("/")))
    return out


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pdxfer.demo.gateway", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument(
        "--prefill", action="append", required=True, metavar="ID=URL", help="may be given more than once"
    )
    parser.add_argument(
        "--decode", action="append", required=True, metavar="ID=URL", help="may be given more than once"
    )
    parser.add_argument("--model", choices=ENGINES, required=True)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s gateway %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    from .model import ModelMissing
    from .worker import listen

    try:
        workers = backends("prefill", args.prefill) + backends("decode", args.decode)
        chat = Chat(args.model)
    except (ModelMissing, ValueError) as error:
        print(f"error: gateway: {error}", file=sys.stderr)
        return 1

    async def run() -> None:
        gateway = Gateway(args.model, chat, workers)
        await listen(application(gateway), args.port, gateway.drain)

    asyncio.run(run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
