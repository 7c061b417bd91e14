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
import contextlib
import json
import random
import sys
import time
from collections.abc import AsyncGenerator
from typing import Any

from . import http1
from .http1 import HttpError

WORDS = (
    "river", "lamp", "winter", "bread", "engine", "garden", "letter", "music", "stone", "ticket", "window", "yellow", "quiet",
    "early", "seven", "paper", "ship", "cloud", "bridge", "market",
)  # fmt: skip
SESSION_SECONDS = 900.0


class Refused(Exception):
    """An answer that is an error object."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(str(error.get("message", error)))
        self.error = error


class Session:
    """One streamed completion over a connection of its own."""

    def __init__(self, number: int, gateway: str, model: str, prompt: str, max_tokens: int) -> None:
        self.number = number
        self._gateway = gateway
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
        except (HttpError, ValueError) as error:
            return self._end("failed", "connection_lost", f"{type(error).__name__}: {error}", True)

    def _end(self, end: str, reason: str, detail: str = "", retriable: bool = False) -> bool:
        self.say(
            "end", end=end, reason=reason, tokens=self.tokens, room=self.room, kv_identical=self.kv_identical,
            retriable=retriable, detail=detail,
        )  # fmt: skip
        return end == "done"

    async def _stream(self) -> str:
        """The finish_reason. Raises Refused, HttpError."""
        reason = ""
        async with contextlib.aclosing(self._events()) as events:
            async for data in events:
                if data == b"[DONE]":
                    if not reason:
                        raise HttpError("[DONE] without a finish_reason")
                    return reason
                reason = self._take(json.loads(data)) or reason
        raise HttpError("the stream ended without [DONE]")

    def _take(self, chunk: dict[str, Any]) -> str:
        """Note what a chunk says; returns its finish_reason. Raises Refused."""
        if "error" in chunk:
            raise Refused(chunk["error"])
        extension = chunk.get("pdxfer") or {}
        self.room = extension.get("room", self.room)
        self.kv_identical = extension.get("kv_identical", self.kv_identical)
        new = len(extension.get("tokens", ()))
        self.tokens += new
        if new and (self.tokens == 1 or self.tokens % 8 == 0):
            self.say("tokens", count=self.tokens, room=self.room)
        return next((choice["finish_reason"] for choice in chunk.get("choices", ()) if choice.get("finish_reason")), "")

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """The data of each server-sent event."""
        async with http1.ask("POST", f"{self._gateway}/v1/chat/completions", json.dumps(self._ask).encode()) as answer:
            if answer.status != 200:
                raise Refused(_error(answer.status, await answer.read()))
            async for event in answer.parts(b"\n\n"):
                if event.startswith(b"data:"):
                    yield event.removeprefix(b"data:").strip()


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
    """The name of the gateway's model. Raises HttpError."""
    async with http1.ask("GET", f"{gateway}/v1/models") as answer:
        return str(json.loads(await answer.read())["data"][0]["id"])


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
    try:
        return asyncio.run(run(args.gateway.rstrip("/"), args.sessions, args.max_tokens, args.seed))
    except HttpError as error:
        print(f"error: agent: the gateway {args.gateway} does not answer: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
