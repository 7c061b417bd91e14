"""The host mirror of a real sidecar: real pages, a real engine, real deaths, and bytes that are changed behind its back."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sidecars import ROOT, Sidecar, until

from pdxfer.client import AsyncClient, Client, Event, MirrorEnd, MirrorEvicted, MirrorHeld, PdxferRefused, Rejected
from pdxfer.pools import PoolLayout, SharedPool

KV = PoolLayout("kv", "uint8", (16, 256), 16, planes=4)
INDEX = PoolLayout("index_k", "uint8", (16, 32), 16, planes=4)
PAGES = 64
BLOCK = 32


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    one = Sidecar(tmp_path, mirror__bytes=64 << 20, mirror__block_tokens=BLOCK).start()
    yield one
    one.end()


def pools(seed: int) -> list[SharedPool]:
    made = [SharedPool.allocate(layout, PAGES) for layout in (KV, INDEX)]
    rng = np.random.default_rng(seed)
    for pool in made:
        for view in pool.pages():
            view[:] = rng.integers(0, 256, view.shape, dtype=np.uint8)
    return made


def bytes_of(made: list[SharedPool], pages: list[int]) -> bytes:
    return b"".join(view[pages].tobytes() for pool in made for view in pool.pages())


class Worker:
    """A client and what it was told."""

    def __init__(self, sidecar: Sidecar, name: str, seed: int) -> None:
        self.pools = pools(seed)
        self.client = Client(sidecar.socket, name, "both", self.pools)
        self.told: list[Event] = []

    def wait(self, number: int, kind: type[Any], timeout: float = 15.0) -> Any:
        def found() -> Any:
            self.told += self.client.poll(0.02)
            return next((e for e in self.told if isinstance(e, kind | Rejected) and e.number == number), None)

        return until(found, timeout, f"{kind.__name__} {number} among {self.told[-5:]}")

    def lookup(self, tokens: Any, **options: Any) -> MirrorHeld:
        return self.wait(self.client.lookup("m", tokens, **options), MirrorHeld)

    def store(self, tokens: Any, pages: Any, **options: Any) -> Any:
        return self.wait(self.client.store("m", tokens, pages, **options), MirrorEnd)

    def load(self, lease: int, pages: Any, blocks: int) -> Any:
        return self.wait(self.client.load(lease, pages, blocks), MirrorEnd)


def mirror_file(sidecar: Sidecar) -> str:
    """The mirror's memory, as the parent has it open."""
    for fd in os.listdir(f"/proc/{sidecar.pid}/fd"):
        try:
            if os.readlink(f"/proc/{sidecar.pid}/fd/{fd}").startswith("/memfd:mirror"):
                return f"/proc/{sidecar.pid}/fd/{fd}"
        except FileNotFoundError:
            continue
    raise AssertionError("the parent has no mirror")


def test_what_one_worker_stores_another_loads_also_after_an_engine_died(sidecar: Sidecar) -> None:
    a, b = Worker(sidecar, "a", 1), Worker(sidecar, "b", 2)
    tokens = np.arange(4 * BLOCK + 5)
    source, target = [9, 3, 11, 0, 40, 22, 63, 7], [1, 2, 50, 30, 5, 61, 8, 33]
    end = a.store(tokens, source)
    assert (end.state, end.blocks, end.asked) == ("DONE", 4, 4), end
    assert end.bytes == sidecar.status()["mirror"]["totals"]["bytes_stored"] > 0
    assert b.lookup(tokens, tenant="other").blocks == 0
    held = b.lookup(tokens)
    assert (held.blocks, held.tokens) == (4, 128)
    assert b.load(held.lease, target, 4).done
    assert bytes_of(b.pools, target) == bytes_of(a.pools, source)
    os.kill(sidecar.engine_pid, signal.SIGKILL)
    b.pools[0].pages()[0][:] = 0
    again = b.load(held.lease, target, 4)
    if not again.done:  # it was under way, or told to the engine that was dying
        assert again.reason == "engine_lost"
        again = b.load(held.lease, target, 4)
    assert again.done
    assert bytes_of(b.pools, target) == bytes_of(a.pools, source)
    b.client.unpin(held.lease)
    assert b.wait(b.client.evict("m"), MirrorEvicted).blocks == 4
    assert b.lookup(tokens).blocks == 0
    assert sidecar.metric('pdxfer_mirror_blocks_total{what="loaded"}') == 8
    assert sidecar.metric('pdxfer_mirror_dropped_blocks_total{reason="asked"}') == 4
    assert sidecar.metric('pdxfer_mirror_ends_total{kind="store",reason="done"}') == 1


