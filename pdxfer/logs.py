"""Logging to standard error: one line a record, as text or as JSON.

Owns: the handler, its formats, and a limiter for records that strangers could repeat without end. Must not: be imported
by the core, which logs nothing.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class TextFormatter(logging.Formatter):
    """``2026-12-01T12:00:00.123 WARNING pdxfer.supervisor [p] engine: restart 1: …``"""

    def __init__(self, node: str) -> None:
        super().__init__()
        self._node = node

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created))
        line = f"{when}.{int(record.msecs):03d} {record.levelname} {record.name} [{self._node}] {record.getMessage()}"
        if record.exc_info:
            line += "\n" + "".join(traceback.format_exception(*record.exc_info)).rstrip()
        return line


class JsonFormatter(logging.Formatter):
    """One object a line; what was passed as ``extra`` becomes fields of it."""

    def __init__(self, node: str) -> None:
        super().__init__()
        self._node = node

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "node": self._node,
            "message": record.getMessage(),
        }
        entry |= {key: value for key, value in vars(record).items() if key not in _PLAIN}
        if record.exc_info:
            entry["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(entry, ensure_ascii=False, default=str)


def set_up(node: str, level: str, as_json: bool) -> None:
    """Send everything to standard error. Called again, it replaces what was set up before."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(node) if as_json else TextFormatter(node))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    set_level(level)


def set_level(level: str) -> None:
    logging.getLogger().setLevel(logging.WARNING)  # libraries: what matters
    logging.getLogger("pdxfer").setLevel(_LEVELS[level])


class Limiter:
    """Let one record for each key through in ``interval`` seconds, and count the rest."""

    def __init__(self, interval: float = 10.0, keys: int = 1024) -> None:
        self._interval = interval
        self._keys = keys
        self._seen: dict[tuple[str, ...], tuple[float, int]] = {}

    def allow(self, key: tuple[str, ...], now: float) -> int | None:
        """None to keep quiet; else how many like it were kept quiet since the last one."""
        last, quiet = self._seen.get(key, (float("-inf"), 0))
        if now - last < self._interval:
            self._seen[key] = (last, quiet + 1)
            return None
        if len(self._seen) >= self._keys:  # strangers can make up keys: forget the oldest
            del self._seen[next(iter(self._seen))]
        self._seen.pop(key, None)
        self._seen[key] = (now, 0)
        return quiet
