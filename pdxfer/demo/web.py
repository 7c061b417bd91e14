"""HTTP answers that notice when their client goes away.

Owns: watching a request's connection while its answer is made. Must not: know what is answered.

Starlette's own streaming cancels its generator in a way that lets it await nothing any more; here the work is a task that
is cancelled once and may finish its clean-up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .ends import Failure

T = TypeVar("T")


class ClientGone(Exception):
    """The connection closed before the answer was complete."""


async def disconnected(receive: Receive) -> None:
    """Return once the client is gone. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        continue


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do the work unless the client goes away before it is done: then cancel it and raise ClientGone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class Streamed(Response):
    """A body that comes in pieces. When the client goes away the generator is cancelled. ``on_close`` is called in any case,
    also when the generator never began."""

    def __init__(
        self,
        pieces: AsyncIterator[bytes],
        media_type: str,
        on_close: Callable[[], None],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(headers=headers, media_type=media_type)
        self.pieces = pieces
        self.on_close = on_close
        self.raw_headers = [(key, value) for key, value in self.raw_headers if key != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(send))
        except ClientGone:
            return
        finally:
            self.on_close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece in self.pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def answer(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


async def body_of(request: Request, limit: int) -> bytes:
    """The request's body. Raises Failure when it is larger than ``limit`` bytes."""
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise Failure("bad_request", f"the body has more than {limit} bytes")
        chunks.append(chunk)
    return b"".join(chunks)
