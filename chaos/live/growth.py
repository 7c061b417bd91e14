"""Does anything grow over a soak? By the processes that lived through several of its runs.

Owns: the comparison of the first and the last inventory of each process. Must not: judge single runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from .verdict import Result

MOST = {"fds": 32.0, "threads": 12.0, "rss_mib": 96.0}  # beyond the first run's end, whatever the number of runs
RUNS = 4  # fewer say nothing


def growth(results: Sequence[Result]) -> list[str]:
    """What grew by more than it may, in words."""
    seen: dict[tuple[str, str], list[float]] = {}
    for result in results:
        for name, of in result.inventory.items():
            for what, (_, after) in of.items():
                if after:
                    seen.setdefault((name, what), []).append(after)
    out = []
    for (name, what), values in seen.items():
        if what in MOST and len(values) >= RUNS:
            early, late = min(values[: len(values) // 2]), min(values[len(values) // 2 :])
            if late - early > MOST[what]:
                out.append(
                    f"{name}: {what} grew from {early:.0f} to {late:.0f} over {len(values)} runs, at most {MOST[what]:g} more"
                )
    return out
