"""Bugs of the host mirror, for ``pdxfer chaos corruption``: the two causes of the original corruption, each alone.

Owns: those two. Must not: be imported by the product. What they have in common with the original is also what they lack: a digest.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import xxhash

from pdxfer.core.mirror import FILLING, MirrorIndex
from pdxfer.core.mirrors import Mirrors
from pdxfer.core.regions import ALIGN, Region

from .live import bug, nothing, replace


def _no_digests() -> None:
    """The engine compares what it finds with what the parent says: so the parent says what is there, whatever it is."""
    memory: list[mmap.mmap] = []
    entry = Mirrors._entry

    def found(self: Any, op: Any, block: int, number: int) -> Any:
        whole = entry(self, op, block, number)
        if not op.loading:
            return whole
        if not memory:
            fd = next(int(n) for n in os.listdir("/proc/self/fd") if _is_mirror(n))
            memory.append(mmap.mmap(fd, 0, prot=mmap.PROT_READ))
        raw = memory[0][whole.offset : whole.offset + op.region.entry_bytes]
        return type(whole)(whole.offset, xxhash.xxh3_64_intdigest(raw), whole.rows)

    replace(Mirrors, "_entry", found)


def _is_mirror(fd: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:mirror")
    except OSError:
        return False


@bug("the host mirror is sized for fp8 index keys (132 bytes), whatever the device holds, and entries have no digest")
def mirror_sized_for_fp8() -> None:
    """The behaviour of the incident (docs/DSV4_BF16_INDEX_CORRUPTION.md), with bounds that keep it from crashing."""
    made = Region.__init__

    def sized(self: Any, place: int, base: int, room: int, specs: Any, settings: Any) -> None:
        made(self, place, base, room, specs, settings)
        assumed = sum(
            spec.planes * n * (132 * spec.page_tokens if spec.name == "index_k" else spec.page_bytes)
            for spec, n in zip(specs, self.pages, strict=True)
        )
        self.stride = -(-assumed // ALIGN) * ALIGN
        self.entries = min(room, room - self.entry_bytes + self.stride) // self.stride

    replace(Region, "__init__", sized)
    _no_digests()


@bug(
    "the host mirror has the right size, and nobody owns its entries or the pages that are copied; entries have no digest"
)
def mirror_without_ledger() -> None:
    """A block is found as soon as its store was asked for, the worker may use its pages again at once, and pins hold nothing."""
    begin, filled, abandon, start, settle = (
        MirrorIndex.begin, MirrorIndex.filled, MirrorIndex.abandon, Mirrors._begin, Mirrors.settle,
    )  # fmt: skip

    def taken(self: Any, space: str, keys: Any, first: int = 0) -> Any:
        found = begin(self, space, keys, first)
        for _, entry in found:
            filled(self, entry, 0)
        return found

    def only_filling(method: Any) -> Any:
        def instead(self: Any, entry: int, *rest: Any) -> None:
            if self._state[entry] == FILLING:
                method(self, entry, *rest)

        return instead

    def at_once(self: Any, op: Any) -> None:
        start(self, op)
        if not op.loading and not op.reason:
            self.end(op, "done", "")

    def without_waiting(self: Any, op: Any) -> None:
        jobs, op.jobs = op.jobs, {}
        if not op.loading:
            op.left.clear()
        settle(self, op)
        op.jobs = jobs

    def pump_all(self: Any) -> None:
        """What was asked for is copied, also when the worker was told that it is over."""
        for op in self.queue:
            op.reason, op.told = "", op.reason
        pump(self)
        for op in {*self.queue, *self.jobs.values()}:
            op.reason = getattr(op, "told", "") or op.reason

    pump = Mirrors.pump
    replace(MirrorIndex, "begin", taken)
    replace(MirrorIndex, "filled", only_filling(filled))
    replace(MirrorIndex, "abandon", only_filling(abandon))
    replace(MirrorIndex, "pin", nothing)
    replace(MirrorIndex, "unpin", nothing)
    replace(Mirrors, "_begin", at_once)
    replace(Mirrors, "settle", without_waiting)
    replace(Mirrors, "pump", pump_all)
    _no_digests()
