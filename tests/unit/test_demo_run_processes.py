"""The demo's process manager, with small real processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from pdxfer.demo.processes import MARKER, DemoError, Manager, Spec, alive, birth, exit_text, leftovers, until

SLEEP = (sys.executable, "-c", "import time; print('here', flush=True); time.sleep(60)")
STUBBORN = (
    sys.executable,
    "-c",
    "import signal, time; signal.signal(15, signal.SIG_IGN); print('here', flush=True); time.sleep(60)",
)


async def logged(manager: Manager, name: str, text: str) -> None:
    async def missing() -> str:
        return "" if any(text in line for line in manager[name].tail()) else "not yet"

    assert not await until(missing, 10), manager[name].tail()


def test_starts_logs_and_stops(tmp_path: Path) -> None:
    async def run() -> None:
        manager = Manager(tmp_path)
        running = await manager.start(Spec("a", SLEEP))
        await logged(manager, "a", "here")
        assert running.pid and alive(running.pid, birth(running.pid))
        assert [pid for pid, _ in leftovers(manager.id)] == [running.pid]
        assert await manager.stop() == []
        assert running.exits == [-signal.SIGTERM] and not running.pid
        assert leftovers(manager.id) == []

    asyncio.run(run())


def test_restarts_what_it_should_and_counts(tmp_path: Path) -> None:
    async def run() -> None:
        manager = Manager(tmp_path)
        running = await manager.start(Spec("worker", SLEEP, restart=True))
        other = await manager.start(Spec("agent", SLEEP))
        first = manager.kill("worker")
        manager.kill("agent")

        async def missing() -> str:
            return "" if running.restarts == 1 and running.pid and other.exits else "not yet"

        assert not await until(missing, 10)
        assert running.pid != first and running.exits == [-signal.SIGKILL]
        assert other.restarts == 0 and not other.pid
        assert [h.kind for h in manager.happened if h.name == "worker"] == ["start", "kill", "exit", "restart"]
        with pytest.raises(DemoError, match="agent is not running"):
            manager.kill("agent")
        assert await manager.stop() == []

    asyncio.run(run())


def test_gives_up_on_a_process_that_cannot_live(tmp_path: Path) -> None:
    async def run() -> None:
        said: list[str] = []
        manager = Manager(tmp_path, said.append)
        running = await manager.start(
            Spec("worker", (sys.executable, "-c", "raise SystemExit(3)"), ready=never, restart=True, budget=2)
        )
        with pytest.raises(DemoError, match="worker did not come up: it ended by exit code 3"):
            await manager.wait_ready(["worker"], 20)

        async def missing() -> str:
            return "" if running.gave_up else "not yet"

        assert not await until(missing, 20)
        assert running.exits == [3, 3, 3] and "exit code 3" in running.gave_up and said == [running.gave_up]
        await manager.stop()

    asyncio.run(run())


async def never() -> str:
    return "port 1 does not answer"


def test_says_what_does_not_come_up(tmp_path: Path) -> None:
    async def run() -> None:
        manager = Manager(tmp_path)
        await manager.start(
            Spec(
                "sidecar p",
                (sys.executable, "-c", "print('no space in shm'); raise SystemExit(7)"),
                ready=never,
                advice="make room",
            )
        )
        began = time.monotonic()
        with pytest.raises(DemoError) as error:
            await manager.wait_ready(["sidecar p"], 20)
        assert time.monotonic() - began < 10, "a dead process is not waited for"
        for part in ("sidecar p", "exit code 7", "no space in shm", "make room"):
            assert part in str(error.value)
        await manager.stop()

    asyncio.run(run())


def test_a_deadline_names_what_is_missing(tmp_path: Path) -> None:
    async def run() -> None:
        manager = Manager(tmp_path)
        await manager.start(Spec("gateway", SLEEP, ready=never, advice="look at the port"))
        with pytest.raises(DemoError, match=r"gateway is not up within 0.4 s: port 1 does not answer"):
            await manager.wait_ready(["gateway"], 0.4)
        await manager.stop()

    asyncio.run(run())


def test_kills_what_ignores_sigterm_and_says_so(tmp_path: Path) -> None:
    async def run() -> None:
        manager = Manager(tmp_path)
        await manager.start(Spec("deaf", STUBBORN))
        await logged(manager, "deaf", "here")
        problems = await manager.stop(0.5)
        assert len(problems) == 1 and "deaf did not end" in problems[0]
        assert leftovers(manager.id) == []

    asyncio.run(run())


def test_finds_and_ends_grandchildren(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
        print("here", child.pid, flush=True)
    """)

    async def run() -> None:
        manager = Manager(tmp_path)
        await manager.start(Spec("parent", (sys.executable, "-c", script)))
        await logged(manager, "parent", "here")
        await manager.wait_exit("parent", 10)
        orphan = int(manager["parent"].tail()[-1].split()[1])
        assert alive(orphan)
        problems = await manager.stop()
        assert len(problems) == 1 and str(orphan) in problems[0]
        assert not alive(orphan)

    asyncio.run(run())


def test_children_die_with_the_demo(tmp_path: Path) -> None:
    script = textwrap.dedent(f"""
        import asyncio, pathlib, sys
        from pdxfer.demo.processes import Manager, Spec
        async def run():
            manager = Manager(pathlib.Path({str(tmp_path)!r}))
            running = await manager.start(Spec("a", {SLEEP!r}))
            print(running.pid, flush=True)
            await asyncio.sleep(60)
        asyncio.run(run())
    """)
    demo = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert demo.stdout is not None
    child = int(demo.stdout.readline())
    born = birth(child)
    assert alive(child, born)
    demo.kill()
    demo.wait()
    end = time.monotonic() + 5
    while alive(child, born) and time.monotonic() < end:
        time.sleep(0.02)
    assert not alive(child, born)
    demo.stdout.close()


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    async def run() -> None:
        manager = Manager(tmp_path)
        with pytest.raises(DemoError, match=r"x cannot be started: .*nowhere.*: No such file"):
            await manager.start(Spec("x", (str(tmp_path / "nowhere"),)))

    asyncio.run(run())


def test_until_ends_at_its_deadline_even_if_the_probe_hangs() -> None:
    async def hang() -> str:
        await asyncio.sleep(60)
        return ""

    async def run() -> None:
        began = time.monotonic()
        assert await until(hang, 0.3) == "no answer"
        assert time.monotonic() - began < 2

    asyncio.run(run())


def test_words_and_markers() -> None:
    assert exit_text(-9) == "SIGKILL" and exit_text(70) == "exit code 70" and exit_text(-250) == "signal 250"
    assert birth(os.getpid()) and not birth(2**22 + 1) and not alive(os.getpid(), "0")
    with contextlib.suppress(KeyError):
        assert not os.environ[MARKER], "the tests must not run inside a demo"
