"""The mirror for people and metrics, and its books checked as a whole.

Owns: what status and metrics show of it; R4 and R5 of it as assertions, for tests and the simulator. Must not: change anything.
"""

from __future__ import annotations

from typing import Any

from .mirror import DROPS, ENTRY_STATES, FILLING
from .mirrors import Mirrors


def snapshot(mirrors: Mirrors) -> dict[str, Any]:
    """For people and metrics."""
    regions = [region for region in mirrors.regions if region is not None]
    entries = {name: sum(r.index.counts[i] for r in regions) for i, name in enumerate(ENTRY_STATES)}
    dropped = {why: mirrors.dropped[why] + sum(r.index.dropped[why] for r in regions) for why in DROPS}
    return {
        "bytes": mirrors.settings.bytes,
        "block_tokens": mirrors.settings.block_tokens,
        "regions": [
            {
                "pools": [spec.name for spec in r.specs],
                "entry_bytes": r.entry_bytes,
                "entries": r.index.entries,
                "spaces": len(r.index.spaces()),
                "workers": len(r.users),
            }
            for r in regions
        ],
        "entries": entries,
        "dropped": dropped,
        "leases": len(mirrors.leases),
        "operations": len(mirrors.operations),
        "totals": dict(mirrors.totals),
        "ends": {kind: dict(ends) for kind, ends in mirrors.ends.items()},
    }


def audit(mirrors: Mirrors) -> None:
    """Raise AssertionError when an invariant does not hold."""
    st = mirrors.state
    assert set(mirrors.jobs) == {id for op in mirrors.operations.values() for id in op.jobs}
    pins: dict[tuple[int, int], int] = {}
    filling: set[tuple[int, int]] = set()
    for region in mirrors.regions:
        if region is not None:
            region.index.audit()
            assert region.users <= st.workers.keys(), "a region is kept for a worker that is gone"
    for lease in mirrors.leases.values():
        assert ("lease", lease.id) in st.timers, f"lease {lease.id} has no deadline"
        assert lease.id in lease.owner.leases
        assert lease.region in mirrors.regions, f"lease {lease.id} is on a region that is gone"
        for entry in lease.entries:
            key = (lease.region.place, entry)
            pins[key] = pins.get(key, 0) + 1
    for op in mirrors.operations.values():
        assert ("mirror", op.serial) in st.timers, f"{op.kind} {op.serial} waits without a deadline"
        assert op.region in mirrors.regions, f"{op.kind} {op.serial} is on a region that is gone"
        assert op.jobs or not op.reason, f"{op.kind} {op.serial} has ended, and no job holds it"
        assert op.jobs or op in mirrors.queue, f"{op.kind} {op.serial} waits for nothing"
        for _, entry in op.blocks:
            key = (op.region.place, entry)
            if op.loading:
                pins[key] = pins.get(key, 0) + 1
            elif entry in op.left:
                assert key not in filling, f"entry {entry} is filled by two stores"
                filling.add(key)
    for region in mirrors.regions:
        for entry in range(region.index.entries if region is not None else 0):
            assert region is not None
            key = (region.place, entry)
            assert region.index.pins(entry) == pins.get(key, 0), f"entry {entry} has pins that nobody holds"
            assert (region.index.state(entry) == FILLING) == (key in filling), f"entry {entry} is filled by nobody"
