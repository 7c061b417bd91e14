"""The wedge contract against real processes under a load of 16 sessions: what is hit ends by name and in time, and all
comes home. Bounds are the contract's, with room for a busy machine.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from load import Load, pair
from sidecars import Sidecar

STALL = 10.0  # limits.stall_deadline
SLACK = 5.0  # what a shared machine may add


@asynccontextmanager
async def loaded(directory: Path, sessions: int = 16) -> AsyncIterator[Load]:
    p, d = pair(directory)
    try:
        p.start(wait=False)
        d.start(wait=False)
        await asyncio.to_thread(p.wait_ready)
        await asyncio.to_thread(d.wait_ready)
        async with Load(p, d, sessions) as load:
            load.start()
            await within(20.0, lambda: load.done() >= 4 * sessions, "rooms flow")
            yield load
    finally:
        p.end()
        d.end()


async def within(seconds: float, reached: Callable[[], object], what: str) -> float:
    """Seconds until it was so."""
    began = time.monotonic()
    while not reached():
        assert time.monotonic() - began < seconds, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.02)
    return time.monotonic() - began


async def everything_ends_and_comes_home(load: Load, struck: float, bound: float) -> None:
    """Rooms that were open when the fault struck end within the bound; then rooms flow again, and all comes home."""
    hit = {key for key, opened in load.open.items() if opened <= struck}
    await within(
        bound, lambda: not hit & load.open.keys(), f"{len(hit)} rooms end; ends so far: {load.reasons(struck)}"
    )
    flowing = load.done()
    await within(bound, lambda: load.done() >= flowing + 32, f"rooms flow again; ends: {load.reasons(struck)}")
    await asyncio.wait_for(load.stop(), STALL + SLACK)
    assert not load.open
    found: list[str] = []

    async def home() -> bool:
        found.append(await asyncio.to_thread(load.home))
        return not found[-1]

    began = time.monotonic()
    while not await home():
        assert time.monotonic() - began < 10.0 + SLACK, f"not home: {found[-1]}"
        await asyncio.sleep(0.1)
    assert load.wrong == 0


def stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 110.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("side", ["p", "d"])
def test_engine_stopped_for_30_seconds(tmp_path: Path, side: str) -> None:
    """It is taken for hung after the stall deadline, killed, and replaced; SIGCONT finds nobody."""

    async def test() -> None:
        async with loaded(tmp_path) as load:
            sidecar: Sidecar = getattr(load, side)
            pid = sidecar.engine_pid
            os.kill(pid, signal.SIGSTOP)
            struck = time.monotonic()
            await within(2.0, lambda: stopped(pid), "it is stopped")
            await everything_ends_and_comes_home(load, struck, STALL + SLACK)
            assert sidecar.engine_pid not in (0, pid)
            await asyncio.sleep(max(0.0, 30.0 - (time.monotonic() - struck)))
            with pytest.raises(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            ends = await load.room()
            assert all(end.done for end in ends), ends

    run(test)


@pytest.mark.parametrize("side", ["p", "d"])
def test_engine_killed(tmp_path: Path, side: str) -> None:
    async def test() -> None:
        async with loaded(tmp_path) as load:
            sidecar: Sidecar = getattr(load, side)
            pid = sidecar.engine_pid
            os.kill(pid, signal.SIGKILL)
            await everything_ends_and_comes_home(load, time.monotonic(), 5.0 + SLACK)
            assert sidecar.engine_pid not in (0, pid)

    run(test)


@pytest.mark.parametrize("side", ["p", "d"])
def test_parent_killed_and_restarted(tmp_path: Path, side: str) -> None:
    """Its workers attach again by themselves, its peer hears of the new incarnation."""

    async def test() -> None:
        async with loaded(tmp_path) as load:
            sidecar: Sidecar = getattr(load, side)
            before = sidecar.status()["incarnation"]
            sidecar.signal(signal.SIGKILL)
            struck = time.monotonic()
            assert sidecar.wait(5.0) == -signal.SIGKILL
            sidecar.start(wait=False)
            await everything_ends_and_comes_home(load, struck, 10.0 + SLACK)
            assert sidecar.status()["incarnation"] > before

    run(test)


@pytest.mark.parametrize("side", ["p", "d"])
def test_parent_stopped(tmp_path: Path, side: str) -> None:
    """Its own worker and its peer both notice the silence; after SIGCONT it finds its way back."""

    async def test() -> None:
        async with loaded(tmp_path) as load:
            sidecar: Sidecar = getattr(load, side)
            sidecar.signal(signal.SIGSTOP)
            struck = time.monotonic()
            await within(2.0, lambda: stopped(sidecar.pid), "it is stopped")
            other = side != "p"
            hit = {key for key, opened in load.open.items() if opened <= struck and key[1] == other}
            await within(
                STALL + SLACK, lambda: not hit & load.open.keys(), f"the other side's rooms end: {load.reasons(struck)}"
            )
            await asyncio.sleep(max(0.0, STALL + SLACK + 2.0 - (time.monotonic() - struck)))
            sidecar.signal(signal.SIGCONT)
            await everything_ends_and_comes_home(load, time.monotonic(), STALL + SLACK)

    run(test)


@pytest.mark.parametrize("fault", ["exception", "loop"])
def test_bootstrap_thread_dies_or_hangs(tmp_path: Path, fault: str) -> None:
    """It is replaced in place, and no room is lost."""

    async def test() -> None:
        async with loaded(tmp_path) as load:
            began = load.p.status()["services"]["bootstrap"]["restarts"]
            struck = time.monotonic()
            code, answer = await asyncio.to_thread(load.p.ask, "POST", "/debug/bootstrap", {"inject": fault})
            assert code == 200, answer
            await within(
                STALL + SLACK, lambda: load.p.status()["services"]["bootstrap"]["restarts"] > began, "it is restarted"
            )
            await everything_ends_and_comes_home(load, time.monotonic(), STALL + SLACK)
            lost = load.reasons(struck)
            if fault == "exception":
                assert set(lost) == {"done"}, lost

    run(test)
