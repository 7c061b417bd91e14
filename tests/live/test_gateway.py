"""Gateway, workers and sidecars as real processes, over real NIXL, with the synthetic engine that checks every byte."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("uvicorn", reason="needs pdxfer[demo]")
pytest.importorskip("nixl", reason="needs pdxfer[engine]")

from pdxfer.core.reasons import ENDS
from pdxfer.demo import checks
from pdxfer.demo.reference import answers
from pdxfer.demo.system import DECODE, PREFILL, System

START = 60.0


async def until(reached: Callable[[], Awaitable[Any]], seconds: float, what: str) -> Any:
    end = asyncio.get_running_loop().time() + seconds
    while True:
        if found := await reached():
            return found
        assert asyncio.get_running_loop().time() < end, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.05)


class Running:
    """The demo's system and what the tests ask of it."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.http = httpx.AsyncClient(trust_env=False, timeout=20)

    async def stats(self, engine_id: str) -> dict[str, Any]:
        found: dict[str, Any] = (await self.http.get(f"{self.system.observer.workers[engine_id]}/stats")).json()
        return found

    async def unhome(self) -> str:
        """What is not at its baseline."""
        found = []
        for engine_id in (PREFILL, DECODE):
            try:
                stats = await self.stats(engine_id)
            except httpx.HTTPError as error:
                return f"{engine_id}: {error!r}"
            assert stats["wrong_bytes"] == 0, stats
            if stats["pages_free"] != stats["pages_total"] or stats["rooms_open"] or not stats["connected"]:
                found.append(str(stats))
        for node, url in self.system.observer.sidecars.items():
            status = (await self.http.get(f"{url}/status")).json()
            lent = {state: n for state, n in status["pages"].items() if n and state != "home"}
            busy = {state: n for states in status["rooms_by_state"].values() for state, n in states.items() if n}
            held = {s: n for states in status["slots"].values() for s, n in states.items() if n and s != "free"}
            if lent or busy or held or not status["workers"] or not status["ready"]:
                found.append(f"{node}: pages {lent}, rooms {busy}, slots {held}, workers {len(status['workers'])}")
        return "; ".join(found)

    async def home(self, seconds: float = 10.0) -> None:
        async def reached() -> bool:
            return not await self.unhome()

        try:
            await until(reached, seconds, "home")
        except AssertionError as error:
            raise AssertionError(await self.unhome()) from error

    async def ask(self, prompt: checks.Prompt) -> checks.Answer:
        return await checks.ask(self.http, self.system.gateway, self.system.model, prompt, 20)

    async def agent(self, number: int, sessions: int, tokens: int) -> str:
        spec = self.system.agent(number, sessions, tokens)
        await self.system.manager.start(spec)
        return spec.name

    def record(self, name: str) -> list[dict[str, Any]]:
        lines = self.system.agent_output(name).read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]


