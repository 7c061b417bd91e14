"""The engine's totals, for metrics.

Owns: their names. Must not: send them (loop.py does, at most once a second).
"""

from __future__ import annotations

import threading


class Counters:
    """Seconds are of the thread that did the work; copy threads add to them, hence the lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values = dict.fromkeys(
            (
                "bytes_sent",
                "bytes_scattered",
                "bytes_copied",
                "gather_seconds",
                "digest_seconds",
                "write_seconds",
                "scatter_seconds",
                "copy_seconds",
                "transfers",
                "transfer_errors",
                "notifications",
                "notifications_garbage",
                "notifications_dropped",
                "reports_dropped",
                "nixl_errors",
                "digest_mismatches",
                "copy_errors",
                "mirror_store_seconds",
                "mirror_load_seconds",
                "mirror_bytes_stored",
                "mirror_bytes_loaded",
                "mirror_digest_mismatches",
            ),
            0.0,
        )

    def add(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._values[name] += amount

    def set(self, name: str, value: float) -> None:
        with self._lock:
            self._values[name] = value

    def snapshot(self) -> dict[str, float]:
        with self._lock:
            return dict(self._values)
