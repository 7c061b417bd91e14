"""What a client knows of its stores and loads: requests for the host mirror, and what the answers mean.

Owns: the table of stores and loads, each one's one end. Must not: touch a socket or wait.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pdxfer.core import worker
from pdxfer.core.messages import good_name
from pdxfer.core.mirror import MAX_TOKEN
from pdxfer.core.reasons import ENDS
from pdxfer.pools import SharedPool

from .errors import PdxferRefused
from .events import Event, MirrorEnd, MirrorEvicted, MirrorHeld
from .pages import tables

TokenIds = Sequence[int] | npt.NDArray[Any]
SIDECAR_LOST: Final = "sidecar_lost"


def token_bytes(tokens: TokenIds) -> bytes:
    """Token ids as they travel: little-endian uint32. Raises TypeError or PdxferRefused('bad_tokens')."""
    found = np.asarray(tokens)
    if found.size == 0 and found.ndim == 1:
        return b""
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise TypeError(f"tokens are {found.dtype} of shape {found.shape}, expected a flat list of whole numbers")
    low, high = int(found.min()), int(found.max())
    if low < 0 or high > MAX_TOKEN:
        raise PdxferRefused("bad_tokens", f"token id {low if low < 0 else high}, expected 0 to {MAX_TOKEN}")
    return found.astype("<u4", copy=False).tobytes()


class MirrorTable:
    """``pools``: the worker's, in the order of its attach."""

    def __init__(self, pools: Sequence[SharedPool]) -> None:
        self.pools = tuple(pools)
        self.open: dict[int, tuple[bool, float]] = {}  # request number -> it is a load, since when

    # requests ------------------------------------------------------------------------------------------------------

    def lookup(self, req: int, model: str, tenant: str, tokens: TokenIds, hold: bool) -> worker.Lookup:
        _check_names(model, tenant)
        return worker.Lookup(req, model, tenant, token_bytes(tokens), bool(hold))

    def store(self, req: int, model: str, tenant: str, tokens: TokenIds, first_block: int, pages: Any) -> worker.Store:
        _check_names(model, tenant)
        raw = tuple(t.tobytes() for t in tables(pages, self.pools, "", all_named=True))
        frame = worker.Store(req, model, tenant, token_bytes(tokens), int(first_block), raw)
        self.open[req] = (False, time.monotonic())
        return frame

    def load(self, req: int, lease: int, first_block: int, blocks: int, pages: Any) -> worker.Load:
        raw = tuple(t.tobytes() for t in tables(pages, self.pools, "", all_named=True))
        frame = worker.Load(req, int(lease), int(first_block), int(blocks), raw)
        self.open[req] = (True, time.monotonic())
        return frame

    def evict(self, req: int, model: str, tenant: str) -> worker.Evict:
        _check_names(model, tenant)
        return worker.Evict(req, model, tenant)

    def withdraw(self, req: int) -> None:
        """It was refused, or never sent."""
        self.open.pop(req, None)

    # answers -------------------------------------------------------------------------------------------------------

    def take(self, frame: worker.Held | worker.Evicted | worker.MirrorEnded) -> Event | None:
        """What a frame means to the engine; None when it is about nothing that is known here."""
        match frame:
            case worker.Held():
                return MirrorHeld(frame.req, frame.lease, frame.blocks, frame.block_tokens)
            case worker.Evicted():
                return MirrorEvicted(frame.req, frame.blocks)
        if self.open.pop(frame.operation, None) is None:
            return None
        return MirrorEnd(
            frame.operation, frame.loading, frame.state, frame.reason, frame.retriable, frame.detail, frame.blocks,
            frame.asked, frame.bytes, frame.age,
        )  # fmt: skip

    def end_all(self, detail: str, *, pages_safe: bool) -> list[Event]:
        """The sidecar is gone, and with it every store, load and lease, and the mirror."""
        operations, self.open = self.open, {}
        meaning = ENDS[SIDECAR_LOST]
        now = time.monotonic()
        return [
            MirrorEnd(
                req, loading, meaning.state, SIDECAR_LOST, meaning.retriable, detail,
                age=now - since, pages_safe=pages_safe or not loading,
            )
            for req, (loading, since) in operations.items()
        ]  # fmt: skip


def _check_names(model: str, tenant: str) -> None:
    for what, name in (("model", model), ("tenant", tenant)):
        if not isinstance(name, str) or (name and not good_name(name)):
            raise PdxferRefused("bad_tokens", f"{what} {str(name)[:40]!r}, expected at most 128 printable characters")
