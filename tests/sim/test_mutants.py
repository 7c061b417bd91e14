"""The simulator can fail: every seeded bug of chaos/mutants/sim.py is caught by it, or by the one scenario that it takes."""

from __future__ import annotations

import pytest
import test_core_failures

from pdxfer.chaos.mutants.sim import BY_SCENARIO, MUTANTS
from pdxfer.chaos.sim import many

SEEDS = 400  # within which a mutant must be caught


def test_there_are_enough() -> None:
    assert len(set(MUTANTS) - set(BY_SCENARIO)) >= 20
    assert set(BY_SCENARIO) <= set(MUTANTS)


@pytest.mark.parametrize("name", sorted(set(MUTANTS) - set(BY_SCENARIO)))
def test_the_simulator_catches(name: str) -> None:
    mutant = MUTANTS[name]
    likely = () if mutant.likely is None else (mutant.likely,)
    found = many.hunt(mutant.in_force, first=likely, most=SEEDS)
    assert found.caught, f"mutant {name} survives {SEEDS} seeds: an invariant is missing"
    print(f"{name}: seed {found.seed}: {found.violation}")


@pytest.mark.parametrize(("name", "scenario"), sorted(BY_SCENARIO.items()))
def test_its_scenario_catches(name: str, scenario: str) -> None:
    with MUTANTS[name].in_force(), pytest.raises(AssertionError):
        getattr(test_core_failures, scenario)()
