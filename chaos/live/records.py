"""What the workers and agents of a chaos run write down, a JSON line for each event.

Owns: the lines' shapes, writing and reading them. Must not: judge. Times are CLOCK_MONOTONIC, which all processes of a
machine share, so that a record outlives the process that wrote it and can be compared with the others.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

NEVER = float("inf")


class Leg(msgspec.Struct):
    """One side of one room, as its worker saw it. Written when it is opened and again when it has ended."""

    worker: str
    pid: int
    room: str
    epoch: int
    sending: bool
    opened: float
    aborted: float = NEVER  # when this worker asked for the abort
    ended: float = NEVER  # the end was reported and the pages were home
    state: str = ""  # DONE, ABORTED, FAILED or REFUSED
    reason: str = ""
    detail: str = ""
    matched: bool = True  # both sides had met, as far as this one knows
    wrong: int = 0  # bytes that were not what the sender had, in a room that was reported done
    bytes: int = 0

    @property
    def done(self) -> bool:
        return self.state == "DONE"

    @property
    def key(self) -> tuple[str, int, str, int, bool]:
        return (self.worker, self.pid, self.room, self.epoch, self.sending)


class Trip(msgspec.Struct):
    """One room, as the agent that asked for it saw it."""

    room: str
    began: float
    ended: float
    send: str  # reasons, "" when there was no answer
    receive: str

    @property
    def done(self) -> bool:
        return self.send == self.receive == "done"


class Writer:
    """Appends lines, each with one system call: a SIGKILL tears at most the last one."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def write(self, line: Leg | Trip) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")


def read_legs(paths: list[Path]) -> list[Leg]:
    """Every leg in its newest state, in the order of opening."""
    found: dict[tuple[str, int, str, int, bool], Leg] = {}
    for path in paths:
        for raw in _lines(path):
            leg = msgspec.json.decode(raw, type=_Wire).leg()
            found[leg.key] = leg
    return sorted(found.values(), key=lambda leg: leg.opened)


def read_trips(path: Path) -> list[Trip]:
    return [msgspec.json.decode(raw, type=Trip) for raw in _lines(path)]


class _Wire(Leg):
    """JSON has no infinity: msgspec writes null for it."""

    aborted: float | None = None  # type: ignore[assignment]
    ended: float | None = None  # type: ignore[assignment]

    def leg(self) -> Leg:
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        for name in ("aborted", "ended"):
            if values[name] is None:
                values[name] = NEVER
        return Leg(**values)


def _lines(path: Path) -> list[bytes]:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return []
    return [line for line in raw.splitlines(keepends=True) if line.endswith(b"\n")]
