"""A run for people: its timeline, one line for each thing that happened, and how its rooms ended.

Owns: their forms. Must not: run or judge anything.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from pdxfer.core import events, messages, worker

from .run import Result

QUIET = (events.Tick, messages.Heartbeat, worker.Ping)  # they come all the time and say little
WIDEST = 60  # characters of one field


def timeline(result: Result, *, room: str = "", everything: bool = False) -> Iterator[str]:
    """Lines of time, place and what happened; ``room``: only what names it, and what strikes everybody."""
    for when, who, what in result.timeline:
        text = what if isinstance(what, str) else _frame(what, everything)
        if text and (not room or isinstance(what, str) or _names(what, room)):
            yield f"{when:9.4f}  {who:8}  {text}"


def summary(result: Result) -> Iterator[str]:
    for number, fault in enumerate(result.faults):
        yield f"fault {number}: {fault}"
    yield "rooms: " + (", ".join(f"{n} {reason}" for reason, n in result.ends.most_common()) or "none")
    yield f"seed {result.seed}: {result.violation or 'every invariant held'}"


def _frame(what: object, everything: bool) -> str:
    match what:
        case events.WorkerSaid(id=id, frame=frame):
            return _line(f"from worker {id}", frame, everything)
        case events.WorkerAttached(id=id, frame=frame):
            return _line(f"worker {id} attaches", frame, everything)
        case events.PeerSaid(node=node, body=body):
            said = [text for message in body if (text := _line("", message, everything))]
            return f"from node {node}:  {'; '.join(said)}" if said else ""
        case events.EngineSaid(report=report):
            return _line("from its engine", report, everything)
        case events.ToWorker(id=id, frame=frame):
            return _line(f"→ worker {id}", frame, everything)
        case events.ToPeer(node=node, message=message):
            return _line(f"→ node {node}", message, everything)
        case events.ToEngine(job=job):
            return _line("→ its engine", job, everything)
        case (
            worker.Attach()
            | worker.Ping()
            | worker.Open()
            | worker.Push()
            | worker.Finish()
            | worker.Receive()
            | worker.Abort()
        ):
            return _line("says", what, everything)
        case _:
            return _line("", what, everything)


def _line(who: str, frame: object, everything: bool) -> str:
    if isinstance(frame, QUIET) and not everything:
        return ""
    text = short(frame)
    return f"{who}:  {text}" if who else text


def short(value: object) -> str:
    """``Want room-3/0 source=p-0``: what is empty is left out, and long values are cut."""
    if not isinstance(value, msgspec.Struct):
        return _field(value)
    fields = {name: getattr(value, name) for name in value.__struct_fields__}
    head = type(value).__name__
    if "room" in fields:
        head += f" {fields.pop('room')}/{fields.pop('epoch', 0)}"
    parts = [f"{name}={_field(v)}" for name, v in fields.items() if v not in (b"", "", (), None)]
    return " ".join([head, *parts])


def _field(value: object) -> str:
    match value:
        case bytes():
            text = f"{len(value)} B"
        case float():
            text = f"{value:.4g}"
        case msgspec.Struct():
            text = f"({short(value)})"
        case tuple():
            text = f"[{', '.join(_field(v) for v in value)}]"
        case _:
            text = str(value)
    return text if len(text) <= WIDEST else text[: WIDEST - 1] + "…"


def _names(what: object, room: str) -> bool:
    """Does a struct name this room anywhere?"""
    if isinstance(what, str):
        return what == room
    if isinstance(what, tuple):
        return any(_names(one, room) for one in what)
    return isinstance(what, msgspec.Struct) and any(
        _names(getattr(what, name), room) for name in what.__struct_fields__
    )
