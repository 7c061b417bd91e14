"""How an agent's sessions went, from the record that the agent writes as they go.

Owns: reading that record. Must not: count; ``rounds`` does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NEVER = float("inf")


@dataclass
class Session:
    """One streaming request of an agent. Times are time.monotonic, which all processes of a machine share."""

    number: int
    began: float
    ended: float = NEVER
    tokens: int = 0  # as far as was recorded
    end: str = ""  # done, aborted or failed; empty: its end was not recorded
    reason: str = ""
    kv_identical: bool | None = None
    detail: str = ""


def read_sessions(path: Path) -> list[Session]:
    """All sessions that were begun. A last line that a kill tore is left out."""
    found: dict[int, Session] = {}
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    for text in lines:
        if not text.endswith("\n"):
            continue
        line: Mapping[str, Any] = json.loads(text)
        number = int(line["session"])
        if line["event"] == "start":
            found[number] = Session(number, float(line["at"]))
            continue
        session = found[number]
        if line["event"] == "tokens":
            session.tokens = int(line["count"])
        elif line["event"] == "end":
            session.ended, session.tokens = float(line["at"]), int(line["tokens"])
            session.end, session.reason = str(line["end"]), str(line["reason"])
            session.kv_identical, session.detail = line["kv_identical"], str(line["detail"])
    return list(found.values())
