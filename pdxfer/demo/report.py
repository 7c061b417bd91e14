"""What the demo found: parity, rounds, the verdict, and their forms as a table and as JSON.

Owns: the result's data, when a round and the whole count as passed, and the names of the JSON keys. Must not: measure
anything. The HTML page is ``page``'s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table


@dataclass
class Round:
    """One fault under load, and how everything came out of it."""

    fault: str
    sessions: int
    step: int = 0  # of the demo's four
    hit: int = 0  # sessions that were under way when the fault struck
    done: int = 0
    aborted: int = 0
    failed: int = 0
    unresolved: int = 0
    recovery_seconds: float | None = None  # from the fault until everything was home and a probe prompt was answered
    service_seconds: float | None = None  # from the fault until the first probe prompt was answered right
    pages_leaked: int = 0
    slots_leaked: int = 0
    wrong_bytes: int = 0
    injected: bool = False
    proof_seconds: float | None = None  # from the fault until that was seen, the successor of what was struck included
    proof: str = ""  # what shows that the fault took effect
    answers: int = 0  # probe prompts answered afterwards
    answers_equal: int = 0  # and equal to before
    ends: dict[str, int] = field(default_factory=dict)  # sessions' ends by reason
    rooms: dict[str, dict[str, int]] = field(default_factory=dict)  # the sidecars' room ends by node and reason
    problems: list[str] = field(default_factory=list)

    def faults_found(self) -> list[str]:
        """Everything that makes this round fail; empty when it passed."""
        found = list(self.problems)
        if not self.injected:
            found.append(f"fault not injected: {self.proof or 'nothing shows that it took effect'}")
        counted = self.done + self.aborted + self.failed + self.unresolved
        if counted != self.sessions:
            found.append(f"{counted} of {self.sessions} sessions are accounted for")
        if self.unresolved:
            found.append(f"{self.unresolved} sessions did not end")
        if self.pages_leaked:
            found.append(f"{self.pages_leaked} pages did not come home")
        if self.slots_leaked:
            found.append(f"{self.slots_leaked} slots did not come home")
        if self.wrong_bytes:
            found.append(f"{self.wrong_bytes} bytes were delivered wrong")
        if not self.answers or self.answers_equal != self.answers:
            found.append(f"{self.answers_equal} of {self.answers} prompts were answered as before")
        if self.recovery_seconds is None:
            found.append("it did not recover within its deadline")
        return found

    @property
    def passed(self) -> bool:
        return not self.faults_found()

    def as_json(self) -> dict[str, Any]:
        return {
            "fault": self.fault,
            "sessions": self.sessions,
            "done": self.done,
            "aborted": self.aborted,
            "failed": self.failed,
            "unresolved": self.unresolved,
            "recovery_seconds": _round(self.recovery_seconds),
            "pages_leaked": self.pages_leaked,
            "slots_leaked": self.slots_leaked,
            "wrong_bytes": self.wrong_bytes,
            "step": self.step,
            "hit": self.hit,
            "passed": self.passed,
            "injected": self.injected,
            "proof": self.proof,
            "proof_seconds": _round(self.proof_seconds),
            "service_seconds": _round(self.service_seconds),
            "answers": self.answers,
            "answers_equal": self.answers_equal,
            "ends": dict(sorted(self.ends.items())),
            "room_ends": {node: dict(sorted(ends.items())) for node, ends in sorted(self.rooms.items())},
            "problems": self.faults_found(),
        }


@dataclass
class Parity:
    """Step 1: the answers through two workers against those of one process."""

    prompts: int = 0
    identical: int = 0  # answers equal token for token, their KV bytes equal and their code found
    kv_identical: int = 0
    needles: int = 0
    needles_found: int = 0
    tokens: int = 0  # compared
    longest_prompt: int = 0  # tokens
    problems: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return self.prompts > 0 and self.identical == self.prompts and not self.problems

    def as_json(self) -> dict[str, Any]:
        return {
            "identical": self.identical,
            "prompts": self.prompts,
            "kv_identical": self.kv_identical,
            "needles": self.needles,
            "needles_found": self.needles_found,
            "tokens_compared": self.tokens,
            "longest_prompt_tokens": self.longest_prompt,
            "problems": self.problems,
        }


@dataclass
class Report:
    """Everything that a run of the demo says."""

    engine: str
    dtype: str
    seed: int
    expected_rounds: int
    started: str = ""  # wall clock, ISO 8601
    versions: Mapping[str, str] = field(default_factory=dict)
    parity: Parity = field(default_factory=Parity)
    rounds: list[Round] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # beside those of parity and rounds
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)  # seconds by phase of the demo

    @property
    def passed(self) -> bool:
        return (
            self.parity.passed
            and len(self.rounds) == self.expected_rounds
            and all(item.passed for item in self.rounds)
            and not self.problems
        )

    def all_problems(self) -> list[str]:
        """One line each, with what it belongs to."""
        if self.problems and not self.parity.prompts:  # it broke off before anything was measured
            return list(self.problems)
        out = [f"parity: {text}" for text in self.parity.problems]
        if not self.parity.problems and not self.parity.passed:
            out.append(f"parity: {self.parity.identical} of {self.parity.prompts} prompts were answered alike")
        for item in self.rounds:
            out += [f"{item.fault}: {text}" for text in item.faults_found()]
        if len(self.rounds) != self.expected_rounds:
            out.append(f"{len(self.rounds)} of {self.expected_rounds} rounds were run")
        return out + self.problems

    def verdict_line(self) -> str:
        """The one-line verdict."""
        parity = f"{self.parity.identical}/{self.parity.prompts} answers equal to one process"
        if not self.passed:
            problems = self.all_problems()
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            return f"FAIL: {problems[0].splitlines()[0]}{more}" if problems else "FAIL"
        slowest = max((item.recovery_seconds or 0.0 for item in self.rounds), default=0.0)
        return (
            f"PASS: {parity}, {len(self.rounds)} faults, every session ended, every page and slot came home,"
            f" 0 wrong bytes, slowest recovery {slowest:.1f} s"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "verdict": "pass" if self.passed else "fail",
            "parity": self.parity.as_json(),
            "rounds": [item.as_json() for item in self.rounds],
            "problems": self.all_problems(),
            "engine": self.engine,
            "dtype": self.dtype,
            "seed": self.seed,
            "started": self.started,
            "seconds": _round(self.seconds),
            "phases": {name: _round(seconds) for name, seconds in self.phases.items()},
            "versions": dict(self.versions),
        }

    def write_json(self, path: Path) -> None:
        """Whole or not at all."""
        temporary = path.with_name(path.name + ".new")
        temporary.write_text(json.dumps(self.as_json(), indent=2) + "\n", encoding="utf-8")
        temporary.replace(path)


COLUMNS = (
    "fault",
    "sessions hit",
    "how each ended",
    "seconds to recovery",
    "pages leaked",
    "slots leaked",
    "wrong bytes",
    "",
)
CAPTION = "Recovery: from the fault until a prompt is answered as before and all is home, the load's own time included."


def ended_text(item: Round) -> str:
    """How the round's sessions ended, in words: the counts that are not 0, failures with their reasons."""
    parts = [f"{count} {word}" for count, word in ((item.done, "done"), (item.aborted, "aborted")) if count]
    if item.failed:
        reasons = ", ".join(
            f"{name} {count}" for name, count in sorted(item.ends.items()) if name not in ("done", "aborted")
        )
        parts.append(f"{item.failed} failed" + (f" ({reasons})" if reasons else ""))
    if item.unresolved:
        parts.append(f"{item.unresolved} unresolved")
    return ", ".join(parts) or "none"


def row(item: Round) -> tuple[str, ...]:
    """A round as the table's cells, in the order of COLUMNS."""
    return (
        item.fault,
        f"{item.hit} of {item.sessions}",
        ended_text(item),
        "never" if item.recovery_seconds is None else f"{item.recovery_seconds:.1f}",
        str(item.pages_leaked),
        str(item.slots_leaked),
        str(item.wrong_bytes),
        "ok" if item.passed else "FAIL",
    )


def table(report: Report) -> Table:
    """The table for a terminal."""
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=CAPTION, caption_justify="left")
    widths = (None, 8, None, 9, 7, 7, 6, 4)  # what is left is shared by the two columns of words
    for index, (name, width) in enumerate(zip(COLUMNS, widths, strict=True)):
        out.add_column(name, width=width, justify="right" if 3 <= index <= 6 else "left", overflow="fold")
    for item in report.rounds:
        out.add_row(*row(item), style=None if item.passed else "bold red")
    return out


def _round(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
