"""A small HTTP/1.1 client: one connection for each request, answers as they come.

Owns: speaking HTTP to the demo's own servers on loopback. Must not: know what is asked. It is here because eighty streams with
a token each per step must cost little on a machine whose two cores also run a model: this takes a fifth of what a general
client takes, and it keeps no connection that may have died since.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

CONNECT_SECONDS = 5.0
HEAD_LIMIT = 64 << 10


class HttpError(Exception):
    """There was no connection, it ended too early, or what came is no HTTP."""


class Answer:
    """An answer whose head has come."""

    def __init__(self, status: int, headers: dict[str, str], reader: asyncio.StreamReader) -> None:
        self.status = status
        self.headers = headers
        self._reader = reader

    async def read(self) -> bytes:
        """The whole body. Raises HttpError."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises HttpError when it ends before its end."""
        reader = self._reader
        try:
            if self.headers.get("transfer-encoding") != "chunked":
                if length := int(self.headers.get("content-length", "0")):
                    yield await reader.readexactly(length)
                return
            while True:
                line = await reader.readuntil(b"\r\n")
                size = int(line, 16)
                chunk = await reader.readexactly(size + 2)
                if not size:
                    return
                yield chunk[:-2]
        except asyncio.IncompleteReadError as error:
            raise HttpError("the connection closed in the middle of the answer") from error
        except (OSError, ValueError, asyncio.LimitOverrunError) as error:
            raise HttpError(f"{type(error).__name__}: {error}") from error

    async def parts(self, end: bytes) -> AsyncIterator[bytes]:
        """The body in parts that each end with ``end`` (left out). What comes after the last one is dropped."""
        pending = b""
        async for chunk in self.chunks():
            *whole, pending = (pending + chunk).split(end)
            for part in whole:
                yield part


@asynccontextmanager
async def ask(method: str, url: str, body: bytes = b"", connect: float = CONNECT_SECONDS) -> AsyncIterator[Answer]:
    """Send a request; the connection lasts as long as the block. Raises HttpError. Waiting for the answer has no deadline of
    its own: put one around it."""
    where = urlsplit(url)
    host, port = where.hostname or "127.0.0.1", where.port or 80
    try:
        async with asyncio.timeout(connect):
            reader, writer = await asyncio.open_connection(host, port, limit=HEAD_LIMIT)
    except (OSError, TimeoutError) as error:
        raise HttpError(f"no connection to {host}:{port}: {error or 'no answer in time'}") from error
    try:
        try:
            writer.write(
                f"{method} {where.path or '/'} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
                + body
            )
            await writer.drain()
            status, headers = _head(await reader.readuntil(b"\r\n\r\n"))
        except asyncio.IncompleteReadError as error:
            raise HttpError(f"{host}:{port} closed the connection without an answer") from error
        except (OSError, asyncio.LimitOverrunError) as error:
            raise HttpError(f"{host}:{port}: {type(error).__name__}: {error}") from error
        yield Answer(status, headers, reader)
    finally:
        writer.close()


def _head(raw: bytes) -> tuple[int, dict[str, str]]:
    first, *rest = raw.decode("latin-1").split("\r\n")
    words = first.split(" ", 2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
        raise HttpError(f"no HTTP: {first[:80]!r}")
    headers = {}
    for line in rest:
        name, sep, value = line.partition(":")
        if sep:
            headers[name.strip().lower()] = value.strip().lower()
    return int(words[1]), headers
