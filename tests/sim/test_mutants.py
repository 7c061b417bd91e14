"""The tests can fail: every seeded bug is caught, by the simulator or by the one scenario that it takes."""

from __future__ import annotations

import mutants
import pytest
import test_core_failures

from pdxfer.chaos.sim import run

SEEDS = 400  # within which a mutant must be caught
LIKELY = {  # seeds that were seen to catch a mutant are tried first
    "attached_while_its_last_life_lingers": 102, "end_said_once": 165, "early_abort_forgotten": 75,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(mutants.MUTANTS) - set(mutants.BY_SCENARIO)))
def test_the_simulator_catches(name: str) -> None:
    likely = LIKELY.get(name, 0)
    for seed in (likely, *range(SEEDS)):
        result = run.run(seed, mutant=mutants.MUTANTS[name])
        if not result.ok:
            print(f"{name}: seed {seed}: {result.violation}")
            return
    pytest.fail(f"mutant {name} survives {SEEDS} seeds: an invariant is missing")


@pytest.mark.parametrize(("name", "scenario"), sorted(mutants.BY_SCENARIO.items()))
def test_its_scenario_catches(name: str, scenario: str) -> None:
    with mutants.MUTANTS[name](), pytest.raises(AssertionError):
        getattr(test_core_failures, scenario)()
