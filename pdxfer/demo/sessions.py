"""How an agent's sessions ended, from the record that the agent writes.

Owns: reading that record. Must not: count; ``rounds`` does.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Session:
    """One streaming request of an agent. Times are time.monotonic, which all processes of a machine share."""

    end: str  # done, aborted or failed
    reason: str
    began: float
    ended: float
    kv_identical: bool | None


def read_sessions(path: Path) -> list[Session]:
    raise NotImplementedError(json)
