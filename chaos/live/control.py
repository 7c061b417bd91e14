"""How agents talk to workers: JSON lines on a unix socket, one answer for each request, by number.

Owns: the client side of that, and the shapes of the requests. Must not: know sidecars.

The connection is the agent's life: when it closes, the worker aborts every room that was asked for on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from pathlib import Path
from typing import Any, Literal, Self

import msgspec


class Ask(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """``send`` and ``receive`` are answered when the room has ended, the others at once."""

    op: Literal["send", "receive", "abort", "stats"]
    id: int = 0
    room: str = ""
    epoch: int = 0
    tokens: int = 0
    source: str = ""  # receive
    source_incarnation: int = 0
    pushes: int = 1  # send
    pause: float = 0.0  # seconds between pushes
    abort_after: float = -1.0  # the worker itself aborts the room, twice, so many seconds after its opening


class Lost(Exception):
    """The worker's connection closed, or there is none."""


class Line:
    """A connection to a worker."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count(1)
        self.open = True
        self._task = asyncio.create_task(self._read(reader))

    @classmethod
    async def connect(cls, path: Path) -> Self:
        """Raises Lost."""
        try:
            return cls(*await asyncio.open_unix_connection(path))
        except OSError as error:
            raise Lost(f"{path}: {error.strerror}") from error

    def start(self, ask: Ask) -> asyncio.Future[dict[str, Any]]:
        """Ask; the future has the answer. Raises Lost."""
        if not self.open:
            raise Lost("the worker closed the connection")
        ask.id = next(self._numbers)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[ask.id] = future
        self._writer.write(msgspec.json.encode(ask) + b"\n")
        return future

    async def ask(self, ask: Ask) -> dict[str, Any]:
        """Raises Lost."""
        return await self.start(ask)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            with contextlib.suppress(OSError):  # a reset is an end like any other
                while line := await reader.readline():
                    answer = msgspec.json.decode(line)
                    future = self._waiting.pop(answer["id"], None)
                    if future is not None and not future.done():
                        future.set_result(answer)
        finally:
            self.open = False
            self._writer.close()
            waiting, self._waiting = self._waiting, {}
            for future in waiting.values():
                if not future.done():
                    future.set_exception(Lost("the worker closed the connection"))
                    future.exception()  # it is no fault that nobody waits