def run(tmp_path: Path, body: Callable[[Running], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(110):
            said: list[str] = []
            system = System("synthetic", "fp32", 0, tmp_path / "logs", said.append)
            it = Running(system)
            try:
                await system.start(lambda name: None)
                await body(it)
            finally:
                await it.http.aclose()
                problems = await system.close(keep_logs=True)
            assert not problems

    asyncio.run(whole())


def test_answers_are_the_references_and_every_byte_is_right(tmp_path: Path) -> None:
    prompts = checks.prompts(1, 12)
    known = answers("synthetic", "fp32", [{"messages": p.messages, "max_tokens": 12} for p in prompts], 1)

    async def body(it: Running) -> None:
        found = await asyncio.gather(*(it.ask(prompt) for prompt in prompts))
        for answer, truth in zip(found, known, strict=True):
            assert not answer.error
            assert list(answer.tokens) == truth["tokens"] and answer.text == truth["text"]
            assert answer.kv_identical is True and answer.prompt_tokens == truth["prompt_tokens"]
        name = await it.agent(1, 16, 12)
        assert await it.system.manager.wait_exit(name, 40) == 0
        ends = [line for line in it.record(name) if line["event"] == "end"]
        assert len(ends) == 16 and all(e["end"] == "done" and e["kv_identical"] for e in ends)
        await it.home()

    run(tmp_path, body)


def test_an_agent_with_80_sessions_is_killed_again_and_again(tmp_path: Path) -> None:
    prompt = checks.Prompt("hello", "hello", "", 12)

    async def body(it: Running) -> None:
        before = await it.ask(prompt)
        for number, moment in enumerate((0.3, 1.0, 2.0)):
            name = await it.agent(number + 1, 80, 500)

            async def busy() -> bool:
                return bool((await it.stats(DECODE))["rooms_open"])

            await until(busy, 20, "the load is on")
            await asyncio.sleep(moment)
            it.system.manager.kill(name)
            await it.home(10)
            after = await it.ask(prompt)
            assert (after.tokens, after.error, after.kv_identical) == (before.tokens, "", True)
            assert not any(line["event"] == "end" for line in it.record(name)), "it was killed before any session's end"
        assert set((await it.stats(DECODE))["requests"]) <= {"done", "aborted", "aborted_early"}

    run(tmp_path, body)


@pytest.mark.parametrize("node", ["p", "d"])
def test_workers_survive_their_sidecars_restart(tmp_path: Path, node: str) -> None:
    prompt = checks.Prompt("hello", "hello", "", 12)

    async def body(it: Running) -> None:
        before = await it.ask(prompt)
        pids = [(await it.stats(engine_id))["pid"] for engine_id in (PREFILL, DECODE)]
        name = await it.agent(1, 16, 60)

        async def busy() -> bool:
            return bool((await it.stats(DECODE))["batch"])

        await until(busy, 20, "the load is on")
        manager = it.system.manager
        sidecar = f"sidecar {node}"
        manager.kill(sidecar)
        await manager.wait_exit(sidecar, 5)
        await manager.start(manager[sidecar].spec)
        await manager.wait_ready([sidecar], 30)
        assert await manager.wait_exit(name, 40) in (0, 1)
        ends = [line for line in it.record(name) if line["event"] == "end"]
        assert len(ends) == 16, "every session ended"
        assert {line["reason"] for line in ends} <= {"length", "no_worker", *ENDS}

        async def answered() -> bool:
            after = await it.ask(prompt)
            return (after.tokens, after.error, after.kv_identical) == (before.tokens, "", True)

        await until(answered, 30, "the prompt is answered as before")
        await it.home()
        assert pids == [(await it.stats(engine_id))["pid"] for engine_id in (PREFILL, DECODE)]

    run(tmp_path, body)


@pytest.mark.parametrize("engine_id", [PREFILL, DECODE])
def test_a_killed_worker_ends_its_sessions_by_name_and_comes_back(tmp_path: Path, engine_id: str) -> None:
    role = {PREFILL: "prefill worker", DECODE: "decode worker"}[engine_id]
    prompt = checks.Prompt("hello", "hello", "", 12)

    async def body(it: Running) -> None:
        before = await it.ask(prompt)
        status = (await it.http.get(f"{it.system.observer.sidecars['d']}/status")).json()
        pid = status["engine"]["pid"]
        os.kill(pid, signal.SIGSTOP)  # so that no room is over before the kill: one takes but a few milliseconds
        try:
            name = await it.agent(1, 16, 100)

            async def busy() -> bool:
                return (await it.stats(engine_id))["rooms_open"] >= 4

            await until(busy, 20, "the load is on")
            it.system.manager.kill(role)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert await it.system.manager.wait_exit(name, 40) in (0, 1)
        ends = [line for line in it.record(name) if line["event"] == "end"]
        assert len(ends) == 16 and len({line["session"] for line in ends}) == 16
        reasons = Counter(line["reason"] for line in ends)
        assert set(reasons) <= {"length", "no_worker", *ENDS}, reasons
        assert not any(line["end"] == "done" and not line["kv_identical"] for line in ends)
        assert any(line["end"] == "failed" and line["retriable"] for line in ends), reasons

        async def answered() -> bool:
            after = await it.ask(prompt)
            return (after.tokens, after.error, after.kv_identical) == (before.tokens, "", True)

        await until(answered, 30, "the prompt is answered as before")
        await it.home()

    run(tmp_path, body)
