"""The ways that index keys can take between the worker that wrote them and the one that selects from them.

Owns: what each path does, as orders to workers and sidecars, one small object each. Must not: compare, or know what is in a
pool. A path that is not in PATHS does not exist for anybody: nothing is shown for what was not run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from pdxfer.bench.child import Child
from pdxfer.bench.sidecars import Sidecars

from .cases import Selection

Found = dict[str, Selection]  # by room

SOURCE, TARGET = "probe-prefill", "probe-decode"  # engine ids
PATIENCE = 300.0  # seconds for an order
FILLED, MOVED, LOADED = 1, 2, 3  # seeds of page tables: no two places of a room's keys are alike


class Stage(NamedTuple):
    """What a path is played on: both workers are attached, and the prefill worker's pages are filled."""

    sidecars: Sidecars
    prefill: Child
    decode: Child
    prefix: str  # of room ids, new for every path


class Path(NamedTuple):
    """``play`` moves the keys and returns what is selected where they came to lie."""

    name: str
    what: str
    play: Callable[[Stage], Awaitable[Found]]


async def ask(child: Child, order: str, *arguments: object) -> object:
    return await asyncio.to_thread(child.ask, (order, arguments), PATIENCE)


async def selected(child: Child) -> Found:
    found = await ask(child, "select")
    assert isinstance(found, dict)
    return found


async def transfer(stage: Stage) -> Found:
    """Every room from the prefill worker's pages to pages of the decode worker."""
    await ask(stage.decode, "place", MOVED, False)
    stage.decode.tell(("receive", (stage.prefix, SOURCE)))
    stage.prefill.tell(("send", (stage.prefix,)))
    for child in (stage.prefill, stage.decode):
        await asyncio.to_thread(child.answer, PATIENCE)
    return await selected(stage.decode)


async def _nowhere(stage: Stage) -> Found:
    await ask(stage.decode, "place", MOVED, False)
    await ask(stage.decode, "fill")
    return await selected(stage.decode)


async def _after_respawn(stage: Stage) -> Found:
    for node in "pd":
        await stage.sidecars.kill_engine(node)
    return await transfer(stage)


async def _kept(child: Child) -> None:
    """A worker's filled pages into its node's mirror, and out of it into other pages."""
    await ask(child, "forget")
    await ask(child, "store")
    await ask(child, "place", LOADED, False)
    await ask(child, "load")


async def _mirror(stage: Stage) -> Found:
    await ask(stage.decode, "place", MOVED, False)
    await ask(stage.decode, "fill")
    await _kept(stage.decode)
    return await selected(stage.decode)


async def _mirror_then_nixl(stage: Stage) -> Found:
    try:
        await _kept(stage.prefill)
        return await transfer(stage)
    finally:
        await ask(stage.prefill, "place", FILLED, True)  # as the next path expects it
        await ask(stage.prefill, "fill")


async def _mirror_after_respawn(stage: Stage) -> Found:
    await ask(stage.decode, "place", MOVED, False)
    await ask(stage.decode, "fill")
    await ask(stage.decode, "forget")
    await ask(stage.decode, "store")
    await stage.sidecars.kill_engine("d")
    await ask(stage.decode, "place", LOADED, False)
    await ask(stage.decode, "load")
    return await selected(stage.decode)


PATHS = {
    path.name: path
    for path in (
        Path("none", "no transfer: the decode worker writes the same keys itself, into other pages", _nowhere),
        Path("nixl", "prefill worker, sidecar, NIXL, sidecar, decode worker", transfer),
        Path(
            "mirror", "into the host mirror and out of it into other pages; rooms share what they begin with", _mirror
        ),
        Path("mirror-nixl", "as mirror, on the prefill side; then as nixl", _mirror_then_nixl),
        Path("mirror-respawn", "as mirror, and the engine is killed between store and load", _mirror_after_respawn),
        Path("respawn", "both engines are killed; then as nixl, by the new ones", _after_respawn),
    )
}
