"""A request's way through both workers: every end has its name, every page comes home, nothing untouched notices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from demo_wire import FakeSidecar, Wire, until

from pdxfer.demo.decode import DecodeWorker
from pdxfer.demo.ends import Failure
from pdxfer.demo.engine import Sequence
from pdxfer.demo.prefill import PrefillWorker
from pdxfer.demo.requests import DecodeAsk, PrefillAsk
from pdxfer.demo.synthetic import SyntheticEngine, token_at, token_seed


class Pair:
    """A prefill worker and a decode worker on one wire."""

    def __init__(self, pages: int, admission: float, step: float, token: float) -> None:
        self.wire = Wire(0.005)
        sides = [SyntheticEngine(pages, layers=1, step_delay=step, token_delay=token, context=4096) for _ in range(2)]
        self.p, self.d = (FakeSidecar(self.wire, name, e.pools) for name, e in zip("pd", sides, strict=True))
        self.prefill = PrefillWorker(sides[0], self.p, admission=admission)
        self.decode = DecodeWorker(sides[1], self.d, admission=admission, max_batch=8)

    async def ask(self, room: str, prompt: list[int], max_tokens: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """What both workers answered."""
        decode = self.decode.decode(DecodeAsk(room, "p0", len(prompt), max_tokens))
        prefill = self.prefill.prefill(PrefillAsk(room, prompt))
        return await prefill.last(), [line async for line in decode.lines()]

    def home(self) -> None:
        for worker in (self.prefill, self.decode):
            worker.pages.audit()
            stats = worker.stats()
            assert stats["pages_free"] == stats["pages_total"], stats
            assert (stats["rooms_open"], stats["waiting"], stats["late_bytes"]) == (0, 0, 0)
        assert not self.wire.sends and not self.wire.receives


@asynccontextmanager
async def pair(pages: int = 64, admission: float = 5.0, step: float = 0.0, token: float = 0.0) -> AsyncIterator[Pair]:
    found = Pair(pages, admission, step, token)
    try:
        yield found
    finally:
        await found.decode.close(2)
        await found.prefill.close(2)


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await body()

    asyncio.run(bounded())


def tokens(lines: list[dict[str, Any]]) -> list[int]:
    return [line["token"] for line in lines if "token" in line]


def answer_of(prompt: list[int], count: int) -> list[int]:
    return [token_at(token_seed(prompt), n) for n in range(count)]


def test_answers_of_requests_of_different_lengths_at_once() -> None:
    async def body() -> None:
        async with pair(pages=256) as it:
            asked = [
                ([n] * length, count)
                for n, (length, count) in enumerate([(5, 3), (16, 40), (600, 17), (40, 1), (33, 20)])
            ]
            found = await asyncio.gather(*(it.ask(f"r{n}", *one) for n, one in enumerate(asked)))
            for (prompt, count), (sent, lines) in zip(asked, found, strict=True):
                assert lines[0] == {"admitted": True} and tokens(lines) == answer_of(prompt, count)
                last = lines[-1]
                assert last["done"] and last["reason"] == "done" and last["finish_reason"] == "length"
                assert last["usage"]["completion_tokens"] == count and last["usage"]["prompt_tokens"] == len(prompt)
                assert last["kv_digest"] == sent["kv_digest"] == last["kv_digest_prefill"]
            assert it.wire.pushes[("r2", 0)] == 2, "600 tokens are pushed in two pieces"
            assert it.decode.stats()["requests"] == {"done": 5} and it.decode.wrong_bytes == 0
            it.home()

    run(body)


def test_an_answer_ends_at_its_end_token_and_the_batch_goes_on() -> None:
    async def body() -> None:
        async with pair() as it:
            whole = answer_of([1, 2], 30)
            it.decode.engine.ends = frozenset([whole[4]])  # type: ignore[misc]
            first = whole.index(whole[4]) + 1
            (_, lines), (_, other) = await asyncio.gather(it.ask("a", [1, 2], 30), it.ask("b", [3, 4], 30))
            assert tokens(lines) == whole[:first] and lines[-1]["finish_reason"] == "stop"
            assert other[-1]["done"]
            it.home()

    run(body)


def test_a_bit_that_turns_on_its_way_is_an_error_by_name() -> None:
    async def body() -> None:
        async with pair() as it:
            it.wire.damage = True
            _, lines = await it.ask("r", [1] * 20, 5)
            assert lines[-1]["error"]["reason"] == "cache_mismatch" and not tokens(lines)
            assert it.decode.stats()["wrong_bytes"] == 2, "a byte in each pool"
            it.home()

    run(body)


def test_a_write_into_a_live_page_is_an_error_by_name() -> None:
    async def body() -> None:
        async with pair(step=0.01) as it:
            asked = asyncio.create_task(it.ask("r", [1] * 20, 10))
            await until(lambda: it.decode.scheduler.batch)
            it.decode.pools[0].pages()[0][:, 3] ^= 1  # every page of the pool
            _, lines = await asked
            assert lines[-1]["error"]["reason"] == "cache_mismatch" and it.decode.wrong_bytes >= 2

    run(body)


@pytest.mark.parametrize("moment", ["admitted", "computing", "moving", "decoding"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_abort_at_any_moment(moment: str, side: str) -> None:
    async def body() -> None:
        async with pair(step=0.005, token=1e-4 if moment == "computing" else 0.0) as it:
            it.wire.delay = 0.1 if moment == "moving" else 0.0
            bystander = asyncio.create_task(it.ask("other", [9] * 30, 20))
            decode = it.decode.decode(DecodeAsk("r", "p0", 600, 200))
            if moment != "admitted":
                prefill = it.prefill.prefill(PrefillAsk("r", [1] * 600))
            reached = {
                "admitted": lambda: ("r", 0) in it.wire.receives,
                "computing": lambda: ("r", 0) in it.wire.sends,
                "moving": lambda: ("r", 0) in it.wire.sends and it.wire.sends[("r", 0)].moving,
                "decoding": lambda: any(
                    job.seq.room == "r" and len(job.seq.tokens) > 3 for job in it.decode.scheduler._running
                ),
            }
            await until(reached[moment])
            worker = it.prefill if side == "prefill" else it.decode
            await worker.abort("r", 0, "the client went away")
            await worker.abort("r", 0, "twice")
            lines = [line async for line in decode.lines()] if side == "decode" or moment != "decoding" else []
            if side == "decode" or moment != "decoding":
                assert lines[-1]["error"]["reason"] == "aborted" and lines[-1]["error"]["state"] == "ABORTED"
            else:  # the transfer is over: the prefill worker has no part in the request any more
                await it.decode.abort("r", 0, "")
                await decode.last()
            if moment != "admitted":
                last = await prefill.last()
                assert moment == "decoding" or last["error"]["reason"] == "aborted"
            _, lines = await bystander
            assert lines[-1]["done"] and tokens(lines) == answer_of([9] * 30, 20)
            it.home()

    run(body)


def test_an_abort_that_comes_first_kills_the_room_on_arrival() -> None:
    async def body() -> None:
        async with pair() as it:
            assert await it.decode.abort("r", 0, "") is False
            _, lines = await it.ask("r", [1], 2)
            assert lines[-1]["error"]["reason"] == "room_reused"
            it.home()

    run(body)


def test_requests_wait_for_pages_in_order() -> None:
    async def body() -> None:
        async with pair(pages=4, step=0.005) as it:
            found = await asyncio.gather(*(it.ask(f"r{n}", [n] * 30, 20) for n in range(3)))
            assert all(lines[-1]["done"] for _, lines in found), "one after another"
            it.home()

    run(body)


def test_requests_that_cannot_be_served_end_by_name() -> None:
    async def body() -> None:
        async with pair(pages=4, step=0.02) as it:
            long = await it.prefill.prefill(PrefillAsk("a", [1] * 5000)).last()
            assert long["error"]["reason"] == "context_length_exceeded"
            large = await it.decode.decode(DecodeAsk("a", "p0", 64, 64)).last()
            assert large["error"]["reason"] == "no_pages"
            with pytest.raises(Failure, match="bad_request"):
                it.prefill.prefill(PrefillAsk("r", []))
            with pytest.raises(Failure, match="bad_request"):
                it.decode.decode(DecodeAsk("r", "p0", 1, 0))
            it.decode.admission = 0.05
            first = asyncio.create_task(it.ask("b", [1] * 30, 20))
            await asyncio.sleep(0.01)
            refused = await it.decode.decode(DecodeAsk("c", "p0", 30, 20)).last()
            assert refused["error"]["reason"] == "no_pages" and refused["error"]["retriable"]
            assert (await first)[1][-1]["done"]
            it.home()

    run(body)


def test_the_sidecar_goes_away_and_comes_back() -> None:
    async def body() -> None:
        async with pair(step=0.005) as it:
            it.wire.delay = 0.5
            asked = asyncio.create_task(it.ask("r", [1] * 50, 20))
            await until(lambda: ("r", 0) in it.wire.receives and ("r", 0) in it.wire.sends)
            it.d.lose()
            sent, lines = await asked
            assert sent["error"]["reason"] == "sidecar_lost" and lines[-1]["error"]["reason"] == "sidecar_lost"
            assert lines[-1]["error"]["retriable"]
            it.home()
            lines = [line async for line in it.decode.decode(DecodeAsk("s", "p0", 5, 5)).lines()]
            assert lines[-1]["error"]["reason"] == "sidecar_lost"
            it.d.connected, it.wire.delay = True, 0.0
            assert (await it.ask("t", [1], 3))[1][-1]["done"]
            it.home()

    run(body)


def test_an_engine_that_raises_fails_its_requests_and_serves_the_next() -> None:
    async def body() -> None:
        async with pair(step=0.001) as it:
            right = it.decode.engine.decode_step

            def broken(batch: list[Sequence]) -> None:
                raise ValueError("no such expert")

            it.decode.engine.decode_step = broken  # type: ignore[method-assign, assignment]
            found = await asyncio.gather(it.ask("a", [1], 9), it.ask("b", [2], 9))
            for _, lines in found:
                assert (
                    lines[-1]["error"]["reason"] == "engine_error" and "no such expert" in lines[-1]["error"]["detail"]
                )
            it.decode.engine.decode_step = right  # type: ignore[method-assign]
            assert (await it.ask("c", [3], 9))[1][-1]["done"]
            it.home()

    run(body)


def test_a_shutdown_ends_everything_by_name() -> None:
    async def body() -> None:
        async with pair(step=0.01) as it:
            decode = it.decode.decode(DecodeAsk("r", "p0", 20, 200))
            prefill = it.prefill.prefill(PrefillAsk("r", [1] * 20))
            lines = decode.lines()
            while "token" not in await anext(lines):
                continue
            await it.decode.close(2)
            last = [line async for line in lines][-1]
            assert last["error"]["reason"] == "shutdown"
            assert (await prefill.last())["reason"] == "done"
            with pytest.raises(Failure, match="shutdown"):
                it.decode.decode(DecodeAsk("s", "p0", 1, 1))
            it.home()

    run(body)


def test_one_room_at_a_time() -> None:
    async def body() -> None:
        async with pair() as it:
            first = it.decode.decode(DecodeAsk("r", "p0", 5, 5))
            with pytest.raises(Failure, match="room_exists"):
                it.decode.decode(DecodeAsk("r", "p0", 5, 5))
            it.decode.stop(first, "enough")
            assert (await first.last())["error"]["detail"] == "enough"
            it.home()

    run(body)
