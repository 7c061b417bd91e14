"""The simulator can fail: every seeded bug of chaos/mutants/sim.py is caught by it."""

from __future__ import annotations

import pytest

from pdxfer.chaos.mutants.sim import MUTANTS
from pdxfer.chaos.sim import many

SEEDS = 400  # within which a mutant must be caught


def test_there_are_enough() -> None:
    assert len(MUTANTS) >= 20


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_the_simulator_catches(name: str) -> None:
    mutant = MUTANTS[name]
    likely = () if mutant.likely is None else (mutant.likely,)
    found = many.hunt(mutant.in_force, first=likely, most=SEEDS)
    assert found.caught, f"mutant {name} survives {SEEDS} seeds: an invariant is missing"
    print(f"{name}: seed {found.seed}: {found.violation}")
