"""The verdict on one run: every row of the wedge contract with its bound, what was measured, and whether it held.

Owns: rows, percentiles, and when a run passed. Must not: measure; ``judge`` fills the rows from what was recorded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Row:
    """One line of the verdict. ``values`` are seconds or counts; the bound is for the largest, or for the p99."""

    what: str
    bound: str
    limit: float
    values: list[float] = field(default_factory=list)
    at_p99: bool = False
    unit: str = "s"
    note: str = ""
    applies: bool = True
    gate: bool = True  # False: reported, and not a reason to fail

    @property
    def measured(self) -> bool:
        return bool(self.values)

    @property
    def worst(self) -> float:
        return percentile(self.values, 99) if self.at_p99 else max(self.values)

    @property
    def passed(self) -> bool:
        """What does not apply, or only informs, does not fail. A row that applies needs a measurement."""
        if not self.applies or not self.gate:
            return True
        return self.measured and self.worst <= self.limit

    @property
    def verdict(self) -> str:
        if not self.applies:
            return "–"
        if not self.gate:
            return "info"
        return "pass" if self.passed else "FAIL" if self.measured else "NOT MEASURED"

    def as_json(self) -> dict[str, Any]:
        values = (
            {
                "n": len(self.values),
                "p50": percentile(self.values, 50),
                "p99": percentile(self.values, 99),
                "max": max(self.values),
            }
            if self.values
            else {"n": 0, "p50": None, "p99": None, "max": None}
        )
        return {
            "what": self.what, "bound": self.bound, "limit": self.limit, "unit": self.unit, **values,
            "verdict": self.verdict, "note": self.note,
        }  # fmt: skip


def percentile(values: Sequence[float], p: float) -> float:
    """Nearest rank: a value that was measured, never one between two."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(p / 100 * len(ordered)) - 1)]


@dataclass
class Result:
    """One run of one scenario."""

    scenario: str
    about: str
    sessions: int
    mutant: str = ""
    skipped: str = ""  # why it was not run
    injected: bool = False
    proof: str = ""  # what shows that the fault took effect, or what is missing for that
    rows: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    rooms: int = 0  # of the struck pair
    hit: int = 0  # sides of rooms that were open when the fault struck
    ends: Mapping[str, int] = field(default_factory=dict)  # sides of rooms by reason
    inventory: Mapping[str, Mapping[str, tuple[float, float]]] = field(
        default_factory=dict
    )  # process -> what -> before, after
    seconds: float = 0.0
    timeline: Any = None

    @property
    def held(self) -> bool:
        """Did the system do what the contract says?"""
        return self.injected and not self.problems and all(row.passed for row in self.rows)

    @property
    def passed(self) -> bool:
        """For a control: it was injected, and the verdict caught it."""
        if self.skipped:
            return True
        return self.injected and not self.held if self.mutant else self.held

    @property
    def state(self) -> str:
        if self.skipped:
            return "SKIPPED"
        if not self.injected:
            return "FAULT NOT INJECTED"
        if self.mutant:
            return "caught" if self.passed else "NOT CAUGHT"
        return "pass" if self.passed else "FAIL"

    def broken(self) -> list[str]:
        """What did not hold, in words."""
        if self.skipped:
            return []
        out = [] if self.injected else [f"fault not injected: {self.proof}"]
        for row in self.rows:
            if not row.passed:
                found = f"{row.worst:.3g} {row.unit}" if row.measured else "nothing measured"
                out.append(f"{row.what}: {found}, bound {row.bound}{f' ({row.note})' if row.note else ''}")
        return out + self.problems

    def as_json(self) -> dict[str, Any]:
        return {
            "scenario": self.scenario, "sessions": self.sessions, "mutant": self.mutant, "state": self.state,
            "passed": self.passed, "skipped": self.skipped, "injected": self.injected, "proof": self.proof,
            "seconds": round(self.seconds, 3), "rooms": self.rooms, "hit": self.hit, "ends": dict(self.ends),
            "rows": [row.as_json() for row in self.rows], "problems": self.problems, "broken": self.broken(),
            "inventory": {name: {k: list(v) for k, v in of.items()} for name, of in self.inventory.items()},
        }  # fmt: skip
