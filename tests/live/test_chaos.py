"""Live chaos, briefly: one fault against the product holds, and the same against a broken build is caught."""

from __future__ import annotations

import asyncio

import pytest

from pdxfer.chaos.live import run
from pdxfer.chaos.live.scenarios import SCENARIOS
from pdxfer.chaos.live.verdict import Result
from pdxfer.chaos.live.world import Kind, World

SESSIONS = 4


async def one(name: str, mutant: str) -> Result:
    world = World(Kind(mutant=mutant))
    try:
        await world.start()
        return await run.run(world, SCENARIOS[name], SESSIONS, lambda text: None)
    finally:
        problems = await world.close()
        assert mutant or not problems, problems


@pytest.mark.parametrize("control", [False, True])
def test_an_agent_is_killed(control: bool) -> None:
    scenario = SCENARIOS["agent-kill-0.2s"]
    result = asyncio.run(asyncio.wait_for(one(scenario.name, scenario.mutant if control else ""), 100.0))
    assert result.passed, result.broken()
    assert result.injected and result.hit
    assert result.timeline.lanes.keys() == {"p", "d", "b"}
