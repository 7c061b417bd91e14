"""The gateway over real HTTP: OpenAI's shapes, errors by name, and a client that goes away becomes an abort at both workers."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from demo_wire import FakeSidecar, Wire, until
from starlette.applications import Starlette

from pdxfer.demo import agent, openai
from pdxfer.demo import gateway as gateways
from pdxfer.demo import worker as workers
from pdxfer.demo.backends import Backend
from pdxfer.demo.decode import DecodeWorker
from pdxfer.demo.ends import Failure
from pdxfer.demo.prefill import PrefillWorker
from pdxfer.demo.reference import Chat, answers
from pdxfer.demo.synthetic import SyntheticEngine

HELLO = {"model": "synthetic", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 6}


class Quiet(uvicorn.Server):
    """Leaves the test's signals alone."""

    @asynccontextmanager
    async def running(self, listener: socket.socket) -> AsyncIterator[None]:
        task = asyncio.create_task(self._serve([listener]))
        await until(lambda: self.started)
        try:
            yield
        finally:
            self.should_exit = True
            await task


class Service:
    """Two workers on a wire and a gateway, each with its own HTTP server on loopback."""

    def __init__(self, step: float, token: float) -> None:
        self.wire = Wire(0.002)
        engines = [SyntheticEngine(256, layers=1, step_delay=step, token_delay=token) for _ in range(2)]
        self.p, self.d = (FakeSidecar(self.wire, name, e.pools) for name, e in zip("pd", engines, strict=True))
        self.prefill = PrefillWorker(engines[0], self.p, admission=5)
        self.decode = DecodeWorker(engines[1], self.d, admission=5, max_batch=64)
        self.http = httpx.AsyncClient(trust_env=False, timeout=10)
        self.url = ""
        self.gateway: Any = None
        self.worker_urls: list[str] = []

    async def start(self, stack: AsyncExitStack) -> None:
        for name, worker in (("prefill-0", self.prefill), ("decode-0", self.decode)):
            self.worker_urls.append(await self._listen(stack, workers.application(name, worker)))
        backends = [
            Backend("prefill", "prefill-0", self.worker_urls[0]), Backend("decode", "decode-0", self.worker_urls[1])
        ]  # fmt: skip
        self.gateway = gateways.Gateway("synthetic", Chat("synthetic"), backends)
        self.url = await self._listen(stack, gateways.application(self.gateway))

    async def _listen(self, stack: AsyncExitStack, app: Starlette) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)
        await stack.enter_async_context(Quiet(config).running(listener))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    async def post(self, **change: Any) -> httpx.Response:
        return await self.http.post(f"{self.url}/v1/chat/completions", json=HELLO | change)

    async def home(self) -> None:
        for worker in (self.prefill, self.decode):
            await until(lambda worker=worker: not worker.rooms_open)
            worker.pages.audit()
            assert worker.pages.free == worker.pages.total and not worker.rooms_open
        await until(lambda: not self.gateway._going_on)
        stats = (await self.http.get(f"{self.url}/stats")).json()
        assert (stats["active"], stats["aborting"]) == (0, 0)


