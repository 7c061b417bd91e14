"""A client process with many streams open at once, made to be killed.

Owns: the sessions and the record of how far each came. Must not: know anything of the service but its HTTP interface.

    python -m pdxfer.demo.agent --gateway http://127.0.0.1:8100 --sessions 80 --max-tokens 200 --seed 1

It writes a JSON object a line to standard output, at once: {"session", "event", "at", …} with event start, tokens (the first
and every eighth: how far it is) or end. ``at`` is time.monotonic, the same clock in all processes of a machine. Exit code 0:
every session was done; 1: some were not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

WORDS = (
    "river", "lamp", "winter", "bread", "engine", "garden", "letter", "music", "stone", "ticket", "window", "yellow", "quiet",
    "early", "seven", "paper", "ship", "cloud", "bridge", "market",
)  # fmt: skip
CONNECT_SECONDS = 10.0
SESSION_SECONDS = 900.0


class Broken(Exception):
    """The connection ended before the answer did, or what came is no HTTP."""


class Refused(Exception):
    """An answer that is an error object."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(str(error.get("message", error)))
        self.error = error


class Session:
    """One streamed completion over a connection of its own."""

    def __init__(self, number: int, gateway: str, model: str, prompt: str, max_tokens: int) -> None:
        self.number = number
        self._url = urlsplit(gateway)
        self._ask = {
            "model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, "temperature": 0,
            "stream": True,
        }  # fmt: skip
        self.tokens = 0
        self.room = ""
        self.kv_identical: bool | None = None

    def say(self, event: str, **fields: Any) -> None:
        line = {"session": self.number, "event": event, "at": time.monotonic()} | fields
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()  # whoever kills this process wants to know how far it was

    async def run(self) -> bool:
        """Returns whether it was done."""
        self.say("start")
        try:
            async with asyncio.timeout(SESSION_SECONDS):
                reason = await self._stream()
            return self._end("done", reason)
        except Refused as error:
            found = error.error
            state = {"ABORTED": "aborted"}.get(str(found.get("state")), "failed")
            self.room = str(found.get("room") or self.room)
            return self._end(state, str(found.get("code")), str(error), bool(found.get("retriable")))
        except TimeoutError:
            return self._end("failed", "client_timeout", f"no end within {SESSION_SECONDS:g} s")
        except (OSError, Broken, ValueError, asyncio.IncompleteReadError) as error:
            return self._end("failed", "connection_lost", f"{type(error).__name__}: {error}", True)

    def _end(self, end: str, reason: str, detail: str = "", retriable: bool = False) -> bool:
        self.say(
            "end", end=end, reason=reason, tokens=self.tokens, room=self.room, kv_identical=self.kv_identical,
            retriable=retriable, detail=detail,
        )  # fmt: skip
        return end == "done"

    async def _stream(self) -> str:
        """The finish_reason. Raises Refused, Broken, OSError."""
        reason = ""
        async for data in self._events():
            if data == b"[DONE]":
                if not reason:
                    raise Broken("[DONE] without a finish_reason")
                return reason
            chunk = json.loads(data)
            if "error" in chunk:
                raise Refused(chunk["error"])
            extension = chunk.get("pdxfer") or {}
            self.room = extension.get("room", self.room)
            self.kv_identical = extension.get("kv_identical", self.kv_identical)
            new = len(extension.get("tokens", ()))
            self.tokens += new
            if new and (self.tokens == 1 or self.tokens % 8 == 0):
                self.say("tokens", count=self.tokens, room=self.room)
            for choice in chunk.get("choices", ()):
                reason = choice.get("finish_reason") or reason
        raise Broken("the stream ended without [DONE]")

    async def _events(self) -> AsyncIterator[bytes]:
        """The data of each server-sent event. Spoken by hand: eighty streams must cost little on a busy machine."""
        host, port = self._url.hostname or "127.0.0.1", self._url.port or 80
        async with asyncio.timeout(CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(host, port)
        try:
            body = json.dumps(self._ask).encode()
            head = (
                f"POST {self._url.path.rstrip('/')}/v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            writer.write(head.encode() + body)
            await writer.drain()
            status, headers = await _head(reader)
            if status != 200:
                raw = await reader.read()
                raise Refused(_error(status, raw))
            if headers.get("transfer-encoding") != "chunked":
                raise Broken(f"the answer is not chunked: {headers}")
            pending = b""
            async for chunk in _chunks(reader):
                *events, pending = (pending + chunk).split(b"\n\n")
                for event in events:
                    if event.startswith(b"data:"):
                        yield event.removeprefix(b"data:").strip()
        finally:
            writer.close()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    words = lines[0].split(" ", 2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
        raise Broken(f"no HTTP: {lines[0][:80]!r}")
    headers = {}
    for line in lines[1:]:
        name, sep, value = line.partition(":")
        if sep:
            headers[name.strip().lower()] = value.strip().lower()
    return int(words[1]), headers


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while True:
        line = (await reader.readline()).strip()
        if not line:
            raise Broken("the connection closed in the middle of the stream")
        size = int(line, 16)
        if size == 0:
            return
        yield (await reader.readexactly(size + 2))[:-2]


def _error(status: int, raw: bytes) -> dict[str, Any]:
    """The error object of an answer that is none."""
    try:
        found = json.loads(raw)["error"]
    except (ValueError, KeyError, TypeError):
        found = None
    if isinstance(found, dict):
        return found
    return {"code": f"http_{status}", "message": f"HTTP {status}: {raw[:200]!r}", "state": "FAILED"}


def prompt(seed: int, number: int) -> str:
    """A short question, another one for each session."""
    words = random.Random(f"{seed}/{number}").sample(WORDS, 4)
    return f"Write a long story number {number} about {', '.join(words[:3])} and {words[3]}."


async def model_of(gateway: str) -> str:
    """The name of the gateway's model."""
    import httpx

    async with httpx.AsyncClient(timeout=CONNECT_SECONDS, trust_env=False) as http:
        found = (await http.get(f"{gateway}/v1/models")).raise_for_status().json()
    return str(found["data"][0]["id"])


async def run(gateway: str, sessions: int, max_tokens: int, seed: int) -> int:
    model = await model_of(gateway)
    every = [Session(n, gateway, model, prompt(seed, n), max_tokens) for n in range(sessions)]
    done = await asyncio.gather(*(session.run() for session in every))
    return 0 if all(done) else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pdxfer.demo.agent", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gateway", required=True, metavar="URL")
    parser.add_argument("--sessions", type=int, default=80)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    return asyncio.run(run(args.gateway.rstrip("/"), args.sessions, args.max_tokens, args.seed))


if __name__ == "__main__":
    sys.exit(main())