def test_a_byte_that_changed_in_the_mirror_is_noticed_and_never_served(sidecar: Sidecar) -> None:
    a = Worker(sidecar, "a", 1)
    tokens = np.arange(3 * BLOCK)
    pages = list(range(6))
    assert a.store(tokens, pages).done
    entry = sidecar.status()["mirror"]["regions"][0]["entry_bytes"]
    stride = -(-entry // 4096) * 4096
    with open(mirror_file(sidecar), "r+b") as memory:
        memory.seek(stride + entry // 2)
        byte = memory.read(1)[0]
        memory.seek(stride + entry // 2)
        memory.write(bytes([byte ^ 1]))
    held = a.lookup(tokens)
    assert held.blocks == 3
    before = bytes_of(a.pools, [22, 23])
    end = a.load(held.lease, [20, 21, 22, 23, 24, 25], 3)
    assert (end.reason, end.blocks, end.retriable) == ("mirror_corrupt", 1, False)
    assert "block 1" in end.detail
    assert bytes_of(a.pools, [20, 21]) == bytes_of(a.pools, pages[:2])
    assert bytes_of(a.pools, [22, 23]) == before, "not a byte of it was written"
    assert a.lookup(tokens, hold=False).blocks == 1
    a.client.unpin(held.lease)
    assert a.store(tokens, pages).blocks == 1
    assert a.lookup(tokens, hold=False).blocks == 3
    assert sidecar.metric('pdxfer_mirror_dropped_blocks_total{reason="corrupt"}') == 1
    command = [sys.executable, "-m", "pdxfer", "status", "--admin", "{}:{}".format(*sidecar.address)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    words = " ".join(said.split())
    assert "host mirror of 64 MiB, blocks of 32 tokens: entries empty" in words and "dropped corrupt 1" in words, said


def test_a_worker_that_is_killed_leaves_no_page_pinned(sidecar: Sidecar) -> None:
    a = Worker(sidecar, "a", 1)
    tokens = np.arange(8 * BLOCK)
    assert a.store(tokens, list(range(16))).done
    code = (
        "import sys, time, numpy as np\n"
        "sys.path.insert(0, 'tests/live')\n"
        "from test_mirror import Worker, BLOCK\n"
        "class S: socket = sys.argv[1]\n"
        "w = Worker(S, 'b', 2)\n"
        "print('up', flush=True)\n"
        "while True:\n"
        "    held = w.lookup(np.arange(8 * BLOCK))\n"
        "    for n in range(4): w.client.load(held.lease, list(range(16 * n, 16 * n + 16)), 8)\n"
        "    w.told.clear()\n"
    )
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", code, sidecar.socket], cwd=ROOT, stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGKILL)
        process.wait()

        def quiet() -> bool:
            seen = sidecar.status()
            return not seen["mirror"]["leases"] and not seen["mirror"]["operations"] and len(seen["workers"]) == 1

        until(quiet, 10, "what the dead worker held is let go")
    assert a.lookup(tokens, hold=False).blocks == 8
    assert sidecar.status()["mirror"]["entries"]["ready"] == 8


def test_two_workers_store_and_load_the_same_prefixes_at_once(sidecar: Sidecar) -> None:
    """Each block's bytes are a function of its prefix: whoever stored it, a load brings these bytes."""
    failed: list[str] = []

    def fill(made: list[SharedPool], pages: list[int], name: int) -> None:
        for pool in made:
            for n, view in enumerate(pool.pages()):
                for i, page in enumerate(pages):
                    view[page] = (31 * name + 7 * i + n) % 251

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        w = Worker(sidecar, f"w{number}", number)
        try:
            for _ in range(60):
                name = int(rng.integers(0, 6))
                tokens = np.repeat(np.arange(4) + 100 * name, BLOCK)
                held = w.lookup(tokens)
                if held.blocks:
                    target = list(range(16, 16 + 2 * held.blocks))
                    end = w.load(held.lease, target, held.blocks)
                    if isinstance(end, Rejected):  # another worker has evicted it meanwhile
                        assert end.code == "mirror_miss", end
                    else:
                        assert end.done, end
                        got = bytes_of(w.pools, target)
                        fill(w.pools, target, name)
                        assert got == bytes_of(w.pools, target), f"wrong bytes of prompt {name}"
                    w.client.unpin(held.lease)
                fill(w.pools, list(range(8)), name)
                end = w.store(tokens, list(range(8)))
                assert isinstance(end, Rejected) or end.done, end
                if rng.random() < 0.1:
                    w.wait(w.client.evict("m"), MirrorEvicted)
        except AssertionError as error:
            failed.append(f"worker {number}: {error}")
        finally:
            w.client.close()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failed, failed
    seen = sidecar.status()["mirror"]
    assert seen["totals"]["blocks_loaded"] > 0 and not seen["leases"] and not seen["operations"]


def test_asyncio(sidecar: Sidecar) -> None:
    async def main() -> None:
        made = pools(5)
        tokens = np.arange(2 * BLOCK)
        async with await AsyncClient.connect(sidecar.socket, "a", "both", made) as client:
            assert (await client.lookup("m", tokens)).blocks == 0
            stored = await client.store("m", tokens, [0, 1, 2, 3])
            assert (await stored.ended()).done
            held = await client.lookup("m", tokens)
            loaded = await client.load(held.lease, [10, 11, 12, 13], 2)
            assert (await loaded.ended()).blocks == 2
            await loaded.cancel()
            assert bytes_of(made, [10, 11, 12, 13]) == bytes_of(made, [0, 1, 2, 3])
            with pytest.raises(PdxferRefused, match="mirror_miss"):
                await client.load(held.lease, [10, 11, 12, 13, 14, 15], 3)
            with pytest.raises(PdxferRefused, match="token id -1"):
                await client.lookup("m", [-1])
            await client.unpin(held.lease)
            assert await client.evict("m") == 2
            # whoever asks and does not wait holds nothing in the end
            await (await client.store("m", tokens, [0, 1, 2, 3])).ended()
            asking = asyncio.ensure_future(client.lookup("m", tokens))
            await asyncio.sleep(0)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            for _ in range(100):
                if not sidecar.status()["mirror"]["leases"]:
                    return
                await asyncio.sleep(0.05)
            raise AssertionError("a lease that nobody knows is held")

    asyncio.run(asyncio.wait_for(main(), 60))


def test_the_end_of_the_sidecar_ends_operations_and_the_next_one_begins_empty(sidecar: Sidecar) -> None:
    a = Worker(sidecar, "a", 1)
    tokens = np.arange(8 * BLOCK)
    assert a.store(tokens, list(range(16))).done
    held = a.lookup(tokens)
    number = a.client.load(held.lease, list(range(16, 32)), 8)
    sidecar.signal(signal.SIGKILL)
    sidecar.wait()
    end = a.wait(number, MirrorEnd)
    assert end.done or (end.reason == "sidecar_lost" and end.pages_safe)
    sidecar.start()
    until(lambda: a.client.poll(0.05) is not None and a.client.connected, 15, "attached again")
    assert a.lookup(tokens).blocks == 0
    assert a.store(tokens, list(range(16))).blocks == 8


def test_a_mirror_that_the_machine_cannot_give_is_refused_at_the_start(tmp_path: Path) -> None:
    one = Sidecar(tmp_path, mirror__bytes=1 << 50).start(wait=False)
    assert one.wait() == 75
    assert re.search(r"mirror\.bytes is 1125899906842624: .*1073741824\.0 MiB .* available", one.said()), one.said()
    assert "Traceback" not in one.said()


def test_no_mirror_is_said_by_name(tmp_path: Path) -> None:
    one = Sidecar(tmp_path).start()
    try:
        a = Worker(one, "a", 1)
        refused = a.store(np.arange(BLOCK), [0, 1])
        assert isinstance(refused, Rejected) and refused.code == "mirror_off" and refused.request == "store"
        assert a.client.connected
    finally:
        one.end()


def test_a_request_that_cannot_be_made_leaves_nothing_open(sidecar: Sidecar) -> None:
    a = Worker(sidecar, "a", 1)
    rooms = a.client._link.rooms
    for wrong in (
        lambda: a.client.load(1, [0, 1], None),  # type: ignore[arg-type]
        lambda: a.client.load(2**70, [0, 1], 1),
        lambda: a.client.load(1, [0, 1], 2**70),
        lambda: a.client.store("m", np.arange(BLOCK), [0, 1], first_block=2**70),
        lambda: a.client.unpin(2**70),
        lambda: a.client.cancel(2**70),
    ):
        with pytest.raises((PdxferRefused, TypeError)):
            wrong()
    assert not rooms.busy and not rooms.requests
    assert a.lookup(np.arange(BLOCK), hold=1).blocks == 0, "a truth value, whatever it is written as"
    assert a.client.connected


def test_a_lookup_whose_caller_is_cancelled_holds_nothing(sidecar: Sidecar) -> None:
    async def main() -> None:
        tokens = np.arange(2 * BLOCK)
        async with await AsyncClient.connect(sidecar.socket, "a", "both", pools(5)) as client:
            await (await client.store("m", tokens, [0, 1, 2, 3])).ended()
            for _ in range(20):
                asking = asyncio.ensure_future(client.lookup("m", tokens))
                while not client._told and not asking.done():
                    await asyncio.sleep(0)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            await client.lookup("n", tokens)  # what was said before it has been heard
            assert (await asyncio.to_thread(sidecar.status))["mirror"]["leases"] == 0

    asyncio.run(asyncio.wait_for(main(), 30))