def run(body: Callable[[Service], Awaitable[None]], step: float = 0.0, token: float = 0.0) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20), AsyncExitStack() as stack:
            service = Service(step, token)
            stack.push_async_callback(service.prefill.close, 2)
            stack.push_async_callback(service.decode.close, 2)
            await service.start(stack)
            stack.push_async_callback(service.http.aclose)
            await body(service)

    asyncio.run(bounded())


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_stream_and_whole_answers_are_the_references() -> None:
    (known,) = answers("synthetic", "fp32", [HELLO], 1)

    async def body(it: Service) -> None:
        assert (await it.http.get(f"{it.url}/v1/models")).json()["data"][0]["id"] == "synthetic"
        assert (await it.http.get(f"{it.url}/health")).status_code == 200
        whole = (await it.post()).json()
        assert whole["choices"][0]["message"]["content"] == known["text"] and whole["object"] == "chat.completion"
        assert whole["choices"][0]["finish_reason"] == "length"
        assert whole["usage"] == {"prompt_tokens": known["prompt_tokens"], "completion_tokens": 6,
                                  "total_tokens": known["prompt_tokens"] + 6}  # fmt: skip
        assert whole["pdxfer"]["tokens"] == known["tokens"] and whole["pdxfer"]["kv_identical"] is True
        streamed = await it.post(stream=True, temperature=0, stream_options={"include_usage": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        *chunks, last, usage, done = events(streamed.text)
        assert done == "[DONE]" and usage["choices"] == [] and usage["usage"]["completion_tokens"] == 6
        assert "".join(c["choices"][0]["delta"]["content"] for c in chunks) == known["text"]
        assert [t for c in chunks for t in c["pdxfer"]["tokens"]] == known["tokens"]
        assert (
            chunks[0]["choices"][0]["delta"]["role"] == "assistant" and "role" not in chunks[1]["choices"][0]["delta"]
        )
        assert last["choices"][0]["finish_reason"] == "length" and last["usage"] == whole["usage"]
        assert last["pdxfer"]["kv_identical"] is True and last["pdxfer"]["reason"] == "done"
        assert last["pdxfer"]["kv_digest_prefill"] == last["pdxfer"]["kv_digest_decode"]
        assert last["pdxfer"]["room"] != whole["pdxfer"]["room"]
        await it.home()

    run(body)


def test_clients_that_go_away_become_aborts_at_both_workers() -> None:
    async def body(it: Service) -> None:
        bystander = asyncio.create_task(it.post(max_tokens=60))

        async def leave(after: int) -> None:
            async with it.http.stream(
                "POST", f"{it.url}/v1/chat/completions", json=HELLO | {"stream": True, "max_tokens": 500}
            ) as r:
                lines = r.aiter_lines()
                for _ in range(after):
                    await anext(lines)

        await asyncio.gather(*(leave(n) for n in range(1, 12)))
        silent = asyncio.create_task(it.post(max_tokens=500))  # a client that waits for the whole answer
        await until(lambda: it.decode.scheduler.batch)
        await asyncio.sleep(0.05)
        silent.cancel()
        await asyncio.gather(silent, return_exceptions=True)
        assert (await bystander).json()["pdxfer"]["kv_identical"] is True
        await it.home()
        assert it.decode.ended["aborted"] == 12 and it.decode.ended["done"] == 1
        assert len(it.p.aborts) >= 11, "prefill was done with those that had tokens, and is told all the same"
        assert it.gateway.ended["aborted"] == 12

    run(body, step=0.01)


def test_a_client_that_goes_away_while_its_prompt_is_computed() -> None:
    async def body(it: Service) -> None:
        asked = asyncio.create_task(it.post(stream=True, messages=[{"role": "user", "content": "x" * 2000}]))
        await until(lambda: it.wire.sends)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await it.home()
        assert it.prefill.ended["aborted"] == it.decode.ended["aborted"] == 1

    run(body, token=2e-4)


BAD = (
    ({"temperature": 0.7}, 400, "temperature"),
    ({"n": 2}, 400, "n is '2'"),
    ({"tools": [{}]}, 400, "tools"),
    ({"stop": ["x"]}, 400, "stop"),
    ({"logprobs": True}, 400, "logprobs"),
    ({"model": "gpt-4"}, 404, "gpt-4"),
    ({"model": None}, 400, "model"),
    ({"messages": []}, 400, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": "many"}, 400, "max_tokens"),
    ({"max_tokens": 100_000}, 400, "tokens of context"),
    ({"stream": "yes"}, 400, "stream"),
)


def test_bad_requests_are_refused_by_name() -> None:
    async def body(it: Service) -> None:
        for change, status, says in BAD:
            for stream in ({}, {"stream": True}):
                found = await it.post(**(stream | change))
                assert found.status_code == status, found.text
                assert says in found.json()["error"]["message"]
                assert found.json()["error"]["type"] == "invalid_request_error"
        await it.home()

    run(body)


def test_what_is_no_json_and_what_is_too_large() -> None:
    async def body(it: Service) -> None:
        for raw in (b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b"x" * (5 << 20)):
            found = await it.http.post(f"{it.url}/v1/chat/completions", content=raw)
            assert found.status_code == 400 and found.json()["error"]["code"] == "bad_request"
            for url, path in zip(it.worker_urls, ("prefill", "decode"), strict=True):
                assert (await it.http.post(f"{url}/{path}", content=raw)).status_code == 400
        assert (await it.http.post(f"{it.worker_urls[0]}/prefill", json={"room": 3, "tokens": []})).status_code == 400
        assert (await it.post()).status_code == 200
        await it.home()

    run(body)


def test_a_failure_before_the_first_token_is_an_http_error_and_after_it_an_error_in_the_stream() -> None:
    async def body(it: Service) -> None:
        it.wire.damage = True
        early = await it.post(stream=True)
        assert early.status_code == 502 and early.json()["error"]["code"] == "cache_mismatch"
        assert early.json()["error"]["room"]
        it.wire.damage = False

        async def break_later() -> None:
            await until(lambda: it.decode.scheduler.batch)
            it.decode.engine.decode_step = None  # type: ignore[assignment, method-assign]

        breaker = asyncio.create_task(break_later())
        late = await it.post(stream=True, max_tokens=300)
        await breaker
        *chunks, last = events(late.text)
        assert late.status_code == 200 and chunks and last["error"]["code"] == "engine_error"
        assert last["error"]["state"] == "FAILED" and last["error"]["retriable"] is True
        await it.home()

    run(body, step=0.01)


def test_prefill_failures_reach_the_client_by_their_own_name() -> None:
    async def body(it: Service) -> None:
        def broken(seq: Any) -> Any:
            raise ValueError("no such layer")

        it.prefill.engine.prefill = broken  # type: ignore[method-assign]
        found = await it.post()
        assert found.status_code == 502 and found.json()["error"]["code"] == "engine_error"
        assert "no such layer" in found.json()["error"]["message"]
        it.p.lose()
        found = await it.post()
        assert found.status_code == 503 and found.json()["error"]["code"] in ("sidecar_lost", "no_worker")
        assert found.headers["retry-after"] == "1"
        await it.home()

    run(body)


def test_workers_that_are_away_are_not_used_and_come_back() -> None:
    async def body(it: Service) -> None:
        it.d.connected, it.d.problem = False, "the sidecar is away"
        for backend in it.gateway.backends.all:
            await it.gateway.backends.check(backend)
        found = await it.post()
        assert found.status_code == 503 and "the sidecar is away" in found.json()["error"]["message"]
        assert (await it.http.get(f"{it.url}/health")).status_code == 503
        it.d.connected = True
        assert (await it.post()).status_code == 200, "it is asked again before a request is refused"
        it.gateway.backends.all[0].url = "http://127.0.0.1:1"
        found = await it.post()
        assert found.status_code == 503 and found.json()["error"]["code"] in ("worker_lost", "no_worker")
        await it.home()

    run(body)


def test_a_worker_that_falls_silent_loses_its_requests_by_name() -> None:
    async def body(it: Service) -> None:
        asked = asyncio.create_task(it.post(max_tokens=500))
        await until(lambda: it.decode.scheduler.batch)
        decode = it.gateway.backends.all[1]
        for tell in list(decode.lost):
            tell(Failure("worker_stalled", "decode-0 has not answered for 11 s"))
        assert (await asked).json()["error"]["code"] == "worker_stalled" and not decode.lost
        await it.home()

    run(body, step=0.01)


def test_eighty_sessions_of_the_agent(capsys: pytest.CaptureFixture[str]) -> None:
    async def body(it: Service) -> None:
        assert await agent.run(it.url, 80, 12, 3) == 0
        await it.home()

    run(body, step=0.02)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    ends = [line for line in lines if line["event"] == "end"]
    assert len(ends) == 80 and {line["session"] for line in ends} == set(range(80))
    assert all(e["end"] == "done" and e["reason"] == "length" and e["tokens"] == 12 and e["kv_identical"] for e in ends)
    assert len({e["room"] for e in ends}) == 80


def test_the_agent_says_how_sessions_end(capsys: pytest.CaptureFixture[str]) -> None:
    async def body(it: Service) -> None:
        it.wire.damage = True
        assert await agent.run(it.url, 2, 5, 0) == 1

    run(body)
    ends = [json.loads(line) for line in capsys.readouterr().out.splitlines() if '"end"' in line]
    assert [(e["end"], e["reason"]) for e in ends] == [("failed", "cache_mismatch")] * 2


def test_text_comes_in_whole_characters() -> None:
    text = gateways.Text(Chat("synthetic"))
    assert [text.add(byte) for byte in "aé".encode()] == ["a", "", "é"]
    assert text.add(0xE2) == "" and text.rest() == "\N{REPLACEMENT CHARACTER}" and text.rest() == ""


def test_content_parts_and_roles() -> None:
    raw = json.dumps({"model": "m", "messages": [{"role": "developer", "content": [{"type": "text", "text": "a"}]}]})
    assert openai.parse(raw.encode()).messages == [{"role": "system", "content": "a"}]
    assert openai.parse(raw.encode()).max_tokens == openai.DEFAULT_MAX_TOKENS
